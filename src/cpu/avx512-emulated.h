// Those instructions of AVX-512 that the AMX kernels use, as functions over AVX2's vectors, for
// tests on machines without AVX-512. They have the intrinsics' names, as macros; amx-tile.h
// includes this where STROBE_AVX512_EMULATED is set.
//
// Results have the bits of Intel's manual, but for NaN's payloads, the order of reduce_add's
// additions, and scalef near float32's ends. No kernel depends on these.
#ifndef STROBE_CPU_AVX512_EMULATED_H_
#define STROBE_CPU_AVX512_EMULATED_H_

#include <immintrin.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace strobe::cpu::avx512 {

// Calls: inlined, a file of kernels takes the compiler minutes.
#define STROBE_EMULATED [[maybe_unused]] static __attribute__((noinline))

/// A vector in two halves, or lane by lane.
union Lanes {
  __m256 half[2];
  __m256i half_int[2];
  float f[16];
  int32_t i[16];
  uint32_t u[16];
  uint64_t quad[8];
  uint16_t word[32];
  uint8_t byte[64];
};
template <typename V>
STROBE_EMULATED Lanes lanes_of(V v) {
  static_assert(sizeof v == sizeof(Lanes));
  Lanes x;
  std::memcpy(&x, &v, sizeof x);
  return x;
}
template <typename V>
STROBE_EMULATED V joined(const Lanes& x) {
  V v;
  std::memcpy(&v, &x, sizeof v);
  return v;
}
template <typename To, typename V>
STROBE_EMULATED To cast(V v) {
  return joined<To>(lanes_of(v));
}
template <typename Body>
STROBE_EMULATED __m512 floats(const Body& body) {
  Lanes r;
  for (int h = 0; h < 2; ++h) r.half[h] = body(h);
  return joined<__m512>(r);
}
template <typename Body>
STROBE_EMULATED __m512i ints(const Body& body) {
  Lanes r;
  for (int h = 0; h < 2; ++h) r.half_int[h] = body(h);
  return joined<__m512i>(r);
}
/// Lane by lane: body(lanes, n) sets lane n.
template <int kCount, typename V, typename Body>
STROBE_EMULATED V each(const Body& body) {
  Lanes r;
  for (int n = 0; n < kCount; ++n) body(r, n);
  return joined<V>(r);
}

// Memory.

template <typename V>
STROBE_EMULATED V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <typename V>
STROBE_EMULATED void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
/// Aborts where the processor traps.
template <typename V>
STROBE_EMULATED V load_aligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) std::abort();
  return load<V>(p);
}
template <typename V>
STROBE_EMULATED void store_aligned(void* p, V v) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) std::abort();
  store(p, v);
}
/// Lanes of kBytes that the mask lacks are neither read nor written.
template <int kBytes, typename V>
STROBE_EMULATED V load_some(uint64_t mask, const void* p) {
  V v{};
  for (size_t n = 0; n < sizeof v / kBytes; ++n) {
    if (!(mask >> n & 1)) continue;
    std::memcpy(reinterpret_cast<char*>(&v) + n * kBytes, static_cast<const char*>(p) + n * kBytes,
                kBytes);
  }
  return v;
}
template <int kBytes, typename V>
STROBE_EMULATED void store_some(void* p, uint64_t mask, V v) {
  for (size_t n = 0; n < sizeof v / kBytes; ++n) {
    if (!(mask >> n & 1)) continue;
    std::memcpy(static_cast<char*>(p) + n * kBytes, reinterpret_cast<const char*>(&v) + n * kBytes,
                kBytes);
  }
}
STROBE_EMULATED __m512 gather(__m512i at, const void* base, int scale) {
  const Lanes index = lanes_of(at);
  return each<16, __m512>([&](Lanes& r, int n) {
    std::memcpy(&r.f[n], static_cast<const char*>(base) + int64_t{index.i[n]} * scale, 4);
  });
}

// Constants.

