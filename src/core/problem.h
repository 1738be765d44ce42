// What the caller wants, and what its tensors look like.
#ifndef STROBE_CORE_PROBLEM_H_
#define STROBE_CORE_PROBLEM_H_

#include <cstdint>
#include <string>

#include "core/mask.h"
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

/// Mask of a sequence with the given lengths.
STROBE_INLINE constexpr Mask make_mask(const AttentionProblem& p, int64_t seqlen_q,
                                       int64_t seqlen_k) {
  return Mask::make(seqlen_q, seqlen_k, p.causal != 0, p.window_left, p.window_right);
}

STROBE_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
STROBE_INLINE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
STROBE_INLINE constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
STROBE_INLINE constexpr int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace strobe

#endif  // STROBE_CORE_PROBLEM_H_
