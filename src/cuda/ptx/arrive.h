// mbarriers as compute capability 8.0 has them: arrivals only, and cp.async may be one of them.
// (ptx/barrier.h has those of 9.0, which TMA needs.)
#ifndef STROBE_CUDA_PTX_ARRIVE_H_
#define STROBE_CUDA_PTX_ARRIVE_H_

#include <cstdint>

#include "cuda/ptx/warp_arrivals.h"

namespace strobe::cuda::ptx {

// A barrier is eight bytes of shared memory, here by their shared address. Its phases have a
// parity, 0 for the first. Waiting for parity 1 on a new barrier returns at once: the phase "before
// the first" is over.

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
}

/// This thread arrives when its cp.async so far have landed; the thread itself goes on.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/// The warp's kWarpArrivals, after all its lanes are done.
__device__ __forceinline__ void barrier_arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (arrives(lane)) barrier_arrive(barrier);
}

__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
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
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (!barrier_test(barrier, parity)) {
  }
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_ARRIVE_H_
