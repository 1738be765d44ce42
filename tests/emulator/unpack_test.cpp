// Each code of a quantised cache, unpacked as kernels do it, in each byte of a word.
#include "cuda/common/unpack.cuh"

#include <gtest/gtest.h>

#include <cstdint>

#include "core/codes.h"

namespace strobe::cuda {
namespace {

template <typename T>
float half_of(uint32_t word, int half) {
  T x;
  x.bits = static_cast<uint16_t>(word >> (16 * half));
  return static_cast<float>(x);
}

/// The value of the code in byte `byte` of a word whose other bytes hold `other`.
template <typename T, int kKv>
float unpacked(uint8_t code, uint8_t other, int byte) {
  const uint32_t all = 0x01010101u * other;
  const uint32_t word = (all & ~(0xffu << (8 * byte))) | static_cast<uint32_t>(code) << (8 * byte);
  const UnpackedWord w = unpack_word<T, kKv>(word, kMantissaOf<T, kKv>);
  return half_of<T>(byte % 2 ? w.odd : w.even, byte / 2) * kUnpackedUnit<T, kKv>;
}

template <typename T>
void check_all() {
  for (int code = 0; code < 256; ++code) {
    const auto c = static_cast<uint8_t>(code);
    for (const int other : {0x00, 0x7f, 0x80, 0xff, 0x5a}) {
      const auto o = static_cast<uint8_t>(other);
      for (int byte = 0; byte < 4; ++byte) {
        const auto as_int = static_cast<float>(static_cast<int8_t>(c));
        ASSERT_EQ((unpacked<T, kInt8Codes>(c, o, byte)), as_int) << code << " in " << byte;
        ASSERT_EQ((unpacked<T, kQ8Blocks>(c, o, byte)), as_int) << code << " in " << byte;
        const bool is_nan = (c & 0x7f) == 0x7f;
        const float wanted = is_nan ? (c & 0x80 ? -480.f : 480.f) : float_from_e4m3(c);
        ASSERT_EQ((unpacked<T, kE4m3Codes>(c, o, byte)), wanted) << code << " in " << byte;
        const uint32_t word = static_cast<uint32_t>(c) << (8 * byte);
        ASSERT_EQ((mark_nan_codes(word) & kNanMark) != 0, is_nan) << code << " in " << byte;
        constexpr uint32_t kMantissa = kMantissaOf<T, kQ4Blocks>;
        const UnpackedWord low = unpack_nibbles<T, 0>(word, kMantissa),
                           high = unpack_nibbles<T, 4>(word, kMantissa);
        ASSERT_EQ(half_of<T>(byte % 2 ? low.odd : low.even, byte / 2), (c & 15) - 8);
        ASSERT_EQ(half_of<T>(byte % 2 ? high.odd : high.even, byte / 2), (c >> 4) - 8);
      }
    }
  }
}

TEST(Unpack, EachCodeIsItsValueInBf16) { check_all<__nv_bfloat16>(); }
TEST(Unpack, EachCodeIsItsValueInFp16) { check_all<__half>(); }

}  // namespace
}  // namespace strobe::cuda
