// mbarriers: barriers in shared memory (before 8.0, which has none, counters with the same
// promises). A phase ends when so many arrivals are in as the barrier was initialised with, and all
// bytes that TMA owes it (sm_90). Phases are told apart by parity, 0 for the first. Waiting for
// parity 1 on a new barrier returns at once: the phase "before the first" is over. racecheck takes
// counters for no barriers: its build has mbarriers for 7.5's kernels too (instructions.h).
#ifndef STROBE_CUDA_PTX_BARRIER_H_
#define STROBE_CUDA_PTX_BARRIER_H_

#include <cstdint>

#include "cuda/ptx/instructions.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda::ptx {

/// Arrivals that a warp makes: one, lane 0's, after __syncwarp. compute-sanitizer's racecheck
/// orders by an arrival what the arriving thread itself has done, and takes what the other lanes
/// have written for a race; in a build for it (STROBE_RACECHECK) every lane arrives.
#ifdef STROBE_RACECHECK
inline constexpr uint32_t kWarpArrivals = 32;
#else
inline constexpr uint32_t kWarpArrivals = 1;
#endif

/// The most arrivals that end a barrier's phase.
inline constexpr uint32_t kMostArrivals = (1u << 20) - 1;

/// Whether this lane arrives for its warp.
__device__ __forceinline__ bool arrives(int lane) { return kWarpArrivals == 32 || lane == 0; }

// By the shared address of the barrier's eight bytes.

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#else
  store_shared(barrier, count);
  store_shared(barrier + 4, 0);
#endif
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 800
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
#else
  // Arrivals of two phases are counted. Who is the last of them takes them off again: a count of
  // two phases says the same as one of none.
  __threadfence_block();
  const uint32_t both = 2 * load_shared(barrier);
  if (add_shared(barrier + 4, 1) + 1 == both) add_shared(barrier + 4, 0 - both);
#endif
}

/// Makes the warp's kWarpArrivals, after all its lanes have come here.
__device__ __forceinline__ void barrier_arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (arrives(lane)) barrier_arrive(barrier);
}

/// This thread arrives when its cp.async so far have landed; the thread itself goes on.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
#if STROBE_CUDA_INSTRUCTIONS >= 800
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#else
  barrier_arrive(barrier);  // they have
#endif
}

__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 800
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
#if __CUDA_ARCH__ >= 900
      "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
#else
      "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
#endif
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
#else
  const uint32_t count = load_shared(barrier), arrivals = load_shared(barrier + 4);
  __threadfence_block();
  const uint32_t under_way = arrivals >= count && arrivals < 2 * count ? 1 : 0;
  return under_way != parity;
#endif
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_test(barrier, parity)) {
  }
}

/// The same as a member of a struct in shared memory, with what sm_90 adds.
class Barrier {
 public:
  __device__ __forceinline__ void init(uint32_t count) { barrier_init(address(), count); }
  __device__ __forceinline__ void arrive() { barrier_arrive(address()); }
  __device__ __forceinline__ void arrive(uint32_t count) {
    asm volatile(
        "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0], %1;\n}" ::"r"(address()),
        "r"(count)
        : "memory");
  }
  /// Arrives, and adds `bytes` to what TMA has to deliver before the phase ends.
  __device__ __forceinline__ void arrive_expect(uint32_t bytes) {
    asm volatile(
        "{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(
            address()),
        "r"(bytes)
        : "memory");
  }
  __device__ __forceinline__ void wait(uint32_t parity) { barrier_wait(address(), parity); }
  /// Whether that phase is over. May wait for a moment before it answers no.
  __device__ __forceinline__ bool test(uint32_t parity) { return barrier_test(address(), parity); }
  __device__ __forceinline__ uint32_t address() { return shared_address(&word_); }

 private:
  uint64_t word_;
};

/// Makes initialised barriers known to TMA.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_BARRIER_H_
