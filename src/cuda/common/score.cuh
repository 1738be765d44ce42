// What happens to a score between q.k and the softmax: scale, softcap, ALiBi, mask. Forward and
// backward alike.
#ifndef STROBE_CUDA_COMMON_SCORE_CUH_
#define STROBE_CUDA_COMMON_SCORE_CUH_

#include <type_traits>

#include "cuda/common/params.h"
#include "cuda/common/softcap.h"
#include "cuda/common/softmax.cuh"
#include "cuda/ptx/arithmetic.h"

namespace strobe::cuda {

/// Which form of softcap a score takes: softcap.h.
enum class Cap { kNone, kSmall, kAny };
template <Cap kCap>
using CapConstant = std::integral_constant<Cap, kCap>;

/// What softcap computes with: relative errors of 2^-22 and 2^-23.
struct FastMath {
  __device__ __forceinline__ static float exp2(float x) { return exp2_fast(x); }
  __device__ __forceinline__ static float reciprocal(float x) { return ptx::reciprocal(x); }
};

/// ALiBi's slope * log2(e); 0 without.
__device__ __forceinline__ float alibi_slope_log2(const CommonParams& p, int32_t batch,
                                                  int32_t head) {
  return p.alibi_slopes ? p.alibi_slopes[int64_t{batch} * p.alibi_batch_stride + head] * kLog2e
                        : 0.f;
}

/// What a score is: a function of q.k, batch, head, position of the query and key, with its
/// derivative. A Score is that of one batch entry and head, with its constants multiplied out;
/// row() adds the query and the first of some keys. `scale_log2` alone is all of it where softcap
/// and ALiBi are absent.
struct Score {
  float scale_log2;  // scale * log2(e)
  float cap_log2;    // softcap * log2(e); 0: none
  float cap_power;   // e^(2s / softcap) = 2^(cap_power * q.k)
  float slope_log2;  // ALiBi's slope * log2(e); 0: none

  /// slope_log2: where the kernel has kept it (alibi_slope_log2).
  __device__ __forceinline__ static Score of(const CommonParams& p, float slope_log2) {
    return {p.scale * kLog2e, p.cap_log2, p.cap_power, slope_log2};
  }
  __device__ __forceinline__ static Score of(const CommonParams& p, int32_t batch, int32_t head) {
    return of(p, alibi_slope_log2(p, batch, head));
  }
  /// The scale alone: for kernels of problems that have no more.
  __device__ __forceinline__ static Score scaled(const CommonParams& p) {
    return {p.scale * kLog2e, 0.f, 0.f, 0.f};
  }

  /// The same of a q.k that is yet to be multiplied by a factor.
  __device__ __forceinline__ Score times(float factor) const {
    // As SoftcapConstants has it: 0 times it is 0.
    const float power = fmaxf(fminf(cap_power * factor, 3e38f), -3e38f);
    return {scale_log2 * factor, cap_log2, factor == factor ? power : factor, slope_log2};
  }

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

  /// A score in log 2 units, and d(score) / d(scaled q.k).
  struct ValueAndDerivative {
    float value, derivative;
  };

  /// The scores of one query with neighbouring keys.
  struct Row {
    const Score& s;
    float distance;  // from the first key to the position of the query

    /// Of the key that comes `key` after the first; the options being known when compiled.
    template <Cap kCap, bool kSlopes>
    __device__ __forceinline__ float value(float qk, int key) const {
      float x;
      if constexpr (kCap != Cap::kNone) {
        x = softcapped<kCap == Cap::kAny, false>(qk, s.cap_log2, s.cap_power, FastMath()).score;
      } else {
        // Rounded, and not left to be fused with what is subtracted: a row's maximum then gives 2^0
        // also where a float32 is coarser than the exponents there are.
        x = __fmul_rn(qk, s.scale_log2);
      }
      return kSlopes ? with_slope(x, key) : x;
    }
    /// The same, with ALiBi's slope or 0, and the derivative.
    template <Cap kCap>
    __device__ __forceinline__ ValueAndDerivative value_and_derivative(float qk, int key) const {
      if constexpr (kCap == Cap::kNone) {
        return {with_slope(__fmul_rn(qk, s.scale_log2), key), 1.f};
      } else {
        const SoftcappedScore x =
            softcapped<kCap == Cap::kAny, true>(qk, s.cap_log2, s.cap_power, FastMath());
        return {with_slope(x.score, key), x.slope};
      }
    }
    /// The same for any options; kPrecise: where the cap is not small.
    template <bool kPrecise>
    __device__ __forceinline__ ValueAndDerivative any_value_and_derivative(float qk,
                                                                           int key) const {
      constexpr Cap kCap = kPrecise ? Cap::kAny : Cap::kSmall;
      if (s.cap_log2 > 0.f) return value_and_derivative<kCap>(qk, key);
      return value_and_derivative<Cap::kNone>(qk, key);
    }

   private:
    __device__ __forceinline__ float with_slope(float x, int key) const {
      return __fmaf_rn(-s.slope_log2, fabsf(distance - static_cast<float>(key)), x);
    }
  };
  /// query: its position among the keys. key: the first.
  __device__ __forceinline__ Row row(int32_t query, int32_t key) const {
    return {*this, static_cast<float>(query - key)};
  }
  __device__ __forceinline__ Row row(float query, int32_t key) const {
    return {*this, query - static_cast<float>(key)};
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_SCORE_CUH_
