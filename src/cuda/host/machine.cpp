#include "cuda/host/machine.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace strobe::cuda {

namespace {

// As much of a text as there is room for.
template <size_t kSize>
void copy_text(char (&to)[kSize], const char* from) {
  const size_t length = std::min(std::strlen(from), kSize - 1);
  std::memcpy(to, from, length);
  to[length] = '\0';
}

}  // namespace

Machine::Machine() {
  if (const char* forced = std::getenv("STROBE_CUDA_ARCH")) forced_arch = std::atoi(forced);
  if (const char* forced = std::getenv("STROBE_CUDA_ROW")) forced_row = forced;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    const char* const text = error == cudaErrorInsufficientDriver
                                 ? "no NVIDIA driver, or one older than CUDA 13 needs (580)"
                             : error == cudaErrorNoDevice || error == cudaSuccess
                                 ? "no NVIDIA GPU"
                                 : cudaGetErrorString(error);
    copy_text(reason, text);
    return;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    DeviceProperties d;
    if (cudaGetDeviceProperties(&properties, i) == cudaSuccess) {
      copy_text(d.name, properties.name);
      d.compute_capability = 10 * properties.major + properties.minor;
      d.multiprocessors = properties.multiProcessorCount;
      d.shared_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
      d.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    }
    devices.push_back(d);
  }
}

const Machine& machine() {
  static const Machine m;
  return m;
}

}  // namespace strobe::cuda