STROBE_EMULATED __m512 same(float x) {
  return floats([&](int) { return _mm256_set1_ps(x); });
}
STROBE_EMULATED __m512i same_int(int x) {
  return ints([&](int) { return _mm256_set1_epi32(x); });
}
STROBE_EMULATED __m512i same_word(int16_t x) {
  return ints([&](int) { return _mm256_set1_epi16(x); });
}
template <typename... X>
STROBE_EMULATED __m512i in_order(X... x) {
  static_assert(sizeof...(x) == 16);
  const int32_t all[] = {x...};
  return load<__m512i>(all);
}
/// As _mm512_set4_epi32: the last is the lowest.
STROBE_EMULATED __m512i four_ints(int d, int c, int b, int a) {
  return in_order(a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d);
}

// Arithmetic.

#define STROBE_OF_HALVES_1(name, V, M, of, instruction)    \
  STROBE_EMULATED V name(V a) {                            \
    const Lanes x = lanes_of(a);                           \
    return of([&](int h) { return instruction(x.M[h]); }); \
  }
#define STROBE_OF_HALVES_2(name, V, M, of, instruction)            \
  STROBE_EMULATED V name(V a, V b) {                               \
    const Lanes x = lanes_of(a), y = lanes_of(b);                  \
    return of([&](int h) { return instruction(x.M[h], y.M[h]); }); \
  }
#define STROBE_OF_HALVES_3(name, V, M, of, instruction)                    \
  STROBE_EMULATED V name(V a, V b, V c) {                                  \
    const Lanes x = lanes_of(a), y = lanes_of(b), z = lanes_of(c);         \
    return of([&](int h) { return instruction(x.M[h], y.M[h], z.M[h]); }); \
  }
STROBE_OF_HALVES_2(add, __m512, half, floats, _mm256_add_ps)
STROBE_OF_HALVES_2(sub, __m512, half, floats, _mm256_sub_ps)
STROBE_OF_HALVES_2(mul, __m512, half, floats, _mm256_mul_ps)
STROBE_OF_HALVES_2(div, __m512, half, floats, _mm256_div_ps)
STROBE_OF_HALVES_2(max, __m512, half, floats, _mm256_max_ps)
STROBE_OF_HALVES_2(min, __m512, half, floats, _mm256_min_ps)
STROBE_OF_HALVES_3(fmadd, __m512, half, floats, _mm256_fmadd_ps)
STROBE_OF_HALVES_3(fmsub, __m512, half, floats, _mm256_fmsub_ps)
STROBE_OF_HALVES_3(fnmadd, __m512, half, floats, _mm256_fnmadd_ps)
STROBE_OF_HALVES_1(abs_int, __m512i, half_int, ints, _mm256_abs_epi32)
STROBE_OF_HALVES_2(add_int, __m512i, half_int, ints, _mm256_add_epi32)
STROBE_OF_HALVES_2(sub_int, __m512i, half_int, ints, _mm256_sub_epi32)
STROBE_OF_HALVES_2(mul_even, __m512i, half_int, ints, _mm256_mul_epu32)
STROBE_OF_HALVES_2(max_words, __m512i, half_int, ints, _mm256_max_epu16)
STROBE_OF_HALVES_2(bits_and, __m512i, half_int, ints, _mm256_and_si256)
STROBE_OF_HALVES_2(bits_xor, __m512i, half_int, ints, _mm256_xor_si256)
STROBE_OF_HALVES_2(low_words, __m512i, half_int, ints, _mm256_unpacklo_epi16)
STROBE_OF_HALVES_2(high_words, __m512i, half_int, ints, _mm256_unpackhi_epi16)
STROBE_OF_HALVES_2(low_ints, __m512i, half_int, ints, _mm256_unpacklo_epi32)
STROBE_OF_HALVES_2(high_ints, __m512i, half_int, ints, _mm256_unpackhi_epi32)
STROBE_OF_HALVES_2(low_quads, __m512i, half_int, ints, _mm256_unpacklo_epi64)
STROBE_OF_HALVES_2(high_quads, __m512i, half_int, ints, _mm256_unpackhi_epi64)

