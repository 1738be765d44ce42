// As src/cuda/ptx/next_kernel.h, on the CPU: launches come one after the other.
#ifndef STROBE_CUDA_PTX_NEXT_KERNEL_H_
#define STROBE_CUDA_PTX_NEXT_KERNEL_H_

namespace strobe::cuda::ptx {

inline void wait_for_kernel_before() {}
inline void let_next_kernel_begin() {}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_NEXT_KERNEL_H_
