// How a row of K or V is quantised, and read back: what an append writes, what strobe_quantize
// makes, and what kernels take a row for.
//
//     int8           codes -128 to 127 (-127 is the least that is written) times the row's scale
//     float8 e4m3    codes of 8 bits times the row's scale; what is too large becomes 448
//     q8_0           blocks of 32 values: an fp16 scale, 32 codes of int8
//     q4_0           blocks of 32 values: an fp16 scale, 16 bytes. Byte n has the code of value n
//                    in its lower four bits and that of value n + 16 in its upper ones; a code
//                    less 8 is what the scale multiplies
//
// A scale that is no finite number makes all of its values NaN. So a value that is none, and that
// nothing else can say, spoils its row or block: its scale becomes infinite or NaN.
#ifndef STROBE_CORE_QUANTISED_H_
#define STROBE_CORE_QUANTISED_H_

#include <cstddef>
#include <cstdint>

#include "core/element.h"
#include "core/half.h"

namespace strobe {

inline constexpr float kMostInt8 = 127, kMostE4m3 = 448;

/// What the rows of a quantised tensor are.
struct RowForm {
  int32_t dtype;        // a quantised one
  int32_t scale_dtype;  // fp32 or fp16; not with blocks
  bool makes_scale;     // whether whoever quantises a row makes its scale; else it is given
};

/// The scale as it multiplies codes: NaN where it is not finite.
STROBE_INLINE constexpr float usable_scale(float scale) { return scale + (scale - scale); }

STROBE_INLINE float read_scale(int32_t dtype, const void* at) {
  if (dtype == STROBE_FLOAT16) {
    uint16_t half;
    __builtin_memcpy(&half, at, sizeof half);
    return float_from_half(half);
  }
  float scale;
  __builtin_memcpy(&scale, at, sizeof scale);
  return scale;
}
/// Returns the scale as it is read back.
STROBE_INLINE float write_scale(int32_t dtype, float scale, void* at) {
  if (dtype == STROBE_FLOAT16) {
    const uint16_t half = half_from_float(scale);
    __builtin_memcpy(at, &half, sizeof half);
    return float_from_half(half);
  }
  __builtin_memcpy(at, &scale, sizeof scale);
  return scale;
}

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

/// The nearest float8 e4m3, ties to even; what is larger than the largest, infinity too, becomes
/// the largest.
STROBE_INLINE uint8_t e4m3_from_float(float x) {
  const uint32_t all = __builtin_bit_cast(uint32_t, x), bits = all & 0x7FFFFFFFu;
  const uint32_t sign = all >> 24 & 0x80u;
  uint32_t code;
  if (bits > 0x7F800000u) {
    code = 0x7Fu;  // NaN
  } else if (bits < 0x3C800000u) {
    // Below 2^-6 a multiple of 2^-9: adding 2^14, whose spacing that is, rounds to it.
    const float sum = __builtin_bit_cast(float, bits) + 16384.0f;
    code = __builtin_bit_cast(uint32_t, sum) - 0x46800000u;
  } else {
    code = (bits + 0x7FFFFu + (bits >> 20 & 1u) - 0x3C000000u) >> 20;
    code = code < 0x7Eu ? code : 0x7Eu;
  }
  return static_cast<uint8_t>(sign | code);
}
STROBE_INLINE float float_from_e4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24, bits = code & 0x7Fu;
  // The exponent, moved into a float's place, is 2^120 too small; the product is exact.
  const float value = __builtin_bit_cast(float, bits << 20) * 0x1p120f;
  const uint32_t out = bits == 0x7Fu ? 0x7FC00000u : __builtin_bit_cast(uint32_t, value);
  return __builtin_bit_cast(float, out | sign);
}

