// The softmax of rows held in mma accumulators: base-2 exponentials, reductions over the four lanes
// that share a row, the rule for rows that see nothing, and log-sum-exp.
//
// Scores are in units of log 2 here: score * log2(e), so that exp becomes one EX2. (Milakov and
// Gimelshein, arXiv:1805.02867; arXiv:2307.08691, section 3.1.)
#ifndef STROBE_CUDA_COMMON_SOFTMAX_CUH_
#define STROBE_CUDA_COMMON_SOFTMAX_CUH_

#include <cstdint>
#include <type_traits>

#include "core/sink.h"
#include "cuda/ptx/arithmetic.h"
#include "cuda/ptx/float8.h"

namespace strobe::cuda {

inline constexpr float kLog2e = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;

__device__ __forceinline__ constexpr float infinity() {
  return __builtin_bit_cast(float, 0x7f800000u);
}

using ptx::max_or_nan;
using ptx::min_or_nan;
/// 2^x. Relative error 2^-22; 0 for -inf, NaN for NaN, inf from 128 on.
__device__ __forceinline__ float exp2_fast(float x) { return ptx::exp2(x); }

/// Over the lanes of a quad, which hold a row's columns between them. fmaxf passes over NaN: a NaN
/// score shows in the sum.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ bool quad_any(uint32_t x) {
  x |= __shfl_xor_sync(0xffffffffu, x, 1);
  return (x | __shfl_xor_sync(0xffffffffu, x, 2)) != 0;
}

/// What to subtract from a row's scores: their maximum so far. A row that has seen no score above
/// -inf has nothing to subtract: -inf - -inf would be NaN.
__device__ __forceinline__ float reference_of(float max) { return max == -infinity() ? 0.f : max; }

/// Whether a row's reference is so large that x * scale, exact in a fused x * scale - reference,
/// may be away from the rounded reference by more than the exponents of weights allow: by 8 from
/// 2^27 on, and by 64 from 2^30 on. Such rows are computed again from rounded scores.
/// T: of weights. Those of float8 may grow by less than 1 there, which they may be away by from
/// 2^24 on.
template <typename T = float>
__device__ __forceinline__ bool is_coarse(float reference) {
  constexpr float kCoarse = std::is_same_v<T, ptx::E4m3> ? 0x1p20f : 0x1p27f;
  return fabsf(reference) >= kCoarse && fabsf(reference) < infinity();
}

/// Of a row that is computed again the largest weight is 2^-32 and not 1: the sum of weights times
/// values near float32's largest then stays finite where their mean is finite.
inline constexpr float kValueShift = 32.f;

/// A row's result from its maximum (in log 2 units) and its sum of 2^(score - maximum).
struct RowResult {
  float factor;  // multiplies the accumulated row of O
  float lse;     // natural logarithm

  /// Where V's codes are to be multiplied by this. A row that sees no key stays 0 also if it is
  /// NaN.
  __device__ __forceinline__ void scale_values(float scale) {
    if (factor != 0.f) factor *= scale;
  }
};

/// keep_scale: 1 / (1 - p) of dropout. sum: below 2^126. A row that sees no key gives 0 and -inf.
/// Scores that are all -inf leave a sum of 0: 0 / 0 gives the NaN that plain attention gives.
__device__ __forceinline__ RowResult finish_row(bool sees_keys, float max, float sum,
                                                float keep_scale) {
  if (!sees_keys) return {0.f, -infinity()};
  if (sum == 0.f) return {__int_as_float(0x7fffffff), __int_as_float(0x7fffffff)};
  // Relative error of the quotient 2^-22; absolute error of the logarithm 2^-21.
  return {__fdividef(keep_scale, sum), (max + __log2f(sum)) * kLn2};
}

/// Exponentials of numbers in log 2 units.
struct Log2Math {
  __device__ __forceinline__ static float exp(float x) { return exp2_fast(x); }
};
/// Natural ones.
struct NaturalMath {
  __device__ __forceinline__ static float exp(float x) { return exp2_fast(x * kLog2e); }
  __device__ __forceinline__ static float log1p(float x) { return log1pf(x); }
};

/// The same with a sink, of which lse has its part or not.
__device__ __forceinline__ RowResult finish_row(bool sees_keys, float max, float sum,
                                                float keep_scale, float sink, bool in_lse) {
  const RowResult alone = finish_row(sees_keys, max, sum, keep_scale);
  if (sink == -infinity()) return alone;
  if (!sees_keys) return {0.f, in_lse ? sink : -infinity()};
  const auto share = SinkShare<float>::of<Log2Math>(sink * kLog2e, max);
  const float all = share.sum(sum);
  const float lse = in_lse       ? (share.reference + __log2f(all)) * kLn2
                    : sum == 0.f ? -infinity()
                                 : alone.lse;
  return {__fdividef(keep_scale * share.keys, all), lse};
}

/// Of a row of a query head in a launch. (Without sinks, nothing of the above is executed.)
template <typename Params>
__device__ __forceinline__ RowResult finish_row(const Params& p, int32_t head, bool sees_keys,
                                                float max, float sum, float keep_scale) {
  if (p.sinks) return finish_row(sees_keys, max, sum, keep_scale, p.sinks[head], p.sinks_in_lse);
  return finish_row(sees_keys, max, sum, keep_scale);
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_SOFTMAX_CUH_
