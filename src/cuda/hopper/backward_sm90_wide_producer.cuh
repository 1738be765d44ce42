// Hopper backward, wide heads: the producer warpgroup, whose warps schedule items and load tiles.
// The table at the head of backward_sm90_wide.cuh says which warp does what.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_PRODUCER_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_PRODUCER_CUH_

#include "cuda/backward/order.cuh"
#include "cuda/backward/scratch.cuh"
#include "cuda/backward/seen_queries.cuh"
#include "cuda/backward/steps.h"
#include "cuda/common/tile_mask.h"
#include "cuda/hopper/backward_sm90_wide_layout.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/opaque.h"
#include "cuda/ptx/thread_again.h"
#include "cuda/ptx/tma.h"

namespace strobe::cuda::sm90_wide {

/// Loads V and K of each item, and those panels of the peer's K that this block's share of dQ
/// needs. One thread.
template <typename Tr>
class KeyLoader {
 public:
  __device__ __forceinline__ KeyLoader(typename Tr::Shared& shared, const BackwardMaps& maps)
      : shared_(shared), maps_(maps) {}

  __device__ __forceinline__ void load(const KeyBlock& block, uint32_t rank) {
    using KTile = typename Tr::KTile;
    if (!has_steps(block)) return;
    const auto load = [&](Ring<1>& ring, uint8_t* tile, int panel_bytes, const CUtensorMap& map,
                          int row, int first, int count) {
      ring.empty[0].wait(at_.free());
      ring.full[0].arrive_expect(static_cast<uint32_t>(count * panel_bytes));
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        ptx::tma_load(tile + i * panel_bytes, map, ring.full[0], ptx::L2::kEvictFirst,
                      64 * (first + i), row, block.item.head_kv, block.map_batch);
      }
    };
    // V first, since its stage is free first: an item's last dP, which reads V, comes before its
    // last dQ.
    load(shared_.v_ring, shared_.v, Tr::VTile::kPanelBytes, maps_.v, block.map_k, 0,
         Tr::VTile::kPanels);
    load(shared_.k_ring, shared_.k, KTile::kPanelBytes, maps_.k, block.map_k, 0, KTile::kPanels);
    load(shared_.peer_k_ring, shared_.peer_k, KTile::kPanelBytes, maps_.k,
         block.map_k + (rank == 0 ? kKeys : -kKeys), peer_panels<KTile::kPanels>(rank).first,
         Tr::kPeerPanels);
    ++at_.count;
  }

 private:
  typename Tr::Shared& shared_;
  const BackwardMaps& maps_;
  RingPosition<1> at_;
};

/// The scheduler, one warp: draws items, and writes to shared memory what the others need to know
/// of them. Where additions to dQ have an order it also loads their keys, so that there is a warp
/// that reports additions.
template <typename Tr>
class Scheduler {
 public:
  __device__ __forceinline__ Scheduler(typename Tr::Shared& shared, const BackwardParams& p,
                                       const BackwardScratch& scratch,
                                       const typename Tr::Order& order, const BackwardMaps& maps)
      : shared_(shared), p_(p), scratch_(scratch), order_(order), keys_(shared, maps) {}

  __device__ __forceinline__ void run() {
    // Where pairs wait for one another, the one that is waited for has to be running: there the
    // first item is drawn too, instead of being the pair's own number.
    uint32_t index = Tr::kOrdered ? draw() : blockIdx.x / kBlocks;
#pragma unroll 1
    for (RingPosition<2> at;; ++at.count) {
      const bool found = find(index);
      shared_.block_ring.empty[at.stage()].wait(at.free());
      if (found) {
        describe(index, at.stage());
      } else if (lane() == 0) {
        shared_.blocks[at.stage()].number = -1;
      }
      __syncwarp();
      if (ptx::arrives(lane())) shared_.block_ring.full[at.stage()].arrive();
      if (!found) return;
      if constexpr (Tr::kOrdered) {
        if (lane() == 0) keys_.load(shared_.blocks[at.stage()], rank());
        __syncwarp();
      }
      shared_.request.wait(at.count & 1);
      index = draw();
    }
  }

 private:
  // (Read anew at each use and not kept, since the warp has few registers.)
  __device__ __forceinline__ static int lane() { return ptx::thread_again() % 32; }
  __device__ __forceinline__ static uint32_t rank() { return ptx::cluster_rank(); }

