// A kernel that begins while the one before it in its stream still ends (programmatic dependent
// launch, 9.0): KernelHandle's `early`. Before 9.0, and without that, these do nothing.
#ifndef STROBE_CUDA_PTX_NEXT_KERNEL_H_
#define STROBE_CUDA_PTX_NEXT_KERNEL_H_

namespace strobe::cuda::ptx {

/// Until the kernel before has ended, and all that it has written can be read. A kernel that is
/// launched early touches no memory that others write until each of its threads knows of this.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// As far as this thread block is concerned, the kernel after this one may begin where there is
/// room.
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_NEXT_KERNEL_H_
