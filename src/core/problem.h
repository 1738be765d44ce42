// What the caller wants, and what its tensors look like.
#ifndef STROBE_CORE_PROBLEM_H_
#define STROBE_CORE_PROBLEM_H_

#include <cstdint>
#include <string>

#include "core/arithmetic.h"
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

/// Checks of launch arguments against a resolved problem: pointers, alignment, workspace. On the
/// CPU also the values of cu_seqlens.
Status check_args(const AttentionProblem& problem, size_t workspace_bytes, const ForwardArgs& args);
Status check_args(const AttentionProblem& problem, size_t workspace_bytes,
                  const BackwardArgs& args);

/// One line: "forward bf16 batch 2 x heads 8/2 x seqlen 512/1024 x head_dim 64 causal ...".
std::string to_string(const AttentionProblem& problem);

STROBE_INLINE constexpr int64_t element_size(int32_t dtype) {
  return dtype == STROBE_FLOAT32 ? 4 : 2;
}
const char* dtype_name(int32_t dtype);

/// Rows of q (or k) that the tensors hold, all sequences together.
STROBE_INLINE constexpr int64_t rows_q(const AttentionProblem& p) {
  return p.varlen ? p.total_q : p.batch * p.seqlen_q;
}
STROBE_INLINE constexpr int64_t rows_k(const AttentionProblem& p) {
  return p.varlen ? p.total_k : p.batch * p.seqlen_k;
}

STROBE_INLINE constexpr MaskRule mask_rule(const AttentionProblem& p) {
  return {p.window_left, p.window_right, p.attention_chunk, p.causal != 0};
}

/// The sequences of a launch. Args: ForwardArgs or BackwardArgs; empty ones for a plan.
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
          mask_rule(p)};
}

}  // namespace strobe

#endif  // STROBE_CORE_PROBLEM_H_
