// One row of attention, key by key, from the keys that it sees alone: slow, exact, for any input.
//
// The tiled kernels multiply weights of 0 with values of keys that a row does not see. Where such a
// value is infinite or NaN, so is the product; where weights against a reference maximum meet
// values near the largest float, the sum overflows. Both show in O, and both are computed again
// here; and so are rows whose scores are so large that no fused product can be relative to their
// maximum (is_coarse), which the tiled kernel marks in the same way.
#ifndef STROBE_CUDA_COMMON_FORWARD_EXACT_CUH_
#define STROBE_CUDA_COMMON_FORWARD_EXACT_CUH_

#include <cuda_bf16.h>

#include <type_traits>

#include "cuda/common/dropout.cuh"
#include "cuda/common/params.h"
#include "cuda/common/score.cuh"
#include "cuda/common/softmax.cuh"

namespace strobe::cuda {

/// marks + 0 * x for two packed values: marks stay zero (of either sign) as long as x is finite.
template <typename T>
__device__ __forceinline__ uint32_t mark_not_finite(uint32_t marks, uint32_t x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(marks) : "r"(x), "r"(0));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(marks) : "r"(x), "r"(0));
  }
  return marks;
}
__device__ __forceinline__ bool marked(uint32_t marks) { return (marks & 0x7fff7fff) != 0; }

/// A tile of queries of which some row of O is not finite, in a list.
struct SuspectTile {
  int32_t next;  // negative: the last
  int32_t batch, head, first;
};

/// Rewrites row `query` of O. By a whole warp: lane i has columns i, i + 32, ... of head_dim. No
/// value of V enters lse, which is written only where scores were too large for the tiled kernel.
template <typename T, bool kDropout>
__device__ void exact_row(const ForwardParams& p, int32_t batch, int32_t head, int32_t query) {
  constexpr int kShare = 8;  // head_dim <= 256
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const Sequence sequence = p.sequence(batch);
  const Range keys = sequence.mask.row(query);
  const ScoreRule rule = score_rule(p, batch, head);
  const auto row_of = [&](const Tensor& t, int64_t row, int32_t head_of) {
    return static_cast<T*>(t.data) + batch * t.batch_stride + row * t.row_stride +
           head_of * t.head_stride;
  };
  const T* const q = row_of(p.q, sequence.q_row + query, head);
  float sum = 0.f, max = -infinity(), out[kShare] = {};
#pragma unroll 1
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    const T* const k = row_of(p.k, sequence.k_row + key, head / p.group);
    const T* const v = row_of(p.v, sequence.k_row + key, head / p.group);
    float dot = 0.f;
#pragma unroll 1
    for (int d = lane; d < p.head_dim; d += 32)
      dot += static_cast<float>(q[d]) * static_cast<float>(k[d]);
    for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
    float slope;
    const auto distance = static_cast<float>(sequence.mask.position(query) - key);
    const float score = apply_rule<true>(rule, dot, fabsf(distance), slope);
    const float most = fmaxf(max, score), reference = reference_of(most);
    const float alpha = exp2_fast(max - reference);
    const float weight = exp2_fast(score - reference - kValueShift);
    max = most;
    sum = sum * alpha + weight;
    float kept = weight;  // dropout comes after the softmax, and 0 * inf is NaN
    if (kDropout && p.dropout.enabled() &&
        !keep_one(p.dropout, static_cast<uint32_t>(batch * p.heads + head), query, key)) {
      kept *= 0.f;
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int d = lane + 32 * i;
      if (d < p.head_dim_v) out[i] = out[i] * alpha + kept * static_cast<float>(v[d]);
    }
  }
  const RowResult result =
      finish_row(!keys.empty(), max + kValueShift, sum, kDropout ? p.dropout.keep_scale : 1.f);
  if (p.lse && lane == 0 && is_coarse(max))
    p.lse[sequence.lse_row + head * p.lse_head_stride + query] = result.lse;
  T* const to = row_of(p.out, sequence.q_row + query, head);
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int d = lane + 32 * i;
    if (d < p.head_dim_v) to[d] = static_cast<T>(out[i] * result.factor);
  }
}

/// Rewrites those rows of a tile of `rows` queries that are not finite; this warp's share of them.
template <typename T, bool kDropout>
__device__ void exact_rows(const ForwardParams& p, const SuspectTile& tile, int warp, int warps,
                           int rows) {
  const Sequence sequence = p.sequence(tile.batch);
  const int64_t left = sequence.mask.seqlen_q - tile.first;
  if (left < rows) rows = static_cast<int>(left);
#pragma unroll 1
  for (int row = warp; row < rows; row += warps) {
    const T* const out = static_cast<const T*>(p.out.data) + tile.batch * p.out.batch_stride +
                         (sequence.q_row + tile.first + row) * p.out.row_stride +
                         tile.head * p.out.head_stride;
    float zero = 0.f;  // 0 * x is NaN where x is not finite
    for (int d = static_cast<int>(threadIdx.x % 32); d < p.head_dim_v; d += 32)
      zero = __fmaf_rn(static_cast<float>(out[d]), 0.f, zero);
    if (__any_sync(0xffffffffu, zero != 0.f))
      exact_row<T, kDropout>(p, tile.batch, tile.head, tile.first + row);
  }
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_FORWARD_EXACT_CUH_
