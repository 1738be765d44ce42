// stmatrix: four 8 x 8 matrices of 16-bit values from mma fragments into shared memory: ldmatrix
// the other way round. Lane i gives the address of row i % 8 of matrix i / 8. sm_90.
#ifndef STROBE_CUDA_PTX_STMATRIX_H_
#define STROBE_CUDA_PTX_STMATRIX_H_

#include <cstdint>

namespace strobe::cuda::ptx {

__device__ __forceinline__ void stmatrix(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_STMATRIX_H_
