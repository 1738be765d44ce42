// What happens to a score between q.k and the softmax: scale, softcap, ALiBi, mask. Forward and
// backward alike.
#ifndef STROBE_CUDA_SCORE_CUH_
#define STROBE_CUDA_SCORE_CUH_

#include "core/mask.h"
#include "cuda/params.h"
#include "cuda/softmax.cuh"

namespace strobe::cuda {

/// The rule of one head. `scale_log2` alone is the whole rule where softcap and ALiBi are absent.
struct ScoreRule {
  float scale_log2;  // scale * log2(e)
  float scale;
  float softcap;  // 0: none
  float slope;    // ALiBi; 0: none
};

__device__ __forceinline__ ScoreRule score_rule(const CommonParams& p, int32_t batch,
                                                int32_t head) {
  const float slope =
      p.alibi_slopes ? p.alibi_slopes[int64_t{batch} * p.alibi_batch_stride + head] : 0.f;
  return {p.scale * kLog2e, p.scale, p.softcap, slope};
}

/// tanh(x) = 1 - 2 / (1 + e^2x): absolute error about 2^-23, against 2^-11 of tanh.approx.
__device__ __forceinline__ float tanh_by_exp(float x) {
  return 1.f - __fdividef(2.f, 1.f + exp2_fast(2.f * kLog2e * x));
}

/// q.k -> score in log 2 units, softcap and ALiBi included. distance: |key - position of the
/// query|. Also gives tanh(s / c), which backward needs (0 without softcap).
__device__ __forceinline__ float apply_rule(const ScoreRule& rule, float qk, float distance,
                                            float& tanh) {
  float s = qk * rule.scale;
  tanh = 0.f;
  if (rule.softcap > 0.f) {
    tanh = tanh_by_exp(__fdividef(s, rule.softcap));
    s = tanh * rule.softcap;
  }
  return (s - rule.slope * distance) * kLog2e;
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
