// __half as far as kernels use it.
#ifndef STROBE_TESTS_EMULATOR_CUDA_FP16_H_
#define STROBE_TESTS_EMULATOR_CUDA_FP16_H_

#include <cstdint>

#include "instructions.h"

// NOLINTNEXTLINE(bugprone-reserved-identifier, readability-identifier-naming)
struct __half {
  uint16_t bits;
  __half() = default;
  explicit __half(float x) : bits(strobe::emulator::to_half(x)) {}
  explicit operator float() const { return strobe::emulator::from_half(bits); }
};

#endif  // STROBE_TESTS_EMULATOR_CUDA_FP16_H_
