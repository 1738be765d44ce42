// From q.k to a weight: what the Highway kernels and AMX share.
//
// The arithmetic on vectors is in score-inl.h (Highway) and amx-score.h (AVX-512 intrinsics); both
// give a Scorer, a functor from (product, query position, key) to the score and its derivative for
// one (batch, head). The two compute tanh and exp2 by different methods, as each fits its
// instruction set, so that their results differ in the last bits.
#ifndef STROBE_CPU_SCORE_H_
#define STROBE_CPU_SCORE_H_

#include "cpu/kernels.h"

namespace strobe::cpu {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kInfinity = __builtin_inff();

/// The weights of a row are exp(score - lse), and lse is a float32: at this size it may be off by
/// 3e-5, which all weights of the row then are. From here on kernels do without it.
inline constexpr float kLargeLse = 1024;

/// What the problem says about the scores of one (batch, head).
struct ScoreOptions {
  bool linear;    // score = scale * q.k: neither softcap nor ALiBi nor bias
  float scale;    // multiplies q.k
  float softcap;  // 0: none
  float slope;    // of ALiBi; 0: none
  bool dropout;   // some weights are dropped, by `generator`
  Dropout generator;
  uint32_t batch_head;  // of the generator's counter
};

STROBE_INLINE ScoreOptions score_options(const Context& c, int64_t batch, int64_t head) {
  const AttentionProblem& p = c.problem;
  float slope = 0;
  if (c.alibi_slopes) {
    const bool per_batch = p.alibi == STROBE_ALIBI_PER_BATCH_HEAD;
    slope = c.alibi_slopes[(per_batch ? batch * p.heads : 0) + head];
  }
  return {p.softcap == 0 && !c.alibi_slopes && !c.bias.data,
          p.scale,
          p.softcap,
          slope,
          c.dropout.enabled(),
          c.dropout,
          static_cast<uint32_t>(batch * p.heads + head)};
}

/// The rounds of Philox4x32 (core/philox.h) on vectors of counters; the lanes of c[0] to c[3] are
/// the counters' four words, and become the results' words. Lanes has a type V and, on it,
///   set(word)                        the word in all lanes
///   xor3(a, b, c)                    a ^ b ^ c
///   multiply(a, word, high, low)     both halves of the 64-bit products of a's lanes and the word
template <typename Lanes>
STROBE_INLINE void philox_rounds(const Dropout& dropout, typename Lanes::V (&c)[4]) {
  uint32_t key0 = dropout.key0, key1 = dropout.key1;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    typename Lanes::V high0, low0, high1, low1;
    Lanes::multiply(c[0], kPhiloxM0, high0, low0);
    Lanes::multiply(c[2], kPhiloxM1, high1, low1);
    c[0] = Lanes::xor3(high1, c[1], Lanes::set(key0));
    c[2] = Lanes::xor3(high0, c[3], Lanes::set(key1));
    c[1] = low1;
    c[3] = low0;
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
}

}  // namespace strobe::cpu

#endif  // STROBE_CPU_SCORE_H_
