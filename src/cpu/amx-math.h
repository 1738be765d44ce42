// exp2, log, softcap and rounding to bf16, sixteen float32 lanes at a time.
#ifndef STROBE_CPU_AMX_MATH_H_
#define STROBE_CPU_AMX_MATH_H_

#include "cpu/amx-tile.h"

namespace strobe::cpu::amx {

/// 2^x for every x, within 2 ulp; NaN stays NaN. simd-inl.h has another one for Highway's vectors:
/// reduce and scalef, which make this one short, exist with AVX-512 alone.
STROBE_AMX __m512 exp2(__m512 x) {
  // reduce gives 0 for an infinity or a NaN, and scalef then gives the infinity, the 0 or the NaN.
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

  constexpr Exp2Table() : power() {
    for (int i = 0; i < 32; ++i) {
      // scalef multiplies by 2^floor(n - kVertex); here i / 32 is the fraction of n.
      const double below = i / 32.0 >= kVertex - 1 ? 2 : 4;
      power[i] = static_cast<float>(kA * below * exp2_of_32nds(i));
    }
  }
};

inline constexpr Exp2Table kExp2;

struct FastExp2 {
  __m512 scale, magic, vertex, b, low, high;

  STROBE_INLINE explicit FastExp2(float scale_log2)
      : scale(set(scale_log2)),
        magic(set(Exp2Table::kMagic)),
        vertex(set(Exp2Table::kMagic + static_cast<float>(Exp2Table::kVertex))),
        b(set(static_cast<float>(Exp2Table::kB))),
        low(load(kExp2.power)),
        high(load(kExp2.power + 16)) {}

  /// 2^(scale * s), relative error 4e-7, for |scale * s| < 2^17; beyond that 0 or
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

/// cap * tanh(s / cap) for any cap > 0, and its derivative by s. Both have a relative error of a
/// few ulp: 1 - 2 / (e + 1) would lose 1e-7 of the cap where s is far smaller.
struct Softcap {
  float cap, up, inverse;  // inverse * up = 1 / cap, in two steps as that may be beyond float32

  STROBE_INLINE explicit Softcap(float softcap)
      : cap(softcap), up(softcap < 0x1p-64f ? 0x1p64f : 1), inverse(1 / (softcap * up)) {}

  STROBE_INLINE __m512 operator()(__m512 s, __m512& slope) const {
    const __m512 x = _mm512_mul_ps(_mm512_mul_ps(s, set(up)), set(inverse));
    // Where |x| is small: tanh x = x (1 + x^2 p(x^2)) with Cephes' p, and s instead of cap * x.
    const __m512 z = _mm512_mul_ps(x, x);
    __m512 p = set(-5.70498872745e-3f);
    p = _mm512_fmadd_ps(p, z, set(2.06390887954e-2f));
    p = _mm512_fmadd_ps(p, z, set(-5.37397155531e-2f));
    p = _mm512_fmadd_ps(p, z, set(1.33314422036e-1f));
    p = _mm512_fmadd_ps(p, z, set(-3.33332819422e-1f));
    p = _mm512_mul_ps(p, z);
    const __m512 t = _mm512_fmadd_ps(x, p, x);
    const __m512 small = _mm512_fmadd_ps(s, p, s);
    slope = _mm512_fnmadd_ps(t, t, set(1));
    const __mmask16 is_small = _mm512_cmp_ps_mask(_mm512_abs_ps(x), set(0.625f), _CMP_LT_OQ);
    // A cap is mostly far above the scores.
    if (is_small == 0xFFFF) [[likely]]
      return small;

    // Else e = exp(-2 |x|): tanh |x| = (1 - e) / (1 + e), and its derivative is 4 e / (1 + e)^2.
    const __m512 e = exp2(_mm512_mul_ps(_mm512_abs_ps(x), set(-2 * kLog2e)));
    const __m512 r = _mm512_div_ps(set(1), _mm512_add_ps(e, set(1)));
    const __m512 large = _mm512_mul_ps(set(cap), _mm512_mul_ps(_mm512_sub_ps(set(1), e), r));
    const __m512 large_slope = _mm512_mul_ps(_mm512_mul_ps(set(4), e), _mm512_mul_ps(r, r));
    slope = _mm512_mask_mov_ps(large_slope, is_small, slope);
    // large | (s & sign): its own sign is clear, NaN's does not matter.
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    const __m512 signed_large =
        as_float(_mm512_ternarylogic_epi32(as_int(large), as_int(s), sign, 0xF8));
    return _mm512_mask_mov_ps(signed_large, is_small, small);
  }
};

/// 16 dwords with bf16 of a in their low halves and of b in their high halves, as the pairs of a B
/// tile stand. Rounds to nearest, ties away from zero: after half of what is cut off is added, the
/// conversion is a single shuffle. It takes three operations, of which two may use either vector
/// port; vcvtne2ps2bf16 holds one port for two cycles. A NaN must have a payload that does not
/// overflow in the addition (canonical_nan).
struct RoundToPairs {
  __m512i half, order;

  STROBE_INLINE RoundToPairs()
      : half(_mm512_set1_epi32(0x8000)),
        order(_mm512_set4_epi32(0x0F0E0F0E, 0x0B0A0B0A, 0x07060706, 0x03020302)) {}
  STROBE_INLINE __m512i operator()(__m512 a, __m512 b) const {
    const __m512i x = _mm512_add_epi32(as_int(a), half), y = _mm512_add_epi32(as_int(b), half);
    return _mm512_mask_shuffle_epi8(y, 0x3333333333333333u, x, order);
  }
};

/// What makes weights of scores.
struct WeightConstants {
  FastExp2 exp2;
  RoundToPairs pairs;
};

/// x, with the usual NaN in place of any other NaN: RoundToPairs makes a zero of the NaN
/// 0xFFFFFFFF. Calculations and bf16 values never give such a NaN; the caller's float32 values may.
STROBE_AMX float canonical_nan(float x) { return x == x ? x : __builtin_nanf(""); }

/// x as RoundToPairs rounds it, in float32.
STROBE_AMX __m512 round_to_bf16(__m512 x) {
  return as_float(_mm512_and_si512(_mm512_add_epi32(as_int(x), _mm512_set1_epi32(0x8000)),
                                   _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
}

/// What rounding x to bf16 takes away; 0 where that is not finite.
STROBE_AMX __m512 low_part(__m512 x) {
  const __m512 high = round_to_bf16(x);
  const __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(high), set(kInfinity), _CMP_LT_OQ);
  return _mm512_maskz_sub_ps(finite, x, high);
}

/// 16 bf16 values as float32.
STROBE_AMX __m512 from_bf16(__m256i x) {
  return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

STROBE_AMX float to_float(Bf16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16);
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_MATH_H_
