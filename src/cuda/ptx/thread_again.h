// threadIdx.x, read anew.
#ifndef STROBE_CUDA_PTX_THREAD_AGAIN_H_
#define STROBE_CUDA_PTX_THREAD_AGAIN_H_

namespace strobe::cuda::ptx {

#if defined(__CUDACC__)

/// threadIdx.x, read anew, so that the compiler computes anew what depends on it: it would
/// otherwise keep all of that in registers, and spill it.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

#endif  // __CUDACC__

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_THREAD_AGAIN_H_
