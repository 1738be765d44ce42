// Hopper forward: the producer warpgroup, warps 0 to 3. They load K, V and Q, schedule tiles and
// store O; the table at the head of forward_sm90.cuh says which warp does what, and what each
// barrier waits for. And the warpgroup that transposes float8 V.
// Under a mask as data forward_sm90_masked_loads.cuh loads K and V.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_PRODUCER_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_PRODUCER_CUH_

#include <type_traits>

#include "cuda/common/walks.h"
#include "cuda/hopper/cached_keys.cuh"
#include "cuda/hopper/forward_sm90_layout.cuh"
#include "cuda/hopper/key_chunks.h"
#include "cuda/hopper/scheduler.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/thread_again.h"
#include "cuda/ptx/tma.h"

namespace strobe::cuda::sm90 {

/// The groups of warps that wait until warp 0 has initialised the barriers in shared memory. Each
/// group waits at a hardware barrier of its own, since compute-sanitizer reports a hardware barrier
/// that warps of one thread block reach at different instructions.
enum class Awaits { kScheduler, kOthers, kConsumers };
/// The number of a group's hardware barrier. Those up to W are the ping-pong barriers, and W + 1 is
/// the one at the kernel's end.
template <typename Tr, Awaits kWho>
inline constexpr int kAwaitBarrier = 2 + Tr::kWarpgroups + static_cast<int>(kWho);
/// Threads that take part in it: those of the group that waits, and warp 0.
template <typename Tr, Awaits kWho>
inline constexpr int kAwaitThreads = 32 * (kWho == Awaits::kScheduler ? 2
                                           : kWho == Awaits::kOthers  ? 3
                                                                      : 4 * Tr::kWarpgroups + 1);

/// Waits until the barriers are initialised; each warp calls this once. Without kEarlyTile there is
/// nothing to wait for: the kernel has begun with a __syncthreads after the initialisation.
template <typename Tr, Awaits kWho>
__device__ __forceinline__ void wait_for_barriers() {
  if constexpr (Tr::kEarlyTile)
    ptx::named_barrier_sync<kAwaitBarrier<Tr, kWho>, kAwaitThreads<Tr, kWho>>();
}
/// Warp 0 tells a group that the barriers are initialised.
template <typename Tr, Awaits kWho>
__device__ __forceinline__ void announce_barriers() {
  ptx::named_barrier_arrive<kAwaitBarrier<Tr, kWho>, kAwaitThreads<Tr, kWho>>();
}

/// What a kernel is given of the order of its tiles.
template <typename Tr>
using OrderOf = std::conditional_t<
    Tr::kMasked, MaskedTileOrder,
    std::conditional_t<Tr::kBias, BiasTileOrder,
                       std::conditional_t<Tr::kChunked, ChunkedTileOrder, TileOrder>>>;

/// The scheduler, one warp: takes tile after tile and writes to shared memory what the other warps
/// need to know of it. With kEarlyTile it works out the first tile while warp 0 still initialises
/// the barriers, and waits for these only before it hands the tile over.
template <typename Tr, bool kAllRowsUsed, typename Params>
__device__ void schedule(typename Tr::Shared& shared, const Params& p, const OrderOf<Tr>& order) {
  constexpr int kWarpgroups = Tr::kWarpgroups, kTileK = Tr::kTileK;
  constexpr int kTileQ = kWarpgroups * kWarpgroupRows;
  const auto& sequences = sequences_of<kAllRowsUsed>(p);
  const int pack = pack_of(p);
  TileScheduler<kTileQ, kAllRowsUsed, std::remove_cvref_t<decltype(sequences)>, OrderOf<Tr>>
      scheduler(order, sequences, pack);
  RingPosition<Tr::kTileSlots> at;
  TilePlace place;
  [[maybe_unused]] bool is_uneven = false;
  if constexpr (Tr::kMasked) is_uneven = order.is_uneven(p);
  while (scheduler.next(at.count == 0, place)) {
    if constexpr (Tr::kMasked) {
      if (order.by_visits(is_uneven)) place = order.place(p, scheduler.number(), is_uneven);
    }
    if constexpr (Tr::kBias) place = order.at(place);
    if (!Tr::kEarlyTile || at.count > 0) shared.tile_ring.empty[at.stage()].wait(at.free());
    Tile<kWarpgroups>& tile = shared.tiles[at.stage()];
    const int head = place.head << pack;
    const auto sequence = sequences.sequence(static_cast<uint32_t>(place.batch), head);
    const TileMask mask = sequence.mask.tile(place.begin, kTileQ >> pack, order.rule)
                              .template assuming<kAllRowsUsed>();
    const int queries = mask.seqlen_q;
    // Of the general kernel with three warpgroups, where this warp has 32 registers, ptxas spills
    // one if the number is read anew.
    constexpr bool kReadsAnew = kWarpgroups == 2 || !Tr::kChunked || Tr::kInvariant;
    const int lane = kReadsAnew ? ptx::thread_again() % 32 : static_cast<int>(threadIdx.x % 32);
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
    // Lanes 0 to W - 1 work out the blocks of one warpgroup each, and lane W those of the whole
    // tile.
    const int part = kWarpgroupRows >> pack;  // queries of a warpgroup
    const int begin = lane < kWarpgroups ? lane * part : 0;
    const int end = lane < kWarpgroups ? min(begin + part, queries) : queries;
    WalkOf<int32_t> part_keys = part_of_key_walk(WalkLists::of(p, place.batch, head, place.begin),
                                                 mask, {0, queries}, {begin, end}, kTileK);
    if constexpr (Tr::kChunked) {
      if (p.chunks.of_tile > 1) {
        constexpr int32_t kBlocks = chunk_blocks(kTileK);
        const int32_t from = order.chunk(scheduler.number()) * kBlocks;
        part_keys = part_keys.within(from, from + kBlocks);
        part_keys = part_keys.partial_before(part_keys.begin);
      }
    }
    const PartWalk walk =
        part_walk(part_keys, Tr::kQStages == 1 && !Tr::kInvariant,
                  !Tr::kInvariant && p.batch_invariant && p.query_counts_differ() &&
                      ((end - begin) << pack) % 16 != 0);
    if (lane < kWarpgroups) tile.part[lane] = walk;
    if (lane == kWarpgroups) {
      tile.loaded = !walk.empty();
      tile.walk = walk.blocks().places(walk.begin, walk.empty() ? 1 : walk.end);
      if constexpr (Tr::kMasked) {
        auto& lists = shared.mask.tiles[at.stage()];
        lists.start(p.head_mask(sequence, head), place.begin,
                    static_cast<int32_t>(sequence.mask.seqlen_q), walk.begin,
                    max(walk.begin, walk.end));
        lists.cut(lists.end * kTileK);
        for (int32_t& nothing : lists.has_nothing) nothing = 0;
      }
    }
    if constexpr (Tr::kFloat8) {
      if (lane == 0) shared.float8.scales[at.stage()] = TileScales::of(p, tile.batch, tile.head);
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
    for (PartWalk& part : tile.part) part = {};
    tile.batch = -1;
    tile.walk = BlocksOf<int32_t>{}.places(0, 1);
    tile.loaded = 0;
  }
  if constexpr (ptx::kWarpArrivals > 1) __syncwarp();
  if (ptx::arrives(lane)) shared.tile_ring.full[at.stage()].arrive();
}

/// Calls run(tile) for tile after tile, in a whole warp or in its lane 0 alone. When run returns,
/// no lane may still read the tile: its place is then given back to the scheduler.
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

/// The place of a tile's walk at which the warp that loads asks for the next tile: four steps
/// before the end. This warp is up to two steps ahead of the consumers; the other two are the time
/// that the scheduler has to find the tile.
__device__ __forceinline__ int request_place(const BlocksOf<int32_t>& walk) {
  return max(walk.begin, min(walk.begin + 3, walk.end - 1));
}
/// Consumer warps that do not need the block at this place of the tile's walk.
template <int kWarpgroups>
__device__ __forceinline__ uint32_t idle_warps(const Tile<kWarpgroups>& tile, int place) {
  uint32_t idle = 0;
  for (const PartWalk& part : tile.part) idle += part.has(place) ? 0 : 4;
  return idle;
}

/// Loads blocks of K and V, by one thread. K is loaded one block ahead of V, also from one tile to
/// the next, because consumers issue S = Q K(j)^T before O += P V(j-1).
template <typename Tr>
struct BlockLoader {
  // Rows of no block: there is none; and, under a mask as data, one that is not loaded, for a turn
  // that visits nothing.
  static constexpr int kNone = -1, kNothing = -2;
  struct Place {
    int row, head, batch;
    uint32_t idle;  // consumer warps that do not need the block
  };

  typename Tr::Shared& shared;
  const TensorMaps& maps;
  RingPosition<Tr::kStages> k_at, v_at;
  Place before{kNone, 0, 0, 0};  // the block whose V has still to be loaded

  /// The K of a block, and the V of the one before it. publish(stage): writes what K's `full`
  /// barrier says of the block besides. Under a mask as data idle warps give K back themselves.
  template <typename Publish>
  __device__ __forceinline__ void load_block(const Place& place, const Publish& publish) {
    load(shared.k_ring, k_at, shared.k, maps.k, place, Tr::kMasked ? 0 : place.idle, publish);
    load_v();
    before = place;
  }
  __device__ __forceinline__ void load_v() {
    if (Tr::kMasked ? before.row != kNone : before.row >= 0)
      load(shared.v_ring, v_at, shared.v, maps.v, before, Tr::kFloat8 ? 0 : before.idle,
           [](int) {});
    before.row = kNone;
  }

 private:
  template <typename Publish>
  __device__ __forceinline__ static void load(Ring<Tr::kStages>& ring,
                                              RingPosition<Tr::kStages>& at,
                                              uint8_t (*tiles)[Tr::KTile::kBytes],
                                              const CUtensorMap& map, const Place& place,
                                              uint32_t idle, const Publish& publish) {
    ring.empty[at.stage()].wait(at.free());
    publish(at.stage());
    if (Tr::kMasked && place.row == kNothing) {
      ring.full[at.stage()].arrive();
      // Nobody else waits for a V that is not there, and compute-sanitizer reports a phase of a
      // barrier that nobody has waited for. It is over already.
      ring.full[at.stage()].wait(at.phase());
    } else {
      ring.full[at.stage()].arrive_expect(Tr::KTile::kBytes);
      for (int panel = 0; panel < Tr::kPanels; ++panel) {
        ptx::tma_load(tiles[at.stage()] + panel * Tr::KTile::kPanelBytes, map,
                      ring.full[at.stage()], ptx::L2::kEvictLast, panel * Tr::kPanel, place.row,
                      place.head, place.batch);
      }
    }
    // Consumer warps that do not need the block never arrive at its `empty` barrier, which counts
    // all of them, so this thread arrives for them. It does so here, because it has just seen that
    // the stage was free: the barrier's phase is the one that ends when this block has been read.
    if (idle > 0) ring.empty[at.stage()].arrive(idle * ptx::kWarpArrivals);
    ++at.count;
  }
};

/// Loads K and V of tile after tile, by one thread.
template <typename Tr>
__device__ void load_kv(typename Tr::Shared& shared, const TensorMaps& maps) {
  BlockLoader<Tr> loader{shared, maps};
  for_each_tile<Tr>(shared, [&](const Tile<Tr::kWarpgroups>& tile) {
    typename BlockLoader<Tr>::Place place{0, tile.head_kv, tile.map_batch, 0};
    const int request = request_place(tile.walk);
    for (int at = tile.walk.end - 1; at >= tile.walk.begin; --at) {
      if (at == request) shared.request.arrive();
      // This tile has no keys, and consumers use its one turn to finish the tile before. They wait
      // for that tile's last V first, so it has to be loaded now.
      if (!tile.loaded) {
        loader.load_v();
        break;
      }
      place.row = tile.map_k + tile.walk.block(at) * Tr::kTileK;
      place.idle = idle_warps(tile, at);
      loader.load_block(place, [](int) {});
    }
  });
  loader.load_v();
}

/// Transposes a block of V: this warp's quarter of it, 16 keys x 32 columns at a time. used: keys
/// from there on become zeros. They are not in use and may hold NaN, which times a weight of 0
/// would be NaN.
template <typename Tr>
__device__ __forceinline__ void transpose_block(uint32_t from, uint32_t to, int used) {
  using KTile = typename Tr::KTile;
  using VTile = typename Tr::VTile;
  const int lane = ptx::thread_again() & 31, warp = ptx::thread_again() >> 5 & 3;
  // A warp has all keys of some columns, where there are enough of them for four. It loads several
  // units before it stores the first, so that their loads are under way together.
  constexpr int kColumns = Tr::kWidth / 32, kEach = kColumns * (Tr::kTileK / 16) / 4;
  constexpr int kTogether = kEach % 3 == 0 ? 3 : 2;
  static_assert(kColumns * (Tr::kTileK / 16) % 4 == 0 && kEach % kTogether == 0);
#pragma unroll 1
  for (int begin = 0; begin < kEach; begin += kTogether) {
    uint32_t pairs[kTogether][4];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = 4 * (begin + j) + warp, unit = i / kColumns, column = i % kColumns * 32;
      ptx::ldmatrix_trans(
          pairs[j],
          from + static_cast<uint32_t>(KTile::block_offset(16 * unit, column) +
                                       KTile::fragment_offset(lane, KTile::block_k(column))));
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int i = 4 * (begin + j) + warp, unit = i / kColumns, column = i % kColumns * 32;
      if (16 * unit + 16 > used) {
        // The keys 2t and 2t + 1 of each eight.
        const int first = 16 * unit + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int left = used - first - m % 2 * 8;
          pairs[j][m] = left <= 0 ? 0u : left == 1 ? pairs[j][m] & 0xffffu : pairs[j][m];
        }
      }
      uint32_t rows[4];
#pragma unroll
      for (int m = 0; m < 4; m += 2) {
        rows[m] = __byte_perm(pairs[j][m], pairs[j][m + 1], 0x6420);
        rows[m + 1] = __byte_perm(pairs[j][m], pairs[j][m + 1], 0x7531);
      }
      ptx::stmatrix(to + static_cast<uint32_t>(VTile::stored_offset(lane, column, unit)), rows);
    }
  }
}

