// __half as far as kernels use it.
#ifndef STROBE_TESTS_EMULATOR_CUDA_FP16_H_
#define STROBE_TESTS_EMULATOR_CUDA_FP16_H_

#include <cstdint>

#include "cuda_runtime_api.h"
#include "instructions.h"

// NOLINTNEXTLINE(bugprone-reserved-identifier, readability-identifier-naming)
struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float x) : bits(strobe::emulator::to_half(x)) {}
  explicit operator float() const { return strobe::emulator::from_half(bits); }
};

// NOLINTNEXTLINE(bugprone-reserved-identifier, readability-identifier-naming)
struct __half2 {
  __half x, y;
};
inline float2 __half22float2(__half2 v) {
  return {static_cast<float>(v.x), static_cast<float>(v.y)};
}

#endif  // STROBE_TESTS_EMULATOR_CUDA_FP16_H_
