// Where a launch goes.
#ifndef STROBE_CUDA_HOST_LAUNCH_TARGET_H_
#define STROBE_CUDA_HOST_LAUNCH_TARGET_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#define STROBE_RETURN_IF_CUDA_ERROR(expression)                                  \
  do {                                                                           \
    if (cudaError_t error_ = (expression); error_ != cudaSuccess) return error_; \
  } while (0)

namespace strobe::cuda {

/// The dispatcher has asked the driver already; launchers need not.
struct LaunchTarget {
  cudaStream_t stream;
  int device, multiprocessors;
  int64_t shared_bytes;  // that a block can have when it asks
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_LAUNCH_TARGET_H_
