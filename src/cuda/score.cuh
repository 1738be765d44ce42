// What happens to a score between q.k and the softmax, and to a weight after it: scale, softcap,
// ALiBi, mask, dropout. Forward and backward alike.
#ifndef STROBE_CUDA_SCORE_CUH_
#define STROBE_CUDA_SCORE_CUH_

#include "core/mask.h"
#include "core/philox.h"
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

/// Dropout words of a 16 x 16 block of weights in mma layout (two neighbouring accumulators, or an
/// A fragment): word[b] has, in its low and high half, the 16 random bits of this lane's two
/// columns, for b = 0: row g, columns 0-7; 1: row g, columns 8-15; 2: row g + 8, columns 0-7; 3:
/// row g + 8, columns 8-15 (g = lane / 4). One call of the generator gives the eight columns of a
/// row, word (column / 2) % 4: so lane t of a quad makes call b = t, and the quad transposes. row:
/// of the block's row 0; group: column / 8 of the block's column 0.
__device__ __forceinline__ void dropout_words(const Dropout& dropout, uint32_t batch_head,
                                              uint32_t row, uint32_t group, int lane,
                                              uint32_t (&word)[4]) {
  const int t = lane % 4;
  const Philox4 mine =
      dropout.bits(batch_head, row + lane / 4 + 8 * (t / 2), group + static_cast<uint32_t>(t % 2));
  // A 4 x 4 transpose in two steps. First swap 2 x 2 blocks' off-diagonals with the lane t ^ 2 ...
  const bool high = (t & 2) != 0, odd = (t & 1) != 0;
  uint32_t a0 = mine.word[0], a1 = mine.word[1], a2 = mine.word[2], a3 = mine.word[3];
  const uint32_t s0 = __shfl_xor_sync(0xffffffffu, high ? a0 : a2, 2);
  const uint32_t s1 = __shfl_xor_sync(0xffffffffu, high ? a1 : a3, 2);
  if (high) {
    a0 = s0, a1 = s1;
  } else {
    a2 = s0, a3 = s1;
  }
  // ... then within the blocks, with the lane t ^ 1.
  const uint32_t s2 = __shfl_xor_sync(0xffffffffu, odd ? a0 : a1, 1);
  const uint32_t s3 = __shfl_xor_sync(0xffffffffu, odd ? a2 : a3, 1);
  word[0] = odd ? s2 : a0;
  word[1] = odd ? a1 : s2;
  word[2] = odd ? s3 : a2;
  word[3] = odd ? a3 : s3;
}

/// Dropout::keep, which would put the four words into local memory to index them.
__device__ __forceinline__ bool keep_one(const Dropout& d, uint32_t batch_head, int64_t row,
                                         int64_t column) {
  const auto c = static_cast<uint32_t>(column);
  const Philox4 bits = d.bits(batch_head, static_cast<uint32_t>(row), c / 8);
  const uint32_t low = c & 2 ? bits.word[1] : bits.word[0];
  const uint32_t high = c & 2 ? bits.word[3] : bits.word[2];
  const uint32_t word = c & 4 ? high : low;
  return (c & 1 ? word >> 16 : word & 0xffffu) >= d.threshold;
}

/// Whether the even (low half) and the odd (high half) column of a word are kept.
__device__ __forceinline__ bool keep_low(const Dropout& d, uint32_t word) {
  return (word & 0xffffu) >= d.threshold;
}
__device__ __forceinline__ bool keep_high(const Dropout& d, uint32_t word) {
  return (word >> 16) >= d.threshold;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_SCORE_CUH_
