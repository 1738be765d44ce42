// Rows of Q, K and V as float32, whatever their elements are: floats of each dtype, and quantised
// codes (core/quantised.h), which are unpacked in registers.
//
// A row is read kPair values at a time. Of bf16 and of q4_0 the halves of a word or a byte become
// two vectors, so that no shuffle is needed: PairPlace says which values these are.
#ifndef STROBE_CPU_ELEMENTS_INL_H_
#define STROBE_CPU_ELEMENTS_INL_H_

#include <type_traits>

#include "core/quantised.h"
#include "cpu/simd-inl.h"

namespace strobe::cpu::STROBE_ISA {

/// Values that are read together.
constexpr int64_t kPair = 2 * kLanes;

// The elements of quantised rows: a code, or a block of them.
struct Int8 {
  int8_t code;
};
struct E4m3 {
  uint8_t code;
};
struct E5m2 {
  uint8_t code;
};
struct Q8Block {
  std::byte bytes[kQ8BlockBytes];
};
struct Q4Block {
  std::byte bytes[kQ4BlockBytes];
};

/// What a pair of vectors of a row's values holds.
enum class PairOrder {
  kPlain,  // kLanes values and the kLanes that follow
  kEvenAndOdd,
  kHalvesOfBlocks  // kLanes values of the first half of a block, and those of the second half
};

/// What an element is: how many values it has, and whether these have yet to be multiplied by the
/// scale of their row.
template <typename T>
struct ElementOf {
  static constexpr int64_t kValues = 1;
  static constexpr bool kRowScale = false;
  static constexpr float kCodeUnit = 1;  // what load_pair's codes have yet to be multiplied by
#if HWY_TARGET == HWY_SCALAR
  static constexpr PairOrder kOrder = PairOrder::kPlain;
#else
  static constexpr PairOrder kOrder =
      std::is_same_v<T, hwy::bfloat16_t> ? PairOrder::kEvenAndOdd : PairOrder::kPlain;
#endif
};
struct CodeElement {
  static constexpr int64_t kValues = 1;
  static constexpr bool kRowScale = true;
  static constexpr float kCodeUnit = 1;
  static constexpr PairOrder kOrder = PairOrder::kPlain;
};
template <PairOrder kOf>
struct BlockElement {
  static constexpr int64_t kValues = kBlockValues;
  static constexpr bool kRowScale = false;
  static constexpr float kCodeUnit = 1;
  static constexpr PairOrder kOrder = kOf;
};
template <>
struct ElementOf<Int8> : CodeElement {};
template <>
struct ElementOf<E4m3> : CodeElement {
  static constexpr float kCodeUnit = 256;
};
template <>
struct ElementOf<E5m2> : CodeElement {};
template <>
struct ElementOf<Q8Block> : BlockElement<PairOrder::kPlain> {};
template <>
struct ElementOf<Q4Block> : BlockElement<PairOrder::kHalvesOfBlocks> {};

/// Bytes of so many values of a row.
template <typename T>
constexpr int64_t bytes_of(int64_t values) {
  return values / ElementOf<T>::kValues * static_cast<int64_t>(sizeof(T));
}

/// Calls body(T*) as for_dtype does, for the elements of quantised rows.
template <typename Body>
STROBE_SIMD void for_codes(int32_t dtype, const Body& body) {
  if (dtype == STROBE_INT8) {
    body(static_cast<Int8*>(nullptr));
  } else if (dtype == STROBE_FLOAT8_E4M3) {
    body(static_cast<E4m3*>(nullptr));
  } else if (dtype == STROBE_FLOAT8_E5M2) {
    body(static_cast<E5m2*>(nullptr));
  } else if (dtype == STROBE_Q8_0) {
    body(static_cast<Q8Block*>(nullptr));
  } else if (dtype == STROBE_Q4_0) {
    body(static_cast<Q4Block*>(nullptr));
  }
}
/// The same for those of any rows.
template <typename Body>
STROBE_SIMD void for_element(int32_t dtype, const Body& body) {
  if (is_quantised(dtype)) {
    for_codes(dtype, body);
  } else {
    for_dtype(dtype, body);
  }
}

/// ElementOf's kCodeUnit of codes with scales.
STROBE_SIMD float code_unit(int32_t dtype) {
  float unit = 1;
  for_codes(dtype, [&]<typename T>(T*) { unit = ElementOf<T>::kCodeUnit; });
  return unit;
}

/// NaN where a scale is not finite.
STROBE_SIMD VF usable_scales(VF scale) { return hn::Add(scale, hn::Sub(scale, scale)); }

/// The fp16 at p in all lanes.
STROBE_SIMD VF half_in_all(const void* p) {
  uint16_t half;
  __builtin_memcpy(&half, p, sizeof half);
#if HWY_TARGET == HWY_SCALAR
  return set(float_from_half(half));
#else
  const hn::Rebind<uint16_t, F> u16;
  return hn::PromoteTo(f32, hn::BitCast(hn::Rebind<hwy::float16_t, F>(), hn::Set(u16, half)));
#endif
}
/// The scale at p, of fp32 or fp16, in all lanes, as it multiplies codes.
STROBE_SIMD VF scale_in_all(int32_t dtype, const void* p) {
  if (dtype == STROBE_FLOAT16) return usable_scales(half_in_all(p));
  float scale;
  __builtin_memcpy(&scale, p, sizeof scale);
  return usable_scales(set(scale));
}

/// kLanes codes of int8.
STROBE_SIMD VF signed_bytes(const std::byte* p) {
  const hn::Rebind<int8_t, F> i8;
  return hn::ConvertTo(f32, hn::PromoteTo(i32, hn::LoadU(i8, reinterpret_cast<const int8_t*>(p))));
}
STROBE_SIMD VF load_codes(const Int8* p) {
  return signed_bytes(reinterpret_cast<const std::byte*>(p));
}
#if HWY_TARGET != HWY_SCALAR
/// Codes of e4m3, which are sign-extended here, as fp16: moved to their place there they are 2^8
/// times smaller, and the one magnitude that is NaN gets fp16's largest exponent.
template <typename V>
STROBE_SIMD V half_from_e4m3(V code) {
  const hn::DFromV<V> i16;
  const V half = hn::And(hn::ShiftLeft<7>(code), hn::Set(i16, static_cast<int16_t>(0xBFFF)));
  const V most = hn::Set(i16, 0x3F80);
  const auto is_nan = hn::Eq(hn::And(half, most), most);
  return hn::Or(half, hn::And(hn::VecFromMask(i16, is_nan), hn::Set(i16, 0x7C00)));
}
#endif
STROBE_SIMD VF load_codes(const E4m3* p) {
#if HWY_TARGET == HWY_SCALAR
  return set(float_from_e4m3(p->code) / ElementOf<E4m3>::kCodeUnit);
#else
  const hn::Rebind<int8_t, F> i8;
  const hn::Rebind<int16_t, F> i16;
  const auto code = hn::PromoteTo(i16, hn::LoadU(i8, reinterpret_cast<const int8_t*>(p)));
  return hn::PromoteTo(f32, hn::BitCast(hn::Rebind<hwy::float16_t, F>(), half_from_e4m3(code)));
#endif
}
/// Those of e5m2 are the upper halves of fp16.
STROBE_SIMD VF load_codes(const E5m2* p) {
#if HWY_TARGET == HWY_SCALAR
  return set(float_from_e5m2(p->code));
#else
  const hn::Rebind<uint8_t, F> u8;
  const hn::Rebind<uint16_t, F> u16;
  const auto code = hn::PromoteTo(u16, hn::LoadU(u8, reinterpret_cast<const uint8_t*>(p)));
  return hn::PromoteTo(f32, hn::BitCast(hn::Rebind<hwy::float16_t, F>(), hn::ShiftLeft<8>(code)));
#endif
}
/// kPair codes: both vectors become fp16 in one.
STROBE_SIMD void load_code_pair(const Int8* p, VF& first, VF& second) {
  first = load_codes(p);
  second = load_codes(p + kLanes);
}
STROBE_SIMD void load_code_pair(const E5m2* p, VF& first, VF& second) {
  first = load_codes(p);
  second = load_codes(p + kLanes);
}
STROBE_SIMD void load_code_pair(const E4m3* p, VF& first, VF& second) {
#if HWY_TARGET == HWY_SCALAR
  first = load_codes(p);
  second = load_codes(p + kLanes);
#else
  const hn::Repartition<int16_t, F> i16;
  const hn::Rebind<int8_t, decltype(i16)> i8;
  const auto half =
      half_from_e4m3(hn::PromoteTo(i16, hn::LoadU(i8, reinterpret_cast<const int8_t*>(p))));
  const hn::Rebind<hwy::float16_t, F> f16;
  const hn::Half<decltype(i16)> lower;
  first = hn::PromoteTo(f32, hn::BitCast(f16, hn::LowerHalf(lower, half)));
  second = hn::PromoteTo(f32, hn::BitCast(f16, hn::UpperHalf(lower, half)));
#endif
}

/// Values i to i + kPair - 1 of a row, as float32 in the element's order; i is a multiple of kPair.
/// Codes are left without the scale of their row, and kCodeUnit times too small.
template <typename T>
STROBE_SIMD void load_pair(const std::byte* row, int64_t i, VF& first, VF& second) {
  static_assert(kBlockValues % kPair == 0);
  if constexpr (std::is_same_v<T, Q8Block>) {
    const std::byte* const block = row + i / kBlockValues * kQ8BlockBytes;
    const std::byte* const codes = block + kBlockScaleBytes + i % kBlockValues;
    // code * scale, and NaN where the scale is not finite.
    const VF scale = half_in_all(block), zero = hn::Sub(scale, scale);
    first = hn::MulAdd(signed_bytes(codes), scale, zero);
    second = hn::MulAdd(signed_bytes(codes + kLanes), scale, zero);
  } else if constexpr (std::is_same_v<T, Q4Block>) {
    const std::byte* const block = row + i / kBlockValues * kQ4BlockBytes;
    const std::byte* const codes = block + kBlockScaleBytes + i % kBlockValues / 2;
    const VF scale = half_in_all(block), zero = hn::Sub(scale, scale);
    const hn::Rebind<uint8_t, F> u8;
    const VI both = hn::PromoteTo(i32, hn::LoadU(u8, reinterpret_cast<const uint8_t*>(codes)));
#if HWY_TARGET == HWY_AVX3
    // The 16 values that there are, and each of them by the lower four bits of a lane.
    const VF eight = set(-8), values = hn::MulAdd(hn::Add(hn::Iota(f32, 0), eight), scale, zero);
    first = VF{_mm512_permutexvar_ps(both.raw, values.raw)};
    second = VF{_mm512_permutexvar_ps(hn::ShiftRight<4>(both).raw, values.raw)};
#else
    // (code - 8) * scale: the product with 8 is exact.
    const VF offset = hn::NegMulAdd(scale, set(8), zero);
    first = hn::MulAdd(hn::ConvertTo(f32, hn::And(both, same(15))), scale, offset);
    second = hn::MulAdd(hn::ConvertTo(f32, hn::ShiftRight<4>(both)), scale, offset);
#endif
  } else if constexpr (ElementOf<T>::kRowScale) {
    load_code_pair(reinterpret_cast<const T*>(row) + i, first, second);
  } else if constexpr (ElementOf<T>::kOrder == PairOrder::kEvenAndOdd) {
    const VU words = hn::LoadU(u32, reinterpret_cast<const uint32_t*>(row) + i / 2);
    first = hn::BitCast(f32, hn::ShiftLeft<16>(words));
    second = hn::BitCast(f32, hn::And(words, hn::Set(u32, 0xFFFF0000u)));
  } else {
    const T* const p = reinterpret_cast<const T*>(row) + i;
    first = load_as_float(p);
    second = load_as_float(p + kLanes);
  }
}

/// Whether load_part reads rows of T.
template <typename T>
#if HWY_TARGET == HWY_AVX3
constexpr bool kLoadsParts = !ElementOf<T>::kRowScale && ElementOf<T>::kValues == 1;
#elif HWY_TARGET == HWY_AVX2
constexpr bool kLoadsParts = std::is_same_v<T, float>;  // words have masks there, halves have none
#else
constexpr bool kLoadsParts = false;
#endif

/// As load_pair, where the row ends after n of the pair's values, 0 < n < kPair: zeros behind, and
/// nothing is read there.
template <typename T>
STROBE_SIMD void load_part(const std::byte* row, int64_t i, int64_t n, VF& first, VF& second) {
  static_assert(kLoadsParts<T>);
#if HWY_TARGET != HWY_SCALAR
  const T* const p = reinterpret_cast<const T*>(row) + i;
  const auto in_first = static_cast<size_t>(min64(n, kLanes));
  const auto in_second = static_cast<size_t>(max64(n - kLanes, 0));
  if constexpr (std::is_same_v<T, float>) {
    first = hn::MaskedLoad(hn::FirstN(f32, in_first), f32, p);
    second = hn::MaskedLoad(hn::FirstN(f32, in_second), f32, p + kLanes);
  } else if constexpr (ElementOf<T>::kOrder == PairOrder::kEvenAndOdd) {
    const hn::Repartition<uint16_t, F> u16;
    const auto halves = hn::MaskedLoad(hn::FirstN(u16, static_cast<size_t>(n)), u16,
                                       reinterpret_cast<const uint16_t*>(p));
    const VU words = hn::BitCast(u32, halves);
    first = hn::BitCast(f32, hn::ShiftLeft<16>(words));
    second = hn::BitCast(f32, hn::And(words, hn::Set(u32, 0xFFFF0000u)));
  } else {
    const hn::Rebind<uint16_t, F> u16;
    const hn::Rebind<hwy::float16_t, F> f16;
    const auto* const at = reinterpret_cast<const uint16_t*>(p);
    const auto lower = hn::MaskedLoad(hn::FirstN(u16, in_first), u16, at);
    const auto upper = hn::MaskedLoad(hn::FirstN(u16, in_second), u16, at + kLanes);
    first = hn::PromoteTo(f32, hn::BitCast(f16, lower));
    second = hn::PromoteTo(f32, hn::BitCast(f16, upper));
  }
#endif
}

/// Where the two vectors of the pair at i stand in a row of floats.
template <typename T>
STROBE_SIMD void place_of_pair(int64_t i, int64_t& first, int64_t& second) {
  static_assert(ElementOf<T>::kOrder != PairOrder::kEvenAndOdd);
  if constexpr (ElementOf<T>::kOrder == PairOrder::kHalvesOfBlocks) {
    first = i / kBlockValues * kBlockValues + i % kBlockValues / 2;
    second = first + kBlockValues / 2;
  } else {
    first = i;
    second = i + kLanes;
  }
}
/// The pair at i of a row of floats, in the element's order, and back.
template <typename T>
STROBE_SIMD void take_pair(const float* row, int64_t i, VF& first, VF& second) {
  if constexpr (ElementOf<T>::kOrder == PairOrder::kEvenAndOdd) {
#if HWY_TARGET != HWY_SCALAR
    hn::LoadInterleaved2(f32, row + i, first, second);
#endif
  } else {
    int64_t a, b;
    place_of_pair<T>(i, a, b);
    first = load(row + a);
    second = load(row + b);
  }
}
template <typename T>
STROBE_SIMD void put_pair(VF first, VF second, int64_t i, float* row) {
  if constexpr (ElementOf<T>::kOrder == PairOrder::kEvenAndOdd) {
#if HWY_TARGET != HWY_SCALAR
    hn::StoreInterleaved2(first, second, f32, row + i);
#endif
  } else {
    int64_t a, b;
    place_of_pair<T>(i, a, b);
    store(first, row + a);
    store(second, row + b);
  }
}

/// A quantised row of n values as float32: to[0, round_up(n, kLanes)), zeros behind.
template <typename T>
STROBE_SIMD void unpack_row(const std::byte* row, VF scale, int64_t n, float* to) {
  if constexpr (ElementOf<T>::kValues > 1) {
    for (int64_t i = 0; i < n; i += kPair) {
      VF first, second;
      load_pair<T>(row, i, first, second);
      put_pair<T>(first, second, i, to);
    }
  } else {
    const T* const from = reinterpret_cast<const T*>(row);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(hn::Mul(load_codes(from + i), scale), to + i);
    if (i < n) {
      T tail[kLanes] = {};
      copy_bytes(tail, from + i, n - i);
      // Of a NaN's products with zeros too: what is behind stays 0.
      HWY_ALIGN float some[kLanes];
      store(hn::Mul(load_codes(tail), scale), some);
      for (int64_t j = 0; j < kLanes; ++j) to[i + j] = i + j < n ? some[j] : 0;
    }
  }
}

/// Some rows of Q, K or V as float32: to[rows.size()][stride], padded with zeros to whole vectors.
static void load_input_rows(const RowView& view, Range rows, int64_t dim, float* to,
                            int64_t stride) {
  if (!is_quantised(view.dtype)) return load_rows(view, rows, dim, to, stride);
  for_codes(
      view.dtype, [&]<typename T>(T*) __attribute__((always_inline)) {
        for (int64_t i = rows.begin; i < rows.end; ++i, to += stride) {
          VF scale = set(1);
          if constexpr (ElementOf<T>::kRowScale) {
            scale = hn::Mul(scale_in_all(view.scales.dtype, view.scale(i)),
                            set(ElementOf<T>::kCodeUnit));
          }
          unpack_row<T>(view.row(i), scale, dim, to);
        }
      });
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_ELEMENTS_INL_H_
