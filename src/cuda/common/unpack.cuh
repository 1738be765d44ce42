// Codes of a quantised cache as 16-bit values that tensor cores multiply, without the scale.
//
// A word of four bytes becomes two words: the values of bytes 0 and 2, and those of bytes 1 and 3.
// So no byte has to cross a word but to its own half of one, and the order is undone where it costs
// nothing: Q is stored as K's codes come out, and O's columns are (decode/quantised_keys.cuh).
#ifndef STROBE_CUDA_COMMON_UNPACK_CUH_
#define STROBE_CUDA_COMMON_UNPACK_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/element.h"
#include "cuda/ptx/arithmetic.h"
#include "cuda/ptx/packed.h"

namespace strobe::cuda {

/// Values of bytes 0 and 2, and of 1 and 3.
struct UnpackedWord {
  uint32_t even, odd;
};

/// What values that unpack_word gives are to be multiplied by besides their scale. In fp16 e4m3
/// keeps its exponent's bits, which count from elsewhere there, and int8 becomes values up to 1:
/// their scale, 128 times as large, is a normal number of fp16 where the values' range is.
template <typename T, int kKvDtype>
inline constexpr float kUnpackedUnit = std::is_same_v<T, __nv_bfloat16> ? 1.f
                                       : kKvDtype == kE4m3Codes         ? 256.f
                                       : kKvDtype == kInt8Codes         ? 128.f
                                                                        : 1.f;

/// A word that has bits of kNanMark where w has a code of e4m3 that is NaN. Such codes are unpacked
/// as +-480.
inline constexpr uint32_t kNanMark = 0x80808080;
__device__ __forceinline__ uint32_t mark_nan_codes(uint32_t w) {
  return (w & 0x7f7f7f7f) + 0x01010101;
}

/// The bits into whose mantissas codes go. Whoever unpacks keeps them in a register of which the
/// compiler does not know what it holds (ptx::make_opaque): an instruction takes one constant
/// beside it, and would get the other from a second instruction, each time.
template <typename T, int kKvDtype>
inline constexpr uint32_t kMantissaOf = std::is_same_v<T, __nv_bfloat16> ? 0x43004300  // 128
                                        : kKvDtype == kQ4Blocks          ? 0x64006400  // 1024
                                                                : 0x64646464;  // its upper byte

/// Codes of int8 (also those of q8_0) or e4m3, times kUnpackedUnit. mantissa: kMantissaOf.
template <typename T, int kKvDtype>
__device__ __forceinline__ UnpackedWord unpack_word(uint32_t w, uint32_t mantissa) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kKvDtype != kE4m3Codes && kBf16) {
    // Seven bits go into the mantissa of 128; the sign's bit makes a 256 of another 128.
    const auto value = [&](uint32_t x) {
      return ptx::multiply_add_pair<T>(ptx::masked_or<0x00800080>(x, mantissa), 0xbf80bf80,
                                       ptx::masked_or<0x007f007f>(x, mantissa));
    };
    return {value(w), value(w >> 8)};
  } else if constexpr (kKvDtype != kE4m3Codes) {
    // All eight go into the mantissa of 1024, counted from -128 on.
    const auto value = [](uint32_t x) {
      return kUnpackedUnit<T, kKvDtype> != 1.f
                 ? ptx::multiply_add_pair<T>(x, 0x20002000, 0xc880c880)
                 : ptx::multiply_add_pair<T>(x, 0x3c003c00, 0xe480e480);
    };
    w ^= 0x80808080;
    return {value(__byte_perm(w, mantissa, 0x4240)), value(__byte_perm(w, mantissa, 0x4341))};
  } else if constexpr (kBf16) {
    // The exponent in its place is 2^120 too small; the product is exact, and right for denormals.
    const auto scaled = [](uint32_t x) {
      return ptx::multiply_add_pair<T>(x, 0x7b807b80, 0x80008000);
    };
    return {scaled((w << 4 & 0x07f007f0) | (w << 8 & 0x80008000)),
            scaled((w >> 4 & 0x07f007f0) | (w & 0x80008000))};
  } else {
    return {(w << 7 & 0x3f803f80) | (w << 8 & 0x80008000),
            (w >> 1 & 0x3f803f80) | (w & 0x80008000)};
  }
}

/// The codes of q4_0, less 8, in the lower halves of a word's bytes (kShift 0) or in the upper ones
/// (4). mantissa: kMantissaOf.
template <typename T, int kShift>
__device__ __forceinline__ UnpackedWord unpack_nibbles(uint32_t w, uint32_t mantissa) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  // From 128 or 1024 and the code 8 more are subtracted.
  constexpr uint32_t kOne = kBf16 ? 0x3f803f80 : 0x3c003c00,
                     kLess = kBf16 ? 0xc308c308 : 0xe408e408;
  const auto value = [&](uint32_t x) {
    return ptx::multiply_add_pair<T>(ptx::masked_or<0x000f000f>(x, mantissa), kOne, kLess);
  };
  return {value(w >> kShift), value(w >> (kShift + 8))};
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_UNPACK_CUH_
