// Attention backward on Hopper (sm_90a): TMA, wgmma, warp specialisation (arXiv:2307.08691,
// algorithm 2). docs/hopper-backward.md draws the pipeline over time.
//
// A work item is 128 keys of a key head, with the tiles of queries that see some of them, of all
// query heads that read this key head (or of a part of them), last tile first. A thread block takes
// one item after the other: K and, where it has two stages, V and the first tiles of the next one
// come while it ends the last.
// Scores are transposed, so that P^T and dS^T lie in registers as the A operands of dV and dK.
//
//   warps     registers  role
//   0         24         producer, one thread: takes an item and loads its record (KeyRecord), K
//                        and V; then a tile of Q with its lse and of dO with its delta for each
//                        step
//   1, 2      24         see to it that dQ's sums are zero before anybody adds
//                        (backward_sm90_zeros.cuh), or keep the order of the additions, where
//                        they have one (backward_sm90_turns.cuh); without sums (kStoresDq) they
//                        arrive at barriers alone
//   3         24         idle: a warpgroup gives its registers away as a whole; under a mask as
//                        data one thread looks for steps (backward_sm90_mask.cuh), and 1 and 2
//                        keep an order only where the launch asks for one
//   4 to 7    240        consumer warpgroup 0: keys 0 to 63 (backward_sm90_consumer.cuh)
//   8 to 11   240        consumer warpgroup 1: keys 64 to 127
//
//   barrier         its phases end when                     waited for by
//   block .full     the item's record is there              consumers, producer
//   block .empty    dK and dV are stored by all eight       producer, two items later
//   k, v .full      TMA has delivered K, V                  consumers
//   v .empty        the item's steps are done               producer
//   k .empty        dQ of the item's last step is made      producer
//   q, dout .full   TMA has delivered the tile              consumers
//   q, dout .empty  all eight consumer warps are done       producer
//   ds.full         all eight have left their dS, and dQ's  consumers, a step later
//                   sum is zero (or it is this block's turn)
//   ds.empty        dQ has been made of it by all eight     consumers, two steps later
//   bias .full      TMA has delivered the step's bias       consumers, where there is one
//   bias .empty     it is in all scores of the step         producer
//   ping-pong       (hardware, 1, 2) the other warpgroup    warpgroup, before it issues its
//                   has issued its products                 products; with two panels only, and
//                                                           not in the general kernel
//   found, known    a step is found; whether an item has    producer and warps 1, 2; for `known`
//                   some (under a mask as data)             the consumers too
//   end             (hardware, 3) the consumers are done    warp 2, where additions to dQ have an
//                                                           order
//
//   shared memory   panels of 64 columns, 128-byte swizzle  (layout: backward_sm90_layout.cuh)
//   k               [2][panel][128][64]; v alike, with two panels, in the general kernel and
//                   beside a bias [1]
//   q, dout         [2][panel][tile_q][64]                  lse, delta [2][tile_q], in quad_order
//   ds              [2][panel of queries][128][64]          blocks [2]: items; barriers
//   factors         of the general kernel alone: each thread's own (backward_sm90_scores.cuh)
//   bias            [2 panels of keys][tile_q][64], where there is one (backward_sm90_bias.cuh)
//
// One step of a warpgroup, for query tile i, where the warpgroups take turns (without, most issue
// dQ and dV with dK: BackwardTraits::kIssuesLate). All branches are between two steps, and no
// wgmma is in flight there: ptxas would serialise a wgmma that is in flight across a branch.
//
//   wait Q(i), dO(i), ping-pong | issue S^T = K Q^T, dP^T = V dO^T | wait S | P = exp2(S - lse)
//   wait dS(i-1) | issue dQ = dS(i-1) K, dV += P^T dO | pass ping-pong
//   wait dP | dS = P (dP - delta), left in shared memory | issue dK += dS^T Q
//   wait dQ, add it to the sum in global memory | wait dV, free dO | wait dK, free Q
//
// Where no sequence has a second block of keys, dQ is stored in place of that addition, in the
// caller's type (kStoresDq); there is no sum then. (That has branches while dV and dK are in
// flight, around stores that touch no accumulator of theirs: ptxas does not serialise these, and
// scripts/check_kernels.py fails if it ever does.)
//
// That is the kernel for plain scores. The general one, for softcap, ALiBi and dropout, has
// branches in P: it waits for S with nothing else in flight, then issues dP, dQ and dV
// (docs/hopper-backward.md).
//
// dQ of a step is computed in the step after it, so that no warpgroup waits for the other's dS. The
// dQ of an item's last step is computed in the first step of the next item where there are
// registers for that (kHasNextStep), else between the two items.
//
// A query that does not see a key has weight 0 there, and 0 * NaN = NaN: this kernel marks the rows
// of dK and dV that are not finite and have met a masked tile.
//
// Other kernels of the launch, in their order (backward_launch.h, backward/stages_launch.h): before
// this one backward/pre.cuh makes delta and what else the products need; after it
// backward/dbias.cuh makes the gradient of a bias, where that is asked for, backward/post.cuh turns
// the sum of dQ, where there is one, into dQ, backward/pairwise.cuh computes marked rows again, and
// those of dQ that are not finite, from the pairs that the mask allows and no bias hides, and where
// a group has parts their dK and dV are added (backward/post.cuh).
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_CUH_

