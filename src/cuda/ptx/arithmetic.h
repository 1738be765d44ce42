// Instructions on numbers that CUDA C++ has no exact name for.
#ifndef STROBE_CUDA_PTX_ARITHMETIC_H_
#define STROBE_CUDA_PTX_ARITHMETIC_H_

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/instructions.h"

namespace strobe::cuda::ptx {

/// 2^x. Relative error 2^-22; 0 for -inf, NaN for NaN, inf from 128 on.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// 1 / x. Relative error 2^-23.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The smaller and the larger of two values; NaN where one is.
__device__ __forceinline__ float min_or_nan(float x, float y) {
#if STROBE_CUDA_INSTRUCTIONS >= 800
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  return x;
#else
  return x < y || x != x ? x : y;
#endif
}
__device__ __forceinline__ float max_or_nan(float x, float y) {
#if STROBE_CUDA_INSTRUCTIONS >= 800
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  return x;
#else
  return x > y || x != x ? x : y;
#endif
}

/// x << n; 0 where n is above 31.
__device__ __forceinline__ uint32_t shift_left(uint32_t x, uint32_t n) {
  asm("shl.b32 %0, %0, %1;" : "+r"(x) : "r"(n));
  return x;
}

/// x * y + z of two packed values of type T.
template <typename T>
__device__ __forceinline__ uint32_t multiply_add_pair(uint32_t x, uint32_t y, uint32_t z) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#if STROBE_CUDA_INSTRUCTIONS >= 800
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(z) : "r"(x), "r"(y));
#else
    __trap();  // no kernel for an older device has bf16
#endif
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(z) : "r"(x), "r"(y));
  }
  return z;
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_ARITHMETIC_H_
