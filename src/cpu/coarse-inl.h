// Backward rows whose lse says too little. The weights of a row are exp(score - lse), and lse is a
// float32: at 1000 it may be off by 3e-5, which all weights of the row then are, at 1e7 by 1/2, at
// 1e11 by thousands. From kCoarseLse on the row's maximum and sum are therefore computed again, as
// forward does, and a weight is exp(score - maximum) / sum, at most 1 as in plain attention. The
// division costs nothing: everything that backward computes is linear in dO, so that row of dO (and
// of delta) is divided.
#ifndef STROBE_CPU_COARSE_INL_H_
#define STROBE_CPU_COARSE_INL_H_

#include "cpu/forward-inl.h"

namespace strobe::cpu::STROBE_ISA {

constexpr float kCoarseLse = 1024;

STROBE_SIMD bool coarse(float lse) {
  const float size = lse < 0 ? -lse : lse;
  return size >= kCoarseLse && size < kInfinity;
}

/// How the weights of one row come from its scores: exp2((score * factor - reference) * unit), with
/// softcap and ALiBi after the factor. `divisor`: what dO and delta are multiplied by.
struct RowSoftmax {
  float factor, reference;
  float unit;
  float divisor;
};

/// `at`: of the row in lse.
STROBE_SIMD RowSoftmax row_softmax(const BackwardContext& c, const ScoreRule& rule, int64_t at) {
  const float lse = c.lse[at];
  if (!coarse(lse)) return {rule.scale, lse, kLog2e, 1};
  // As in forward, bit for bit.
  return {rule.plain ? q_factor(rule) : rule.scale, c.row_max[at], score_unit(rule) * kLog2e,
          1 / c.row_sum[at]};
}

STROBE_SIMD ForwardContext forward_of(const BackwardContext& c) {
  ForwardContext f{};
  static_cast<Context&>(f) = c;
  f.block_q = kForwardTileQ;
  return f;
}

static size_t coarse_scratch(const BackwardContext& c) { return forward_scratch(forward_of(c)); }

/// row_max and row_sum of the item's queries, tile by tile where some row needs them.
static void find_row_sums(const BackwardContext& c, const ForwardItem& item, std::byte* scratch) {
  const AttentionProblem& p = c.problem;
  const Sequence sequence = c.sequence(item.batch);
  const int64_t at = sequence.lse_row + item.head * c.sequences.lse_head_stride;
  for (int64_t q = item.q_begin; q < item.q_end; q += kForwardTileQ) {
    const int64_t end = min64(q + kForwardTileQ, item.q_end);
    bool any = false;
    for (int64_t i = q; i < end; ++i) any |= coarse(c.lse[at + i]);
    if (!any) continue;

    Arena arena(scratch);
    const ForwardScratch s = carve_forward(arena, forward_of(c));
    ForwardTile& tile = s.tiles[0];
    start_tile(c, sequence, item, q, s.rows, tile);
    ScoreRule rule = score_rule(c, item.batch, item.head);
    rule.dropout = false;  // it comes after the softmax
    for (Range block = block_at(tile.keys, tile.keys.begin, kForwardTileK); !block.empty();
         block = block_at(tile.keys, block.end, kForwardTileK)) {
      load_rows(c.k, p.dtype, item.batch, item.head / (p.heads / p.heads_kv),
                sequence.k_row + block.begin, block.size(), p.head_dim, s.k,
                round_up(p.head_dim, kLanes));
      weigh_keys(c, rule, sequence, item, tile, block, block, s);
    }
    for (int64_t i = q; i < end; ++i) {
      c.row_max[at + i] = tile.max[i - q];
      c.row_sum[at + i] = tile.sum[i - q];
    }
  }
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_COARSE_INL_H_
