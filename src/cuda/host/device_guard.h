// What every launch does first, and says when something fails.
#ifndef STROBE_CUDA_HOST_DEVICE_GUARD_H_
#define STROBE_CUDA_HOST_DEVICE_GUARD_H_

#include <cuda_runtime_api.h>

#include "core/status.h"

namespace strobe::cuda {

inline Status cuda_status(cudaError_t error, const char* what) {
  cudaGetLastError();  // what it was is in the status; it must not surface in a later call
  return {error == cudaErrorMemoryAllocation ? STROBE_OUT_OF_MEMORY : STROBE_DEVICE_ERROR,
          format("%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error))};
}

// Makes a device current for the time of a launch.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess && before_ != device) {
      error_ = cudaSetDevice(device);
      changed_ = error_ == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_DEVICE_GUARD_H_