#include <cstddef>

#include "cuda/backward/order.cuh"
#include "cuda/backward/scratch.cuh"
#include "cuda/hopper/backward_sm90_bias.cuh"
#include "cuda/hopper/backward_sm90_consumer.cuh"
#include "cuda/hopper/backward_sm90_layout.cuh"
#include "cuda/hopper/backward_sm90_mask.cuh"
#include "cuda/hopper/backward_sm90_turns.cuh"
#include "cuda/hopper/backward_sm90_zeros.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/next_kernel.h"
#include "cuda/ptx/thread_again.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"

namespace strobe::cuda::sm90 {

/// Loads a tile of Q or dO, which begins at `row` of a head, with its rows of lse or delta into a
/// ring's next stage, once that is free.
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

/// The producer, one thread: takes items, and loads the K, V, Q and dO of each.
template <typename Tr>
class BackwardProducer {
 public:
  __device__ __forceinline__ BackwardProducer(typename Tr::Shared& shared, const BackwardParams& p,
                                              const BackwardScratch& scratch,
                                              const typename Tr::Items& items,
                                              const BackwardMapsOf<Tr>& maps)
      : shared_(shared), p_(p), scratch_(scratch), items_(items), maps_(maps) {}

  __device__ __forceinline__ void run() {
    // Where thread blocks wait for one another, the one that is waited for has to be running. The
    // first item is then drawn, too, instead of being the block's own number: a block that draws an
    // item is running.
    uint32_t index = Tr::kOrdered || scratch_.items_zero ? draw() : blockIdx.x;
    if constexpr (Tr::kMask) shared_.long_blocks = items_.long_blocks(p_);
#pragma unroll 1
    for (;; ++item_.count) {
      shared_.block_ring.empty[item_.stage()].wait(item_.free());
      ptx::Barrier& full = shared_.block_ring.full[item_.stage()];
      if (index >= order().items) {
        block().head_kv = -1;
        full.arrive();
        return;
      }
      const typename Tr::Items::Item item = item_at(index);
      block().head_kv = item.head_kv;
      block().part = item.part;
      block().head_begin = item.head_kv * p_.group + item.part * order().heads_per_part;
      block().head_end =
          min(block().head_begin + order().heads_per_part, (item.head_kv + 1) * p_.group);
      if constexpr (Tr::kOrdered && !Tr::kMask) block().direction = item.descends ? 1 : -1;
      full.arrive_expect(sizeof(typename Tr::Record));
      ptx::bulk_load(&block(),
                     static_cast<const typename Tr::Record*>(scratch_.key_records) + item.record,
                     sizeof(typename Tr::Record), full);
      full.wait(item_.phase());
      load();
      if (!Tr::kPersistent) return;
      // The next item is drawn when the last tiles of this one are being loaded, and not earlier,
      // so that the last items of all go to the thread blocks that are free first.
      index = draw();
    }
  }

