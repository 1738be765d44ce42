// Names, sizes and conversions of the three dtypes; names of those of a quantised cache.
#ifndef STROBE_CLI_DTYPE_H_
#define STROBE_CLI_DTYPE_H_

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <strobe/strobe.hpp>

namespace strobe::cli {

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

[[nodiscard]] inline const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8 e4m3";
    case DType::kFloat8E5M2:
      return "float8 e5m2";
    case DType::kInt8:
      return "int8";
    case DType::kQ8_0:
      return "q8_0";
    case DType::kQ4_0:
      return "q4_0";
    default:
      return "float16";
  }
}

[[nodiscard]] inline const char* ShortName(DType dtype) {
  return dtype == DType::kFloat32 ? "fp32" : dtype == DType::kBFloat16 ? "bf16" : "fp16";
}

// As safetensors spells it.
[[nodiscard]] inline const char* FileName(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "F32";
    case DType::kBFloat16:
      return "BF16";
    case DType::kFloat8E4M3:
      return "F8_E4M3";
    case DType::kFloat8E5M2:
      return "F8_E5M2";
    case DType::kInt8:
      return "I8";
    case DType::kQ8_0:
    case DType::kQ4_0:
      return "U8";
    default:
      return "F16";
  }
}

// Of an element; that of a quantised cache is a byte.
[[nodiscard]] inline size_t Bytes(DType dtype) {
  if (dtype == DType::kFloat32) return 4;
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 2 : 1;
}

[[nodiscard]] inline float FromBFloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// To nearest, ties to even; NaN stays NaN.
[[nodiscard]] inline uint16_t ToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

[[nodiscard]] inline float FromFloat16(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000U) << 16;
  const uint32_t magnitude = bits & 0x7fffU;
  if (magnitude >= 0x7c00) {  // infinity and NaN
    return std::bit_cast<float>(sign | 0x7f800000U | (magnitude & 0x3ffU) << 13);
  }
  // Moving the exponent by a multiplication gets the subnormals right as well.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
}

// To nearest, ties to even, subnormals included; beyond 65504 infinity; NaN stays NaN.
[[nodiscard]] inline uint16_t ToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000U);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7e00U);
  if (magnitude >= 65520.0F) return static_cast<uint16_t>(sign | 0x7c00U);
  if (magnitude < 0x1p-14F) {  // subnormal: adding 0.5 leaves the rounded number in the low bits
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(magnitude + 0.5F) - 0x3f000000U));
  }
  const uint32_t m = std::bit_cast<uint32_t>(magnitude);
  return static_cast<uint16_t>(sign | (m - 0x38000000U + 0xfff + (m >> 13 & 1)) >> 13);
}

// `value` rounded to the dtype.
[[nodiscard]] inline float Rounded(DType dtype, float value) {
  switch (dtype) {
    case DType::kBFloat16:
      return FromBFloat16(ToBFloat16(value));
    case DType::kFloat16:
      return FromFloat16(ToFloat16(value));
    default:
      return value;
  }
}

// Element `index` of an array of the dtype.
[[nodiscard]] inline float Load(DType dtype, const void* data, size_t index) {
  if (dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, static_cast<const std::byte*>(data) + 4 * index, 4);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, static_cast<const std::byte*>(data) + 2 * index, 2);
  return dtype == DType::kBFloat16 ? FromBFloat16(bits) : FromFloat16(bits);
}

inline void Store(DType dtype, void* data, size_t index, float value) {
  if (dtype == DType::kFloat32) {
    std::memcpy(static_cast<std::byte*>(data) + 4 * index, &value, 4);
    return;
  }
  const uint16_t bits = dtype == DType::kBFloat16 ? ToBFloat16(value) : ToFloat16(value);
  std::memcpy(static_cast<std::byte*>(data) + 2 * index, &bits, 2);
}

// What a KV cache's keys and values are.
struct KvDTypes {
  DType k = DType::kSame;  // kSame: as q
  std::optional<DType> v;  // unset: as keys

  // Of a problem whose queries have this dtype.
  [[nodiscard]] DType keys(DType dtype) const { return k == DType::kSame ? dtype : k; }
  [[nodiscard]] DType values(DType dtype) const { return KvDTypes{v.value_or(k), {}}.keys(dtype); }
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_DTYPE_H_
