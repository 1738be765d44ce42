// What every step has in common: its arguments, and the names of its types.
#ifndef STROBE_EXAMPLES_PAPER_COMMON_H_
#define STROBE_EXAMPLES_PAPER_COMMON_H_

#include <cuda_bf16.h>

#include <cstdint>

namespace strobe::paper {

using bf16 = __nv_bfloat16;

/// What a kernel is given: self-attention of dense tensors in bf16. Each step stores `out`, and of
/// the rest what its own comment names.
struct Arguments {
  const bf16 *q, *k, *v;  // [batch, seqlen, heads, head_dim]
  bf16* out;              // [batch, seqlen, heads, head_dim]
  float* row_max;         // [batch, heads, seqlen]: a row's largest scaled score, m
  float* row_sum;         // [batch, heads, seqlen]: a row's sum of exp(score - m), l
  float* lse;             // [batch, heads, seqlen]: m + log(l), natural logarithm
  bf16* scores;           // [batch, heads, seqlen, scores_stride]: S, and then P
  int64_t scores_stride;  // step 1's stride_of_scores(seqlen)
  int batch, seqlen, heads;
  float scale;  // of q . k

  /// Elements from a row of one head to the next row of it, in q, k, v and out.
  __device__ int row_stride(int head_dim) const { return heads * head_dim; }
  /// Where row 0 of a (batch, head) begins in q, k, v and out.
  __device__ int64_t first(int batch_head, int head_dim) const {
    const int64_t b = batch_head / heads, h = batch_head % heads;
    return (b * seqlen * heads + h) * head_dim;
  }
};

/// Tiles of `tile` rows that `seqlen` rows take; the last one may be partly empty.
__host__ __device__ constexpr int tiles_of(int seqlen, int tile) {
  return (seqlen + tile - 1) / tile;
}

/// A thread block of steps 1 to 5.
inline constexpr int kWarps = 4, kThreads = 32 * kWarps;

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_COMMON_H_
