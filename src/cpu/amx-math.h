// exp2, tanh, rounding to bf16 and dropout's bits, sixteen float32 lanes at a time.
#ifndef STROBE_CPU_AMX_MATH_H_
#define STROBE_CPU_AMX_MATH_H_

#include "cpu/amx-tile.h"

namespace strobe::cpu::amx {

/// 2^x for every x, within 2 ulp; NaN stays NaN.
STROBE_AMX __m512 exp2_exact(__m512 x) {
  // What is not finite reduces to 0, and scalef gives the infinity, the 0 or the NaN.
  const __m512 f = _mm512_reduce_ps(x, 0);
  __m512 p = set(1.326472721400245e-3f);
  p = _mm512_fmadd_ps(p, f, set(9.671512812596256e-3f));
  p = _mm512_fmadd_ps(p, f, set(5.550733744824564e-2f));
  p = _mm512_fmadd_ps(p, f, set(2.402224208267583e-1f));
  p = _mm512_fmadd_ps(p, f, set(6.931469775973302e-1f));
  p = _mm512_fmadd_ps(p, f, set(1.0f));
  // reduce rounds to the nearest integer, scalef down: what it is given must be that integer.
  return _mm512_scalef_ps(p, _mm512_sub_ps(x, f));
}

/// Weights that are about to be truncated to bf16 are made larger by this factor, so that what
/// truncation takes away is given back on average: the error's root mean square is 5 % above that
/// of rounding to nearest, and the conversion of two vectors is a single byte shuffle.
constexpr double kBf16Bias = 1 + 1 / 256.0 / 1.5;

/// 2^(i / 32), in double.
constexpr double exp2_of_32nds(int i) {
  double p = 1;
  for (int n = 0; n < i; ++n) p *= 1.0218971486541166;
  return p;
}

/// Fast exp2 for the softmax: 2^x = 2^n 2^r with n the nearest multiple of 1/32 and a parabola for
/// 2^r. With r + kVertex instead of r the parabola has no linear term, and n - kVertex serves
/// twice: to make r + kVertex, and as the exponent that scalef takes; the table makes up for the
/// difference. Five operations on the FMA port, two beside it.
struct Exp2Table {
  static constexpr double kVertex = 46 / 32.0;  // 1 / ln 2 = 46.17 / 32
  static constexpr float kMagic = 393216;       // 1.5 * 2^18: adding it rounds to 1/32
  static constexpr double kLn2Exact = 0.69314718055994530942;
  // 2^r = kA ((r + kVertex)^2 + kB), exact at r = 0 with its slope.
  static constexpr double kA = kLn2Exact / (2 * kVertex);
  static constexpr double kB = 1 / kA - kVertex * kVertex;

  alignas(64) float power[32];

  constexpr explicit Exp2Table(double factor) : power() {
    for (int i = 0; i < 32; ++i) {
      // scalef multiplies by 2^floor(n - kVertex); here i / 32 is the fraction of n.
      const double below = i / 32.0 >= kVertex - 1 ? 2 : 4;
      power[i] = static_cast<float>(factor * kA * below * exp2_of_32nds(i));
    }
  }
};

/// Weights come out times kBf16Bias.
inline constexpr Exp2Table kBiasedExp2{kBf16Bias};

struct FastExp2 {
  __m512 scale, magic, vertex, b, low, high;

  STROBE_INLINE explicit FastExp2(float scale_log2)
      : scale(set(scale_log2)),
        magic(set(Exp2Table::kMagic)),
        vertex(set(Exp2Table::kMagic + static_cast<float>(Exp2Table::kVertex))),
        b(set(static_cast<float>(Exp2Table::kB))),
        low(load(kBiasedExp2.power)),
        high(load(kBiasedExp2.power + 16)) {}

  /// kBf16Bias * 2^(scale * s), relative error 4e-7, for |scale * s| < 2^17; beyond that 0 or
  /// infinity, and NaN for NaN.
  STROBE_INLINE __m512 operator()(__m512 s) const {
    __m512 n;
    const __m512 p = mantissa(s, n);
    return _mm512_scalef_ps(p, n);
  }
  /// Lanes that `seen` lacks give 0 whatever s is.
  STROBE_INLINE __m512 masked(__m512 s, __mmask16 seen) const {
    __m512 n;
    const __m512 p = mantissa(s, n);
    return _mm512_maskz_scalef_ps(seen, p, n);
  }

