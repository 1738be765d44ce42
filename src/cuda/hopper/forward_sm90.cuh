// Attention forward on Hopper (sm_90a): TMA, wgmma, warp specialisation. docs/hopper-forward.md
// draws the pipeline over time.
//
// A persistent thread block computes tiles of tile_q queries of a head, 64 for each of W consumer
// warpgroups, against all keys that they see, tile_k at a time, last block first.
//
//   warps         registers  role (0 to 3: forward_sm90_producer.cuh; others: _consumer.cuh)
//   0             56 (W=2)   K and V: loads blocks into two rings, K one block ahead of V
//   1             32 (W=3)   Q: loads each warpgroup's 64 rows
//                            (Of keys in a cache 0 loads K, and 1 Q and V: load_cached)
//   2                        scheduler: takes the next tile, works out which blocks it needs
//   3                        O: stores what the consumers leave in shared memory
//   4 to 4 + 4W   224, 160   consumers: S = Q K^T, softmax, O += P V
//
//   barrier        its phases end when                waited for by
//   k, v .full     TMA has delivered the block        consumers
//   k, v .empty    every consumer warp is done        warp 0 (cached: 0, 1)
//   q.full         TMA has delivered a warpgroup's Q  that warpgroup
//   q.empty        its four warps are done            warp 1
//   bias.full      TMA has delivered a block's bias   that warpgroup
//   bias.empty     its four warps have it in S        warp 1
//   o.full         its four warps have left their O   warp 3
//   o.empty        O has been read                    that warpgroup
//   tile.full      the scheduler has written a tile   all others
//   tile.empty     all others are done with it        scheduler
//   request        warp 0 nears the end of a tile     scheduler
//   ping-pong      (hardware, 1 to W) the warpgroup   warpgroup, before it issues its products
//                  before has issued its products
//   end            (hardware, W + 1) warps 0 to 3     consumers
//                  have no more to do
//   initialised    (hardware, W + 2 to W + 4; up to   all others, before the first of the above
//                  width 96) warp 0 has done so
//
//   shared memory  panels of 64 columns, 128-byte swizzle  (layout: forward_sm90_layout.cuh)
//   q              [q stages][W][panel][64][64]     two stages up to width 128, else one
//   k, v           [stages][panel][tile_k][64]
//   o              [W][panel][64][64]               up to width 128 (with a bias up to 64); else O
//                                                   goes out of registers, as float32 rows do
//   tiles, barriers
//
// In float8 (Tr::kFloat8) there is a warpgroup more, before the consumers, with 40 registers as the
// producers have, and consumers with 216: it transposes V (transpose_v). v.full is waited for by
// it, and it arrives at v.empty; then
//   float8.v .full    its four warps have transposed the block  consumers
//   float8.v .empty   every consumer warp is done               that warpgroup
// Panels of Q, K and V are of 128 columns. float8.v, the transposed blocks, lies behind all else.
// A step of a warpgroup is then that of forward_sm90_float8.cuh.
//
// Under a mask as data (Tr::kMasked) warp 0 goes through the lists of a tile's queries, and leaves
// with each block what either warpgroup does with it: forward_sm90_mask.cuh.
//
// With a bias (Tr::kBias) warp 1 loads that too, block after block: forward_sm90_bias.cuh.
//
// One step of a warpgroup, for block j. All branches are between two steps, and no wgmma is in
// flight there: ptxas would serialise a wgmma that is in flight across a branch.
//
//   wait K(j), V(j-1), ping-pong | issue S = Q K(j)^T | issue O += P V(j-1) | pass ping-pong
//   wait S | softmax of S | wait O, free V(j-1) | free K(j) | P = S
//
// so each softmax runs under the products of the other warpgroups and this one's O += P V, also
// from one tile to the next: O of a tile is complete after the first step of the tile that follows.
//
// The softmax subtracts a reference that need not be the maximum: it is the maximum of the blocks
// that are masked or first, and stays. An unmasked block then needs no maximum, no shuffles and no
// rescaling of O. The result does not depend on the reference as long as nothing overflows; it
// cannot vanish, since the true maximum is no smaller. Where a sum exceeds kSumLimit, the warp
// computes its rows of the block again, with their maximum (redo).
//
// A key that a row does not see has weight 0, and 0 * NaN = NaN. A tile where some O is not finite
// therefore goes onto a list. At the end of the kernel the rows of O that are not finite are
// computed again, from the keys alone that they see (forward_pairwise.cuh). This waits for the end
// because code between two steps would cost the steps registers.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_CUH_

