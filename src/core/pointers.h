// The pointers among a launch's arguments, in one list for all checks of them.
#ifndef STROBE_CORE_POINTERS_H_
#define STROBE_CORE_POINTERS_H_

#include <type_traits>

#include "core/options.h"
#include "core/problem.h"
#include "core/status.h"

namespace strobe {

struct LaunchPointer {
  const char* name;
  const void* pointer;
  bool used;          // whether the problem asks for it: else nothing reads it
  bool needed;        // whether it may not be null
  int64_t alignment;  // in bytes
};

/// visit(LaunchPointer) for all but the workspace and the arrays of for_each_array. problem:
/// resolved. Args: ForwardArgs or BackwardArgs.
template <typename Args, typename Visit>
void for_each_pointer(const AttentionProblem& p, const Args& a, const Visit& visit) {
  constexpr bool kForward = std::is_same_v<Args, ForwardArgs>;
  const int64_t align = element_size(p.dtype), align_kv = element_size(p.kv_dtype);
  const bool some_q = rows_q(p) > 0, some_k = rows_k(p) > 0, alibi = p.alibi != STROBE_ALIBI_NONE;
  const bool varlen_k = p.varlen && !p.cache;  // lengths of keys in a cache are in seqused_k
  visit(LaunchPointer{"q", a.q, true, some_q, align});
  visit(LaunchPointer{"k", a.k, true, some_k, align_kv});
  visit(LaunchPointer{"v", a.v, true, some_k, align_kv});
  visit(LaunchPointer{"out", a.out, true, some_q, element_size(p.out_dtype)});
  visit(LaunchPointer{"lse", a.lse, true, some_q && !kForward, 4});
  if constexpr (!kForward) {
    visit(LaunchPointer{"dout", a.dout, true, some_q, align});
    visit(LaunchPointer{"dlse", a.dlse, p.has_dlse != 0, some_q && p.has_dlse, 4});
    visit(LaunchPointer{"dq", a.dq, true, some_q, align});
    visit(LaunchPointer{"dk", a.dk, true, some_k, align});
    visit(LaunchPointer{"dv", a.dv, true, some_k, align});
  }
  visit(LaunchPointer{"alibi_slopes", a.alibi_slopes, alibi, alibi, 4});
  visit(LaunchPointer{"cu_seqlens_q", a.cu_seqlens_q, p.varlen != 0, p.varlen != 0, 4});
  visit(LaunchPointer{"cu_seqlens_k", a.cu_seqlens_k, varlen_k, varlen_k, 4});
  if constexpr (kForward) {
    if (!p.cache) return;
    const bool paged = p.cache == STROBE_CACHE_PAGED, packed = p.append == STROBE_APPEND_PACKED;
    const bool appends = p.append != STROBE_APPEND_NONE, rotates = p.rotary_dim > 0;
    const bool some_new = appends && (packed ? p.total_new : p.seqlen_new) > 0 && p.seqlen_k > 0;
    const bool some_rotates = rotates && p.rotary_rows > 0;
    visit(LaunchPointer{"block_table", a.block_table, paged, paged && p.pages_per_sequence > 0, 4});
    visit(LaunchPointer{"k_new", a.k_new, appends, some_new, align_kv});
    visit(LaunchPointer{"v_new", a.v_new, appends, some_new, align_kv});
    visit(LaunchPointer{"cu_seqlens_k_new", a.cu_seqlens_k_new, packed, packed, 4});
    visit(LaunchPointer{"rotary_cos", a.rotary_cos, rotates, some_rotates, align});
    visit(LaunchPointer{"rotary_sin", a.rotary_sin, rotates, some_rotates, align});
    for_each_cache_array(p, a, [&](const char* name, int32_t wanted, const int32_t* values) {
      visit(LaunchPointer{name, values, wanted != 0, wanted != 0, 4});
    });
  }
}

/// What check says of the first of these pointers, and of the arrays of for_each_array, that it
/// finds wrong.
template <typename Args, typename Check>
Status first_wrong(const AttentionProblem& p, const Args& a, const Check& check) {
  Status first;
  const auto visit = [&](const LaunchPointer& x) {
    if (first.ok()) first = check(x);
  };
  for_each_pointer(p, a, visit);
  for_each_array(p, a, [&](const OptionArray& array, int32_t wanted, const int32_t* values) {
    visit({array.name, values, wanted != 0, wanted != 0, 4});
  });
  return first;
}

}  // namespace strobe

#endif  // STROBE_CORE_POINTERS_H_
