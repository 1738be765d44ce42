// What happens to a score between q.k and the softmax: scale, softcap, ALiBi, mask. Forward and
// backward alike.
#ifndef STROBE_CUDA_SCORE_CUH_
#define STROBE_CUDA_SCORE_CUH_

#include <type_traits>

#include "core/mask.h"
#include "cuda/params.h"
#include "cuda/softmax.cuh"

namespace strobe::cuda {

/// The rule of one head, with its constants multiplied out. `scale_log2` alone is the whole rule
/// where softcap and ALiBi are absent.
struct ScoreRule {
  float scale_log2;  // scale * log2(e)
  float cap_log2;    // softcap * log2(e); 0: none
  float cap_power;   // e^(2s / softcap) = 2^(cap_power * q.k)
  float slope_log2;  // ALiBi's slope * log2(e); 0: none

  /// Calls body(caps, slopes), two bool constants: whether there is a softcap, and ALiBi. Not kAll:
  /// softcap has one copy of the body, for kernels with no registers to spare.
  template <bool kAll, typename Body>
  __device__ __forceinline__ void choose(const Body& body) const {
    using Yes = std::true_type;
    using No = std::false_type;
    if (cap_log2 == 0.f) {
      slope_log2 == 0.f ? body(No(), No()) : body(No(), Yes());
    } else if (kAll && slope_log2 == 0.f) {
      body(Yes(), No());
    } else {
      body(Yes(), Yes());
    }
  }
};

/// ALiBi's slope * log2(e); 0 without.
__device__ __forceinline__ float alibi_slope_log2(const CommonParams& p, int32_t batch,
                                                  int32_t head) {
  return p.alibi_slopes ? p.alibi_slopes[int64_t{batch} * p.alibi_batch_stride + head] * kLog2e
                        : 0.f;
}
__device__ __forceinline__ ScoreRule score_rule(const CommonParams& p, float slope_log2) {
  return {p.scale * kLog2e, p.cap_log2, p.cap_power, slope_log2};
}
__device__ __forceinline__ ScoreRule score_rule(const CommonParams& p, int32_t batch,
                                                int32_t head) {
  return score_rule(p, alibi_slope_log2(p, batch, head));
}

/// (1 - tanh(s / softcap)) / 2 = 1 / (1 + e^(2s / softcap)). Absolute error about 2^-23, against
/// 2^-12 by way of tanh.approx.
__device__ __forceinline__ float half_below_one(const ScoreRule& rule, float qk) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.f + exp2_fast(qk * rule.cap_power)));
  return y;
}

/// q.k -> score in log 2 units, softcap and ALiBi included. distance: |key - position of the
/// query|. Also gives tanh(s / c), which backward needs (0 without softcap).
template <bool kCaps, bool kSlopes>
__device__ __forceinline__ float apply_rule(const ScoreRule& rule, float qk, float distance,
                                            float& tanh) {
  float s;
  tanh = 0.f;
  if constexpr (kCaps) {
    const float y = half_below_one(rule, qk);
    tanh = __fmaf_rn(-2.f, y, 1.f);
    s = __fmaf_rn(-2.f * rule.cap_log2, y, rule.cap_log2);
  } else {
    s = qk * rule.scale_log2;
  }
  if constexpr (kSlopes) s = __fmaf_rn(-rule.slope_log2, distance, s);
  return s;
}
__device__ __forceinline__ float apply_rule(const ScoreRule& rule, float qk, float distance,
                                            float& tanh) {
  return rule.cap_log2 > 0.f ? apply_rule<true, true>(rule, qk, distance, tanh)
                             : apply_rule<false, true>(rule, qk, distance, tanh);
}

/// Keys [x, y) that query i of a sequence sees, as kernels keep them in shared memory: int32, ends
/// included in [0, seqlen_k]. Rows past the end see what the last row sees, so that they never
/// stand in the way of a whole tile's being unmasked; nothing of them is written.
__device__ __forceinline__ int2 row_limits(const Mask& mask, int32_t i) {
  const int64_t row = i < mask.seqlen_q ? i : mask.seqlen_q - 1;
  const Range r = mask.row(row);
  return make_int2(static_cast<int>(r.begin), static_cast<int>(r.end));
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_SCORE_CUH_
