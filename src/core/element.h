// What the elements of a tensor are, by strobe_dtype, and how many bytes rows of them take.
#ifndef STROBE_CORE_ELEMENT_H_
#define STROBE_CORE_ELEMENT_H_

#include <cstdint>

#include "core/macros.h"
#include "strobe/strobe.h"

namespace strobe {

/// Values of a block of q8_0 and q4_0, which has an fp16 scale in front of its codes.
inline constexpr int64_t kBlockValues = 32;
inline constexpr int64_t kBlockScaleBytes = 2;
inline constexpr int64_t kQ8BlockBytes = kBlockScaleBytes + kBlockValues;
inline constexpr int64_t kQ4BlockBytes = kBlockScaleBytes + kBlockValues / 2;

/// Floats of eight bits.
STROBE_INLINE constexpr bool is_float8(int32_t dtype) {
  return dtype == STROBE_FLOAT8_E4M3 || dtype == STROBE_FLOAT8_E5M2;
}
/// Codes whose scales are in tensors of their own.
STROBE_INLINE constexpr bool has_scales(int32_t dtype) {
  return dtype == STROBE_INT8 || is_float8(dtype);
}
/// Blocks of codes with the scale among them.
STROBE_INLINE constexpr bool has_blocks(int32_t dtype) {
  return dtype == STROBE_Q8_0 || dtype == STROBE_Q4_0;
}
/// Codes that stand for values, in one form or the other.
STROBE_INLINE constexpr bool is_quantised(int32_t dtype) {
  return has_scales(dtype) || has_blocks(dtype);
}

/// Bytes of an element: what strides count. That of a quantised tensor is a byte.
STROBE_INLINE constexpr int64_t element_size(int32_t dtype) {
  return dtype == STROBE_FLOAT32 ? 4 : dtype == STROBE_BFLOAT16 || dtype == STROBE_FLOAT16 ? 2 : 1;
}
/// Elements of a row of so many values (with blocks a multiple of kBlockValues).
STROBE_INLINE constexpr int64_t row_elements(int32_t dtype, int64_t values) {
  if (dtype == STROBE_Q8_0) return values / kBlockValues * kQ8BlockBytes;
  if (dtype == STROBE_Q4_0) return values / kBlockValues * kQ4BlockBytes;
  return values;
}
STROBE_INLINE constexpr int64_t row_bytes(int32_t dtype, int64_t values) {
  return row_elements(dtype, values) * element_size(dtype);
}

}  // namespace strobe

#endif  // STROBE_CORE_ELEMENT_H_
