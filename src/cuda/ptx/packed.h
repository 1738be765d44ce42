// Arithmetic on two 16-bit values in a register.
#ifndef STROBE_CUDA_PTX_PACKED_H_
#define STROBE_CUDA_PTX_PACKED_H_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace strobe::cuda::ptx {

/// Of two packed values of type T each: the smaller ones, NaN where one is.
template <typename T>
__device__ __forceinline__ uint32_t min_or_nan_pair(uint32_t x, uint32_t y) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  } else {
    asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y));
  }
  return x;
}
/// The bits of x under a mask, and those of y: one instruction.
template <uint32_t kMask>
__device__ __forceinline__ uint32_t masked_or(uint32_t x, uint32_t y) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(x), "n"(kMask), "r"(y));
  return result;
}
/// x * y of two packed values of type T.
template <typename T>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t x, uint32_t y) {
  uint32_t product;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  }
  return product;
}

/// Four bytes, each all ones or zeros as the sign of one of the eight bytes of x (0 to 3) and y (4
/// to 7) is: byte i has that of the byte which the selector's i-th four bits name, plus 8.
__device__ __forceinline__ uint32_t sign_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t signs;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(x), "r"(y), "r"(selector));
  return signs;
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_PACKED_H_
