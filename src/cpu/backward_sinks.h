// What attention sinks add to the backward pass, around the kernels, which know of them only that
// lse has them.
#ifndef STROBE_CPU_BACKWARD_SINKS_H_
#define STROBE_CPU_BACKWARD_SINKS_H_

#include <cstdint>

#include "core/kernel.h"
#include "core/workspace.h"
#include "cpu/kernels.h"
#include "cpu/score.h"

namespace strobe::cpu {

/// Makes lse with the sinks where the caller's is without; the sinks' own gradient; and the
/// gradient of lse, which is of the keys alone where the sinks are not in lse.
class BackwardSinks {
 public:
  // Replaces the context's lse where that has to be made.
  BackwardSinks(const BackwardArgs& args, Arena& arena, BackwardContext& c)
      : lse_(args.lse), dlse_(c.problem.has_dlse ? args.dlse : nullptr) {
    const AttentionProblem& p = c.problem;
    const int64_t rows = rows_q(p) * p.heads;
    if (p.sinks_outside_lse) c.lse = made_lse_ = arena.take<float>(rows);
    if (p.has_dsinks) c.sink_weight = arena.take<float>(rows);
  }

  // Before backward_delta of some queries of a head.
  void begin(const BackwardContext& c, int64_t head, int64_t lse_at, Range queries) const {
    if (!c.sinks) return;
    for (int64_t row = lse_at + queries.begin; row < lse_at + queries.end; ++row) {
      const SinkOfRow sink = of(c, head, row);
      if (made_lse_) made_lse_[row] = sink.lse;
      if (c.sink_weight) c.sink_weight[row] = sink.weight;
    }
  }

  // After it: delta is dout * out. sink_weight becomes what the row adds to the sink's gradient.
  // no_key(query): whether the query sees none; then out is 0 whatever dout holds, unless lse says
  // that the sink has not all weight: the row then has keys elsewhere, in another call's part.
  template <typename NoKey>
  void end(const BackwardContext& c, int64_t head, int64_t lse_at, Range queries,
           const NoKey& no_key) const {
    if (!c.sinks) return;
    for (int64_t q = queries.begin; q < queries.end; ++q) {
      const int64_t row = lse_at + q;
      const float dlse = dlse_ ? dlse_[row] : 0;
      if (c.sink_weight) {
        const bool empty = !(c.sink_weight[row] < 1) && no_key(q);
        const float weight = empty ? 1 : c.sink_weight[row];
        const float of_out = empty && c.made_delta ? 0 : c.delta[row];
        const float of_row = weight * ((c.sinks_in_lse ? dlse : 0) - of_out);
        c.sink_weight[row] = c.sink(head) == -kInfinity ? 0 : of_row;
      }
      if (dlse_) c.made_delta[row] -= dlse * of(c, head, row).dlse_factor;
    }
  }

  // The gradient of a head's sink, when end has been called for all queries in use.
  static void write_gradient(const BackwardContext& c, int64_t head, float* dsinks) {
    double sum = c.problem.accumulate ? static_cast<double>(dsinks[head]) : 0;
    for (int64_t batch = 0; batch < c.problem.batch; ++batch) {
      const SequenceRows s = c.sequence_rows(batch);
      const float* const of_rows = c.sink_weight + c.lse_index(s, head);
      for (int64_t q = 0; q < s.seqlen_q; ++q) sum += static_cast<double>(of_rows[q]);
    }
    dsinks[head] = static_cast<float>(sum);
  }

 private:
  SinkOfRow of(const BackwardContext& c, int64_t head, int64_t row) const {
    return SinkOfRow::of<ScalarMath>(c.sink(head), lse_[row], c.sinks_in_lse);
  }

  const float *lse_, *dlse_;  // the caller's
  float* made_lse_ = nullptr;
};

}  // namespace strobe::cpu

#endif  // STROBE_CPU_BACKWARD_SINKS_H_
