// The 16 hardware barriers of a thread block. Barrier 0 is that of __syncthreads.
#ifndef STROBE_CUDA_PTX_NAMED_BARRIER_H_
#define STROBE_CUDA_PTX_NAMED_BARRIER_H_

namespace strobe::cuda::ptx {

/// sync: waits until kThreads threads have come to barrier `id`, this one included. arrive: counts
/// as one of them, and goes on.
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
/// The same with a number that is part of the instruction, for a kernel that has no register to
/// spare for it.
template <int kId, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

template <int kId, int kThreads>
__device__ __forceinline__ void named_barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_NAMED_BARRIER_H_
