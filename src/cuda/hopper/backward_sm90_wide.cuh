// Attention backward on Hopper (sm_90a) for wide heads, head_dim 129 to 256: TMA, wgmma, warp
// specialisation by product (arXiv:2307.08691, algorithm 2). docs/hopper-backward.md draws the
// pipeline over time. backward_sm90.cuh is the kernel for narrower heads.
//
// dK and dV of 64 keys and 256 columns fill the registers of two warpgroups. So a thread block has
// 64 keys, and each of its warpgroups computes some of the five products. A thread block alone
// would be limited by the additions of dQ to its sum in L2. So two neighbouring ones (a cluster)
// work as a pair on 128 keys: they exchange dS, and each computes half of dQ's columns from the
// keys of both, which halves the additions.
//
// A work item is 128 keys of a key head, with the tiles of 64 queries that see some of them, of all
// query heads that read this key head (or of a part of them), last tile first. A pair of thread
// blocks draws item after item, so that an item's results are stored while the next one begins.
//
//   warps     registers  role
//   0         32         producer, one thread: Q and lse, step by step; it asks for the next item
//   1         32         producer, one thread: dO and delta
//   2         32         scheduler: draws items, and says what they are
//   3         32         producer, one thread: V, K, the peer's K. Where additions to dQ have an
//                        order this is the scheduler's, and warp 3 reports additions
//   4 to 7    192        weights:   S, P and dV
//   8 to 11   192        gradients: dP, dS and dK
//   12 to 15  96         dQ
//
//   barrier            its phases end when                      waited for by
//   block.full         the scheduler has described an item      all but the scheduler
//   block.empty        all but the scheduler have finished it   scheduler, two items later
//   drawn.full, .empty block 0 has drawn a number for both;     block 1's scheduler; block 0's, two
//                      block 1 has got it                       numbers later
//   request            an item is nearly loaded                 scheduler
//   k, v, peer_k .full TMA has delivered K, V, the peer's K     weights and dQ; gradients; dQ
//   k, v, peer_k .empty they have been read for the last time   producer
//   q, dout .full      TMA has delivered the tile               weights, gradients
//   q, dout .empty     weights and gradients are done with it   producers
//   weights.full       the weights warps have left P            gradients
//   weights.empty      the gradients warps have read it         weights, two steps later
//   ds.full            the gradients warps have left dS, and    dQ
//                      the peer's dS has arrived
//   ds.empty           dQ has been made of it, here and by the  gradients, two steps later
//                      peer (hence the peer has got it, too)
//   added.full         dQ has been added to its sum             warp 3, where additions have an
//                                                               order
//   added.empty        warp 3 has seen that                     dQ, two steps later
//   nonfinite_full     the flags of dV are there                gradients, at an item's end
//
//   shared memory    panels of 64 columns, 128-byte swizzle: backward_sm90_wide_layout.cuh
//   k, v             [panel][64][64]                         q [2], dout [1 or 2]: alike
//   weights          [2]: P^T, a thread's words as they are  ds [2][own, the peer's][64][64]
//   peer_k           the peer's keys, the panels of this     lse [2], delta [1 or 2]: in quad_order
//                    block's half of dQ
//   blocks, limits   [2]: what an item is; queries that see each of its keys
//
// One step for a query tile i. All branches are between two steps of a warpgroup, and no wgmma of
// it is in flight there: ptxas would serialise a wgmma that is in flight across a branch. Meanwhile
// the other warpgroups, which are up to two steps apart, keep the tensor cores busy.
//
//   weights     wait Q(i) | S^T = K Q^T | P = exp2(S - lse); free Q(i); leave P for the gradients
//               wait dO(i) | dV += P^T dO | free dO(i)
//   gradients   wait dO(i) | dP^T = V dO^T | wait P | dS = P (dP - delta); free dO(i), P
//               leave dS, send it to the peer | wait Q(i) | dK += dS^T Q | free Q(i)
//   dQ          wait dS | dQ = dS K (and dS' K' of the peer), in two products, each added to the
//               sum when it is there, the first under the second | free dS
//
// In the general kernel the weights warpgroup has branches between S and P, with nothing of its own
// in flight, and leaves factors in place of P (backward_sm90_scores.cuh).
//
// Where additions to dQ have an order (`deterministic`; kOrdered), key blocks add to the dQ of a
// tile in the order of their ranks, in which their items are drawn (OrderedItems, addition_rank).
// Each tile of a head has two counters (BackwardScratch::additions), one for each block of a pair:
// the rank of the item that adds next. Two, since which columns of a tile are whose is the same in
// all items. The dQ warpgroup looks at the counter while a step's product is under way, frees dS,
// and adds when the counter says its item's rank:
//
//   dQ          wait dS | dQ = dS K (and dS' K' of the peer), in two products | free dS
//               wait for the counter | add to the sum | arrive at added.full
//   warp 3      wait added.full | raise the counter by one
//
// To raise the counter is a release, which covers the warpgroup's additions, since they came before
// its arrival, and waits until L2 has acknowledged them: warp 3 waits for that, and nobody else.
//
// There is no deadlock. Items are drawn one after the other by pairs that run, each of which goes
// through its items in the order in which it drew them. Take, of all items whose additions are not
// all reported, the one that was drawn first. Its pair has done and reported all its earlier items.
// The dQ warpgroups of the pair wait for dS and for their counters. The counters come, since they
// wait for items that were drawn before, all of which are reported. dS of a step comes, too: what
// makes it waits for tiles from memory, and for dS of two steps before to be free in both blocks,
// which it is when these blocks have made that step's dQ, before they wait for its counter. That
// the weights and gradients warpgroups, or the scheduler, may have come to the next item does not
// matter, since no step of this item waits for the next one's.
//
// The head of backward_sm90.cuh says what becomes of rows that are not finite, and which kernels
// run before and after; that is the same here.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_CUH_

