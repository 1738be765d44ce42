// Step 3: divide once, at the end (arXiv:2307.08691, section 3.1: both tweaks of the forward pass).
//
// Step 2 but for Scaling. O stays unscaled from block to block, the plain sum of exp(s - m) v, so
// that a block multiplies it by exp(m_old - m_new) alone and nobody needs its row sums. They are
// therefore not summed over the lanes of a row, nor over the warps, before the end; and the loop
// has no division. What goes is work that tensor cores do not do, which is dear: a multiplication
// outside of them takes an A100 16 times as long as one inside.
//
// Of the statistics the backward pass needs only L = m + log(l), as it computes P = exp(S - L). So
// one number is stored for a row, and not two.
//
// Stores lse.
#ifndef STROBE_EXAMPLES_PAPER_3_UNSCALED_CUH_
#define STROBE_EXAMPLES_PAPER_3_UNSCALED_CUH_

#include <cmath>

#include "2_flash_attention_1.cuh"

namespace strobe::paper {

///   l_new = l_old exp(m_old - m_new) + l_block
///   O_new = O_old exp(m_old - m_new) + P V
struct DividedAtTheEnd {
  static constexpr bool kNeedsBlockSums = false;  // a lane sums up its own columns until the end

  __device__ __forceinline__ static void after_block(float& sum, float old_factor,
                                                     float block_sum) {
    sum = sum * old_factor + block_sum;
  }
  __device__ __forceinline__ static float at_end(float sum) { return __fdividef(1.f, sum); }
  __device__ __forceinline__ static void store(const Arguments& p, int64_t row, float max,
                                               float sum) {
    p.lse[row] = max * p.scale + logf(sum);
  }
};

struct Unscaled : FlashAttention1 {
  using Scaling = DividedAtTheEnd;
};

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_3_UNSCALED_CUH_
