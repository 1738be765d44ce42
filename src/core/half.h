// Conversions between float32 and fp16 in plain C++, where no vectors are at hand.
#ifndef STROBE_CORE_HALF_H_
#define STROBE_CORE_HALF_H_

#include <cstdint>

#include "core/macros.h"

namespace strobe {

STROBE_INLINE float float_from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  // The half's exponent, moved into a float's place, is 2^112 too small; the product is exact, and
  // right for denormals too. Infinity and NaN keep the largest exponent instead.
  const uint32_t bits = magnitude << 13;
  const float value = __builtin_bit_cast(float, bits) * 0x1p112f;
  const uint32_t out =
      magnitude >= 0x7C00u ? bits | 0x7F800000u : __builtin_bit_cast(uint32_t, value);
  return __builtin_bit_cast(float, out | sign);
}
STROBE_INLINE uint16_t half_from_float(float x) {
  uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7FFFFFFFu;
  uint32_t half;
  if (bits > 0x7F800000u) {
    half = 0x7E00u;  // NaN
  } else if (bits >= 0x477FF000u) {
    half = 0x7C00u;  // 65520 and more round to infinity
  } else if (bits < 0x38800000u) {
    // A denormal half is a multiple of 2^-24: adding 1/2, whose spacing that is, rounds to it.
    half = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, bits) + 0.5f) - 0x3F000000u;
  } else {
    half = (bits + 0xFFFu + (bits >> 13 & 1u) - 0x38000000u) >> 13;  // nearest, ties to even
  }
  return static_cast<uint16_t>(sign | half);
}

}  // namespace strobe

#endif  // STROBE_CORE_HALF_H_