/// Transposes V of tile after tile, by a whole warpgroup: block after block as load_kv loads them.
template <typename Tr, bool kAllRowsUsed, typename Params>
__device__ void transpose_v(typename Tr::Shared& shared, [[maybe_unused]] const Params& p) {
  RingPosition<Tr::kStages> at;  // of both rings
  const auto arrive = [](ptx::Barrier& barrier) {
    if (ptx::arrives(static_cast<int>(ptx::thread_again() % 32))) barrier.arrive();
  };
  for_each_tile<Tr>(shared, [&](const Tile<Tr::kWarpgroups>& tile) {
    const int end = tile.loaded ? tile.walk.end : tile.walk.begin;
#pragma unroll 1
    for (int place = end - 1; place >= tile.walk.begin; --place) {
      int used = Tr::kTileK;
      if (!kAllRowsUsed && p.used_k)
        used = tile.mask.seqlen_k - tile.walk.block(place) * Tr::kTileK;
      const int stage = at.stage();
      shared.v_ring.full[stage].wait(at.phase());
      shared.float8.v_ring.empty[stage].wait(at.free());
      transpose_block<Tr>(ptx::shared_address(shared.v[stage]),
                          ptx::shared_address(shared.float8.v[stage]), used);
      // What this warp has read may be overwritten by TMA, and what it has written be read by
      // wgmma.
      ptx::fence_proxy_async();
      __syncwarp();
      arrive(shared.v_ring.empty[stage]);
      arrive(shared.float8.v_ring.full[stage]);
      // As BlockLoader has it, for consumer warps that do not need the block: the stage was free.
      const uint32_t idle = idle_warps(tile, place);
      if (idle > 0 && ptx::thread_again() % kWarpgroupThreads == 0)
        shared.float8.v_ring.empty[stage].arrive(idle * ptx::kWarpArrivals);
      ++at.count;
    }
    __syncwarp();  // no lane reads the tile after this
  });
}

