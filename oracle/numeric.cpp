#include "numeric.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace oracle {
namespace {

constexpr float kFloat16Infinity = 65520;     // from here on the nearest float16 is infinity
constexpr float kFloat16Smallest = 0x1p-14f;  // normal

// Nearest multiple of 2^(exponent of x - bits), ties to even. Adding and taking away 1.5 * 2^k
// rounds to what float can hold at that size; the sums are exact otherwise.
float KeepBits(float x, int bits) {
  const double magic = std::ldexp(1.5, std::ilogb(x) - bits + 52);
  return static_cast<float>((static_cast<double>(x) + magic) - magic);
}

}  // namespace

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kByte:
      return "byte";
    case DType::kE4m3:
      return "float8 e4m3";
    case DType::kE5m2:
      return "float8 e5m2";
  }
  return "?";
}

int64_t ElementSize(DType dtype) {
  return dtype == DType::kFloat32                                ? 4
         : dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 2
                                                                 : 1;
}

double LargestFinite(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 0x1.fffffep127;
    case DType::kBFloat16:
      return 0x1.fep127;
    case DType::kFloat16:
      return 65504;
    case DType::kByte:
      return 255;
    case DType::kE4m3:
      return 448;
    case DType::kE5m2:
      return 57344;
  }
  return 0;
}

uint16_t EncodeBFloat16(float x) {
  // bfloat16 is the upper half of a float; a carry out of the significand moves the exponent as it
  // should.
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t upper = bits >> 16, lower = bits & 0xFFFF;
  if (std::isnan(x))
    return static_cast<uint16_t>(upper | 0x40);  // quiet, and never infinity's pattern
  const bool up = lower > 0x8000 || (lower == 0x8000 && (upper & 1));
  return static_cast<uint16_t>(upper + (up ? 1 : 0));
}

float DecodeBFloat16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t EncodeFloat16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return sign | 0x7E00;
  const float a = std::fabs(x);
  if (a >= kFloat16Infinity) return sign | 0x7C00;
  // Below the smallest normal all values are multiples of 2^-24, which is also the unit of their
  // bit pattern.
  if (a < kFloat16Smallest)
    return static_cast<uint16_t>(sign | std::lrint(std::ldexp(static_cast<double>(a), 24)));
  const float r = KeepBits(a, 10);
  const int exponent = std::ilogb(r);
  const long significand =
      std::lrint(std::ldexp(static_cast<double>(r), 10 - exponent));  // 1024 to 2047
  return static_cast<uint16_t>(sign | ((exponent + 15) << 10) | (significand - 1024));
}

float DecodeFloat16(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? std::nanf("") : sign * HUGE_VALF;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

double DecodeFloat8(DType dtype, uint8_t code) {
  const int bits = dtype == DType::kE4m3 ? 3 : 2, bias = dtype == DType::kE4m3 ? 7 : 15;
  const int exponent = (code & 0x7F) >> bits, fraction = code & ((1 << bits) - 1);
  const double sign = code & 0x80 ? -1 : 1;
  if (dtype == DType::kE4m3 && (code & 0x7F) == 0x7F) return NAN;
  if (dtype == DType::kE5m2 && exponent == 31) return fraction ? NAN : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - bits);
  return sign * std::ldexp((1 << bits) + fraction, exponent - bias - bits);
}

uint8_t EncodeFloat8(DType dtype, double x) {
  if (std::isnan(x)) return 0x7F;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const double a = std::fmin(std::fabs(x), LargestFinite(dtype));
  // Values ascend with their codes: the last one that is not above a, and the next.
  uint8_t low = 0, end = dtype == DType::kE4m3 ? 0x7F : 0x7C;
  while (end - low > 1) {
    const auto middle = static_cast<uint8_t>((low + end) / 2);
    (DecodeFloat8(dtype, middle) <= a ? low : end) = middle;
  }
  const double below = DecodeFloat8(dtype, low);
  if (below == a) return static_cast<uint8_t>(sign | low);
  const double above = DecodeFloat8(dtype, static_cast<uint8_t>(low + 1));
  const bool up = above - a < a - below || (above - a == a - below && low % 2 != 0);
  return static_cast<uint8_t>(sign | (low + (up ? 1 : 0)));
}

float Round(DType dtype, float x) {
  if (dtype == DType::kFloat32 || !std::isfinite(x)) return x;
  if (dtype == DType::kBFloat16) return DecodeBFloat16(EncodeBFloat16(x));
  const float a = std::fabs(x);
  if (a >= kFloat16Infinity) return std::copysign(HUGE_VALF, x);
  if (a < kFloat16Smallest)
    return std::copysign((a + 0.75f) - 0.75f, x);  // floats near 0.75 stand 2^-24 apart
  // Eleven significant bits: the other thirteen of a float are rounded away, ties to even.
  const uint32_t b = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((b + 0x0FFF + ((b >> 13) & 1)) & ~uint32_t{0x1FFF});
}

float Spacing(DType dtype, float x) {
  if (x == 0 || !std::isfinite(x)) return 0;
  const int bits = dtype == DType::kFloat32 ? 23 : dtype == DType::kBFloat16 ? 7 : 10;
  const int lowest = dtype == DType::kFloat16 ? -14 : -126;
  // The exponent field; subnormals share the spacing of the smallest normal.
  const int exponent = static_cast<int>((std::bit_cast<uint32_t>(x) >> 23) & 255) - 127;
  const int k = (exponent < lowest ? lowest : exponent) - bits;
  return k < -126 ? std::ldexp(1.0f, k)
                  : std::bit_cast<float>(static_cast<uint32_t>(k + 127) << 23);
}

float Load(DType dtype, const void* array, int64_t index) {
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, static_cast<const char*>(array) + index * 4, 4);
    return x;
  }
  if (ElementSize(dtype) == 1) {
    const uint8_t byte = static_cast<const uint8_t*>(array)[index];
    return dtype == DType::kByte ? byte : static_cast<float>(DecodeFloat8(dtype, byte));
  }
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(array) + index * 2, 2);
  return dtype == DType::kBFloat16 ? DecodeBFloat16(bits) : DecodeFloat16(bits);
}

void Store(DType dtype, void* array, int64_t index, float x) {
  if (dtype == DType::kFloat32) {
    std::memcpy(static_cast<char*>(array) + index * 4, &x, 4);
    return;
  }
  if (ElementSize(dtype) == 1) {
    // An infinity that is stored is one, where the type has it.
    const uint8_t code = dtype == DType::kByte ? static_cast<uint8_t>(x)
                         : dtype == DType::kE5m2 && std::isinf(x)
                             ? static_cast<uint8_t>(x < 0 ? 0xFC : 0x7C)
                             : EncodeFloat8(dtype, static_cast<double>(x));
    static_cast<uint8_t*>(array)[index] = code;
    return;
  }
  const uint16_t bits = dtype == DType::kBFloat16 ? EncodeBFloat16(x) : EncodeFloat16(x);
  std::memcpy(static_cast<char*>(array) + index * 2, &bits, 2);
}

}  // namespace oracle
