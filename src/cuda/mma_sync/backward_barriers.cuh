// The barriers of the backward pass through mma.sync. Most are mbarriers in shared memory, named
// here by their addresses. Each buffer that one side fills and another reads has two: readers wait
// for `full`, and the side that fills it waits for `empty`. Where a buffer has several stages,
// there is a pair for each stage, and the n-th use takes stage n % stages.
//
//   what         filled by           used up by         of
//   record       weights half        both halves        an item (backward_item.cuh), two stages
//   k, v         weights half        both, gradients    an item; k with the limits of its keys
//   q, dout      weights half        both halves        a step, kStages stages; with lse, delta
//   exchange     weights half        gradients half     a step, a pair for each pair of warps
//   ds           gradients half      gradients half     a step, from warp to warp
//   weights      weights half        weights half       a step; full is the named barrier
//   added        gradients half      weights half       a step whose additions to dQ are issued, in
//                                                       a deterministic launch; never empty: the
//                                                       exchange comes between
//
// Of each warp one thread arrives; where cp.async copies fill something, every thread does. (And
// once more the thread that has found the step after the one that is copied, where a mask as data
// has lists of them.)
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_BARRIERS_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_BARRIERS_CUH_

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/opaque.h"

namespace strobe::cuda::sm80 {

template <typename Shape>
struct BackwardBarriers {
  static constexpr int kStages = Shape::kStages;
  const uint32_t shared;  // address of all shared memory

  __device__ __forceinline__ uint32_t v_full() const { return at(0); }
  __device__ __forceinline__ uint32_t v_empty() const { return at(1); }
  __device__ __forceinline__ uint32_t ds_full() const { return at(2); }
  __device__ __forceinline__ uint32_t ds_empty() const { return at(3); }
  __device__ __forceinline__ uint32_t weights_empty() const { return at(4); }
  __device__ __forceinline__ uint32_t record_full(int item) const { return at(5, item % 2); }
  __device__ __forceinline__ uint32_t record_empty(int item) const { return at(7, item % 2); }
  __device__ __forceinline__ uint32_t k_full() const { return at(9); }
  __device__ __forceinline__ uint32_t k_empty() const { return at(10); }
  /// Steps alternate between two barriers. With one, a warp that still waits for a step's phase
  /// could not tell it from the phase of the step after next.
  __device__ __forceinline__ uint32_t added(int step) const {
    return at(11 + 4 * kStages + step % 2);
  }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return of_stage(0, stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const { return of_stage(1, stage); }
  __device__ __forceinline__ uint32_t dout_full(int stage) const { return of_stage(2, stage); }
  __device__ __forceinline__ uint32_t dout_empty(int stage) const { return of_stage(3, stage); }
  __device__ __forceinline__ uint32_t exchange_full(int warp) const { return at(kExchange + warp); }
  __device__ __forceinline__ uint32_t exchange_empty(int warp) const {
    return at(kExchange + Shape::kHalfWarps + warp);
  }

  /// Initialises all barriers. By one thread, before any other uses them.
  __device__ __forceinline__ void init() const {
    constexpr uint32_t kOfWarp = ptx::kWarpArrivals, kOfHalf = Shape::kHalfWarps * kOfWarp,
                       kOfAll = 2 * kOfHalf;
    ptx::barrier_init(v_full(), Shape::kHalfThreads);
    ptx::barrier_init(v_empty(), kOfHalf);
    ptx::barrier_init(ds_full(), kOfHalf);
    ptx::barrier_init(ds_empty(), kOfHalf);
    ptx::barrier_init(weights_empty(), kOfHalf);
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(record_full(i), Shape::kHalfThreads);
      ptx::barrier_init(record_empty(i), kOfAll);
    }
    ptx::barrier_init(k_full(), 2 * Shape::kHalfThreads);
    ptx::barrier_init(k_empty(), kOfAll);
    constexpr uint32_t kOfFinder = Shape::kMask ? 1 : 0;
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::barrier_init(q_full(stage), Shape::kHalfThreads + kOfFinder);
      ptx::barrier_init(q_empty(stage), kOfAll);
      ptx::barrier_init(dout_full(stage), Shape::kHalfThreads + kOfFinder);
      ptx::barrier_init(dout_empty(stage), kOfAll);
    }
    ptx::barrier_init(added(0), kOfHalf);
    ptx::barrier_init(added(1), kOfHalf);
    for (int w = 0; w < 2 * Shape::kHalfWarps; ++w) ptx::barrier_init(at(kExchange + w), kOfWarp);
  }

  /// Waits until the n-th use (from 0) of something with `stages` stages is filled, or may be
  /// filled.
  __device__ __forceinline__ static void wait_full(uint32_t barrier, int n, int stages) {
    ptx::barrier_wait(barrier, static_cast<uint32_t>(n / stages) & 1);
  }
  __device__ __forceinline__ static void wait_empty(uint32_t barrier, int n, int stages) {
    ptx::barrier_wait(barrier, (static_cast<uint32_t>(n / stages) & 1) ^ 1);
  }
  /// All threads of the weights half.
  __device__ __forceinline__ static void sync_weights_half() {
    ptx::named_barrier_sync<1, Shape::kHalfThreads>();
  }

 private:
  static constexpr int kExchange = 13 + 4 * kStages;
  static_assert(kExchange + 2 * Shape::kHalfWarps == Shape::kBarriers);

  __device__ __forceinline__ uint32_t at(int i) const {
    return shared + static_cast<uint32_t>(Shape::kBarriersAt + 8 * i);
  }
  /// The n-th of those that begin with the i-th. The number that is not known comes first: ptxas
  /// otherwise keeps the address of the i-th in a register through all items, or spills it.
  __device__ __forceinline__ uint32_t at(int i, int n) const {
    uint32_t base = shared + static_cast<uint32_t>(8 * n);
    ptx::make_opaque(base);
    return base + static_cast<uint32_t>(Shape::kBarriersAt + 8 * i);
  }
  __device__ __forceinline__ uint32_t of_stage(int which, int stage) const {
    return at(11 + which * kStages + stage);
  }
};

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_BARRIERS_CUH_
