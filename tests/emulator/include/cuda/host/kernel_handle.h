// As src/cuda/host/kernel_handle.h: launches are run on the CPU, at once.
#ifndef STROBE_CUDA_HOST_KERNEL_HANDLE_H_
#define STROBE_CUDA_HOST_KERNEL_HANDLE_H_

#include <cstdint>

#include "cuda/host/launch_target.h"
#include "emulated_device.h"

namespace strobe::cuda {

class KernelHandle {
 public:
  constexpr explicit KernelHandle(const void* function, int64_t shared_bytes = 0)
      : function_(function), shared_bytes_(static_cast<uint32_t>(shared_bytes)) {}

  cudaError_t launch(dim3 grid, int threads, void** args, const LaunchTarget&,
                     bool /*early*/ = false) const {
    return emulator::launch(function_, grid, threads, shared_bytes_, args);
  }

 private:
  const void* const function_;
  const uint32_t shared_bytes_;
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_KERNEL_HANDLE_H_