#include "cuda/cache/cached_row.cuh"
#include "cuda/common/rows_past_end.cuh"
#include "cuda/hopper/forward_sm90_bias.cuh"
#include "cuda/hopper/forward_sm90_chunks.cuh"
#include "cuda/hopper/forward_sm90_consumer.cuh"
#include "cuda/hopper/forward_sm90_float8.cuh"
#include "cuda/hopper/forward_sm90_layout.cuh"
#include "cuda/hopper/forward_sm90_masked_loads.cuh"
#include "cuda/hopper/forward_sm90_masked_tile.cuh"
#include "cuda/hopper/forward_sm90_output.cuh"
#include "cuda/hopper/forward_sm90_producer.cuh"
#include "cuda/hopper/forward_sm90_redo.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"

namespace strobe::cuda::sm90 {

/// Initialises the barriers, by one thread. kLoaders: how many arrivals warps 0 and 1 make at a
/// tile's `empty` barrier.
template <typename Tr, uint32_t kLoaders, bool kAllRowsUsed>
__device__ void prepare(typename Tr::Shared& shared, const TensorMaps& maps,
                        const TileOrder& order) {
  constexpr uint32_t kWarps = 4 * Tr::kWarpgroups, kOfWarp = ptx::kWarpArrivals;
  order.stagger.wait(blockIdx.x);
  ptx::tma_prefetch(maps.q);
  ptx::tma_prefetch(maps.k);
  ptx::tma_prefetch(maps.v);
  for (auto& ring : shared.q_ring) ring.init(1, 4 * kOfWarp);
  for (auto& ring : shared.o_ring) ring.init(4 * kOfWarp, kOfWarp);
  shared.k_ring.init(1, kWarps * kOfWarp);
  constexpr uint32_t kTransposing = Tr::kFloat8 ? 4 : 0;  // warps
  shared.v_ring.init(1, (Tr::kFloat8 ? kTransposing : kWarps) * kOfWarp);
  if constexpr (Tr::kBias) {
    for (auto& ring : shared.bias_ring.of) ring.init(1, 4 * kOfWarp);
  }
  if constexpr (Tr::kFloat8) shared.float8.v_ring.init(kTransposing * kOfWarp, kWarps * kOfWarp);
  shared.tile_ring.init(kOfWarp,
                        (kWarps + kTransposing + (Tr::kStagesO ? 1 : 0)) * kOfWarp + kLoaders);
  // Where tiles are fixed the scheduler does not wait for requests. The barrier then expects more
  // arrivals than ever come, so that no phase of it ends: compute-sanitizer reports phases that
  // nobody waits for.
  shared.request.init(order.is_fixed<kAllRowsUsed>() ? ptx::kMostArrivals : 1);
  shared.suspects = -1;
  ptx::fence_barrier_init();
}

/// kGeneral: with softcap, ALiBi or a scale that is not positive (which a bias may have without).
/// kAllRowsUsed:
/// Sequences::all_rows_used(), and out is of type Tr::T. Params: ForwardParams, or TileParams where
/// the keys lie in a cache.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    forward_kernel(const __grid_constant__ Params p,
                   const __grid_constant__ MapsOf<Tr, Params> maps,
                   const __grid_constant__ OrderOf<Tr> order) {
  constexpr int kWarps = 4 * Tr::kWarpgroups;
  // Warps 0 and 1 arrive once, as one thread each; with a cache they work, and arrive, as whole
  // warps, and under a mask as data warp 0 does.
  constexpr uint32_t kLoaders = (kCached<Params> || Tr::kMasked ? ptx::kWarpArrivals : 1) +
                                (kCached<Params> ? ptx::kWarpArrivals : 1);
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Tr::Shared*>(shared_bytes);

  if constexpr (!Tr::kEarlyTile) {
    if (threadIdx.x == 0) prepare<Tr, kLoaders, kAllRowsUsed>(shared, maps, order);
    __syncthreads();
  }

  constexpr int kAllDone = 1 + Tr::kWarpgroups;  // hardware barrier
  // The shuffle tells the compiler that the number is the same for a whole warp.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  // The warps that load come first in the machine code: ptxas has these branches in reverse. At a
  // launch code comes from memory in its order, and what lies 50 KB behind the first instruction is
  // there a microsecond later. Consumers have to wait for data meanwhile.
  if (warp >= Tr::kOtherWarps) {
    ptx::set_max_registers_up<Tr::kConsumerRegisters>();
    wait_for_barriers<Tr, Awaits::kConsumers>();
    if (p.cu_q && has_rows_past_end(p)) {  // while the first blocks are on their way
      clear_past_end(p, {int64_t{blockIdx.x} * kWarps + (warp - Tr::kOtherWarps),
                         int64_t{gridDim.x} * kWarps});
    }
    Consumer<Tr, kGeneral, kAllRowsUsed, Params>(shared, p, warp / 4 - Tr::kOtherWarps / 4).run();
    ptx::named_barrier_sync<Tr::kThreads>(kAllDone);
    for (int i = shared.suspects; i >= 0;) {
      const SuspectTile& tile = static_cast<const Workspace*>(p.workspace)->suspects[i];
      // Computed anew: to keep `warp` until here would spill a register.
      const int own = static_cast<int>(threadIdx.x / 32) - Tr::kOtherWarps;
      constexpr int kRows = Tr::kWarpgroups * kWarpgroupRows;
      if constexpr (kCached<Params>) {
        pairwise_cached_rows<typename Tr::T>(p, tile, own, kWarps, kRows);
      } else {
        constexpr bool kOfPairs = Tr::kMasked || Tr::kBias;
        pairwise_rows<typename Tr::T, false, kAllRowsUsed, kOfPairs, Tr::kFloat8>(p, tile, own,
                                                                                  kWarps, kRows);
      }
      i = tile.next;
    }
  } else {
    ptx::set_max_registers_down<Tr::kProducerRegisters>();
    if (Tr::kFloat8 && warp >= 4) {
      if constexpr (Tr::kFloat8) transpose_v<Tr, kAllRowsUsed>(shared, p);
    } else {
      const bool one_thread = threadIdx.x % 32 == 0;
      if (Tr::kEarlyTile && warp == 0) {
        if (one_thread) prepare<Tr, kLoaders, kAllRowsUsed>(shared, maps, order);
        __syncwarp();
        announce_barriers<Tr, Awaits::kScheduler>();
        announce_barriers<Tr, Awaits::kOthers>();
        announce_barriers<Tr, Awaits::kConsumers>();
      } else if (warp != 2) {  // warp 2 waits in schedule(), after it has worked out the first tile
        wait_for_barriers<Tr, Awaits::kOthers>();
      }
      if constexpr (kCached<Params>) {
        if (warp == 0) load_cached<Tr, true>(shared, p, maps);
        if (warp == 1) load_cached<Tr, false>(shared, p, maps);
      } else {
        if constexpr (Tr::kMasked) {
          if (warp == 0) load_masked_kv<Tr>(shared, maps);
        } else {
          if (warp == 0 && one_thread) load_kv<Tr>(shared, maps);
        }
        if constexpr (Tr::kBias) {
          if (warp == 1 && one_thread) load_q_and_bias<Tr>(shared, p, maps);
        } else {
          if (warp == 1 && one_thread) load_q<Tr>(shared, p, maps.q);
        }
      }
      if (warp == 2) schedule<Tr, kAllRowsUsed>(shared, p, order);
      if (warp == 3 && Tr::kStagesO) store_o<Tr, kAllRowsUsed>(shared, p, maps.out);
    }
    __syncwarp();
    ptx::named_barrier_arrive<Tr::kThreads>(kAllDone);
  }
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_CUH_
