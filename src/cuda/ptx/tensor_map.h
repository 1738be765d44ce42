// CUtensorMap: what TMA reads of a tensor. The host makes it (host/tensor_map.h).
#ifndef STROBE_CUDA_PTX_TENSOR_MAP_H_
#define STROBE_CUDA_PTX_TENSOR_MAP_H_

#if defined(__CUDACC_RTC__)
// NVRTC takes cuda.h's functions of the host for errors.
struct alignas(64) CUtensorMap {
  unsigned long long opaque[16];
};
#else
#include <cuda.h>
#endif

#endif  // STROBE_CUDA_PTX_TENSOR_MAP_H_