 private:
  __device__ __forceinline__ typename Tr::Block& block() { return shared_.blocks[item_.stage()]; }
  __device__ __forceinline__ const ItemOrder& order() const {
    if constexpr (Tr::kOrdered) {
      return items_.order;
    } else {
      return items_;
    }
  }
  __device__ __forceinline__ uint32_t draw() { return atomicAdd(scratch_.ticket, 1u); }
  __device__ __forceinline__ typename Tr::Items::Item item_at(uint32_t index) const {
    if constexpr (Tr::kMask) {
      return items_.item(p_, index, shared_.long_blocks);
    } else {
      return items_.item(index);
    }
  }

  /// are_read(): whether the item's steps read them.
  template <int kStages, typename AreRead>
  __device__ __forceinline__ void load_keys(Ring<kStages>& ring,
                                            uint8_t (&tiles)[kStages][Tr::KTile::kBytes],
                                            const CUtensorMap& map, const AreRead& are_read) {
    const RingPosition<kStages> at{item_.count};
    ring.empty[at.stage()].wait(at.free());
    ptx::Barrier& full = ring.full[at.stage()];
    if (!are_read()) {
      full.arrive();
      return;
    }
    full.arrive_expect(Tr::KTile::kBytes);
#pragma unroll
    for (int panel = 0; panel < Tr::kPanels; ++panel) {
      ptx::tma_load(tiles[at.stage()] + panel * Tr::KTile::kPanelBytes, map, full,
                    ptx::L2::kEvictFirst, 64 * panel, block().map_k, block().head_kv,
                    block().map_batch);
    }
  }
  /// Loads an item's K and V, then Q and dO of step after step.
  __device__ __forceinline__ void load() {
    const typename Tr::Block& block = this->block();
    const auto has_steps = [&] { return block.has_steps(); };
    if constexpr (Tr::kMask) {
      // K need not wait until somebody has looked into the lists.
      load_keys(shared_.k_ring, shared_.k, maps_.k,
                [&] { return !rule_interval(block.walk).empty(); });
      shared_.known[item_.stage()].wait(item_.phase());
      load_keys(shared_.v_ring, shared_.v, maps_.v, has_steps);
#pragma unroll 1
      for (bool more = block.has_steps(); more; ++at_.count) {
        const RingPosition<Tr::kFoundStages> found{at_.count};
        shared_.found[found.stage()].wait(found.phase());
        const typename Tr::StepSlot& now = shared_.steps[at_.count % Tr::kSlots];
        more = now.next.exists();
        load_step(now.record.step);
      }
    } else {
      load_keys(shared_.k_ring, shared_.k, maps_.k, has_steps);
      load_keys(shared_.v_ring, shared_.v, maps_.v, has_steps);
#pragma unroll 1
      for (HeadStep now = HeadStep::first(block.walk, block.head_begin, block.direction);
           block.has_steps() && !now.done(block.head_end);
           now.advance(block.walk, block.direction), ++at_.count) {
        load_step(now);
      }
    }
  }
  __device__ __forceinline__ void load_step(const typename Tr::Step& now) {
    const typename Tr::Block& block = this->block();
    const int32_t tile = tile_of(now, block.walk);
    const int64_t scratch_row = Tr::kTileQ * (int64_t{now.head} * scratch_.tiles + block.scratch +
                                              static_cast<uint32_t>(tile));
    const int row = block.map_q + tile * Tr::kTileQ, stage = at_.stage();
    load_queries<Tr>(shared_.q_ring, at_, shared_.q[stage], maps_.q, row, now.head, block.map_batch,
                     shared_.lse[stage], scratch_.lse + scratch_row);
    load_queries<Tr>(shared_.dout_ring, at_, shared_.dout[stage], maps_.dout, row, now.head,
                     block.map_batch, shared_.delta[stage], scratch_.delta + scratch_row);
    if constexpr (Tr::kBias) {
      load_bias<Tr>(shared_, p_.bias, maps_.bias, {at_.count}, tile * Tr::kTileQ, block.key_begin,
                    now.head, block.batch);
    }
  }

