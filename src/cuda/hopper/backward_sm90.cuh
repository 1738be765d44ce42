// Attention backward on Hopper (sm_90a): TMA, wgmma, warp specialisation (arXiv:2307.08691,
// algorithm 2). docs/hopper-backward.md draws the pipeline over time.
//
// A thread block takes 128 keys of a key head, and goes through the tiles of queries that see some
// of them, of all query heads that read this key head (or of a part of them), last tile first.
// Scores are transposed, so that P^T and dS^T lie in registers as the A operands of dV and dK.
//
//   warps     registers  role
//   0         24         producer, one thread: loads K and V once, then a tile of Q with its lse
//                        and of dO with its delta for each step
//   1 to 3    24         idle: a warpgroup gives its registers away as a whole
//   4 to 7    240        consumer warpgroup 0: keys 0 to 63 (backward_sm90_consumer.cuh)
//   8 to 11   240        consumer warpgroup 1: keys 64 to 127
//
//   barrier         its phases end when                     waited for by
//   k_full, v_full  TMA has delivered K, V                  consumers
//   q, dout .full   TMA has delivered the tile              consumers
//   q, dout .empty  all eight consumer warps are done       producer
//   ds.full         all eight have left their dS            consumers, a step later
//   ds.empty        dQ has been made of it by all eight     consumers, two steps later
//   turn 1, 2       (hardware) the other warpgroup has      warpgroup, before it issues its
//                   issued its products                     products; at width 128 only
//
//   shared memory   panels of 64 columns, 128-byte swizzle  (layout: backward_sm90_layout.cuh)
//   k, v            [panel][128][64]                        q, dout   [2][panel][tile_q][64]
//   ds              [2][panel of queries][128][64]          lse, delta [2][tile_q], in quad_order
//   limits          of the queries that see each key        block, barriers
//
// One step of a warpgroup, for query tile i. Nothing is under way at its begin or end, where all
// branches are: ptxas would serialise wgmma across them.
//
//   wait Q(i), dO(i), turn | issue S^T = K Q^T, dP^T = V dO^T | wait S | P = exp2(S - lse)
//   wait dS(i-1) | issue dQ = dS(i-1) K, dV += P^T dO | pass the turn
//   wait dP | dS = P (dP - delta), left in shared memory | issue dK += dS^T Q
//   wait dQ, add it to the sum in global memory | wait dV, free dO | wait dK, free Q
//
// dQ of a step is made in the next one, so that no warpgroup waits for the other's dS.
//
// A query that does not see a key has weight 0 there, and 0 * NaN = NaN: rows of dQ, dK and dV that
// are not finite and have met a masked tile are computed again by the kernel that comes after, from
// the pairs that the mask allows (backward_exact.cuh).
//
// Two more kernels: backward_pre.cuh before, backward_post.cuh after (host/backward_stages.h).
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_CUH_

#include <cstddef>

#include "cuda/common/backward_order.cuh"
#include "cuda/common/backward_scratch.cuh"
#include "cuda/hopper/backward_sm90_consumer.cuh"
#include "cuda/hopper/backward_sm90_layout.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warp_arrivals.h"
#include "cuda/ptx/wgmma.h"

