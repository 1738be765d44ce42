// Float8 e4m3 (OCP 8-bit floating point): 1 sign, 4 exponent and 3 mantissa bits, no infinity. From
// compute capability 8.9 on.
#ifndef STROBE_CUDA_PTX_FLOAT8_H_
#define STROBE_CUDA_PTX_FLOAT8_H_

#include <cuda_fp16.h>

#include <cstdint>

namespace strobe::cuda::ptx {

/// A value by its bits. (cuda_fp8.h has one too, and thousands of lines beside it.)
struct E4m3 {
  uint8_t bits;

#if defined(__CUDACC__)
  __device__ __forceinline__ explicit operator float() const {
    uint32_t halves = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(bits)));
#endif
    return __half2float(__ushort_as_half(static_cast<uint16_t>(halves)));
  }
#endif  // __CUDACC__
};

#if defined(__CUDACC__)

/// Four float32 values rounded to nearest e4m3 in one register, `a` in the low byte. What is larger
/// than 448 becomes 448, NaN stays NaN.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t r;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high}; }"
      : "=r"(r)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return r;
}

#endif  // __CUDACC__

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_FLOAT8_H_
