// What happens to a score between q.k and the softmax: scale, softcap, ALiBi; forward and backward
// alike.
#ifndef STROBE_CPU_SCORE_INL_H_
#define STROBE_CPU_SCORE_INL_H_

#include "cpu/simd-inl.h"

namespace strobe::cpu::STROBE_ISA {

/// What happens to a score between q.k and the softmax.
struct ScoreRule {
  bool plain;     // scale only: no softcap, no ALiBi
  float scale;    // multiplies q.k
  float softcap;  // 0: none
  float slope;    // ALiBi
  bool dropout;
};

STROBE_SIMD ScoreRule score_rule(const Context& c, int64_t batch, int64_t head) {
  const AttentionProblem& p = c.problem;
  return {p.softcap == 0 && !c.alibi_slopes, p.scale, p.softcap, c.alibi_slope(batch, head),
          c.dropout.enabled()};
}

/// softcap and ALiBi on a scaled score. `distance`: |key - position of the query|. Also gives
/// tanh(s / c), which backward needs.
STROBE_SIMD VF apply_rule(const ScoreRule& rule, VF s, VF distance, VF& tanh) {
  if (rule.softcap > 0) {
    // A division: 1 / softcap is infinite below 2.9e-39.
    tanh = hn::Tanh(f32, hn::Div(s, set(rule.softcap)));
    s = hn::Mul(tanh, set(rule.softcap));
  }
  return hn::NegMulAdd(set(rule.slope), distance, s);
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_SCORE_INL_H_
