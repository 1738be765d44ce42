// Which rows of a tile are in use, and which of its columns a row sees.
#ifndef STROBE_CUDA_HOPPER_TILE_ROWS_CUH_
#define STROBE_CUDA_HOPPER_TILE_ROWS_CUH_

#include <cstdint>

#include "cuda/hopper/forward_sm90_layout.cuh"
#include "cuda/ptx/tma.h"

namespace strobe::cuda::sm90 {

/// Sets rows of a tile from `begin` on to zeros. They are not in use and may hold NaN, which times
/// a weight of 0 would be NaN and send the tile to pairwise_rows. Every warpgroup writes these
/// zeros before its ping-pong barrier, after which its products read the tile: so the writes of all
/// its warps are done by then. Two warpgroups may write the same tile at a time; they write the
/// same zeros.
template <typename SharedTile>
__device__ __forceinline__ void zero_rows_from(uint8_t* tile, int begin) {
  constexpr int kRowBytes = SharedTile::kRowBytes, kPanelBytes = SharedTile::kPanelBytes;
  if (begin * kRowBytes >= kPanelBytes) return;
  const int first =
      max(begin, 0) * kRowBytes + 16 * static_cast<int>(threadIdx.x % kWarpgroupThreads);
#pragma unroll 1
  for (int i = first; i < kPanelBytes; i += 16 * kWarpgroupThreads) {
#pragma unroll
    for (int panel = 0; panel < SharedTile::kPanels; ++panel)
      *reinterpret_cast<uint4*>(tile + panel * kPanelBytes + i) = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_proxy_async();
}

/// Turns the signs of all float8 values of a warpgroup's own tile, before its ping-pong barrier as
/// above.
template <typename SharedTile>
__device__ __forceinline__ void negate_rows(uint8_t* tile) {
#pragma unroll 1
  for (int i = 4 * static_cast<int>(threadIdx.x % kWarpgroupThreads); i < SharedTile::kBytes;
       i += 4 * kWarpgroupThreads) {
    *reinterpret_cast<uint32_t*>(tile + i) ^= 0x80808080u;
  }
  ptx::fence_proxy_async();
}

/// How many of the columns 0, 1, 8, 9, 16, 17, ... are below x.
template <int kTileK>
__device__ __forceinline__ int columns_before(int x) {
  x = min(max(x, 0), kTileK);
  return x / 8 * 2 + min(x % 8, 2);
}
/// 2^n - 1 for n from 0 to 32; 0 below, all ones above.
__device__ __forceinline__ uint32_t low_bits(int n) {
  return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1;
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_TILE_ROWS_CUH_
