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

// Kernels that multiply bf16 round the weights (and their gradients) to bf16, but for these:
/// of queries that see no more keys. Where a row has few weights they are large, and so are the
/// results: weights rounded once would add as much to the results' errors as rounding the results
/// does.
inline constexpr int64_t kFewKeys = 48;
/// And of keys that no more queries (of a head) see, for their dK and dV.
inline constexpr int64_t kFewQueries = 8;

/// Whether one of the queries is such a query.
STROBE_INLINE bool sees_few_keys(const Mask& mask, Range queries) {
  for (int64_t i = queries.begin; i < queries.end; ++i) {
    const Range seen = mask.row(i);
    if (!seen.empty() && seen.size() <= kFewKeys) return true;
  }
  return false;
}

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
          c.dropout.batch_head(batch, head)};
}

/// Exponentials and logarithms of single numbers.
struct ScalarMath {
  STROBE_INLINE static float exp(float x) { return __builtin_expf(x); }
  STROBE_INLINE static float log1p(float x) { return __builtin_log1pf(x); }
};

/// How a row that has been gone through ends: with the sums of its weights, which are
/// exp(score - reference), and with its head's sink.
struct RowEnd {
  SinkShare<double> sink;
  double reference;
  bool empty;        // the row sees no key
  float given_sink;  // minus infinity: none
  bool in_lse;

  /// reference: a natural logarithm; minus infinity where no score is above that.
  STROBE_INLINE static RowEnd of(const Context& c, int64_t head, double reference, bool empty) {
    const float sink = c.sink(head);
    return {SinkShare<double>::of<ScalarMath>(static_cast<double>(sink), reference), reference,
            empty, sink, c.sinks_in_lse};
  }

  /// What O is multiplied by. numerator: over what the sum of its weights is divided. own: what the
  /// sink's weight is multiplied by, where O's weights are smaller than they should be. Seen scores
  /// that are all -inf leave a sum of 0, and give NaN as standard attention does.
  STROBE_INLINE float factor(float sum, float numerator = 1, float own = 1) const {
    if (empty) return 0;
    const float all = sum * sink.keys + sink.own * own;
    return all == 0 ? __builtin_nanf("") : numerator * sink.keys / all;
  }
  STROBE_INLINE float lse(float sum) const {
    if (empty) return in_lse ? given_sink : -kInfinity;
    const auto of_sum = [](double at, float x) {
      return static_cast<float>(at + __builtin_log(static_cast<double>(x)));
    };
    if (given_sink == -kInfinity) return sum == 0 ? __builtin_nanf("") : of_sum(reference, sum);
    if (in_lse) return of_sum(sink.reference, sink.sum(sum));
    return sum == 0 ? -kInfinity : of_sum(reference, sum);
  }
};

/// Completes the row_sum of a row whose lse is large, which is that of the keys of this launch, and
/// whose maximum is `reference`, a natural logarithm. The sink is one more term, and its weight is
/// told. Where the caller gives delta, these keys may be a part of those in lse: then lse tells the
/// sum, as well as a float32 does. It is never less than that of these keys, so that no weight is
/// above 1 for the rounding of lse.
STROBE_INLINE void complete_row_sum(const BackwardContext& c, int64_t head, int64_t row,
                                    double reference) {
  const float sink = c.sink(head);
  const bool by_lse = c.problem.has_delta != 0;
  if (sink == -kInfinity && !by_lse) return;
  // Where all scores are -inf, there is no maximum to take off.
  if (reference == -kInfinity) c.row_max[row] = 0;
  // No larger than a float32 holds: the keys' weights are nothing beside it all the same.
  const auto term = [&](float x) {
    const double above = static_cast<double>(x) - reference;
    return ScalarMath::exp(above > kMostSinkAbove ? kMostSinkAbove : static_cast<float>(above));
  };
  const float own = sink == -kInfinity ? 0 : term(sink);
  c.row_sum[row] += own;
  if (by_lse) {
    const float all = term(c.lse[row]);
    if (all > c.row_sum[row]) c.row_sum[row] = all;
  }
  if (sink != -kInfinity && c.sink_weight) c.sink_weight[row] = own / c.row_sum[row];
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
