// __nv_bfloat16 as far as kernels use it.
#ifndef STROBE_TESTS_EMULATOR_CUDA_BF16_H_
#define STROBE_TESTS_EMULATOR_CUDA_BF16_H_

#include <cstdint>

#include "instructions.h"

// NOLINTNEXTLINE(bugprone-reserved-identifier, readability-identifier-naming)
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) : bits(strobe::emulator::to_bfloat16(x)) {}
  explicit operator float() const { return strobe::emulator::from_bfloat16(bits); }
};

#endif  // STROBE_TESTS_EMULATOR_CUDA_BF16_H_
