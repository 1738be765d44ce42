// What happens to a score between q.k and the softmax: scale, softcap, ALiBi; forward and backward
// alike.
#ifndef STROBE_CPU_SCORE_INL_H_
#define STROBE_CPU_SCORE_INL_H_

#include "cpu/simd-inl.h"

namespace strobe::cpu::STROBE_ISA {

/// What happens to a score between q.k and the softmax. Scores are in units of log 2 after it.
struct ScoreRule {
  bool plain;     // scale only, and that is folded into Q (or K): nothing to do
  float fold;     // the factor that is folded in
  float softcap;  // 0: none
  float slope;    // ALiBi
  bool dropout;
};

STROBE_SIMD ScoreRule score_rule(const Context& c, int64_t batch, int64_t head) {
  const AttentionProblem& p = c.problem;
  ScoreRule rule;
  rule.plain = p.softcap == 0 && !c.alibi_slopes;
  rule.fold = rule.plain ? p.scale * kLog2e : p.scale;
  rule.softcap = p.softcap;
  rule.slope = c.alibi_slope(batch, head);
  rule.dropout = c.dropout.enabled();
  return rule;
}

/// softcap and ALiBi. `distance`: |key - position of the query|. Also gives tanh(s / c), which
/// backward needs.
STROBE_SIMD VF apply_rule(const ScoreRule& rule, VF s, VF distance, VF& tanh) {
  if (rule.softcap > 0) {
    tanh = hn::Tanh(f32, hn::Mul(s, set(1 / rule.softcap)));
    s = hn::Mul(tanh, set(rule.softcap));
  }
  s = hn::NegMulAdd(set(rule.slope), distance, s);
  return hn::Mul(s, set(kLog2e));
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_SCORE_INL_H_