  typename Tr::Shared& shared_;
  const BackwardParams& p_;
  const BackwardScratch& scratch_;
  const typename Tr::Items& items_;
  const BackwardMapsOf<Tr>& maps_;
  RingPosition<Tr::kItemStages> item_;
  RingPosition<Tr::kStages> at_;
};

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams p,
                    const __grid_constant__ BackwardScratch scratch,
                    const __grid_constant__ BackwardOrder order,
                    const __grid_constant__ typename Tr::Items items,
                    const __grid_constant__ BackwardMapsOf<Tr> maps) {
  constexpr int kEndBarrier = 3, kEndThreads = 32 * (Tr::kWarps + 1);
  constexpr uint32_t kOfAll = Tr::kWarps * ptx::kWarpArrivals, kOne = Tr::kOrdered ? 1 : 0;
  // Under a mask as data: whether an order is kept.
  const bool keeps_order = !Tr::kMask || p.deterministic != 0;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<typename Tr::Shared*>(shared_bytes);

  if (threadIdx.x == 0) {
    if (p.total_q > 0) {  // without queries there are no tensor maps
      ptx::tma_prefetch(maps.q);
      ptx::tma_prefetch(maps.k);
      ptx::tma_prefetch(maps.v);
      ptx::tma_prefetch(maps.dout);
      if constexpr (Tr::kBias) ptx::tma_prefetch(maps.bias);
    }
    const uint32_t keepers = keeps_order ? kOne : 0;
    constexpr uint32_t kZeros = Tr::kOrdered ? 1 : ptx::kWarpArrivals;  // warp 1: a thread, or all
    shared.block_ring.init(1, kOfAll + (Tr::kMask ? 1 + 2 * keepers : kZeros + 1));
    shared.k_ring.init(1, kOfAll);
    shared.v_ring.init(1, kOfAll);
    shared.q_ring.init(Tr::kMask ? 2 : 1, kOfAll + keepers);
    shared.dout_ring.init(1, kOfAll);
    shared.ds_ring.init(kOfAll + (Tr::kMask ? keepers : 1), kOfAll);
    if constexpr (Tr::kBias) shared.bias_ring.init(1, kOfAll);
    if constexpr (Tr::kMask) {
      for (ptx::Barrier& barrier : shared.found) barrier.init(1);
      for (ptx::Barrier& barrier : shared.known) barrier.init(1);
    }
    ptx::fence_barrier_init();
  }
  ptx::wait_for_kernel_before();
  __syncthreads();

  // The shuffle tells the compiler that the number is the same for a whole warp.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  // (In this order the warps that load come first in the machine code: forward_sm90.cuh.)
  if (warp >= 4) {
    ptx::set_max_registers_up<Tr::kConsumerRegisters>();
    BackwardConsumer<Tr>(shared, p, scratch, warp / 4 - 1).run(order);
    if constexpr (Tr::kOrdered) {
      if (keeps_order) {
        __syncwarp();
        ptx::named_barrier_arrive<kEndBarrier, kEndThreads>();
      }
    }
  } else {
    ptx::set_max_registers_down<Tr::kProducerRegisters>();
    // (The roles are branches of one another. Written one after the other, they make ptxas spill a
    // register of the consumers.)
    if (warp == 0) {
      if (threadIdx.x == 0) {
        BackwardProducer<Tr>(shared, p, scratch, items, maps).run();
        // Not earlier: the code of the kernels after this one would come from memory, into the
        // caches, while this one's does.
        ptx::let_next_kernel_begin();
      }
    } else if constexpr (!Tr::kOrdered) {
      if (warp == 1) ZeroSums<Tr>(shared, scratch).run();
      if (warp == 2 && ptx::thread_again() % 32 == 0)
        AwaitZeros<Tr>(shared, p, scratch, order).run();
    } else {
      const bool first_lane = ptx::thread_again() % 32 == 0;
      const auto report_additions = [&] {
        ReportAdditions<Tr> additions(shared, p, scratch, order);
        if (first_lane) additions.run();
        __syncwarp();
        ptx::named_barrier_sync<kEndBarrier, kEndThreads>();
        if (first_lane) additions.report();
      };
      if constexpr (Tr::kMask) {
        if (warp == 3) {
          if (first_lane) FindSteps<Tr>(shared, p).run();
        } else if (keeps_order) {
          if (warp == 2) {
            report_additions();
          } else if (first_lane) {
            KeepTurns<Tr>(shared, p, scratch, order).run();
          }
        }
      } else {
        if (warp == 1 && first_lane) KeepTurns<Tr>(shared, p, scratch, order).run();
        if (warp == 2) report_additions();
      }
    }
  }
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_CUH_
