// Hopper forward: the four warps that compute nothing. forward_sm90.cuh has the whole picture.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_PRODUCER_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_PRODUCER_CUH_

#include <type_traits>

#include "core/visits.h"
#include "cuda/hopper/cached_keys.cuh"
#include "cuda/hopper/forward_sm90_layout.cuh"
#include "cuda/hopper/scheduler.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/thread_again.h"
#include "cuda/ptx/tma.h"

namespace strobe::cuda::sm90 {

/// Who waits for warp 0 to initialise the barriers in shared memory. Each has a hardware barrier of
/// its own: compute-sanitizer reports one that the warps of a thread block reach at different
/// instructions.
enum class Awaits { kScheduler, kOthers, kConsumers };
/// Its number: 1 to 1 + W have other uses.
template <typename Tr, Awaits kWho>
inline constexpr int kAwaitBarrier = 2 + Tr::kWarpgroups + static_cast<int>(kWho);
/// Those who wait, and warp 0.
template <typename Tr, Awaits kWho>
inline constexpr int kAwaitThreads = 32 * (kWho == Awaits::kScheduler ? 2
                                           : kWho == Awaits::kOthers  ? 3
                                                                      : 4 * Tr::kWarpgroups + 1);

/// Waits, once. Without kEarlyTile the kernel has waited before.
template <typename Tr, Awaits kWho>
__device__ __forceinline__ void wait_for_barriers() {
  if constexpr (Tr::kEarlyTile)
    ptx::named_barrier_sync<kAwaitBarrier<Tr, kWho>, kAwaitThreads<Tr, kWho>>();
}
/// Warp 0 has initialised them.
template <typename Tr, Awaits kWho>
__device__ __forceinline__ void announce_barriers() {
  ptx::named_barrier_arrive<kAwaitBarrier<Tr, kWho>, kAwaitThreads<Tr, kWho>>();
}

/// Takes tiles and works out what the others need to know of them. One warp, which with kEarlyTile
/// begins before there are barriers, and hands over the first tile when there are.
template <typename Tr, bool kAllRowsUsed, typename Params>
__device__ void schedule(typename Tr::Shared& shared, const Params& p, const TileOrder& order) {
  constexpr int kWarpgroups = Tr::kWarpgroups, kTileK = Tr::kTileK;
  constexpr int kTileQ = kWarpgroups * kWarpgroupRows;
  const auto& sequences = sequences_of<kAllRowsUsed>(p);
  const int pack = pack_of(p);
  TileScheduler<kTileQ, kAllRowsUsed, std::remove_cvref_t<decltype(sequences)>> scheduler(
      order, sequences, pack);
  RingPosition<Tr::kTileSlots> at;
  TilePlace place;
  while (scheduler.next(at.count == 0, place)) {
    const int lane = ptx::thread_again() % 32;
    if (!Tr::kEarlyTile || at.count > 0) shared.tile_ring.empty[at.stage()].wait(at.free());
    Tile<kWarpgroups>& tile = shared.tiles[at.stage()];
    const auto sequence = sequences.sequence(static_cast<uint32_t>(place.batch));
    const TileMask mask = sequence.mask.tile(place.begin, kTileQ >> pack, order.rule)
                              .template assuming<kAllRowsUsed>();
    const int queries = mask.seqlen_q;
    const int head = place.head << pack;
    if (lane == 0) {
      tile.mask = mask;
      tile.batch = place.batch;
      tile.head = head;
      tile.head_kv =
          static_cast<int32_t>(order.tiles.kv_group.divide(static_cast<uint32_t>(place.head)));
      tile.rows = queries << pack;
      tile.first = place.begin;
      tile.map_batch = p.cu_q ? 0 : place.batch;
      tile.map_q = static_cast<int>(sequence.q_row) + place.begin;
      if constexpr (kCached<Params>) {
        // A sequence whose numbers are out of range has no keys, and its queries become NaN.
        tile.entry = sequence.in_range ? static_cast<int>(sequence.keys.entry) : -1;
        tile.map_k = static_cast<int>(sequence.keys.first);
      } else {
        tile.map_k = static_cast<int>(sequence.k_row);
      }
      tile.number = scheduler.number();
      tile.suspect = 0;
      tile.lse_row = sequence.lse_row + int64_t{head} * p.lse_head_stride + place.begin;
    }
    // Lanes 0 to W - 1 work for a warpgroup each, lane W for the tile.
    const int part = kWarpgroupRows >> pack;  // of the queries
    const int begin = lane < kWarpgroups ? lane * part : 0;
    const int end = lane < kWarpgroups ? min(begin + part, queries) : queries;
    Blocks blocks{};
    const Visits visits = key_visits(mask, {begin, end}, kTileK);
    if (!visits.blocks.empty()) {
      blocks = {static_cast<int32_t>(visits.blocks.begin), static_cast<int32_t>(visits.blocks.end),
                static_cast<int32_t>(visits.full.begin), static_cast<int32_t>(visits.full.end)};
      // With one stage of Q the last block takes its maximum too: such a block needs no redo, so Q
      // is free as soon as S is there, and the next tile's Q arrives under the softmax.
      if (Tr::kQStages == 1 && blocks.keep_begin == blocks.begin) ++blocks.keep_begin;
      // Rows past a sequence's end hold the next one's queries, or anything. In a block that keeps
      // its reference they can send their warp to `redo`, which changes the bits of the rows beside
      // them.
      if (p.batch_invariant && p.query_counts_differ() && ((end - begin) << pack) % 16 != 0) {
        blocks.keep_begin = blocks.keep_end = blocks.end;
      }
    }
    if (lane < kWarpgroups) tile.part[lane] = blocks;
    if (lane == kWarpgroups) {
      tile.loaded = blocks.end > 0;
      tile.block_begin = blocks.begin;
      tile.block_end = tile.loaded ? blocks.end : 1;
    }
    __syncwarp();
    if (at.count == 0) wait_for_barriers<Tr, Awaits::kScheduler>();
    if (ptx::arrives(lane)) shared.tile_ring.full[at.stage()].arrive();
    if (!scheduler.fixed()) shared.request.wait(at.count & 1);
    ++at.count;
  }
  if (at.count == 0) wait_for_barriers<Tr, Awaits::kScheduler>();
  const int lane = ptx::thread_again() % 32;
  shared.tile_ring.empty[at.stage()].wait(at.free());
  if (lane == 0) {
    Tile<kWarpgroups>& tile = shared.tiles[at.stage()];
    for (Blocks& part : tile.part) part = {};
    tile.batch = -1;
    tile.block_begin = tile.loaded = 0;
    tile.block_end = 1;
  }
  if constexpr (ptx::kWarpArrivals > 1) __syncwarp();
  if (ptx::arrives(lane)) shared.tile_ring.full[at.stage()].arrive();
}

/// Calls run(tile) for tile after tile, in a warp or in its lane 0 alone; when run returns, no lane
/// of the warp reads the tile any more.
template <typename Tr, typename Run>
__device__ __forceinline__ void for_each_tile(typename Tr::Shared& shared, Run run) {
  for (RingPosition<Tr::kTileSlots> at;; ++at.count) {
    shared.tile_ring.full[at.stage()].wait(at.phase());
    const Tile<Tr::kWarpgroups>& tile = shared.tiles[at.stage()];
    if (tile.batch < 0) return;
    run(tile);
    if (ptx::arrives(static_cast<int>(threadIdx.x % 32)))
      shared.tile_ring.empty[at.stage()].arrive();
  }
}

/// K and V, by one thread: K one block ahead of V, also from tile to tile.
template <typename Tr>
__device__ void load_kv(typename Tr::Shared& shared, const TensorMaps& maps) {
  struct Place {
    int row, head, batch;
    uint32_t idle;  // consumer warps that do not need the block
  };
  const auto load = [](Ring<Tr::kStages>& ring, RingPosition<Tr::kStages>& at,
                       uint8_t(*tiles)[Tr::KTile::kBytes], const CUtensorMap& map,
                       const Place& place) {
    ring.empty[at.stage()].wait(at.free());
    ring.full[at.stage()].arrive_expect(Tr::KTile::kBytes);
    for (int panel = 0; panel < Tr::kPanels; ++panel) {
      ptx::tma_load(tiles[at.stage()] + panel * Tr::KTile::kPanelBytes, map, ring.full[at.stage()],
                    ptx::L2::kEvictLast, panel * 64, place.row, place.head, place.batch);
    }
    // For those who will not come by. Here, because here the phase is known to be theirs.
    if (place.idle > 0) ring.empty[at.stage()].arrive(place.idle * ptx::kWarpArrivals);
    ++at.count;
  };
  RingPosition<Tr::kStages> k_at, v_at;
  Place before{-1, 0, 0, 0};  // the block whose V has still to be loaded
  const auto load_v = [&] {
    if (before.row >= 0) load(shared.v_ring, v_at, shared.v, maps.v, before);
    before.row = -1;
  };
  for_each_tile<Tr>(shared, [&](const Tile<Tr::kWarpgroups>& tile) {
    Place place{0, tile.head_kv, tile.map_batch, 0};
    // The scheduler gets as much time for the next tile as four steps take: two in which this warp
    // runs ahead, two to find the tile.
    const int request = max(tile.block_begin, min(tile.block_begin + 3, tile.block_end - 1));
    for (int n = tile.block_end - 1; n >= tile.block_begin; --n) {
      if (n == request) shared.request.arrive();
      // Consumers now finish the tile before: without its last V they would wait for ever.
      if (!tile.loaded) {
        load_v();
        break;
      }
      place.row = tile.map_k + n * Tr::kTileK;
      place.idle = 0;
      for (const Blocks& part : tile.part) place.idle += n < part.begin || n >= part.end ? 4 : 0;
      load(shared.k_ring, k_at, shared.k, maps.k, place);
      load_v();
      before = place;
    }
  });
  load_v();
}

/// Q of a tile, by one thread.
template <typename Tr, typename Params>
__device__ __forceinline__ void load_tile_q(typename Tr::Shared& shared,
                                            [[maybe_unused]] const Params& p,
                                            const CUtensorMap& map,
                                            const Tile<Tr::kWarpgroups>& tile,
                                            RingPosition<Tr::kQStages> at) {
#pragma unroll 1
  for (int w = 0; w < Tr::kWarpgroups; ++w) {
    Ring<Tr::kQStages>& ring = shared.q_ring[w];
    ring.empty[at.stage()].wait(at.free());
    ring.full[at.stage()].arrive_expect(Tr::QTile::kBytes);
    for (int panel = 0; panel < Tr::kPanels; ++panel) {
      uint8_t* const to = shared.q[at.stage()][w] + panel * Tr::QTile::kPanelBytes;
      if constexpr (kCached<Params>) {
        ptx::tma_load(to, map, ring.full[at.stage()], ptx::L2::kEvictFirst, panel * 64, 0,
                      tile.map_q + query_of(p, w * kWarpgroupRows), tile.head >> p.pack,
                      tile.map_batch);
      } else {
        ptx::tma_load(to, map, ring.full[at.stage()], ptx::L2::kEvictFirst, panel * 64,
                      tile.map_q + w * kWarpgroupRows, tile.head, tile.map_batch);
      }
    }
  }
}

/// Q, by one thread.
template <typename Tr>
__device__ void load_q(typename Tr::Shared& shared, const ForwardParams& p,
                       const CUtensorMap& map) {
  RingPosition<Tr::kQStages> at;
  for_each_tile<Tr>(shared, [&](const Tile<Tr::kWarpgroups>& tile) {
    load_tile_q<Tr>(shared, p, map, tile, at);
    ++at.count;
  });
}

/// Q and V of keys in a cache, or K, each by a whole warp: the boxes of a block take one warp too
/// long for both. Pages are looked up one block ahead.
template <typename Tr, bool kIsK>
__device__ void load_cached(typename Tr::Shared& shared, const TileParams& p,
                            const CachedTensorMaps& maps) {
  using KTile = typename Tr::KTile;
  Ring<Tr::kStages>& ring = kIsK ? shared.k_ring : shared.v_ring;
  const CUtensorMap& map = kIsK ? maps.k : maps.v;
  // A key without a page is NaN to the queries that see it, whatever its value.
  constexpr uint32_t kLost = kIsK ? 0x7fff7fff : 0;
  const auto lane = [] { return static_cast<int>(ptx::thread_again() % 32); };
  RingPosition<Tr::kStages> at;
  RingPosition<Tr::kQStages> q_at;
  for_each_tile<Tr>(shared, [&](const Tile<Tr::kWarpgroups>& tile) {
    if constexpr (!kIsK) {
      if (lane() == 0) load_tile_q<Tr>(shared, p, maps.q, tile, q_at);
      ++q_at.count;
      __syncwarp();
    }
    const KeyRows keys = p.cache.rows_at(tile.batch, tile.entry, tile.map_k);
    const int32_t begin = tile.block_begin, end = tile.mask.seqlen_k;
    const auto find = [&](int n) {
      return LaneBox::find(maps.boxes, keys, n * Tr::kTileK, Tr::kTileK, end);
    };
    // As load_kv does; this warp runs ahead by as many blocks as there are stages.
    const int request = max(begin, min(begin + 3, tile.block_end - 1));
    LaneBox next{};
    if (tile.loaded) next = find(tile.block_end - 1);
    for (int n = tile.block_end - 1; n >= begin; --n) {
      if (kIsK && n == request && lane() == 0) shared.request.arrive();
      if (!tile.loaded) break;
      const LaneBox box = next;
      if (n > begin) next = find(n - 1);
      uint32_t idle = 0;
      for (const Blocks& part : tile.part) idle += n < part.begin || n >= part.end ? 4 : 0;
      load_boxes<KTile>(kIsK ? shared.k[at.stage()] : shared.v[at.stage()], map,
                        ring.full[at.stage()], maps.boxes, keys, box, tile.head_kv, kLost,
                        [&] { ring.empty[at.stage()].wait(at.free()); });
      // For those who will not come by. Here, because here the phase is known to be theirs.
      if (idle > 0 && lane() == 0) ring.empty[at.stage()].arrive(idle * ptx::kWarpArrivals);
      ++at.count;
    }
    __syncwarp();  // all lanes have read the tile
  });
}

/// O from shared to global memory. One warp.
template <typename Tr, typename Params>
__device__ void store_o(typename Tr::Shared& shared, const Params& p, const CUtensorMap& map) {
  using OTile = typename Tr::OTile;
  using T = typename Tr::T;
  constexpr int kRounds = (Tr::kPanels + Tr::kOPanels - 1) / Tr::kOPanels;
  uint32_t phases = 0;  // of the warpgroups' rings, which have one stage: a bit each
  for_each_tile<Tr>(shared, [&](const Tile<Tr::kWarpgroups>& tile) {
    const int lane = ptx::thread_again() % 32;
    // What warpgroup w has left, from panel `begin` on.
    const auto store = [&](int w, int begin) {
      phases ^= 1u << w;
      const int rows = min(tile.rows - w * kWarpgroupRows, kWarpgroupRows);
      const int first = tile.map_q + query_of(p, w * kWarpgroupRows);
      // TMA leaves out rows past the tensor's end, but not those of the next sequence, nor those
      // that are not in use.
      if (!p.query_counts_differ() || rows == kWarpgroupRows) {
        if (lane == 0) {
          for (int i = 0; i < Tr::kOPanels; ++i) {
            const uint8_t* const from = shared.o[w] + i * OTile::kPanelBytes;
            if constexpr (kCached<Params>) {
              ptx::tma_store(map, from, (begin + i) * 64, 0, first, tile.head >> p.pack,
                             tile.map_batch);
            } else {
              ptx::tma_store(map, from, (begin + i) * 64, first, tile.head, tile.map_batch);
            }
          }
          ptx::tma_store_wait_read();
        }
      } else {
        T* const out = static_cast<T*>(p.out.data) + begin * 64 +
                       p.out.element(tile.map_batch, first, tile.head);
#pragma unroll 1
        for (int i = lane; i < rows * Tr::kOPanels * 8; i += 32) {
          const int row = i / (Tr::kOPanels * 8), column = i % (Tr::kOPanels * 8) * 8;
          if (begin * 64 + column < p.head_dim_v)
            *reinterpret_cast<uint4*>(out + p.out.element(0, query_of(p, row), head_of(p, row)) +
                                      column) =
                *reinterpret_cast<const uint4*>(shared.o[w] + OTile::offset(row, column));
        }
      }
      __syncwarp();
      if (ptx::arrives(lane)) shared.o_ring[w].empty[0].arrive();
    };
    // A warpgroup that sees nothing has written its zeros already.
    if constexpr (kRounds == 1) {
#pragma unroll 1
      for (int w = 0; w < Tr::kWarpgroups; ++w) {
        if (tile.part[w].begin == tile.part[w].end) continue;
        shared.o_ring[w].full[0].wait(phases >> w & 1);
        store(w, 0);
      }
    } else {
      // Whoever is ready. A warpgroup whose keys end some blocks before the others' (chunks) leaves
      // its second round here before it goes on to those blocks, and the others wait for it there:
      // nobody may wait for them before it has been stored.
      constexpr int kBits = 8;
      uint32_t left = 0;  // rounds of each warpgroup
      for (int w = 0; w < Tr::kWarpgroups; ++w)
        left |= (tile.part[w].begin == tile.part[w].end ? 0u : kRounds) << kBits * w;
#pragma unroll 1
      for (int w = 0; left != 0; w = w + 1 == Tr::kWarpgroups ? 0 : w + 1) {
        const int rounds = static_cast<int>(left >> kBits * w & 0xff);
        if (rounds == 0) continue;
        const bool ready = shared.o_ring[w].full[0].test(phases >> w & 1);
        if (!__all_sync(0xffffffffu, ready)) continue;
        store(w, (kRounds - rounds) * Tr::kOPanels);
        left -= 1u << kBits * w;
      }
    }
    __syncwarp();
  });
  ptx::tma_store_wait();
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_PRODUCER_CUH_
