// How a warp fetches a block of keys, or values, from a cache: each lane a box of rows.
#ifndef STROBE_CUDA_HOPPER_CACHED_KEYS_CUH_
#define STROBE_CUDA_HOPPER_CACHED_KEYS_CUH_

#include <cstdint>

#include "core/cache.h"
#include "cuda/common/key_boxes.h"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tensor_map.h"
#include "cuda/ptx/thread_again.h"
#include "cuda/ptx/tma.h"

namespace strobe::cuda::sm90 {

/// A lane's box of a block.
struct LaneBox {
  int32_t entry, row;  // of the cache, or of its pages
  bool wanted;         // some key of the box is the sequence's

  /// Loads the number of the page. The load is waited for where the number is used, a block later.
  __device__ __forceinline__ static LaneBox find(const KeyBoxes& boxes, const KeyRows& keys,
                                                 int32_t block_key, int32_t tile_k, int32_t end) {
    const auto i = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t first = i * boxes.rows;
    if (first >= tile_k || block_key + first >= end) return {0, 0, false};
    const KeyRows::Place place = boxes.place(keys, block_key, i);
    return {static_cast<int32_t>(place.entry), static_cast<int32_t>(place.row), true};
  }
};

/// Fetches a block into a stage; `full` gets one arrival. free(): waits until the stage is free; it
/// is called after everything that can be worked out before. Rows of pages that are not there
/// become `lost`, a pair of values; boxes without keys stay what they were. By a whole warp, each
/// lane with its own box: where boxes have eight or sixteen rows, one lane that fetches all of them
/// takes half as long again.
template <typename Tile, typename Free>
__device__ __forceinline__ void load_boxes(uint8_t* tile, const CUtensorMap& map,
                                           ptx::Barrier& full, const KeyBoxes& boxes,
                                           const KeyRows& keys, const LaneBox& box, int32_t head,
                                           uint32_t lost, const Free& free) {
  const bool there = box.wanted && keys.has(box.entry);
  const uint32_t loaded = __ballot_sync(0xffffffffu, there);
  const bool some_lost = __any_sync(0xffffffffu, box.wanted && !there) != 0;
  const int32_t box_bytes = boxes.rows * Tile::kRowBytes;
  const auto bytes = static_cast<uint32_t>(__popc(loaded) * box_bytes * Tile::kPanels);
  const int lane = static_cast<int>(ptx::thread_again() % 32);
  free();
  if (some_lost) {
    if (box.wanted && !there) {
#pragma unroll 1
      for (int i = 0; i < box_bytes; i += 16) {
#pragma unroll 1
        for (int panel = 0; panel < Tile::kPanels; ++panel)
          *reinterpret_cast<uint4*>(tile + lane * box_bytes + panel * Tile::kPanelBytes + i) =
              make_uint4(lost, lost, lost, lost);
      }
      ptx::fence_proxy_async();
    }
  }
  // Every lane has seen that the stage is free before lane 0 lets the block arrive: where its box
  // is the only one, consumers could free the stage again, and a lane that still waits cannot tell
  // that phase from the one before.
  __syncwarp();
  if (lane == 0) full.arrive_expect(bytes);
  if (!there) return;
#pragma unroll 1
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
    ptx::tma_load(tile + lane * box_bytes + panel * Tile::kPanelBytes, map, full,
                  ptx::L2::kEvictLast, panel * 64, box.row, head, box.entry);
  }
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_CACHED_KEYS_CUH_