  /// Draws the number of the next item. Block 0 of a pair draws for both, and sends the number to
  /// block 1.
  __device__ __forceinline__ uint32_t draw() {
    uint32_t number = 0;
    const int slot = drawn_at_.stage();
    ptx::Barrier& full = shared_.drawn_ring.full[slot];
    ptx::Barrier& empty = shared_.drawn_ring.empty[slot];
    if (lane() == 0) {
      if (rank() == 0) {
        number = (Tr::kOrdered ? 0 : gridDim.x / kBlocks) + atomicAdd(scratch_.ticket, 1u);
        empty.wait(drawn_at_.free());
        ptx::send_word(ptx::shared_of(ptx::shared_address(&shared_.drawn[slot]), 1), number,
                       ptx::shared_of(ptx::shared_address(&full), 1));
      } else {
        full.arrive_expect(4);
        full.wait(drawn_at_.phase());
        number = *static_cast<volatile uint32_t*>(&shared_.drawn[slot]);
        ptx::arrive_at(ptx::shared_of(ptx::shared_address(&empty), 0));
      }
    }
    ++drawn_at_.count;
    return __shfl_sync(0xffffffffu, number, 0);
  }
  /// Moves on from `index`, by drawing, to an item that exists: sequences shorter than the longest
  /// have fewer key blocks than are counted. False: there are no more items. Of an item that does
  /// not exist the flags of rows that are not finite are set to 0, since no consumer sets them.
  __device__ __forceinline__ bool find(uint32_t& index) {
#pragma unroll 1
    for (;; index = draw()) {
      if (index >= order_.items) return false;
      if (!(p_.cu_k || p_.used_k)) return true;
      const BackwardItem item = item_of(index);
      if (item.block * kItemKeys < p_.sequence_rows(item.batch).seqlen_k) return true;
      if (rank() == 0 && lane() < kFlagWords)
        scratch_.nonfinite[number_of(index, item) * kFlagWords + lane()] = 0;
    }
  }
  __device__ __forceinline__ BackwardItem item_of(uint32_t index) const {
    __builtin_assume(order_.items <= INT32_MAX);  // the launcher saw to it
    if constexpr (Tr::kOrdered) {
      const OrderedItems::Item item = order_.items_in_order.item(index);
      return {static_cast<int32_t>(item.record / order_.blocks), item.head_kv, item.part,
              static_cast<int32_t>(item.record % order_.blocks)};
    } else {
      return backward_item(order_, p_.heads_kv, index);
    }
  }
  /// The number in BackwardOrder of the item that is drawn as the index-th.
  __device__ __forceinline__ int64_t number_of(uint32_t index, const BackwardItem& item) const {
    if constexpr (!Tr::kOrdered) return index;
    const uint32_t head = static_cast<uint32_t>(item.batch * p_.heads_kv + item.head_kv);
    return (head * order_.parts + static_cast<uint32_t>(item.part)) * order_.blocks +
           static_cast<uint32_t>(item.block);
  }
  /// The item, and its sequence's mask in 32 bits: all its queries as one tile.
  struct Found {
    BackwardItem item;
    Sequence sequence;
    TileMask mask;
  };
  __device__ __forceinline__ Found look_up(uint32_t index) const {
    const BackwardItem item = item_of(index);
    const Sequence sequence = p_.sequence_of_all_heads(item.batch);
    return {item, sequence, sequence.mask.tile(0, sequence.mask.seqlen_q)};
  }
  /// Writes the item's record, and its keys' limits. (Looked up three times, for fewer registers.)
  __device__ __forceinline__ void describe(uint32_t index, int slot) {
    typename Tr::Block& block = shared_.blocks[slot];
    if (lane() == 0) {
      const auto [item, sequence, mask] = look_up(index);
      // The walk of all 128 keys: both blocks of a pair go through the same steps.
      const int32_t begin = item.block * kItemKeys;
      const Range keys{begin, min(begin + kItemKeys, mask.seqlen_k)};
      block.walk = item_walk(WalkLists::of_heads(p_, item.batch, 0, p_.heads), mask, keys, kQueries,
                             kItemKeys);
    }
    ptx::make_opaque(index);
    if (lane() == 0) {
      const auto [item, sequence, mask] = look_up(index);
      block.item = item;
      block.number = number_of(index, item);
      if constexpr (Tr::kOrdered) {
        const bool descends = order_.items_in_order.item(index).descends;
        block.direction = descends ? 1 : -1;
        block.rank = addition_rank(static_cast<uint32_t>(item.block), scratch_.key_tiles, descends);
      }
      block.k_row = sequence.k_row;
      block.seqlen_k = mask.seqlen_k;
      block.head_begin = item.head_kv * p_.group + item.part * order_.heads_per_part;
      block.head_end = min(block.head_begin + order_.heads_per_part, (item.head_kv + 1) * p_.group);
      // (Opaque, the tiles of a sequence are counted here: they would be kept through all items,
      // and spilled.)
      const int32_t tile_q = Tr::kOrdered ? ptx::opaque(kQueries) : kQueries;
      block.scratch = scratch_begin(p_, tile_q, item.batch);
      block.key_begin = item.block * kItemKeys + static_cast<int32_t>(rank()) * kKeys;
      block.map_batch = p_.cu_q ? 0 : item.batch;
      block.map_q = static_cast<int32_t>(sequence.q_row);
      block.map_k = static_cast<int32_t>(sequence.k_row) + block.key_begin;
    }
    ptx::make_opaque(index);
    const auto [item, sequence, mask] = look_up(index);
    const int32_t key_begin = item.block * kItemKeys + static_cast<int32_t>(rank()) * kKeys;
#pragma unroll 1
    for (int key = lane(); key < kKeys; key += 32)
      shared_.limits[slot][key] = key_limits(mask, key_begin + key);
  }