#include <cstddef>

#include "cuda/backward/order.cuh"
#include "cuda/backward/scratch.cuh"
#include "cuda/hopper/backward_sm90_wide_consumer.cuh"
#include "cuda/hopper/backward_sm90_wide_layout.cuh"
#include "cuda/hopper/backward_sm90_wide_producer.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/next_kernel.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"

namespace strobe::cuda::sm90_wide {

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1) __cluster_dims__(kBlocks, 1, 1)
    backward_kernel(const __grid_constant__ BackwardParams p,
                    const __grid_constant__ BackwardScratch scratch,
                    const __grid_constant__ typename Tr::Order order,
                    const __grid_constant__ BackwardMaps maps) {
  constexpr uint32_t kOfWarpgroup = 4 * ptx::kWarpArrivals;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Tr::Shared*>(shared_bytes);

  const uint32_t rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    if (p.total_q > 0) {  // else there are no maps
      ptx::tma_prefetch(maps.q);
      ptx::tma_prefetch(maps.k);
      ptx::tma_prefetch(maps.v);
      ptx::tma_prefetch(maps.dout);
    }
    shared.block_ring.init(ptx::kWarpArrivals, 3 * kOfWarpgroup + 3);
    shared.drawn_ring.init(1, 1);
    shared.request.init(1);
    for (ptx::Barrier& full : shared.nonfinite_full) full.init(kOfWarpgroup);
    shared.k_ring.init(1, 2 * kOfWarpgroup);
    shared.v_ring.init(1, kOfWarpgroup);
    shared.peer_k_ring.init(1, kOfWarpgroup);
    shared.q_ring.init(1, 2 * kOfWarpgroup);
    shared.dout_ring.init(1, 2 * kOfWarpgroup);
    shared.weights_ring.init(kOfWarpgroup, kOfWarpgroup);
    shared.ds_ring.init(kOfWarpgroup, kBlocks * kOfWarpgroup);
    if constexpr (Tr::kOrdered) shared.added_ring.init(kOfWarpgroup, 1);
    ptx::fence_barrier_init();
  }
  ptx::wait_for_kernel_before();
  ptx::cluster_sync();  // the peer's barriers are there, too

  // The shuffle tells the compiler that the number is the same for a whole warp.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  // (In this order the warps that load come first in the machine code: forward_sm90.cuh.)
  if (warp >= 12) {
    ptx::set_max_registers_down<Tr::kDqRegisters>();
    DqWarpgroup<Tr>(shared, p, scratch).run(rank);
  } else if (warp >= 8) {
    ptx::set_max_registers_up<Tr::kConsumerRegisters>();
    GradientsWarpgroup<Tr>(shared, p, scratch).run(order, rank);
  } else if (warp >= 4) {
    ptx::set_max_registers_up<Tr::kConsumerRegisters>();
    WeightsWarpgroup<Tr>(shared, p, scratch).run(order);
  } else {
    ptx::set_max_registers_down<Tr::kProducerRegisters>();
    if (warp == 2) {
      Scheduler<Tr>(shared, p, scratch, order, maps).run();
      ptx::let_next_kernel_begin();  // not earlier: backward_sm90.cuh
    } else if (threadIdx.x % 32 == 0) {
      if (warp == 0) {
        load_queries<Tr, typename Tr::QTile, true>(shared, shared.q_ring, shared.q, maps.q,
                                                   shared.lse, scratch.lse, scratch.tiles);
      } else if (warp == 1) {
        load_queries<Tr, typename Tr::DoutTile, false>(shared, shared.dout_ring, shared.dout,
                                                       maps.dout, shared.delta, scratch.delta,
                                                       scratch.tiles);
      } else if constexpr (Tr::kOrdered) {
        report_additions<Tr>(shared, scratch, rank);
      } else {
        KeyLoader<Tr> keys(shared, maps);
        for_each_item_loaded<Tr>(shared, [&](const KeyBlock& block) { keys.load(block, rank); });
      }
    }
  }
  // The peer may still read this block's dS, or arrive at its barriers.
  __syncwarp();
  ptx::cluster_sync();
}

}  // namespace strobe::cuda::sm90_wide

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_CUH_
