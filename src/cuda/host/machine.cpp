#include "cuda/host/machine.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string_view>

namespace strobe::cuda {

namespace {

// Of a device, as DeviceProperties has it. Words of the bus come at both edges of the clock.
double memory_rate_of(int device) {
  int kilohertz = 0, bits = 0;
  const bool known =
      cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device) == cudaSuccess;
  if (!known) cudaGetLastError();
  return known ? 2e-6 * kilohertz * (bits / 8) : 0;
}

}  // namespace

Machine::Machine() {
  if (const char* forced = std::getenv("STROBE_CUDA_ARCH")) forced_arch = std::atoi(forced);
  if (const char* forced = std::getenv("STROBE_CUDA_ROW")) forced_instance = current_name(forced);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    const char* const text = error == cudaErrorInsufficientDriver
                                 ? "no NVIDIA driver, or one older than CUDA 13 needs (580)"
                             : error == cudaErrorNoDevice || error == cudaSuccess
                                 ? "no NVIDIA GPU"
                                 : cudaGetErrorString(error);
    std::string_view(text).copy(reason, sizeof reason - 1);  // as much as there is room for
    return;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    DeviceProperties d;
    if (cudaGetDeviceProperties(&properties, i) == cudaSuccess) {
      std::string_view(properties.name).copy(d.name, sizeof d.name - 1);
      d.compute_capability = 10 * properties.major + properties.minor;
      d.multiprocessors = properties.multiProcessorCount;
      d.shared_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
      d.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
      d.memory_rate = memory_rate_of(i);
    }
    devices.push_back(d);
  }
}

const Machine& machine() {
  static const Machine m;
  return m;
}

}  // namespace strobe::cuda