STROBE_EMULATED __m512 abs(__m512 a) {
  return cast<__m512>(bits_and(cast<__m512i>(a), same_int(0x7FFFFFFF)));
}
STROBE_EMULATED __m512i shift_left(__m512i a, int n) {
  const Lanes x = lanes_of(a);
  return ints([&](int h) { return _mm256_slli_epi32(x.half_int[h], n); });
}
STROBE_EMULATED __m512i shift_right(__m512i a, int n) {
  const Lanes x = lanes_of(a);
  return ints([&](int h) { return _mm256_srli_epi32(x.half_int[h], n); });
}
STROBE_EMULATED __m512i shift_quads_left(__m512i a, int n) {
  const Lanes x = lanes_of(a);
  return ints([&](int h) { return _mm256_slli_epi64(x.half_int[h], n); });
}
STROBE_EMULATED __m512i shift_quads_right(__m512i a, int n) {
  const Lanes x = lanes_of(a);
  return ints([&](int h) { return _mm256_srli_epi64(x.half_int[h], n); });
}
STROBE_EMULATED __m512i ternary(__m512i a, __m512i b, __m512i c, int table) {
  const Lanes x = lanes_of(a), y = lanes_of(b), z = lanes_of(c);
  return each<8, __m512i>([&](Lanes& r, int n) {
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) {
      if (!(table >> i & 1)) continue;
      bits |= (i & 4 ? x.quad[n] : ~x.quad[n]) & (i & 2 ? y.quad[n] : ~y.quad[n]) &
              (i & 1 ? z.quad[n] : ~z.quad[n]);
    }
    r.quad[n] = bits;
  });
}
/// x - the integer that is nearest; 0 of infinities.
STROBE_EMULATED __m512 reduce(__m512 a, int) {
  const Lanes x = lanes_of(a);
  return floats([&](int h) {
    const __m256 v = x.half[h];
    const __m256 rest =
        _mm256_sub_ps(v, _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.f), v);
    const __m256 infinite = _mm256_cmp_ps(magnitude, _mm256_set1_ps(INFINITY), _CMP_EQ_OQ);
    return _mm256_andnot_ps(infinite, rest);
  });
}
/// a * 2^floor(b), of an a that is far from float32's ends.
STROBE_EMULATED __m512 scalef(__m512 a, __m512 b) {
  const Lanes x = lanes_of(a), y = lanes_of(b);
  return floats([&](int h) {
    const __m256 floor = _mm256_round_ps(y.half[h], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    const __m256 bounded = _mm256_max_ps(_mm256_min_ps(floor, _mm256_set1_ps(400)),
                                         _mm256_set1_ps(-400));  // NaN becomes 400
    // In steps that are normal numbers. All but the last are exact, unless the result is 0 or an
    // infinity.
    __m256i n = _mm256_cvtps_epi32(bounded);
    __m256 r = x.half[h];
    for (int step = 0; step < 4; ++step) {
      const __m256i some =
          _mm256_max_epi32(_mm256_min_epi32(n, _mm256_set1_epi32(120)), _mm256_set1_epi32(-120));
      n = _mm256_sub_epi32(n, some);
      r = _mm256_mul_ps(r, _mm256_castsi256_ps(_mm256_slli_epi32(
                               _mm256_add_epi32(some, _mm256_set1_epi32(127)), 23)));
    }
    // An infinite b makes 0 or an infinity of a NaN too.
    const __m256 infinity = _mm256_set1_ps(INFINITY), zero = _mm256_setzero_ps();
    const __m256 a_nan = _mm256_cmp_ps(x.half[h], x.half[h], _CMP_UNORD_Q);
    const __m256 up = _mm256_cmp_ps(y.half[h], infinity, _CMP_EQ_OQ);
    const __m256 down = _mm256_cmp_ps(y.half[h], _mm256_sub_ps(zero, infinity), _CMP_EQ_OQ);
    r = _mm256_blendv_ps(r, infinity, _mm256_and_ps(a_nan, up));
    r = _mm256_blendv_ps(r, zero, _mm256_and_ps(a_nan, down));
    const __m256 nan = _mm256_cmp_ps(y.half[h], y.half[h], _CMP_UNORD_Q);
    return _mm256_blendv_ps(r, y.half[h], nan);
  });
}
/// x in [3/4, 3/2) times a power of two is the argument, which is a positive normal number.
STROBE_EMULATED __m512 mantissa(__m512 a) {
  const Lanes x = lanes_of(a);
  return each<16, __m512>([&](Lanes& r, int n) {
    int exponent;
    const float m = std::frexp(x.f[n], &exponent);  // in [1/2, 1)
    r.f[n] = m < 0.75f ? 2 * m : m;
  });
}
STROBE_EMULATED __m512 exponent(__m512 a) {
  const Lanes x = lanes_of(a);
  return each<16, __m512>([&](Lanes& r, int n) { r.f[n] = std::logb(x.f[n]); });
}
STROBE_EMULATED float sum_of(__m512 a) {
  const Lanes x = lanes_of(a);
  float s[8];
  for (int n = 0; n < 8; ++n) s[n] = x.f[n] + x.f[n + 8];
  for (int count = 4; count > 0; count /= 2) {
    for (int n = 0; n < count; ++n) s[n] += s[n + count];
  }
  return s[0];
}
STROBE_EMULATED float largest_of(__m512 a) {
  const Lanes x = lanes_of(a);
  float most = x.f[0];
  for (int n = 1; n < 16; ++n) most = x.f[n] > most ? x.f[n] : most;
  return most;
}

// Conversions.

STROBE_EMULATED __m512 from_ints(__m512i a) {
  const Lanes x = lanes_of(a);
  return floats([&](int h) { return _mm256_cvtepi32_ps(x.half_int[h]); });
}
STROBE_EMULATED __m512i from_words(__m256i a) {
  return ints([&](int h) {
    return _mm256_cvtepu16_epi32(h == 0 ? _mm256_castsi256_si128(a)
                                        : _mm256_extracti128_si256(a, 1));
  });
}
STROBE_EMULATED __m512 from_halves(__m256i a) {
  return floats([&](int h) {
    return _mm256_cvtph_ps(h == 0 ? _mm256_castsi256_si128(a) : _mm256_extracti128_si256(a, 1));
  });
}
STROBE_EMULATED __m256i half_of(__m512i a, int h) { return lanes_of(a).half_int[h]; }
/// To nearest even; what is below the least normal number becomes 0, whatever the modes are.
STROBE_EMULATED uint16_t bf16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7F800000) == 0) return static_cast<uint16_t>(bits >> 16 & 0x8000);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
STROBE_EMULATED __m512bh bf16_of_both(__m512 high, __m512 low) {
  const Lanes a = lanes_of(low), b = lanes_of(high);
  return each<32, __m512bh>(
      [&](Lanes& r, int n) { r.word[n] = bf16_of(n < 16 ? a.f[n] : b.f[n - 16]); });
}
STROBE_EMULATED float no_denormal(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x;
}
STROBE_EMULATED __m512 add_pairs(__m512 sum, __m512bh a, __m512bh b) {
  const Lanes s = lanes_of(sum), x = lanes_of(a), y = lanes_of(b);
  const auto value = [](uint16_t w) {
    return no_denormal(std::bit_cast<float>(uint32_t{w} << 16));
  };
  return each<16, __m512>([&](Lanes& r, int n) {
    float t = no_denormal(s.f[n]);
    t = no_denormal(std::fma(value(x.word[2 * n + 1]), value(y.word[2 * n + 1]), t));
    r.f[n] = no_denormal(std::fma(value(x.word[2 * n]), value(y.word[2 * n]), t));
  });
}

