// The 16 hardware barriers of a thread block, by a number that is part of the instruction. (With a
// number in a register, as ptx/barrier.h has them, a kernel that has none to spare may spill.)
#ifndef STROBE_CUDA_PTX_NAMED_BARRIER_H_
#define STROBE_CUDA_PTX_NAMED_BARRIER_H_

namespace strobe::cuda::ptx {

/// Waits until kThreads have come to barrier kId (0 is __syncthreads).
template <int kId, int kThreads>
__device__ __forceinline__ void sync_threads_at() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_NAMED_BARRIER_H_
