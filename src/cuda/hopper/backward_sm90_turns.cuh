// Hopper backward, additions to dQ in a fixed order (`deterministic`): how a thread block waits for
// its turn to add to a tile, and tells the others that it has added. backward_sm90.cuh has the
// whole picture.
//
// Key blocks add to the dQ of a tile in the order of their ranks, in which they are drawn
// (addition_rank). Each query tile of a head has a counter (BackwardScratch::additions): the rank
// of the key block that adds next. Two threads of the producer's warpgroup wait for it and raise it
// by one. The consumers do what they do without an order, and know nothing of counters:
//
//   - KeepTurns waits until the counter says this block's rank, and then arrives at ds.full, for
//   which the
//     consumers wait before they compute a step's dQ;
//   - ReportAdditions waits at dout.empty, where the consumers arrive after they have added dQ of
//     the step before, and then raises the counter. So an item's last step is reported in the first
//     step of the next item, and the last step of all when the consumers have come to their end. To
//     raise the counter is a release, which covers the consumers' additions, since they came before
//     the consumers' arrival. It waits until L2 has acknowledged them; only this thread waits for
//     that.
//
// There is no deadlock. Items are drawn one after the other (OrderedItems), and each key block of a
// tile waits only for blocks that were drawn before it. Take, of all items whose additions are not
// all reported, the one that was drawn first, and say that it is at its step i. All that it could
// wait for is reported, so its turn for dQ(i) comes. Its consumers compute dQ(i) in their next step
// (of this item or the next one, or at the end), and that step waits for nothing but tiles from
// memory, because the turn for its own dQ is asked for a step later.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_TURNS_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_TURNS_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/backward/ended_items.cuh"
#include "cuda/backward/order.cuh"
#include "cuda/backward/scratch.cuh"
#include "cuda/hopper/backward_sm90_layout.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/thread_again.h"

namespace strobe::cuda::sm90 {

/// What KeepTurns and ReportAdditions share: a walk through the steps of all of the thread block's
/// items. One thread.
template <typename Tr>
class AdditionOrder {
 protected:
  using Block = typename Tr::Block;
  using Step = std::conditional_t<Tr::kMask, typename Tr::StepSlot, HeadStep>;

  __device__ __forceinline__ AdditionOrder(typename Tr::Shared& shared, const BackwardParams& p,
                                           const BackwardScratch& scratch,
                                           const BackwardOrder& order)
      : shared_(shared), p_(p), scratch_(scratch), order_(order) {}

  /// do_step(block, now) for each step of all items; under a mask as data without_steps(block) for
  /// each item that has none.
  template <typename DoStep, typename WithoutSteps>
  __device__ __forceinline__ void for_each_step(
      const DoStep& do_step, [[maybe_unused]] const WithoutSteps& without_steps) {
#pragma unroll 1
    for (;; ++item_.count) {
      shared_.block_ring.full[item_.stage()].wait(item_.phase());
      const Block& block = shared_.blocks[item_.stage()];
      if (block.head_kv < 0) return;
      if constexpr (Tr::kMask) {
        shared_.known[item_.stage()].wait(item_.phase());
        if (!block.has_steps()) without_steps(block);
#pragma unroll 1
        for (bool more = block.has_steps(); more; ++at_.count) {
          const RingPosition<Tr::kFoundStages> found{at_.count};
          shared_.found[found.stage()].wait(found.phase());
          const Step& now = shared_.steps[at_.count % Tr::kSlots];
          do_step(block, now);
          more = now.next.exists();
        }
      } else {
#pragma unroll 1
        for (HeadStep now = HeadStep::first(block.walk, block.head_begin, block.direction);
             block.has_steps() && !now.done(block.head_end);
             now.advance(block.walk, block.direction), ++at_.count) {
          do_step(block, now);
        }
      }
      if (!Tr::kPersistent) return;
      shared_.block_ring.empty[item_.stage()].arrive();
    }
  }

  template <typename DoStep>
  __device__ __forceinline__ void for_each_step(const DoStep& do_step) {
    for_each_step(do_step, [](const Block&) {});
  }

  /// The counter of a step's query tile and head.
  __device__ __forceinline__ uint32_t* counter(const Block& block, const Step& of) const {
    const typename Tr::Step& step = step_of(of);
    return scratch_.additions + (static_cast<uint32_t>(step.head) * scratch_.tiles + block.scratch +
                                 static_cast<uint32_t>(tile_of(step, block.walk)));
  }

