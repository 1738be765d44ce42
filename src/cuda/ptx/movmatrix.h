// movmatrix: the transpose of an 8 x 8 matrix of 16-bit values that a warp holds in an mma
// fragment.
#ifndef STROBE_CUDA_PTX_MOVMATRIX_H_
#define STROBE_CUDA_PTX_MOVMATRIX_H_

#include <cstdint>

namespace strobe::cuda::ptx {

#if defined(__CUDACC__)

__device__ __forceinline__ uint32_t transpose_fragment(uint32_t x) {
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(x) : "r"(x));
  return x;
}

#endif  // __CUDACC__

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_MOVMATRIX_H_
