// Softcap: cap * tanh(score / cap), for any cap.
// Written for the host too, with what the GPU's approximations come from as an argument, so that a
// test without a GPU can put their errors in.
#ifndef STROBE_CUDA_COMMON_SOFTCAP_H_
#define STROBE_CUDA_COMMON_SOFTCAP_H_

#include <cmath>

#include "core/macros.h"

namespace strobe::cuda {

/// A launch's constants, in units of log 2. All 0 without softcap.
struct SoftcapConstants {
  float cap_log2;   // softcap * log2(e)
  float cap_power;  // e^(2s / softcap) = 2^(cap_power * q.k)

  STROBE_INLINE static SoftcapConstants make(float scale, float softcap) {
    constexpr float kLog2e = 1.44269504088896340736f;
    if (!(softcap > 0)) return {0.f, 0.f};
    // Both numbers are kept finite: then the largest caps (1e30 is as good as none) give no NaN,
    // and under the smallest ones a score of 0 stays 0.
    const float cap = std::fmin(softcap, 1e30f);
    return {cap * kLog2e, std::fmax(std::fmin(2 * kLog2e * (scale / cap), 3e38f), -3e38f)};
  }
};

struct SoftcappedScore {
  float score;  // in units of log 2
  float slope;  // d(score) / d(score without softcap): 1 - tanh^2
};

/// Caps up to this one, which are those that models have, take the short form.
inline constexpr float kSmallCap = 64.f;

/// tanh(x) = 1 - 2 / (1 + e^2x) is off by about 2^-23 of 1, hence the score by so much of the cap:
/// at most 3e-5 for small ones. kPrecise: the error is relative, by x times a polynomial in x^2
/// below tanh = 0.54, chosen without a branch; ten instructions more, a fifth of the forward
/// pass's time. kSlope: the slope is wanted. It is 4 y (1 - y), y = 1 / (1 + e^2|x|) being at most
/// a half: nothing cancels. `math` has exp2 and reciprocal.
template <bool kPrecise, bool kSlope, typename Math>
STROBE_INLINE SoftcappedScore softcapped(float qk, float cap_log2, float cap_power,
                                         const Math& math) {
  const float z = qk * cap_power;  // 2 log2(e) x
  if constexpr (!kPrecise && !kSlope) {
    const float below = math.reciprocal(fmaf(math.exp2(z), 0.5f, 0.5f));  // 1 - tanh x
    return {fmaf(-cap_log2, below, cap_log2), 1.f};
  }
  const float below = math.reciprocal(fmaf(math.exp2(fabsf(z)), 0.5f, 0.5f));  // 1 - tanh |x|
  float tanh = copysignf(1.f - below, z);
  if constexpr (kPrecise) {
    // tanh(x) / z in powers of z: least largest relative error up to 1.75.
    const float u = z * z;
    float r = fmaf(u, 1.118435570e-06f, -3.131726711e-05f);
    r = fmaf(u, r, 6.656067483e-04f);
    r = fmaf(u, r, -1.387569565e-02f);
    r = fmaf(u, r, 0.34657359f);
    tanh = fabsf(z) < 1.75f ? z * r : tanh;
  }
  return {cap_log2 * tanh, below * (2.f - below)};
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_SOFTCAP_H_
