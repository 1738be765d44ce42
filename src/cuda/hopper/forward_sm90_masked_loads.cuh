// Hopper forward: the warp that loads K and V under a mask as data, and with each block leaves what
// either warpgroup does with it (forward_sm90_mask.cuh).
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_MASKED_LOADS_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_MASKED_LOADS_CUH_

#include "cuda/hopper/forward_sm90_mask.cuh"
#include "cuda/hopper/forward_sm90_producer.cuh"

namespace strobe::cuda::sm90 {

/// As load_kv, under a mask as data: by a whole warp, which goes through the tile's lists together.
template <typename Tr>
__device__ void load_masked_kv(typename Tr::Shared& shared, const TensorMaps& maps) {
  constexpr int kWarpgroups = Tr::kWarpgroups;
  constexpr uint32_t kAll = 0xffffffffu;
  using Loader = BlockLoader<Tr>;
  using Window = ListWindow<kWarpgroups * kWarpgroupRows, Tr::kTileK>;
  const auto is_first = [] { return ptx::thread_again() % 32 == 0; };
  Loader loader{shared, maps};
  RingPosition<Tr::kTileSlots> slot;
  for_each_tile<Tr>(shared, [&](const Tile<kWarpgroups>& tile) {
    const auto& lists = shared.mask.tiles[slot.stage()];
    ++slot.count;
    Window window(lists);
    // What each warpgroup does with the lane's block. One that none computes is not loaded: nobody
    // would wait for its V, before the stage gets another.
    int32_t flags[kWarpgroups] = {};
    const auto advance = [&] {
      return window.advance([&] {
        bool some = false;
#pragma unroll
        for (int w = 0; w < kWarpgroups; ++w) {
          const bool is_second = lists.list_of(w * kWarpgroupRows) != 0;
          bool sees = false, sees_all = true;
#pragma unroll
          for (int i = 0; i < Window::kParts; ++i) {
            const int32_t part = is_second ? window.parts[1][i] : window.parts[0][i];
            sees |= part != MaskVisit::kHidden;
            sees_all &= part == MaskVisit::kFull;
          }
          const PartWalk& by_rule = tile.part[w];
          const bool is_limited = !by_rule.is_full(by_rule.rank(window.block()));
          const bool is_computed = sees && by_rule.visits(window.block());
          flags[w] = (is_computed ? PartVisit::kComputed : 0) |
                     (is_limited || !sees_all ? PartVisit::kMasked : 0) |
                     (is_limited ? PartVisit::kLimited : 0);
          some |= is_computed;
        }
        return some;
      });
    };
    uint32_t visited = advance();
    bool is_requested = false;  // the next tile
#pragma unroll 1
    for (bool is_last = false; !is_last;) {
      const bool is_there = visited != 0;  // else the tile visits nothing
      const int from = is_there ? __ffs(static_cast<int>(visited)) - 1 : 0;
      visited &= visited - 1;
      const int32_t block = window.block_of(from);
      PartVisit parts[kWarpgroups] = {};
      uint32_t idle = 0;
#pragma unroll
      for (int w = 0; w < kWarpgroups; ++w) {
        const bool is_second = lists.list_of(w * kWarpgroupRows) != 0;
#pragma unroll
        for (int i = 0; i < Window::kParts; ++i) {
          const int32_t own = is_second ? window.parts[1][i] : window.parts[0][i];
          parts[w].parts[i] = __shfl_sync(kAll, own, from);
        }
        parts[w].block = block;
        parts[w].flags = __shfl_sync(kAll, is_there ? flags[w] : 0, from);
        idle += parts[w].is(PartVisit::kComputed) ? 0 : 4;
      }
      if (visited == 0) visited = advance();
      is_last = visited == 0;
      const bool is_followed_by_two = (visited & (visited - 1)) != 0;
#pragma unroll
      for (int w = 0; w < kWarpgroups; ++w) {
        const int32_t next =
            __shfl_sync(kAll, flags[w], is_last ? 0 : __ffs(static_cast<int>(visited)) - 1);
        parts[w].flags |=
            is_followed_by_two && PartVisit::is_full(next) ? PartVisit::kNextIsFull : 0;
      }
      // As request_place has it, where no more than these blocks are left.
      if (!is_requested && (is_last || (__popc(visited) <= 3 && window.is_done()))) {
        is_requested = true;
        if (is_first()) shared.request.arrive();
      }
      if (!is_first()) continue;
      const int row = is_there ? tile.map_k + block * Tr::kTileK : Loader::kNothing;
      loader.load_block({row, tile.head_kv, tile.map_batch, idle}, [&](int stage) {
#pragma unroll
        for (int w = 0; w < kWarpgroups; ++w) {
          parts[w].flags |= is_last ? PartVisit::kLast : 0;
          shared.mask.visits[stage][w] = parts[w];
        }
      });
    }
    __syncwarp();  // no lane reads the tile after this
  });
  if (is_first()) loader.load_v();
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_MASKED_LOADS_CUH_