  /// What that counter says when it is this block's turn.
  __device__ __forceinline__ uint32_t rank(const Block& block, const Step& of) const {
    if constexpr (Tr::kMask) {
      return static_cast<uint32_t>(of.record.rank);
    } else {
      return block.rank(of, scratch_.key_tiles);
    }
  }
  __device__ __forceinline__ static const typename Tr::Step& step_of(const Step& of) {
    if constexpr (Tr::kMask) {
      return of.record.step;
    } else {
      return of;
    }
  }

  using EndedItems = cuda::EndedItems<1>;
  __device__ __forceinline__ uint32_t ended_word(const Block& block) const {
    return EndedItems::first_word(p_, scratch_, order_.parts, block.batch, block.head_kv,
                                  block.part);
  }
  __device__ __forceinline__ EndedItems ended_items(uint32_t first_word) const {
    return EndedItems::of(scratch_, first_word);
  }
  /// (Records of packed sequences have room for one block more than there are, and more yet where a
  /// sequence is longer than the problem's bound.)
  __device__ __forceinline__ uint32_t key_block(const Block& block) const {
    return min(static_cast<uint32_t>(block.key_begin) / Tr::kTileK, scratch_.key_tiles);
  }

  typename Tr::Shared& shared_;
  const BackwardParams& p_;
  const BackwardScratch& scratch_;
  const BackwardOrder& order_;
  RingPosition<Tr::kItemStages> item_;
  RingPosition<Tr::kStages> at_;
};

template <typename Tr>
class KeepTurns : AdditionOrder<Tr> {
 public:
  using typename AdditionOrder<Tr>::Block;
  __device__ __forceinline__ KeepTurns(typename Tr::Shared& shared, const BackwardParams& p,
                                       const BackwardScratch& scratch, const BackwardOrder& order)
      : AdditionOrder<Tr>(shared, p, scratch, order) {}

  __device__ __forceinline__ void run() {
    const auto keep_turn = [&](const Block& block, const auto& now) {
      const int stage = this->at_.stage();
      this->shared_.ds_ring.empty[stage].wait(this->at_.free());
      const uint32_t rank = this->rank(block, now);
      const uint32_t* const counter = this->counter(block, now);
      while (ptx::load_acquire(counter) != rank) {
        if constexpr (Tr::kMask) {
          if (this->ended_items(this->ended_word(block)).all_before(this->key_block(block))) break;
        }
      }
      this->shared_.ds_ring.full[stage].arrive();
    };
    // (Items that have no steps make no additions: it does not matter who notes their ends.)
    this->for_each_step(keep_turn, [&](const Block& block) {
      this->ended_items(this->ended_word(block))
          .add(this->key_block(block), this->scratch_.key_tiles);
    });
  }
};

template <typename Tr>
class ReportAdditions : AdditionOrder<Tr> {
 public:
  using typename AdditionOrder<Tr>::Block;
  __device__ __forceinline__ ReportAdditions(typename Tr::Shared& shared, const BackwardParams& p,
                                             const BackwardScratch& scratch,
                                             const BackwardOrder& order)
      : AdditionOrder<Tr>(shared, p, scratch, order) {}

  __device__ __forceinline__ void run() {
    if constexpr (Tr::kMask) this->shared_.ending.block = Tr::Shared::Ending::kNone;
    const auto report_before = [&](const Block& block, const auto& now) {
      const int stage = this->at_.stage();
      this->shared_.dout_ring.empty[stage].wait(this->at_.phase());
      // q.empty counts this arrival too. Before it the producer loads no further Q, so that
      // dout.empty cannot go on by a whole phase before this thread has seen this one.
      this->shared_.q_ring.empty[stage].arrive();
      report();
      counter_ = this->counter(block, now);
      next_rank_ = this->rank(block, now) + 1;
      if constexpr (Tr::kMask) {
        if (!now.next.exists())
          this->shared_.ending = {this->ended_word(block), this->key_block(block)};
      }
    };
    this->for_each_step(report_before);
  }
  /// Raises the counter of the step before, whose additions are made. After run(): of the thread
  /// block's last step.
  __device__ __forceinline__ void report() {
    if (counter_) ptx::store_release(counter_, next_rank_);
    if constexpr (Tr::kMask) {
      using Ending = typename Tr::Shared::Ending;
      const Ending ending = this->shared_.ending;
      if (ending.block == Ending::kNone) return;
      this->ended_items(ending.first_word).add(ending.block, this->scratch_.key_tiles);
      this->shared_.ending.block = Ending::kNone;
    }
  }

 private:
  uint32_t* counter_ = nullptr;  // of the step before
  uint32_t next_rank_ = 0;
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_TURNS_CUH_
