// The pointers among a launch's arguments, in one list for all checks of them.
#ifndef STROBE_CORE_POINTERS_H_
#define STROBE_CORE_POINTERS_H_

#include <type_traits>
#include <utility>

#include "core/checks.h"
#include "core/options.h"
#include "core/overlap.h"
#include "core/packed_mask.h"
#include "core/problem.h"
#include "core/status.h"

namespace strobe {

struct LaunchPointer {
  const char* name;
  const void* pointer;
  bool used;          // whether the problem asks for it: else nothing reads it
  bool needed;        // whether it may not be null
  int64_t alignment;  // in bytes, a power of two: the size of an element
  Extents extents;
  bool written;  // whether a launch writes it
  // What a problem that does not use it says, in words: then the pointer has to be null. Null: it
  // may be given all the same.
  const char* without = nullptr;
  // What a message adds to "expected NULL": how the problem would use it.
  const char* instead = "";
};

/// visit(LaunchPointer) for all but the workspace and the arrays of for_each_array. problem:
/// resolved. Args: ForwardArgs or BackwardArgs.
template <typename Args, typename Visit>
void for_each_pointer(const AttentionProblem& p, const Args& a, const Visit& visit) {
  constexpr bool kForward = std::is_same_v<Args, ForwardArgs>;
  const int64_t align = element_size(p.dtype), align_k = element_size(p.kv_dtype);
  const int64_t align_v = element_size(v_dtype_of(p));
  const bool some_q = rows_q(p) > 0, some_k = rows_k(p) > 0, alibi = p.alibi != STROBE_ALIBI_NONE;
  const bool varlen_k = p.varlen && !p.cache;  // lengths of keys in a cache are in seqused_k
  const bool appends = p.append != STROBE_APPEND_NONE;
  const auto array = [](int64_t count) { return Extents::contiguous(4 * count); };
  const auto of_q = [&](const Strides& s, int64_t dim, int64_t size) {
    return p.varlen ? Extents::of(1, p.total_q, p.heads, dim, s, size)
                    : Extents::of(p.batch, p.seqlen_q, p.heads, dim, s, size);
  };
  const auto of_k = [&](const Strides& s, int64_t elements, int64_t size) {
    return Extents::of(kv_entries(p), kv_rows(p), p.heads_kv, elements, s, size);
  };
  const int64_t d = p.head_dim, dv = p.head_dim_v, size_out = element_size(p.out_dtype);
  const bool reads_out = kForward || !p.has_delta;  // or writes it
  const Extents lse = array(rows_q(p) * p.heads);
  visit(LaunchPointer{"q", a.q, true, some_q, align, of_q(p.q, d, align), false});
  visit(LaunchPointer{"k", a.k, true, some_k, align_k,
                      of_k(p.k, row_elements(p.kv_dtype, d), align_k), appends});
  visit(LaunchPointer{"v", a.v, true, some_k, align_v,
                      of_k(p.v, row_elements(v_dtype_of(p), dv), align_v), appends});
  visit(LaunchPointer{"out", a.out, reads_out, some_q && reads_out, size_out,
                      of_q(p.out, dv, size_out), kForward});
  visit(LaunchPointer{"lse", a.lse, true, some_q && !kForward, 4, lse, kForward});
  if constexpr (!kForward) {
    visit(LaunchPointer{"dout", a.dout, true, some_q, align, of_q(p.dout, dv, align), false});
    const bool has_dlse = p.has_dlse != 0, has_delta = p.has_delta != 0;
    visit(
        LaunchPointer{"dlse", a.dlse, has_dlse, some_q && has_dlse, 4, lse, false, "has_dlse = 0"});
    visit(LaunchPointer{"delta", a.delta, has_delta, some_q && has_delta, 4, lse, false,
                        "has_delta = 0"});
    const bool has_dsinks = p.has_dsinks != 0;
    visit(LaunchPointer{"dsinks", a.dsinks, has_dsinks, has_dsinks, 4, array(p.heads), true,
                        "has_dsinks = 0"});
    const int64_t size = element_size(p.grad_dtype);
    visit(LaunchPointer{"dq", a.dq, true, some_q, size, of_q(p.dq, d, size), true});
    visit(LaunchPointer{"dk", a.dk, true, some_k, size, of_k(p.dk, d, size), true});
    visit(LaunchPointer{"dv", a.dv, true, some_k, size, of_k(p.dv, dv, size), true});
  }
  const auto visit_bias = [&](const char* name, const void* pointer, int32_t used, int32_t dtype,
                              const Strides& s, bool written, const char* without) {
    const int64_t bytes = element_size(dtype);
    const Extents extents =
        Extents::of_bias(p.bias_batch, p.bias_heads, p.bias_seqlen_q, p.seqlen_k, s, bytes);
    const bool some = used && p.bias_seqlen_q > 0 && p.seqlen_k > 0;
    visit(LaunchPointer{name, pointer, used != 0, some, bytes, extents, written, without});
  };
  visit_bias("bias", a.bias, p.has_bias, p.bias_dtype, p.bias, false, "has_bias = 0");
  if constexpr (!kForward) {
    visit_bias("dbias", a.dbias, p.has_dbias, p.dbias_dtype, p.dbias, true, "has_dbias = 0");
  }
  const auto visit_array = [&](const char* name, const void* pointer, bool used, bool needed,
                               const Extents& extents, const char* without) {
    visit(LaunchPointer{name, pointer, used, needed, 4, extents, false, without});
  };
  visit_array("alibi_slopes", a.alibi_slopes, alibi, alibi,
              array(p.alibi == STROBE_ALIBI_PER_HEAD ? p.heads : p.batch * p.heads),
              "alibi = 0 (none)");
  visit_array("sinks", a.sinks, p.has_sinks != 0, p.has_sinks != 0, array(p.heads),
              "has_sinks = 0");
  const Extents starts = array(p.batch + 1);
  visit_array("cu_seqlens_q", a.cu_seqlens_q, p.varlen != 0, p.varlen != 0, starts, "varlen = 0");
  visit_array("cu_seqlens_k", a.cu_seqlens_k, varlen_k, varlen_k, starts,
              p.varlen ? "a cache (lengths of its keys are in seqused_k)" : "varlen = 0");
  const bool masked = p.mask.kind != STROBE_MASK_NONE;
  visit(LaunchPointer{"mask", a.mask, masked, masked, kMaskAlignment,
                      Extents::contiguous(masked ? 4 * MaskLayout::of(p).end : 0), false,
                      "mask.kind = 0 (none)"});
  if constexpr (kForward) {
    const bool paged = p.cache == STROBE_CACHE_PAGED, packed = p.append == STROBE_APPEND_PACKED;
    const bool rotates = p.rotary_dim > 0;
    const int64_t rows_new = packed ? p.total_new : p.seqlen_new;
    // Without a row of each sequence there is nothing to point to; packed, whoever appends nothing
    // this time keeps the pointers.
    const bool takes_new = appends && (packed || rows_new > 0);
    const bool some_new = takes_new && rows_new > 0 && p.seqlen_k > 0;
    const char* const without_new = appends ? "seqlen_new = 0" : "append = 0 (none)";
    const char* const instead_new = appends ? "" : ", or append and seqlen_new in the problem";
    const bool some_rotates = rotates && p.rotary_rows > 0;
    const int64_t align_new = element_size(new_dtype_of(p));
    const auto of_new = [&](const Strides& s, int64_t dim) {
      return Extents::of(packed ? 1 : p.batch, rows_new, p.heads_kv, dim, s, align_new);
    };
    const auto visit_new = [&](const char* name, const void* pointer, const Strides& s,
                               int64_t dim) {
      visit(LaunchPointer{name, pointer, takes_new, some_new, align_new, of_new(s, dim), false,
                          without_new, instead_new});
    };
    const Extents angles = Extents::contiguous(p.rotary_rows * (p.rotary_dim / 2) * align);
    const auto visit_angles = [&](const char* name, const void* pointer) {
      visit(LaunchPointer{name, pointer, rotates, some_rotates, align, angles, false,
                          "rotary_dim = 0 (none)"});
    };
    visit_array(
        "block_table", a.block_table, paged, paged && p.pages_per_sequence > 0,
        Extents::of(p.batch, 1, 1, p.pages_per_sequence, {p.block_table_stride, 0, 0, 1}, 4),
        p.cache ? "cache = 1 (contiguous)" : "cache = 0 (none)");
    visit_new("k_new", a.k_new, p.k_new, d);
    visit_new("v_new", a.v_new, p.v_new, dv);
    const auto visit_scale = [&](const char* name, const void* pointer, const Strides& s,
                                 int32_t dtype) {
      const int32_t kind = scale_kind(p, dtype);
      const bool of_rows = kind == STROBE_KV_SCALE_ROW;
      const bool of_sequences = kind == STROBE_KV_SCALE_BATCH_HEAD;
      const int64_t size = element_size(p.kv_scale_dtype);
      const Extents extents =
          Extents::of(of_rows        ? kv_entries(p)
                      : of_sequences ? p.batch
                                     : 1,
                      of_rows ? kv_rows(p) : 1, differ_by_head(kind) ? p.heads_kv : 1, 1, s, size);
      const bool used = kind != STROBE_KV_SCALE_NONE;
      visit(LaunchPointer{name, pointer, used, used && some_k, size, extents, appends && of_rows,
                          p.kv_scale == STROBE_KV_SCALE_NONE
                              ? "kv_scale = 0 (none)"
                              : "a dtype that has no scales (kv_scale is the other tensor's)"});
    };
    visit_scale("k_scale", a.k_scale, p.k_scale, p.kv_dtype);
    visit_scale("v_scale", a.v_scale, p.v_scale, v_dtype_of(p));
    const bool scales_q = p.has_q_scale != 0;
    visit(LaunchPointer{"q_scale", a.q_scale, scales_q, scales_q && some_q, 4,
                        Extents::of(p.batch, 1, p.heads_kv, 1, p.q_scale, 4), false,
                        "has_q_scale = 0"});
    visit_array("cu_seqlens_k_new", a.cu_seqlens_k_new, packed, packed, starts,
                appends ? "append = 1 (dense)" : "append = 0 (none)");
    visit_angles("rotary_cos", a.rotary_cos);
    visit_angles("rotary_sin", a.rotary_sin);
    for_each_cache_array(
        p, a, [&](const char* name, const char* without, int32_t wanted, const int32_t* values) {
          visit_array(name, values, wanted != 0, wanted != 0, array(p.batch), without);
        });
  }
}

/// The same, and the arrays of for_each_array.
template <typename Args, typename Visit>
void for_each_argument(const AttentionProblem& p, const Args& a, const Visit& visit) {
  for_each_pointer(p, a, visit);
  for_each_array(p, a, [&](const OptionArray& array, int32_t wanted, const int32_t* values) {
    visit(LaunchPointer{array.name, values, wanted != 0, wanted != 0, 4,
                        Extents::contiguous(4 * p.batch), false, array.without});
  });
}

/// What check says of the first of these that it finds wrong.
template <typename Args, typename Check>
Status first_wrong(const AttentionProblem& p, const Args& a, const Check& check) {
  Status first;
  for_each_argument(p, a, [&](const LaunchPointer& x) {
    if (!first.ok()) return;
    if (Status found = check(x); !found.ok()) first = std::move(found);
  });
  return first;
}

}  // namespace strobe

#endif  // STROBE_CORE_POINTERS_H_
