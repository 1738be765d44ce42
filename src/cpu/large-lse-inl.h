// Backward rows whose lse is large. The weights of a row are exp(score - lse), and lse is a
// float32: at 1000 it may be off by 3e-5, which all weights of the row then are, at 1e7 by 1/2, at
// 1e11 by thousands. From kLargeLse on, the row's maximum and sum are therefore computed again as
// forward computes them, and a weight is exp(score - maximum) / sum, which is at most 1 as in
// standard attention. Where the keys may be a part of the row's (complete_row_sum), the sum is no
// better than lse tells it.
#ifndef STROBE_CPU_LARGE_LSE_INL_H_
#define STROBE_CPU_LARGE_LSE_INL_H_

#include "cpu/forward-inl.h"

namespace strobe::cpu::STROBE_ISA {

STROBE_SIMD bool is_large(float lse) {
  const float size = lse < 0 ? -lse : lse;
  return size >= kLargeLse && size < kInfinity;  // infinity: the row sees nothing
}

/// How the weights of one row come from its scores: exp2((score - reference) * unit) * over_sum.
/// The score is q.k * factor where the score is linear, and the Scorer's otherwise.
struct RowSoftmax {
  float factor, reference;
  float unit;
  float over_sum;  // what a weight is multiplied by
};

/// lse_at: the row's place in lse.
STROBE_SIMD RowSoftmax row_softmax(const BackwardContext& c, const ScoreOptions& options,
                                   int64_t lse_at) {
  const float lse = c.lse[lse_at];
  if (!is_large(lse)) return {options.scale, lse, kLog2e, 1};
  // As in forward, bit for bit.
  return {options.linear ? q_factor(options) : options.scale, c.row_max[lse_at],
          score_unit(options) * kLog2e, 1 / c.row_sum[lse_at]};
}

/// Fills row_max and row_sum of the item's queries, for each tile in which some row needs them.
static void find_row_sums(const BackwardContext& c, const ForwardItem& item, std::byte* scratch) {
  const AttentionProblem& p = c.problem;
  const Sequence sequence = c.sequence(item.batch, item.head);
  const int64_t at = c.lse_index(sequence, item.head);
  const RowView k = c.key_rows(c.k, sequence, c.head_kv(item.head));
  for (int64_t q = item.q_begin; q < item.q_end; q += kForwardTileQ) {
    const int64_t end = min64(q + kForwardTileQ, item.q_end);
    bool any = false;
    for (int64_t i = q; i < end; ++i) any |= is_large(c.lse[at + i]);
    if (!any) continue;

    Arena arena(scratch);
    const ForwardContext forward = c.forward(kForwardTileQ);
    const ForwardScratch s = carve_forward(arena, forward);
    ForwardTile& tile = s.tiles[0];
    start_tile(forward, sequence, item, q, s.rows, tile);
    ScoreOptions options = score_options(c, item.batch, item.head);
    options.dropout = false;  // it comes after the softmax
    RowsAhead none_ahead;
    for (int64_t place = tile.walk.begin; place < tile.walk.end; place = tile.walk.after(place)) {
      const Range block = forward_keys(tile.walk.block(place), tile.size, tile.keys);
      load_keys(k, p, block, s.k);
      weigh_keys(c, options, sequence, item.head, tile, block, block,
                 hidden_from(c, sequence, item.head, tile, place, block), none_ahead, s);
    }
    for (int64_t i = q; i < end; ++i) {
      c.row_max[at + i] = tile.max[i - q];
      c.row_sum[at + i] = tile.sum[i - q];
      if (is_large(c.lse[at + i])) {
        complete_row_sum(
            c, item.head, at + i,
            static_cast<double>(tile.max[i - q]) * static_cast<double>(score_unit(options)));
      }
    }
  }
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_LARGE_LSE_INL_H_