 private:
  STROBE_INLINE __m512 mantissa(__m512 s, __m512& n) const {
    const __m512 t = _mm512_fmadd_ps(s, scale, magic);
    n = _mm512_sub_ps(t, vertex);
    const __m512 w = _mm512_fmsub_ps(s, scale, n);
    const __m512 power = _mm512_permutex2var_ps(low, as_int(t), high);
    return _mm512_mul_ps(_mm512_fmadd_ps(w, w, b), power);
  }
};

/// Natural logarithm of positive normal numbers, within 2e-7 of the larger of 1 and the result.
STROBE_AMX __m512 log(__m512 x) {
  // x = 2^e (1 + f) with 1 + f in [3/4, 3/2): log(1 + f) = f - f^2 / 2 + f^3 p(f), Cephes' p.
  const __m512 m = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  const __m512 e = _mm512_getexp_ps(_mm512_div_ps(x, m));
  const __m512 f = _mm512_sub_ps(m, set(1));
  __m512 p = set(7.0376836292e-2f);
  p = _mm512_fmadd_ps(p, f, set(-1.1514610310e-1f));
  p = _mm512_fmadd_ps(p, f, set(1.1676998740e-1f));
  p = _mm512_fmadd_ps(p, f, set(-1.2420140846e-1f));
  p = _mm512_fmadd_ps(p, f, set(1.4249322787e-1f));
  p = _mm512_fmadd_ps(p, f, set(-1.6668057665e-1f));
  p = _mm512_fmadd_ps(p, f, set(2.0000714765e-1f));
  p = _mm512_fmadd_ps(p, f, set(-2.4999993993e-1f));
  p = _mm512_fmadd_ps(p, f, set(3.3333331174e-1f));
  const __m512 ff = _mm512_mul_ps(f, f);
  const __m512 tail = _mm512_fmsub_ps(p, f, set(0.5f));
  return _mm512_fmadd_ps(e, set(kLn2), _mm512_fmadd_ps(ff, tail, f));
}

/// tanh within 2e-7.
STROBE_AMX __m512 tanh(__m512 x) {
  const __m512 e = exp2_exact(_mm512_mul_ps(x, set(2 * kLog2e)));
  return _mm512_sub_ps(set(1), _mm512_div_ps(set(2), _mm512_add_ps(e, set(1))));
}

/// 16 dwords: bf16 of a in the low halves and of b in the high halves; how pairs of a B tile stand.
struct RoundToPairs {
  STROBE_INLINE __m512i operator()(__m512 a, __m512 b) const {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(b));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
};

/// The same by truncation, for values that carry kBf16Bias: one shuffle that merges.
struct TruncateToPairs {
  __m512i order;

  STROBE_INLINE TruncateToPairs()
      : order(_mm512_set4_epi32(0x0F0E0F0E, 0x0B0A0B0A, 0x07060706, 0x03020302)) {}
  STROBE_INLINE __m512i operator()(__m512 a, __m512 b) const {
    return _mm512_mask_shuffle_epi8(as_int(b), 0x3333333333333333u, as_int(a), order);
  }
};

/// 16 bf16 values as float32.
STROBE_AMX __m512 from_bf16(__m256i x) {
  return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

STROBE_AMX float to_float(Bf16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16);
}

/// High and low halves of the 64-bit products of 16 lanes.
STROBE_AMX void multiply_wide(__m512i a, uint32_t by, __m512i& high, __m512i& low) {
  const __m512i m = _mm512_set1_epi32(static_cast<int>(by));
  const __m512i even = _mm512_mul_epu32(a, m);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), m);
  high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
}

struct Philox16 {
  __m512i word[4];
};

/// Dropout::bits for 16 lanes.
STROBE_AMX Philox16 philox(const Dropout& dropout, uint32_t batch_head, __m512i row,
                           __m512i group) {
  __m512i c0 = group, c1 = row, c2 = _mm512_set1_epi32(static_cast<int>(batch_head)),
          c3 = _mm512_set1_epi32(static_cast<int>(dropout.counter3));
  uint32_t key0 = dropout.key0, key1 = dropout.key1;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    __m512i high0, low0, high1, low1;
    multiply_wide(c0, kPhiloxM0, high0, low0);
    multiply_wide(c2, kPhiloxM1, high1, low1);
    const __m512i k0 = _mm512_set1_epi32(static_cast<int>(key0));
    const __m512i k1 = _mm512_set1_epi32(static_cast<int>(key1));
    c0 = _mm512_ternarylogic_epi32(high1, c1, k0, 0x96);  // xor of all three
    c1 = low1;
    c2 = _mm512_ternarylogic_epi32(high0, c3, k1, 0x96);
    c3 = low0;
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_MATH_H_
