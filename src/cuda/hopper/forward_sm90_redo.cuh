// Hopper forward: a block whose weights came out too large for their type, against the reference
// that the row had before it, is computed once more against its own maximum.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_REDO_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_REDO_CUH_

#include <cstdint>

#include "cuda/common/quad.cuh"
#include "cuda/hopper/forward_sm90_consumer.cuh"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/thread_again.h"

namespace strobe::cuda::sm90 {

/// Computes the warp's 16 rows of S of a block again, from Q and K in shared memory, and this
/// time takes their maximum as the reference. By mma.sync, which needs this warp alone: wgmma
/// would need the whole warpgroup. With Tr::kInvariant only rows whose own sums exceed the limit
/// take their maximum. The others get the weights that they had: the two instructions add up a
/// k16 step with the same bits (docs/hopper-forward.md).
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::redo(
    int stage, int first_key, [[maybe_unused]] bool masked, float (&part)[2]) {
  using QTile = typename Tr::QTile;
  using KTile = typename Tr::KTile;
  const uint32_t q = ptx::shared_address(shared_.q[q_at().stage()][warpgroup_]) +
                     QTile::block_offset(16 * warp(), 0);
  const uint32_t k = ptx::shared_address(shared_.k[stage]);
#pragma unroll
  for (int i = 0; i < kTileK / 2; ++i) s_[i] = 0.f;
#pragma unroll 1
  for (int step = 0; step < kWidth / 16; ++step) {
    const int lane = ptx::thread_again() % 32;
    uint32_t a[4], b[4];
    ptx::ldmatrix(a, q + static_cast<uint32_t>(step / 4 * QTile::kPanelBytes +
                                               QTile::fragment_offset(lane, step % 4)));
#pragma unroll
    for (int j = 0; j < kTileK / 16; ++j) {
      ptx::ldmatrix(b, k + static_cast<uint32_t>(step / 4 * KTile::kPanelBytes +
                                                 KTile::block_offset(16 * j, 0) +
                                                 KTile::fragment_offset_b(lane, step % 4)));
      mma(s_ + 8 * j, a, b[0], b[1]);
      mma(s_ + 8 * j + 4, a, b[2], b[3]);
    }
  }
  float alpha[2];
  apply_options(first_key);
  if constexpr (Tr::kInvariant) {
    if (masked) mask(first_key);
    const bool again[2] = {quad_any(part[0] <= kSumLimit ? 0 : 1),
                           quad_any(part[1] <= kSumLimit ? 0 : 1)};
    take_maximum(alpha, to_log2(), again);
  } else {
    take_maximum(alpha, to_log2());
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) part[r] = take_weights(r, to_log2(), reference_of(max_[r]));
  rescale(alpha);
}

template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::mma(
    float* s, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  float c[4] = {s[0], s[1], s[2], s[3]};
  ptx::mma<T>(c, a, b0, b1);
#pragma unroll
  for (int i = 0; i < 4; ++i) s[i] = c[i];
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_REDO_CUH_
