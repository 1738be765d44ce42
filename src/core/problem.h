// What the caller wants, and what its tensors look like.
#ifndef STROBE_CORE_PROBLEM_H_
#define STROBE_CORE_PROBLEM_H_

#include <cstdint>
#include <string>

#include "core/arithmetic.h"
#include "core/cache.h"
#include "core/element.h"
#include "core/extents.h"
#include "core/mask.h"
#include "core/sequence.h"
#include "core/status.h"
#include "strobe/strobe.h"

namespace strobe {

/// The problem as the C ABI has it: the struct there documents each field.
using AttentionProblem = strobe_problem;
using ForwardArgs = strobe_forward_args;
using BackwardArgs = strobe_backward_args;
using Strides = strobe_strides;

/// Fills in every default: heads_kv, head_dim_v, scale, strides; cuts the bounds of varying lengths
/// to what all sequences have together. Expects a problem that passed
/// check_problem.
void resolve_defaults(AttentionProblem& problem);

/// Every check that needs no tensor; the text names argument, got and wanted. Kernel support is not
/// its business.
Status check_problem(const AttentionProblem& problem);

/// Checks of launch arguments against a resolved problem: pointers, alignment, workspace.
Status check_args(const AttentionProblem& problem, size_t workspace_bytes, const ForwardArgs& args);
Status check_args(const AttentionProblem& problem, size_t workspace_bytes,
                  const BackwardArgs& args);

/// Checks of the numbers in a launch's arrays, which lie in the CPU's memory; the arguments passed
/// check_args. What another thread may change meanwhile has to be copied before: what is found good
/// here is good afterwards, but for the block table, whose entries are asked for again
/// (KeyRows::place).
Status check_numbers(const AttentionProblem& problem, const ForwardArgs& args);
Status check_numbers(const AttentionProblem& problem, const BackwardArgs& args);

/// One line: "forward bf16 batch 2 x heads 8/2 x seqlen 512/1024 x head_dim 64 causal ...".
std::string to_string(const AttentionProblem& problem);

const char* dtype_name(int32_t dtype);

/// Float8 attention: q is of codes, and k and v are, in a cache or not.
STROBE_INLINE constexpr bool has_float8_queries(const AttentionProblem& p) {
  return is_float8(p.dtype);
}
/// The dtype of the values: that of the keys, kv_dtype, unless the problem says another.
STROBE_INLINE constexpr int32_t v_dtype_of(const AttentionProblem& p) {
  return p.v_dtype == STROBE_SAME_DTYPE ? p.kv_dtype : static_cast<int32_t>(p.v_dtype);
}
/// Keys or values of codes beside queries of floats, which there are in a cache alone. problem:
/// resolved.
STROBE_INLINE constexpr bool has_quantised_cache(const AttentionProblem& p) {
  return (is_quantised(p.kv_dtype) || is_quantised(v_dtype_of(p))) && !has_float8_queries(p);
}
/// The dtype of k_new and v_new: floats as the queries are, which an append rounds or quantises; of
/// float8 attention codes as the cache has them, whose bytes it copies. problem: resolved.
STROBE_INLINE constexpr int32_t new_dtype_of(const AttentionProblem& p) {
  return has_float8_queries(p) ? p.kv_dtype : p.dtype;
}
/// Whether keys and values have different dtypes. problem: resolved.
STROBE_INLINE constexpr bool has_mixed_cache(const AttentionProblem& p) {
  return v_dtype_of(p) != p.kv_dtype;
}
/// The strobe_kv_scale of keys, or values, of this dtype: the problem's, where it has scales.
STROBE_INLINE constexpr int32_t scale_kind(const AttentionProblem& p, int32_t dtype) {
  return has_scales(dtype) || has_float8_queries(p) ? p.kv_scale : STROBE_KV_SCALE_NONE;
}

/// Why a kernel that reads whole tensors, and writes out in the dtype of its inputs, declines;
/// empty when it need not.
std::string declines_without_cache(const AttentionProblem& p);

/// The sequences of a launch without a cache. Args: ForwardArgs or BackwardArgs; empty ones for a
/// plan.
template <typename Args>
STROBE_INLINE constexpr Sequences sequences_of(const AttentionProblem& p, const Args& a) {
  return {p.varlen ? a.cu_seqlens_q : nullptr,
          p.varlen ? a.cu_seqlens_k : nullptr,
          p.has_seqused_q ? a.seqused_q : nullptr,
          p.has_seqused_k ? a.seqused_k : nullptr,
          p.has_q_position ? a.q_position : nullptr,
          p.has_prefix ? a.prefix : nullptr,
          static_cast<int32_t>(p.batch),
          static_cast<int32_t>(p.heads),
          static_cast<int32_t>(p.seqlen_q),
          static_cast<int32_t>(p.seqlen_k),
          p.varlen ? p.total_q : p.seqlen_q,
          MaskRule::of(p)};
}

/// The sequences of a launch with a cache.
STROBE_INLINE constexpr CachedSequences cached_sequences_of(const AttentionProblem& p,
                                                            const ForwardArgs& a) {
  CachedSequences s{};
  static_cast<Sequences&>(s) = sequences_of(p, a);
  s.cu_k = nullptr;
  const bool paged = p.cache == STROBE_CACHE_PAGED, packed = p.append == STROBE_APPEND_PACKED;
  s.table = paged ? a.block_table : nullptr;
  s.entries = p.has_cache_batch_idx ? a.cache_batch_idx : nullptr;
  s.leftpad = p.has_leftpad ? a.leftpad : nullptr;
  s.cu_new = packed ? a.cu_seqlens_k_new : nullptr;
  s.rotary_position = p.has_rotary_position ? a.rotary_position : nullptr;
  s.table_stride = p.block_table_stride;
  s.page_size = Divider::make(paged ? static_cast<uint32_t>(p.page_size) : 1);
  s.pool = static_cast<int32_t>(p.pages);
  s.cache_batch = static_cast<int32_t>(paged ? p.batch : p.cache_batch);
  s.rows_new = p.append ? static_cast<int32_t>(p.seqlen_new) : 0;
  s.total_new = packed ? static_cast<int32_t>(p.total_new) : 0;
  s.rotary_dim = static_cast<int32_t>(p.rotary_dim);
  s.rotary_rows = static_cast<int32_t>(p.rotary_rows);
  s.rotary_interleaved = p.rotary_interleaved != 0;
  s.most_q = INT32_MAX;
  return s;
}

}  // namespace strobe

#endif  // STROBE_CORE_PROBLEM_H_