/// Loads a tile's Q, 64 rows for each warpgroup, by one thread.
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
        ptx::tma_load(to, map, ring.full[at.stage()], ptx::L2::kEvictFirst, panel * Tr::kPanel,
                      tile.map_q + w * kWarpgroupRows, tile.head, tile.map_batch);
      }
    }
  }
}

/// Loads Q of tile after tile, by one thread.
template <typename Tr>
__device__ void load_q(typename Tr::Shared& shared, const ForwardParams& p,
                       const CUtensorMap& map) {
  RingPosition<Tr::kQStages> at;
  for_each_tile<Tr>(shared, [&](const Tile<Tr::kWarpgroups>& tile) {
    load_tile_q<Tr>(shared, p, map, tile, at);
    ++at.count;
  });
}

/// For keys in a cache: loads K (kIsK), or else Q and V, by a whole warp. Two warps share this
/// because one would take too long to fetch the boxes of both K and V. The pages of a block are
/// looked up while the block before is loaded.
template <typename Tr, bool kIsK>
__device__ void load_cached(typename Tr::Shared& shared, const TileParams& p,
                            const CachedTensorMaps& maps) {
  using KTile = typename Tr::KTile;
  Ring<Tr::kStages>& ring = kIsK ? shared.k_ring : shared.v_ring;
  const CUtensorMap& map = kIsK ? maps.k : maps.v;
  // What is written for a key that has no page. NaN in K makes every query that sees the key NaN,
  // so V may be zeros.
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
    const int32_t begin = tile.walk.begin, end = tile.mask.seqlen_k;
    const auto find = [&](int place) {
      return LaneBox::find(maps.boxes, keys, tile.walk.block(place) * Tr::kTileK, Tr::kTileK, end);
    };
    // This warp runs ahead of the consumers by as many blocks as there are stages.
    const int request = request_place(tile.walk);
    LaneBox next{};
    if (tile.loaded) next = find(tile.walk.end - 1);
    for (int place = tile.walk.end - 1; place >= begin; --place) {
      if (kIsK && place == request && lane() == 0) shared.request.arrive();
      if (!tile.loaded) break;
      const LaneBox box = next;
      if (place > begin) next = find(place - 1);
      const uint32_t idle = idle_warps(tile, place);
      load_boxes<KTile>(kIsK ? shared.k[at.stage()] : shared.v[at.stage()], map,
                        ring.full[at.stage()], maps.boxes, keys, box, tile.head_kv, kLost,
                        [&] { ring.empty[at.stage()].wait(at.free()); });
      // As in load_kv, for consumer warps that do not need the block. load_boxes has waited until
      // the stage was free, so the phase is the one that ends when this block has been read.
      if (idle > 0 && lane() == 0) ring.empty[at.stage()].arrive(idle * ptx::kWarpArrivals);
      ++at.count;
    }
    __syncwarp();  // no lane reads the tile after this
  });
}

