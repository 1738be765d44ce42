// A kernel's leave to use more than 48 KB of shared memory.
#ifndef STROBE_CUDA_SHARED_MEMORY_H_
#define STROBE_CUDA_SHARED_MEMORY_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

namespace strobe::cuda {

/// The devices on which a kernel has it, a bit each; a static variable a kernel.
using SharedMemoryLeave = std::atomic<uint64_t>;

/// Asks for `bytes`, once a device (from device 64 on, each time). By several threads at once too:
/// asking again does no harm. `device` is the current one.
inline cudaError_t allow_shared_memory(const void* kernel, int64_t bytes, int device,
                                       SharedMemoryLeave& devices) {
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (devices.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(bytes));
  if (e == cudaSuccess) devices.fetch_or(bit, std::memory_order_relaxed);
  return e;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_SHARED_MEMORY_H_
