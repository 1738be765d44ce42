// Functions of the driver, looked up through the runtime: nothing links against libcuda.
#ifndef STROBE_CUDA_HOST_DRIVER_FUNCTION_H_
#define STROBE_CUDA_HOST_DRIVER_FUNCTION_H_

#include <cuda_runtime_api.h>

namespace strobe::cuda {

/// Null where the driver has none of this name.
template <typename Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result);
  if (error == cudaSuccess) return reinterpret_cast<Function>(function);
  cudaGetLastError();  // callers go on without it, and it must not surface in a later call
  return nullptr;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_DRIVER_FUNCTION_H_
