// Hopper backward, wide heads: where data lie and which thread block they belong to, as index maps
// that tests check on the CPU. backward_sm90_wide.cuh has the kernel, and the whole picture.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_MAPS_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_MAPS_CUH_

#include <cstdint>

#include "core/macros.h"

namespace strobe::cuda::sm90_wide {

/// Keys and queries of a thread block's step; blocks of a cluster, and their keys together.
inline constexpr int kKeys = 64, kQueries = 64;
inline constexpr int kBlocks = 2, kItemKeys = kBlocks * kKeys;

/// Where the weights warpgroup leaves four words of P^T for the gradients warpgroup, in bytes:
/// those of queries 16j to 16j + 15 that `thread` of a warpgroup has. Only the thread of the same
/// number reads them, so their order is free, as long as neighbouring threads' words are
/// neighbours.
STROBE_INLINE constexpr int weights_offset(int thread, int j) { return 16 * (128 * j + thread); }

/// Panels of 64 columns of dQ that a block makes in a step.
struct DqShare {
  int first, count;
};

/// Each block of a pair makes a half from the keys of both; of three panels one block makes two and
/// the other one, which changes with every step.
template <int kPanels>
STROBE_INLINE constexpr DqShare dq_share(uint32_t rank, uint32_t step) {
  if constexpr (kPanels % 2 == 0) return {static_cast<int>(rank) * kPanels / 2, kPanels / 2};
  const int low = static_cast<int>((kPanels + 1 - step % 2) / 2);  // panels of block 0
  return rank == 0 ? DqShare{0, low} : DqShare{low, kPanels - low};
}
/// Panels of the other block's K that a block of a pair holds, from the first that is ever its.
template <int kPanels>
STROBE_INLINE constexpr DqShare peer_panels(uint32_t rank) {
  if constexpr (kPanels % 2 == 0) return dq_share<kPanels>(rank, 0);
  const int first = static_cast<int>(rank) * (kPanels / 2);
  return {first, kPanels / 2 + 1};
}

/// Where a warp's 16 x 8 accumulator of dQ belongs in the sum of its tile, in values: `row_block`
/// of 16 queries, columns from 8 * `chunk` on (BackwardScratch::dq).
template <int kWidth>
STROBE_INLINE constexpr int sum_block(int row_block, int chunk) {
  return (row_block * (kWidth / 8) + chunk) * 128;
}

/// Words that say which of an item's rows of dK and dV are not finite, each for 16 keys: which is a
/// warp's.
inline constexpr int kFlagWords = kItemKeys / 16;
STROBE_INLINE constexpr int flag_word(uint32_t rank, int warp) {
  return kKeys / 16 * static_cast<int>(rank) + warp;
}

}  // namespace strobe::cuda::sm90_wide

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_MAPS_CUH_