  typename Tr::Shared& shared_;
  const BackwardParams& p_;
  const BackwardScratch& scratch_;
  const typename Tr::Order& order_;
  KeyLoader<Tr> keys_;
  RingPosition<2> drawn_at_;
};

/// Calls run(block) for item after item, in the one thread that loads.
template <typename Tr, typename Run>
__device__ __forceinline__ void for_each_item_loaded(typename Tr::Shared& shared, const Run& run) {
#pragma unroll 1
  for (RingPosition<2> at;; ++at.count) {
    shared.block_ring.full[at.stage()].wait(at.phase());
    const typename Tr::Block& block = shared.blocks[at.stage()];
    if (block.number < 0) return;
    run(block);
    shared.block_ring.empty[at.stage()].arrive();
  }
}

/// Loads Q with lse, or dO with delta, for each step. One thread. kRequestsItems: this thread also
/// asks the scheduler for the next item.
template <typename Tr, typename Tile, bool kRequestsItems, int kStages>
__device__ __forceinline__ void load_queries(typename Tr::Shared& shared, Ring<kStages>& ring,
                                             uint8_t (*tiles)[Tile::kBytes], const CUtensorMap& map,
                                             float (*values)[kQueries], const float* values_from,
                                             uint32_t tiles_of_head) {
  RingPosition<kStages> at;
  for_each_item_loaded<Tr>(shared, [&](const typename Tr::Block& block) {
    if (!has_steps(block)) {
      if constexpr (kRequestsItems) shared.request.arrive();
      return;
    }
    // The next item is asked for two steps before this item's last: early enough for its record to
    // be there in time, late enough for the last items of all to go to the pairs that are free
    // first.
    int to_last = steps_of(block.walk, block.head_begin, block.head_end);
    if (kRequestsItems && to_last <= 2) shared.request.arrive();
#pragma unroll 1
    for (HeadStep now = HeadStep::first(block.walk, block.head_begin, block.direction);
         !now.done(block.head_end);
         now.advance(block.walk, block.direction), ++at.count, --to_last) {
      if (kRequestsItems && to_last == 3) shared.request.arrive();
      const int stage = at.stage();
      const int32_t tile = now.tile(block.walk);
      const int64_t row = kQueries * (int64_t{now.head} * tiles_of_head + block.scratch +
                                      static_cast<uint32_t>(tile));
      ptx::Barrier& full = ring.full[stage];
      ring.empty[stage].wait(at.free());
      full.arrive_expect(Tile::kBytes + 4 * kQueries);
#pragma unroll 1
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        ptx::tma_load(tiles[stage] + panel * Tile::kPanelBytes, map, full, ptx::L2::kEvictLast,
                      64 * panel, block.map_q + tile * kQueries, now.head, block.map_batch);
      }
      ptx::bulk_load(values[stage], values_from + row, 4 * kQueries, full);
    }
  });
}

/// Reports the additions to dQ of each step, where they have an order: raises the counter of the
/// step's tile when the dQ warpgroup has added. To raise it is a release, which covers the
/// additions since they came before the warpgroup's arrival, and waits until L2 has acknowledged
/// them; only this thread waits for that. One thread.
template <typename Tr>
__device__ __forceinline__ void report_additions(typename Tr::Shared& shared,
                                                 const BackwardScratch& scratch, uint32_t rank) {
  RingPosition<2> at;
  for_each_item_loaded<Tr>(shared, [&](const typename Tr::Block& block) {
    if (!has_steps(block)) return;
#pragma unroll 1
    for (HeadStep now = HeadStep::first(block.walk, block.head_begin, block.direction);
         !now.done(block.head_end); now.advance(block.walk, block.direction), ++at.count) {
      shared.added_ring.full[at.stage()].wait(at.phase());
      shared.added_ring.empty[at.stage()].arrive();
      const int32_t of_head = now.tile(block.walk);
      const uint32_t tile = static_cast<uint32_t>(now.head) * scratch.tiles + block.scratch +
                            static_cast<uint32_t>(of_head);
      ptx::store_release(additions_of(scratch, tile, rank),
                         block.turn(now.head, of_head, scratch.key_tiles) + 1);
    }
  });
}

}  // namespace strobe::cuda::sm90_wide

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_PRODUCER_CUH_
