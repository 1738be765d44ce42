// What happens to a score between q.k and the softmax: scale, softcap, ALiBi, mask. Forward and
// backward alike.
#ifndef STROBE_CUDA_COMMON_SCORE_CUH_
#define STROBE_CUDA_COMMON_SCORE_CUH_

#include <type_traits>

#include "core/mask.h"
#include "cuda/common/params.h"
#include "cuda/common/softcap.h"
#include "cuda/common/softmax.cuh"

namespace strobe::cuda {

/// Which form of softcap a rule takes: softcap.h.
enum class Cap { kNone, kSmall, kAny };
template <Cap kCap>
using CapConstant = std::integral_constant<Cap, kCap>;

/// The rule of one head, with its constants multiplied out. `scale_log2` alone is the whole rule
/// where softcap and ALiBi are absent.
struct ScoreRule {
  float scale_log2;  // scale * log2(e)
  float cap_log2;    // softcap * log2(e); 0: none
  float cap_power;   // e^(2s / softcap) = 2^(cap_power * q.k)
  float slope_log2;  // ALiBi's slope * log2(e); 0: none

  __device__ __forceinline__ Cap cap() const {
    return cap_log2 == 0.f ? Cap::kNone : cap_log2 <= kSmallCap * kLog2e ? Cap::kSmall : Cap::kAny;
  }

  /// Calls body(cap, slopes), a Cap and a bool constant: whether there is a softcap, and ALiBi. Not
  /// kAll: softcap has no copy of the body without ALiBi, for kernels with no registers to spare.
  template <bool kAll, typename Body>
  __device__ __forceinline__ void choose(const Body& body) const {
    using Yes = std::true_type;
    using No = std::false_type;
    const Cap cap = this->cap();
    if (cap == Cap::kNone) {
      slope_log2 == 0.f ? body(CapConstant<Cap::kNone>(), No())
                        : body(CapConstant<Cap::kNone>(), Yes());
    } else if (cap == Cap::kAny) {
      body(CapConstant<Cap::kAny>(), Yes());
    } else if (kAll && slope_log2 == 0.f) {
      body(CapConstant<Cap::kSmall>(), No());
    } else {
      body(CapConstant<Cap::kSmall>(), Yes());
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

/// What softcap computes with: relative errors of 2^-22 and 2^-23.
struct FastMath {
  __device__ __forceinline__ static float exp2(float x) { return exp2_fast(x); }
  __device__ __forceinline__ static float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
};

/// q.k -> score in log 2 units, softcap and ALiBi included. distance: |key - position of the
/// query|.
template <Cap kCap, bool kSlopes>
__device__ __forceinline__ float apply_rule(const ScoreRule& rule, float qk, float distance) {
  float s;
  if constexpr (kCap != Cap::kNone) {
    s = softcapped<kCap == Cap::kAny, false>(qk, rule.cap_log2, rule.cap_power, FastMath()).score;
  } else {
    // Rounded, and not left to be fused with what is subtracted: a row's maximum then gives 2^0
    // also where a float32 is coarser than the exponents there are.
    s = __fmul_rn(qk, rule.scale_log2);
  }
  if constexpr (kSlopes) s = __fmaf_rn(-rule.slope_log2, distance, s);
  return s;
}
/// The same for any rule; kPrecise: where the cap is not small. Also gives d(score) / d(scaled
/// q.k), which backward needs.
template <bool kPrecise>
__device__ __forceinline__ float apply_rule(const ScoreRule& rule, float qk, float distance,
                                            float& slope) {
  SoftcappedScore s{0.f, 1.f};
  if (rule.cap_log2 > 0.f) {
    s = softcapped<kPrecise, true>(qk, rule.cap_log2, rule.cap_power, FastMath());
  } else {
    s.score = __fmul_rn(qk, rule.scale_log2);
  }
  slope = s.slope;
  return __fmaf_rn(-rule.slope_log2, distance, s.score);
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

#endif  // STROBE_CUDA_COMMON_SCORE_CUH_
