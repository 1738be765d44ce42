// A kernel as the host launches it.
#ifndef STROBE_CUDA_HOST_KERNEL_HANDLE_H_
#define STROBE_CUDA_HOST_KERNEL_HANDLE_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>

#include "cuda/host/driver_function.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

/// A static variable a kernel: its handle, and the devices on which it may use its shared memory.
/// By several threads at once too: asking the driver again does no harm.
class KernelHandle {
 public:
  constexpr explicit KernelHandle(const void* function, int64_t shared_bytes = 0)
      : function_(function), shared_bytes_(static_cast<uint32_t>(shared_bytes)) {}

  /// args: where the kernel's parameters are. The target's device is the current one. early: it may
  /// begin before the kernel before it in the stream has ended, for which it waits itself
  /// (ptx/next_kernel.h), where the device runs code that can.
  cudaError_t launch(dim3 grid, int threads, void** args, const LaunchTarget& target,
                     bool early = false) {
    const uint64_t bit = target.device < 64 ? uint64_t{1} << target.device : 0;
    if ((devices_.load(std::memory_order_acquire) & bit) == 0) {  // from device 64 on, each time
      if (const cudaError_t error = prepare(bit, early); error != cudaSuccess) return error;
    }
    // Straight to the driver, which saves the runtime's own look-up of the function, 0.1
    // microseconds. Where that does not succeed the runtime tries again: it makes the device's
    // context current in a host thread that has none, or else knows what the error is. Not where a
    // graph is being captured: there the first failure has ended the capture, and is the one to
    // tell.
    static const auto launch = driver_function<decltype(&cuLaunchKernel)>("cuLaunchKernel");
    CUfunction const handle = handle_.load(std::memory_order_relaxed);
    const auto block = static_cast<unsigned>(threads);
    static const auto launch_early =
        driver_function<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx");
    early = early && launch_early && (waits_.load(std::memory_order_relaxed) & bit) != 0;
    if (launch && handle) {
      CUlaunchAttribute attribute{};
      attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attribute.value.programmaticStreamSerializationAllowed = 1;
      const CUlaunchConfig config{grid.x, grid.y,        grid.z,        block,      1,
                                  1,      shared_bytes_, target.stream, &attribute, 1};
      const CUresult result = early ? launch_early(&config, handle, args, nullptr)
                                    : launch(handle, grid.x, grid.y, grid.z, block, 1, 1,
                                             shared_bytes_, target.stream, args, nullptr);
      if (result == CUDA_SUCCESS) return cudaSuccess;
      const bool captured = result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED &&
                            result <= CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
      if (captured) return static_cast<cudaError_t>(result);  // the same numbers since CUDA 10.1
    }
    return cudaLaunchKernel(function_, grid, dim3(block), args, shared_bytes_, target.stream);
  }

 private:
  cudaError_t prepare(uint64_t bit, bool early) {
    constexpr uint32_t kWithoutLeave = 48 << 10;
    if (shared_bytes_ > kWithoutLeave) {
      STROBE_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
          function_, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes_)));
    }
    if (early) {
      // PTX of 8.0, which newer devices run where there is no code of theirs, does not wait.
      constexpr int kCanWait = 90;
      cudaFuncAttributes attributes{};
      STROBE_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, function_));
      if (attributes.ptxVersion >= kCanWait) waits_.fetch_or(bit, std::memory_order_relaxed);
    }
    cudaKernel_t kernel{};  // of no device: the driver takes it as the function of the current one
    STROBE_RETURN_IF_CUDA_ERROR(cudaGetKernel(&kernel, function_));
    handle_.store(reinterpret_cast<CUfunction>(kernel), std::memory_order_relaxed);
    devices_.fetch_or(bit, std::memory_order_release);
    return cudaSuccess;
  }

  const void* const function_;
  const uint32_t shared_bytes_;
  std::atomic<CUfunction> handle_{nullptr};
  std::atomic<uint64_t> devices_{0}, waits_{0};
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_KERNEL_HANDLE_H_