// Shuffles.

STROBE_EMULATED __m512 permute_two(__m512 a, __m512i at, __m512 b) {
  const Lanes x = lanes_of(a), y = lanes_of(b), index = lanes_of(at);
  return each<16, __m512>([&](Lanes& r, int n) {
    const uint32_t from = index.u[n] & 31;
    r.u[n] = from < 16 ? x.u[from] : y.u[from - 16];
  });
}
STROBE_EMULATED __m512i shuffle_blocks(__m512i a, __m512i b, int by) {
  const Lanes x = lanes_of(a), y = lanes_of(b);
  return each<8, __m512i>([&](Lanes& r, int n) {
    const int block = by >> (n / 2 * 2) & 3;
    r.quad[n] = (n < 4 ? x : y).quad[block * 2 + n % 2];
  });
}
STROBE_EMULATED __m512i shuffle_bytes(__m512i other, uint64_t mask, __m512i a, __m512i order) {
  const Lanes x = lanes_of(a), y = lanes_of(order), z = lanes_of(other);
  const Lanes moved =
      lanes_of(ints([&](int h) { return _mm256_shuffle_epi8(x.half_int[h], y.half_int[h]); }));
  return each<64, __m512i>(
      [&](Lanes& r, int n) { r.byte[n] = mask >> n & 1 ? moved.byte[n] : z.byte[n]; });
}

