// How a row of K or V is quantised, and read back: what an append writes, what strobe_quantize
// makes, and what kernels take a row for.
//
//     int8           codes -128 to 127 (-127 is the least that is written) times the row's scale
//     float8 e4m3    codes of 8 bits times the row's scale; what is too large becomes 448
//     float8 e5m2    the same; what is too large becomes 57344
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

#include "core/codes.h"
#include "core/element.h"
#include "core/half.h"

namespace strobe {

/// What the rows of a quantised tensor are.
struct RowForm {
  int32_t dtype;        // a quantised one
  int32_t scale_dtype;  // fp32 or fp16; not with blocks
  bool makes_scale;     // whether whoever quantises a row makes its scale; else it is given
};

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

/// The first of the values that are largest in magnitude; a NaN if there is one.
STROBE_INLINE float largest_value(const float* x, int64_t n, float largest = 0) {
  for (int64_t i = 0; i < n; ++i) {
    const bool larger = __builtin_fabsf(x[i]) > __builtin_fabsf(largest);
    if (larger || x[i] != x[i]) largest = x[i];
  }
  return largest;
}
/// The scale of values of which this is the largest in magnitude: with its sign for q4_0, by its
/// magnitude for all others. NaN makes one of them, whatever its bits.
STROBE_INLINE float scale_for(int32_t dtype, float largest) {
  if (largest != largest) return __builtin_bit_cast(float, 0x7FC00000);
  if (dtype == STROBE_Q4_0) return largest / -8;
  const float most = dtype == STROBE_FLOAT8_E4M3   ? kMostE4m3
                     : dtype == STROBE_FLOAT8_E5M2 ? kMostE5m2
                                                   : kMostInt8;
  return __builtin_fabsf(largest) / most;
}
/// The value of a code with a scale in a tensor of its own, before its scale.
STROBE_INLINE float value_of_code(int32_t dtype, uint8_t code) {
  if (dtype == STROBE_FLOAT8_E4M3) return float_from_e4m3(code);
  if (dtype == STROBE_FLOAT8_E5M2) return float_from_e5m2(code);
  return static_cast<float>(static_cast<int8_t>(code));
}

/// Values of a row of n that the Hadamard matrix rotates at a time: the largest power of two that
/// divides n, so that each of the row's values is in one such block.
STROBE_INLINE int64_t hadamard_block(int64_t n) { return n & -n; }
/// Whether rows of n values are rotated: in one block, or in blocks that are long enough to spread
/// a value over.
STROBE_INLINE bool can_rotate_by_hadamard(int64_t n) {
  return hadamard_block(n) == n || n % 16 == 0;
}

/// Each block of the row times the orthonormal Hadamard matrix of Sylvester's order, which is its
/// own inverse.
STROBE_INLINE void rotate_by_hadamard(float* x, int64_t n) {
  float factor = 1;
  for (int64_t half = 1; half < hadamard_block(n); half *= 2) {
    // (A power of four gives an exact factor.)
    factor *= 0.5f;
    for (int64_t i = 0; i < n; i += 2 * half) {
      for (int64_t j = i; j < i + half; ++j) {
        const float sum = x[j] + x[j + half], difference = x[j] - x[j + half];
        x[j] = sum;
        x[j + half] = difference;
      }
    }
  }
  factor = __builtin_sqrtf(factor);
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
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
    } else if (form.dtype == STROBE_FLOAT8_E4M3) {
      for (int64_t i = 0; i < n; ++i) {
        to[i] = static_cast<std::byte>(e4m3_from_float(in_units(x[i], by)));
      }
    } else {
      for (int64_t i = 0; i < n; ++i) {
        to[i] = static_cast<std::byte>(e5m2_from_float(in_units(x[i], by)));
      }
    }
    return;
  }
  for (; n > 0; n -= kBlockValues, x += kBlockValues) {
    const float largest = largest_value(x, kBlockValues);
    const float by = write_scale(STROBE_FLOAT16, scale_for(form.dtype, largest), to);
    std::byte* const codes = to + kBlockScaleBytes;
    if (form.dtype == STROBE_Q8_0) {
      for (int64_t i = 0; i < kBlockValues; ++i) {
        codes[i] = static_cast<std::byte>(nearest_code(in_units(x[i], by), -kMostInt8, kMostInt8));
      }
      to += kQ8BlockBytes;
    } else {
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
      x[i] = by * value_of_code(form.dtype, static_cast<uint8_t>(from[i]));
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
