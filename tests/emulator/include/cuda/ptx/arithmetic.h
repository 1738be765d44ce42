// As src/cuda/ptx/arithmetic.h, on the CPU.
#ifndef STROBE_CUDA_PTX_ARITHMETIC_H_
#define STROBE_CUDA_PTX_ARITHMETIC_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace strobe::cuda::ptx {

inline float exp2(float x) { return emulator::exp2_approx(x); }
inline float reciprocal(float x) { return emulator::reciprocal_approx(x); }

inline float min_or_nan(float x, float y) { return x != x || y != y ? NAN : std::fmin(x, y); }
inline float max_or_nan(float x, float y) { return x != x || y != y ? NAN : std::fmax(x, y); }

inline uint32_t shift_left(uint32_t x, uint32_t n) { return n > 31 ? 0 : x << n; }

template <typename T>
uint32_t multiply_add_pair(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t result = 0;
  for (int half = 0; half < 2; ++half) {
    const auto value = [&](uint32_t word) {
      T t;
      t.bits = static_cast<uint16_t>(word >> (16 * half));
      return static_cast<double>(static_cast<float>(t));
    };
    const T sum(static_cast<float>(value(x) * value(y) + value(z)));
    result |= uint32_t{sum.bits} << (16 * half);
  }
  return result;
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_ARITHMETIC_H_