// Masks.

template <int kHow>
STROBE_EMULATED __mmask16 compare(__m512 a, __m512 b) {
  const Lanes x = lanes_of(a), y = lanes_of(b);
  unsigned mask = 0;
  for (int h = 0; h < 2; ++h) {
    mask |= static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(x.half[h], y.half[h], kHow)))
            << 8 * h;
  }
  return static_cast<__mmask16>(mask);
}
template <int kCount, typename Holds>
STROBE_EMULATED uint32_t mask_of(const Holds& holds) {
  uint32_t mask = 0;
  for (int n = 0; n < kCount; ++n) mask |= static_cast<uint32_t>(holds(n)) << n;
  return mask;
}
STROBE_EMULATED __mmask16 int_is_above(__m512i a, __m512i b) {
  const Lanes x = lanes_of(a), y = lanes_of(b);
  return static_cast<__mmask16>(mask_of<16>([&](int n) { return x.i[n] > y.i[n]; }));
}
STROBE_EMULATED __mmask16 unsigned_is_least(__m512i a, __m512i b) {
  const Lanes x = lanes_of(a), y = lanes_of(b);
  return static_cast<__mmask16>(mask_of<16>([&](int n) { return x.u[n] >= y.u[n]; }));
}
STROBE_EMULATED __mmask32 word_is_least(__m512i a, __m512i b) {
  const Lanes x = lanes_of(a), y = lanes_of(b);
  return mask_of<32>([&](int n) { return x.word[n] >= y.word[n]; });
}
STROBE_EMULATED __mmask32 words_are_equal(__m512i a, __m512i b) {
  const Lanes x = lanes_of(a), y = lanes_of(b);
  return mask_of<32>([&](int n) { return x.word[n] == y.word[n]; });
}
/// Lanes of `yes` where the mask has them, else those of `no`.
template <typename V>
STROBE_EMULATED V chosen(uint32_t mask, V yes, V no) {
  const Lanes x = lanes_of(yes), y = lanes_of(no);
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  Lanes r;
  for (int h = 0; h < 2; ++h) {
    const __m256i some = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask >> 8 * h)), bit);
    r.half_int[h] = _mm256_blendv_epi8(y.half_int[h], x.half_int[h], _mm256_cmpeq_epi32(some, bit));
  }
  return joined<V>(r);
}

#undef STROBE_OF_HALVES_1
#undef STROBE_OF_HALVES_2
#undef STROBE_OF_HALVES_3
#undef STROBE_EMULATED

}  // namespace strobe::cpu::avx512

// Some are macros in the compiler's header where it does not optimise.
#undef _mm512_cmp_ps_mask
#undef _mm512_extracti64x4_epi64
#undef _mm512_getmant_ps
#undef _mm512_i32gather_ps
#undef _mm512_reduce_ps
#undef _mm512_setr_epi32
#undef _mm512_shuffle_i32x4
#undef _mm512_slli_epi32
#undef _mm512_slli_epi64
#undef _mm512_srli_epi32
#undef _mm512_srli_epi64
#undef _mm512_ternarylogic_epi32