/// Stores O, which consumers have left in shared memory, to global memory. One warp. (Float32 rows
/// they store themselves: there would be room for half as many columns.)
template <typename Tr, bool kAllRowsUsed, typename Params>
__device__ void store_o(typename Tr::Shared& shared, const Params& p, const CUtensorMap& map) {
  using OTile = typename Tr::OTile;
  constexpr int kRounds = (Tr::kWidth + 64 * Tr::kOPanels - 1) / (64 * Tr::kOPanels);
  uint32_t phases = 0;  // parity of each warpgroup's o.full, one bit each: the rings have one stage
  for_each_tile<Tr>(shared, [&](const Tile<Tr::kWarpgroups>& tile) {
    if (p.template writes_float<!kAllRowsUsed>()) return;
    if (Tr::kChunked && p.chunks.of_tile > 1) return;  // pieces leave no O here
    const int lane = ptx::thread_again() % 32;
    // Whether warpgroup w arrives at o.full without an O. Under a mask as data alone: without one,
    // it does not arrive then.
    const auto has_nothing = [&]([[maybe_unused]] int w) {
      if constexpr (Tr::kMasked) return shared.mask.tiles[&tile - shared.tiles].has_nothing[w] != 0;
      return false;
    };
    // Stores what warpgroup w has left in shared memory: columns from panel `begin` on.
    const auto store = [&](int w, int begin) {
      phases ^= 1u << w;
      const int rows = min(tile.rows - w * kWarpgroupRows, kWarpgroupRows);
      const int first = tile.map_q + query_of(p, w * kWarpgroupRows);
      // TMA writes nothing past the tensor's end, but it would overwrite the next sequence's rows,
      // and rows that are not in use. Where a tile has such rows they are left out by hand.
      if (has_nothing(w)) {
      } else if (!p.query_counts_differ() || rows == kWarpgroupRows) {
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
        auto* const out = static_cast<uint16_t*>(p.out.data) + begin * 64 +
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
    // A warpgroup none of whose rows sees a key leaves nothing here: it has written its zeros
    // itself (store_nothing).
    if constexpr (kRounds == 1) {
#pragma unroll 1
      for (int w = 0; w < Tr::kWarpgroups; ++w) {
        if (!Tr::kMasked && tile.part[w].empty()) continue;
        shared.o_ring[w].full[0].wait(phases >> w & 1);
        store(w, 0);
      }
    } else {
      // Rounds are stored of whichever warpgroup is ready, in no fixed order. With attention chunks
      // a warpgroup may be done with its keys some blocks before the others. It then waits here
      // until its round has been stored, and only then takes its turns in the remaining blocks, in
      // which the others wait for it at the ping-pong barrier. If this warp waited for the others
      // first, that would be a deadlock.
      constexpr int kBits = 8;
      uint32_t left = 0;  // rounds of each warpgroup
      for (int w = 0; w < Tr::kWarpgroups; ++w)
        left |= (!Tr::kMasked && tile.part[w].empty() ? 0u : kRounds) << kBits * w;
#pragma unroll 1
      for (int w = 0; left != 0; w = w + 1 == Tr::kWarpgroups ? 0 : w + 1) {
        const int rounds = static_cast<int>(left >> kBits * w & 0xff);
        if (rounds == 0) continue;
        const bool ready = shared.o_ring[w].full[0].test(phases >> w & 1);
        if (!__all_sync(0xffffffffu, ready)) continue;
        store(w, (kRounds - rounds) * Tr::kOPanels);
        left -= (has_nothing(w) ? kRounds : 1u) << kBits * w;
      }
    }
    __syncwarp();
  });
  ptx::tma_store_wait();
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_PRODUCER_CUH_