/// The first of the values that are largest in magnitude; a NaN if there is one.
STROBE_INLINE float largest_value(const float* x, int64_t n, float largest = 0) {
  for (int64_t i = 0; i < n; ++i) {
    const bool larger = __builtin_fabsf(x[i]) > __builtin_fabsf(largest);
    if (larger || x[i] != x[i]) largest = x[i];
  }
  return largest;
}
/// The scale of values whose largest magnitude this is.
STROBE_INLINE float scale_for(int32_t dtype, float largest) {
  return __builtin_fabsf(largest) / (dtype == STROBE_FLOAT8_E4M3 ? kMostE4m3 : kMostInt8);
}

/// n values to the row at `to`. scale: of the row, as the form says; null with blocks.
STROBE_INLINE void quantise_row(const RowForm& form, const float* x, int64_t n, std::byte* to,
                                std::byte* scale) {
  if (has_scales(form.dtype)) {
    const float by =
        form.makes_scale
            ? write_scale(form.scale_dtype, scale_for(form.dtype, largest_value(x, n)), scale)
            : read_scale(form.scale_dtype, scale);
    if (form.dtype == STROBE_INT8) {
      for (int64_t i = 0; i < n; ++i) {
        to[i] = static_cast<std::byte>(nearest_code(in_units(x[i], by), -kMostInt8, kMostInt8));
      }
    } else {
      for (int64_t i = 0; i < n; ++i) {
        to[i] = static_cast<std::byte>(e4m3_from_float(in_units(x[i], by)));
      }
    }
    return;
  }
  for (; n > 0; n -= kBlockValues, x += kBlockValues) {
    const float largest = largest_value(x, kBlockValues);
    std::byte* const codes = to + kBlockScaleBytes;
    if (form.dtype == STROBE_Q8_0) {
      const float by = write_scale(STROBE_FLOAT16, scale_for(form.dtype, largest), to);
      for (int64_t i = 0; i < kBlockValues; ++i) {
        codes[i] = static_cast<std::byte>(nearest_code(in_units(x[i], by), -kMostInt8, kMostInt8));
      }
      to += kQ8BlockBytes;
    } else {
      const float by = write_scale(STROBE_FLOAT16, largest / -8, to);
      for (int64_t i = 0; i < kBlockValues / 2; ++i) {
        const int32_t low = nearest_code(in_units(x[i], by), -8, 7) + 8;
        const int32_t high = nearest_code(in_units(x[i + kBlockValues / 2], by), -8, 7) + 8;
        codes[i] = static_cast<std::byte>(low | high << 4);
      }
      to += kQ4BlockBytes;
    }
  }
}

/// The row's n values.
STROBE_INLINE void dequantise_row(const RowForm& form, const std::byte* from,
                                  const std::byte* scale, int64_t n, float* x) {
  if (has_scales(form.dtype)) {
    const float by = usable_scale(read_scale(form.scale_dtype, scale));
    for (int64_t i = 0; i < n; ++i) {
      const auto code = static_cast<uint8_t>(from[i]);
      x[i] = by * (form.dtype == STROBE_INT8 ? static_cast<float>(static_cast<int8_t>(code))
                                             : float_from_e4m3(code));
    }
    return;
  }
  for (; n > 0; n -= kBlockValues, x += kBlockValues) {
    const float by = usable_scale(read_scale(STROBE_FLOAT16, from));
    const std::byte* const codes = from + kBlockScaleBytes;
    if (form.dtype == STROBE_Q8_0) {
      for (int64_t i = 0; i < kBlockValues; ++i) {
        x[i] = by * static_cast<float>(static_cast<int8_t>(codes[i]));
      }
      from += kQ8BlockBytes;
    } else {
      for (int64_t i = 0; i < kBlockValues / 2; ++i) {
        const int32_t both = static_cast<uint8_t>(codes[i]);
        x[i] = by * static_cast<float>((both & 15) - 8);
        x[i + kBlockValues / 2] = by * static_cast<float>((both >> 4) - 8);
      }
      from += kQ4BlockBytes;
    }
  }
}

}  // namespace strobe

#endif  // STROBE_CORE_QUANTISED_H_