namespace strobe::cuda::sm90 {

/// Fills a ring's next place: the tile at `row` of a head, with its lse or delta.
template <typename Tr>
__device__ __forceinline__ void load_queries(Ring<Tr::kStages>& ring, RingPosition<Tr::kStages> at,
                                             uint8_t* tile, const CUtensorMap& map, int row,
                                             int head, int batch, float* values,
                                             const float* values_from) {
  ptx::Barrier& full = ring.full[at.stage()];
  ring.empty[at.stage()].wait(at.free());
  full.arrive_expect(Tr::QTile::kBytes + 4 * Tr::kTileQ);
#pragma unroll
  for (int panel = 0; panel < Tr::kPanels; ++panel) {
    ptx::tma_load(tile + panel * Tr::QTile::kPanelBytes, map, full, ptx::L2::kEvictLast, 64 * panel,
                  row, head, batch);
  }
  ptx::bulk_load(values, values_from, 4 * Tr::kTileQ, full);
}

/// K and V, then Q and dO of step after step. One thread.
template <typename Tr>
__device__ __forceinline__ void load_all(typename Tr::Shared& shared,
                                         const BackwardScratch& scratch, const BackwardMaps& maps) {
  const KeyBlock& block = shared.block;
  const auto load_keys = [&](ptx::Barrier& full, uint8_t* tile, const CUtensorMap& map) {
    full.arrive_expect(Tr::KTile::kBytes);
#pragma unroll
    for (int panel = 0; panel < Tr::kPanels; ++panel) {
      ptx::tma_load(tile + panel * Tr::KTile::kPanelBytes, map, full, ptx::L2::kEvictFirst,
                    64 * panel, block.map_k, block.item.head_kv, block.map_batch);
    }
  };
  RingPosition<Tr::kStages> at;
  QueryStep now = QueryStep::first(block);
  if (block.visits.begin == block.visits.end) return;
  load_keys(shared.k_full, shared.k, maps.k);
#pragma unroll 1
  for (; !now.done(block); now.advance(block), ++at.count) {
    const int64_t scratch_row = Tr::kTileQ * (int64_t{now.head} * scratch.tiles + block.scratch +
                                              static_cast<uint32_t>(now.tile));
    const int row = block.map_q + now.tile * Tr::kTileQ, stage = at.stage();
    load_queries<Tr>(shared.q_ring, at, shared.q[stage], maps.q, row, now.head, block.map_batch,
                     shared.lse[stage], scratch.lse + scratch_row);
    if (at.count == 0) load_keys(shared.v_full, shared.v, maps.v);
    load_queries<Tr>(shared.dout_ring, at, shared.dout[stage], maps.dout, row, now.head,
                     block.map_batch, shared.delta[stage], scratch.delta + scratch_row);
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p,
                    const __grid_constant__ BackwardScratch scratch,
                    const __grid_constant__ BackwardOrder order,
                    const __grid_constant__ BackwardMaps maps) {
  constexpr uint32_t kOfAll = Tr::kWarps * ptx::kWarpArrivals;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Tr::Shared*>(shared_bytes);

  const int64_t index = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  if (index >= order.items) return;
  const BackwardItem item = backward_item(order, p.heads_kv, index);
  const Sequence sequence = p.sequence(item.batch);
  const int32_t key_begin = item.block * Tr::kTileK;
  if (key_begin >= sequence.mask.seqlen_k) {  // of a sequence shorter than the longest
    if (threadIdx.x < Tr::kWarps) scratch.nonfinite[index * Tr::kWarps + threadIdx.x] = 0;
    return;
  }
  if (threadIdx.x == 0) {
    if (p.total_q > 0) {  // else there are no maps
      ptx::tma_prefetch(maps.q);
      ptx::tma_prefetch(maps.k);
      ptx::tma_prefetch(maps.v);
      ptx::tma_prefetch(maps.dout);
    }
    shared.k_full.init(1);
    shared.v_full.init(1);
    shared.q_ring.init(1, kOfAll);
    shared.dout_ring.init(1, kOfAll);
    shared.ds_ring.init(kOfAll, kOfAll);
    ptx::fence_barrier_init();
    KeyBlock& block = shared.block;
    const Range keys{key_begin, min64(key_begin + Tr::kTileK, sequence.mask.seqlen_k)};
    block.visits = QueryVisits::make(sequence.mask, keys, Tr::kTileQ, Tr::kTileK);
    block.head_begin = item.head_kv * p.group + item.part * order.heads_per_part;
    block.head_end = min(block.head_begin + order.heads_per_part, (item.head_kv + 1) * p.group);
    block.item = item;
    block.number = index;
    block.k_row = sequence.k_row;
    block.seqlen_k = static_cast<int32_t>(sequence.mask.seqlen_k);
    block.scratch = scratch_begin(p, Tr::kTileQ, item.batch);
    block.key_begin = key_begin;
    block.map_batch = p.cu_q ? 0 : item.batch;
    block.map_q = static_cast<int32_t>(sequence.q_row);
    block.map_k = static_cast<int32_t>(sequence.k_row) + key_begin;
  }
  if (threadIdx.x >= 128 && threadIdx.x < 128 + Tr::kTileK) {
    const int key = static_cast<int>(threadIdx.x) - 128;
    shared.limits[key] = key_limits(sequence.mask, key_begin + key);
  }
  __syncthreads();

  // The shuffle tells the compiler that the number is the same for a whole warp.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  if (warp < 4) {
    ptx::set_max_registers_down<Tr::kProducerRegisters>();
    if (threadIdx.x == 0) load_all<Tr>(shared, scratch, maps);
  } else {
    ptx::set_max_registers_up<Tr::kConsumerRegisters>();
    BackwardConsumer<Tr> consumer(shared, p, scratch, warp / 4 - 1);
    if (shared.block.visits.begin < shared.block.visits.end) {
      consumer.run();
      consumer.store(order);
    } else {
      consumer.clear();
      consumer.store(order);
    }
  }
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_CUH_
