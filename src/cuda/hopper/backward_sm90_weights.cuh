// Hopper backward: P^T and dS^T from accumulators, 16 queries at a time, as operands of the next
// product.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_WEIGHTS_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_WEIGHTS_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/backward/pre.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/packed.h"
#include "cuda/ptx/stmatrix.h"

namespace strobe::cuda::sm90 {

/// Query of a lane's i-th of eight accumulators: two neighbouring 16 x 8 blocks of S^T.
__device__ __forceinline__ constexpr int query_of(int lane, int i) {
  return 2 * (lane % 4) + i / 4 * 8 + i % 2;
}

/// Whether `Seen` says which pairs are seen of two neighbouring queries at a time (AllowedPairs),
/// or of each (SeenQueries).
template <typename Seen>
inline constexpr bool kSeesTwo = requires(const Seen& seen) {
  seen.of(0);
};

/// lse or delta of a lane's queries of a tile, which lie in quad_order: four of each 16.
template <int kCount>
__device__ __forceinline__ void load_of_queries(float4 (&x)[kCount], const float* values,
                                                int lane) {
  const float4* const from = reinterpret_cast<const float4*>(values) + lane % 4;
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] = from[4 * j];
}

/// What a bias adds to eight of a lane's scores: nothing where there is none.
struct NoBias {
  __device__ __forceinline__ float added_to(float x, int /*i*/) const { return x; }
};

/// P^T = exp2(S^T * scale + bias - lse), packed. No weight is above 1, however coarse lse is.
/// scale: in log 2 units. bias: NoBias, or BiasOfQueries. lse: of the lane's four queries, in
/// quad_order. seen: a SeenQueries, or AllowedPairs
template <typename T, bool kMasked, typename OfBias, typename Seen>
__device__ __forceinline__ void take_weights(const float* s, float scale, const OfBias& bias,
                                             const float4& lse, int lane, int first_query,
                                             const Seen& seen, uint32_t* weights) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  const float references[4] = {lse.x, lse.y, lse.z, lse.w};
  float w[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    w[i] = exp2_fast(bias.added_to(fmaf(s[i], scale, -references[i / 4 * 2 + i % 2]), i));
    if constexpr (kMasked && !kSeesTwo<Seen>) {
      if (!seen(i / 2 % 2, first_query + query_of(lane, i))) w[i] = 0.f;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    weights[i] = ptx::min_or_nan_pair<T>(ptx::pack<T>(w[2 * i], w[2 * i + 1]),
                                         kBf16 ? 0x3f803f80u : 0x6c006c00u);  // 1, 4096
    if constexpr (kMasked && kSeesTwo<Seen>) weights[i] &= seen.of(first_query).two(first_query, i);
  }
}

/// Two weights times two values. bf16 has float32's exponents: the product may be taken of packed
/// values. fp16's weights are too large for that (StageTraits::kScale).
template <typename T>
__device__ __forceinline__ uint32_t times_weights(uint32_t weights, float low, float high) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return ptx::multiply_pair<T>(weights, ptx::pack<T>(low, high));
  } else {
    const float2 w = unpack<T>(weights);
    return ptx::pack<T>(w.x * low, w.y * high);
  }
}

/// dS^T = P^T (dP^T - delta), packed. weight_scale: what weights are held times
/// (StageTraits::kScale).
template <typename T, bool kMasked, typename Seen>
__device__ __forceinline__ void take_ds(const float* dp, const uint32_t* weights,
                                        float weight_scale, const float4& delta, int lane,
                                        int first_query, const Seen& seen, uint32_t* ds) {
  const float deltas[4] = {delta.x, delta.y, delta.z, delta.w};
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = fmaf(dp[i], 1.f / weight_scale, -deltas[i / 4 * 2 + i % 2]);
    if constexpr (kMasked && !kSeesTwo<Seen>) {
      if (!seen(i / 2 % 2, first_query + query_of(lane, i))) x[i] = 0.f;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ds[i] = times_weights<T>(weights[i], x[2 * i], x[2 * i + 1]);
    if constexpr (kMasked && kSeesTwo<Seen>) ds[i] &= seen.of(first_query).two(first_query, i);
  }
}

/// The warp's 16 rows of packed pairs, from `row` on, to a tile in shared memory.
template <typename Tile, int kCount>
__device__ __forceinline__ void store_rows(uint32_t tile, int row, int lane,
                                           const uint32_t (&pairs)[kCount]) {
  // (The address of the next 16 columns differs in single bits, which an exclusive or flips:
  // tile.cuh.)
  const uint32_t rows =
      tile + static_cast<uint32_t>(Tile::block_offset(row, 0) + Tile::fragment_offset(lane, 0));
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const uint32_t block[4] = {pairs[4 * j], pairs[4 * j + 1], pairs[4 * j + 2], pairs[4 * j + 3]};
    ptx::stmatrix((rows ^ static_cast<uint32_t>(32 * (j % 4))) +
                      static_cast<uint32_t>(j / 4 * Tile::kPanelBytes),
                  block);
  }
}

/// Whether one of the thread's two rows of a sum, as fragment.cuh counts them, has an infinity or a
/// NaN.
template <int kCount>
__device__ __forceinline__ bool not_finite(const float (&sum)[kCount], int half) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    found |= !(fabsf(sum[4 * i + 2 * half]) < infinity() &&
               fabsf(sum[4 * i + 2 * half + 1]) < infinity());
  }
  return found;
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_WEIGHTS_CUH_