#define STROBE_EMULATED(f) ::strobe::cpu::avx512::f
#define _mm256_maskz_loadu_epi16(m, p) (STROBE_EMULATED(load_some) < 2, __m256i > (m, p))
#define _mm512_abs_epi32 STROBE_EMULATED(abs_int)
#define _mm512_abs_ps STROBE_EMULATED(abs)
#define _mm512_add_epi32 STROBE_EMULATED(add_int)
#define _mm512_add_ps STROBE_EMULATED(add)
#define _mm512_and_si512 STROBE_EMULATED(bits_and)
#define _mm512_castps_si512(a) (STROBE_EMULATED(cast) < __m512i > (a))
#define _mm512_castsi512_ps(a) (STROBE_EMULATED(cast) < __m512 > (a))
#define _mm512_castsi512_si256(a) STROBE_EMULATED(half_of)(a, 0)
#define _mm512_cmp_ps_mask(a, b, how) (STROBE_EMULATED(compare) < how > (a, b))
#define _mm512_cmpeq_epi16_mask STROBE_EMULATED(words_are_equal)
#define _mm512_cmpge_epu16_mask STROBE_EMULATED(word_is_least)
#define _mm512_cmpge_epu32_mask STROBE_EMULATED(unsigned_is_least)
#define _mm512_cmpgt_epi32_mask STROBE_EMULATED(int_is_above)
#define _mm512_cmpneq_ps_mask(a, b) (STROBE_EMULATED(compare) < _CMP_NEQ_UQ > (a, b))
#define _mm512_cvtepi32_ps STROBE_EMULATED(from_ints)
#define _mm512_cvtepu16_epi32 STROBE_EMULATED(from_words)
#define _mm512_cvtne2ps_pbh STROBE_EMULATED(bf16_of_both)
#define _mm512_cvtph_ps STROBE_EMULATED(from_halves)
#define _mm512_cvtss_f32(a) (STROBE_EMULATED(lanes_of)(a).f[0])
#define _mm512_div_ps STROBE_EMULATED(div)
#define _mm512_dpbf16_ps STROBE_EMULATED(add_pairs)
#define _mm512_extracti64x4_epi64 STROBE_EMULATED(half_of)
#define _mm512_fmadd_ps STROBE_EMULATED(fmadd)
#define _mm512_fmsub_ps STROBE_EMULATED(fmsub)
#define _mm512_fnmadd_ps STROBE_EMULATED(fnmadd)
#define _mm512_getexp_ps STROBE_EMULATED(exponent)
#define _mm512_getmant_ps(a, interval, sign) STROBE_EMULATED(mantissa)(a)
#define _mm512_i32gather_ps STROBE_EMULATED(gather)
#define _mm512_load_ps(p) (STROBE_EMULATED(load_aligned) < __m512 > (p))
#define _mm512_load_si512(p) (STROBE_EMULATED(load_aligned) < __m512i > (p))
#define _mm512_loadu_si512(p) (STROBE_EMULATED(load) < __m512i > (p))
#define _mm512_mask_add_ps(no, m, a, b) STROBE_EMULATED(chosen)(m, STROBE_EMULATED(add)(a, b), no)
#define _mm512_mask_blend_epi32(m, a, b) STROBE_EMULATED(chosen)(m, b, a)
#define _mm512_mask_max_ps(no, m, a, b) STROBE_EMULATED(chosen)(m, STROBE_EMULATED(max)(a, b), no)
#define _mm512_mask_mov_ps(no, m, a) STROBE_EMULATED(chosen)(m, a, no)
#define _mm512_mask_shuffle_epi8 STROBE_EMULATED(shuffle_bytes)
#define _mm512_mask_storeu_epi16(p, m, a) STROBE_EMULATED(store_some)<2>(p, m, a)
#define _mm512_mask_storeu_ps(p, m, a) STROBE_EMULATED(store_some)<4>(p, m, a)
#define _mm512_maskz_div_ps(m, a, b) \
  STROBE_EMULATED(chosen)(m, STROBE_EMULATED(div)(a, b), STROBE_EMULATED(same)(0))
