// What codes stand for, and how a value becomes one: arithmetic alone, the same on CPUs and GPUs to
// the bit. What rows are made of them is in quantised.h.
#ifndef STROBE_CORE_CODES_H_
#define STROBE_CORE_CODES_H_

#include <cstdint>

#include "core/macros.h"

namespace strobe {

inline constexpr float kMostInt8 = 127, kMostE4m3 = 448, kMostE5m2 = 57344;

/// The scale as it multiplies codes: NaN where it is not finite.
STROBE_INLINE constexpr float usable_scale(float scale) { return scale + (scale - scale); }

/// x in units of the scale: 0 where either says nothing.
STROBE_INLINE float in_units(float x, float scale) { return scale == 0 ? 0 : x / scale; }

/// The nearest integer, ties to even, cut to the two; 0 for NaN.
STROBE_INLINE int32_t nearest_code(float x, float least, float most) {
  x = x == x ? x : 0;
  x = x < least ? least : x > most ? most : x;
  // The sum's spacing is 1: its lower bits are the integer.
  const int32_t bits = __builtin_bit_cast(int32_t, x + 12582912.0f);
  return bits - 0x4B400000;
}

/// The code of eight bits that is nearest to x, ties to even, of kMantissa bits of mantissa and an
/// exponent with this bias; what is above kMost becomes that. NaN is 0x7F.
template <int kMantissa, int kBias, uint32_t kMost>
STROBE_INLINE uint8_t float8_from_float(float x) {
  constexpr int kShift = 23 - kMantissa;
  constexpr uint32_t kRebias = uint32_t{127 - kBias} << 23, kLeastNormal = kRebias + (1u << 23);
  // Below the least normal number a code is a multiple of one spacing: adding a number that has
  // this spacing as a float rounds to it.
  constexpr uint32_t kOfSpacing = uint32_t{127 + 1 - kBias + kShift} << 23;
  const uint32_t all = __builtin_bit_cast(uint32_t, x), bits = all & 0x7FFFFFFFu;
  if (bits > 0x7F800000u) return 0x7F;
  const uint32_t sign = all >> 24 & 0x80u;
  uint32_t code;
  if (bits < kLeastNormal) {
    const float sum = __builtin_bit_cast(float, bits) + __builtin_bit_cast(float, kOfSpacing);
    code = __builtin_bit_cast(uint32_t, sum) - kOfSpacing;
  } else {
    constexpr uint32_t kHalf = (1u << (kShift - 1)) - 1;
    code = (bits + kHalf + (bits >> kShift & 1u) - kRebias) >> kShift;
    code = code < kMost ? code : kMost;
  }
  return static_cast<uint8_t>(sign | code);
}

/// The nearest float8 e4m3, ties to even; what is larger than the largest, infinity too, becomes
/// the largest. NaN has one code: the sign of infinity / infinity differs between machines.
STROBE_INLINE uint8_t e4m3_from_float(float x) { return float8_from_float<3, 7, 0x7E>(x); }
/// The same of float8 e5m2: infinity becomes the largest finite one too.
STROBE_INLINE uint8_t e5m2_from_float(float x) { return float8_from_float<2, 15, 0x7B>(x); }
STROBE_INLINE float float_from_e5m2(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24, bits = code & 0x7Fu;
  // The exponent, moved into a float's place, is 2^112 too small; that of infinity and NaN is not
  // the largest there.
  const float value = __builtin_bit_cast(float, bits << 21) * 0x1p112f;
  const uint32_t out =
      bits >= 0x7Cu ? 0x7F800000u | (bits & 3u) << 21 : __builtin_bit_cast(uint32_t, value);
  return __builtin_bit_cast(float, out | sign);
}
STROBE_INLINE float float_from_e4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24, bits = code & 0x7Fu;
  // The exponent, moved into a float's place, is 2^120 too small; the product is exact.
  const float value = __builtin_bit_cast(float, bits << 20) * 0x1p120f;
  const uint32_t out = bits == 0x7Fu ? 0x7FC00000u : __builtin_bit_cast(uint32_t, value);
  return __builtin_bit_cast(float, out | sign);
}

}  // namespace strobe

#endif  // STROBE_CORE_CODES_H_