#define _mm512_maskz_loadu_epi16(m, p) (STROBE_EMULATED(load_some) < 2, __m512i > (m, p))
#define _mm512_maskz_loadu_ps(m, p) (STROBE_EMULATED(load_some) < 4, __m512 > (m, p))
#define _mm512_maskz_mov_ps(m, a) STROBE_EMULATED(chosen)(m, a, STROBE_EMULATED(same)(0))
#define _mm512_maskz_mul_ps(m, a, b) \
  STROBE_EMULATED(chosen)(m, STROBE_EMULATED(mul)(a, b), STROBE_EMULATED(same)(0))
#define _mm512_maskz_scalef_ps(m, a, b) \
  STROBE_EMULATED(chosen)(m, STROBE_EMULATED(scalef)(a, b), STROBE_EMULATED(same)(0))
#define _mm512_maskz_sub_ps(m, a, b) \
  STROBE_EMULATED(chosen)(m, STROBE_EMULATED(sub)(a, b), STROBE_EMULATED(same)(0))
#define _mm512_maskz_xor_epi32(m, a, b) \
  STROBE_EMULATED(chosen)(m, STROBE_EMULATED(bits_xor)(a, b), STROBE_EMULATED(same_int)(0))
#define _mm512_max_epu16 STROBE_EMULATED(max_words)
#define _mm512_max_ps STROBE_EMULATED(max)
#define _mm512_min_ps STROBE_EMULATED(min)
#define _mm512_mul_epu32 STROBE_EMULATED(mul_even)
#define _mm512_mul_ps STROBE_EMULATED(mul)
#define _mm512_permutex2var_ps STROBE_EMULATED(permute_two)
#define _mm512_reduce_add_ps STROBE_EMULATED(sum_of)
#define _mm512_reduce_max_ps STROBE_EMULATED(largest_of)
#define _mm512_reduce_ps STROBE_EMULATED(reduce)
#define _mm512_scalef_ps STROBE_EMULATED(scalef)
#define _mm512_set1_epi16 STROBE_EMULATED(same_word)
#define _mm512_set1_epi32 STROBE_EMULATED(same_int)
#define _mm512_set1_ps STROBE_EMULATED(same)
#define _mm512_set4_epi32 STROBE_EMULATED(four_ints)
#define _mm512_setr_epi32 STROBE_EMULATED(in_order)
#define _mm512_setzero_ps() STROBE_EMULATED(same)(0)
#define _mm512_setzero_si512() STROBE_EMULATED(same_int)(0)
#define _mm512_shuffle_i32x4 STROBE_EMULATED(shuffle_blocks)
#define _mm512_slli_epi32 STROBE_EMULATED(shift_left)
#define _mm512_slli_epi64 STROBE_EMULATED(shift_quads_left)
#define _mm512_srli_epi32 STROBE_EMULATED(shift_right)
#define _mm512_srli_epi64 STROBE_EMULATED(shift_quads_right)
#define _mm512_store_ps(p, a) STROBE_EMULATED(store_aligned)(p, a)
#define _mm512_store_si512(p, a) STROBE_EMULATED(store_aligned)(p, a)
#define _mm512_sub_epi32 STROBE_EMULATED(sub_int)
#define _mm512_sub_ps STROBE_EMULATED(sub)
#define _mm512_ternarylogic_epi32 STROBE_EMULATED(ternary)
#define _mm512_unpackhi_epi16 STROBE_EMULATED(high_words)
#define _mm512_unpackhi_epi32 STROBE_EMULATED(high_ints)
#define _mm512_unpackhi_epi64 STROBE_EMULATED(high_quads)
#define _mm512_unpacklo_epi16 STROBE_EMULATED(low_words)
#define _mm512_unpacklo_epi32 STROBE_EMULATED(low_ints)
#define _mm512_unpacklo_epi64 STROBE_EMULATED(low_quads)
#define _mm512_xor_si512 STROBE_EMULATED(bits_xor)

#endif  // STROBE_CPU_AVX512_EMULATED_H_
