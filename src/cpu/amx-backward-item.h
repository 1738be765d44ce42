// What the backward pass does once for each item and query tile: it packs the operands, adds dQ to
// that of the items before, and writes the results.
#ifndef STROBE_CPU_AMX_BACKWARD_ITEM_H_
#define STROBE_CPU_AMX_BACKWARD_ITEM_H_

#include "cpu/amx-backward.h"
#include "cpu/amx-forward-online.h"

namespace strobe::cpu::amx {

static Tiles backward_tiles(const AttentionProblem& p) {
  // K, V, K^T, dK, dV and dS of an item should stay in L2: 1.3 MB at 512 keys and head_dim 128.
  const int64_t block = p.head_dim + p.head_dim_v > 256 ? kBackwardBlock / 2 : kBackwardBlock;
  return {kBackwardTileQ, kStrip, block};
}

static size_t backward_scratch(const BackwardContext& context) {
  Arena arena, row_sums;
  carve_backward(arena, context);
  carve_forward(row_sums, context.forward(kForwardTileQ), kForwardTileQ);
  return arena.used() > row_sums.used() ? arena.used() : row_sums.used();
}

/// Lanes whose lse is large (kLargeLse). Infinity stands for a row that sees nothing.
STROBE_AMX uint32_t large_lanes(const float* lse, int64_t count) {
  const __m512 x =
      _mm512_abs_ps(_mm512_maskz_loadu_ps(static_cast<__mmask16>(lanes(0, count)), lse));
  return _mm512_cmp_ps_mask(x, set(kLargeLse), _CMP_GE_OQ) &
         _mm512_cmp_ps_mask(x, set(kInfinity), _CMP_LT_OQ);
}
STROBE_AMX bool any_large(const float* lse, int64_t count) {
  uint32_t large = 0;
  for (int64_t r = 0; r < count; r += kTile) large |= large_lanes(lse + r, count - r);
  return large != 0;
}

/// Fills row_max and row_sum of tiles in which some row's lse is large: the maximum of the scores
/// that backward will compute, bit for bit, and the sum of the weights. lse does not tell them, and
/// decoding made it by another kernel's arithmetic, whose scores of 1e7 differ by 1 and more.
static void find_row_sums(const BackwardContext& c, const ForwardItem& item, std::byte* scratch) {
  const Sequence sequence = c.sequence(item.batch, item.head);
  const int64_t at = c.lse_index(sequence, item.head);
  for (int64_t q = item.q_begin; q < item.q_end; q += kForwardTileQ) {
    const Range tile{q, min64(q + kForwardTileQ, item.q_end)};
    if (!any_large(c.lse + at + tile.begin, tile.size())) continue;
    Arena arena(scratch);
    const ForwardContext context = c.forward(kForwardTileQ);
    const Forward f{context,
                    sequence,
                    {item.batch, item.head, tile.begin, tile.end},
                    carve_forward(arena, context, kForwardTileQ)};
    pack_rows(f.q_rows(tile), kForwardTileQ, f.s.q);
    f.find_few(1);
    configure_tiles();
    online_tiles(f, 0, 1, 0);
    tile_release();
    for (int64_t r = 0; r < tile.size(); ++r) {
      c.row_max[at + tile.begin + r] = f.s.reference[r * kTile];
      c.row_sum[at + tile.begin + r] = f.s.sum[r * kTile];
      if (large_lanes(c.lse + at + tile.begin + r, 1) != 0) {
        complete_row_sum(c, item.head, at + tile.begin + r,
                         static_cast<double>(f.s.reference[r * kTile]));
      }
    }
  }
}

static void backward_delta(const BackwardContext& c, const ForwardItem& item, std::byte* scratch) {
  find_row_sums(c, item, scratch);
  if (!c.made_delta) return;
  const AttentionProblem& p = c.problem;
  const Sequence sequence = c.sequence(item.batch, item.head);
  const int64_t at = c.lse_index(sequence, item.head);
  const Range queries{item.q_begin, item.q_end};
  const RowView out_rows = c.query_rows(c.out, sequence, item.head);
  const Rows out(out_rows, queries, p.head_dim_v);
  const Rows dout(c.query_rows(c.dout, sequence, item.head), queries, p.head_dim_v);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  for (int64_t r = 0; r < queries.size(); ++r) {
    __m512 sum = _mm512_setzero_ps();
    if (p.out_dtype == STROBE_FLOAT32) {
      const auto* const x = reinterpret_cast<const float*>(out_rows.row(item.q_begin + r));
      const Bf16* const y = dout.data(r);
      for (int64_t e = 0; e < out.dim; e += kTile) {
        const auto some = static_cast<__mmask16>(lanes(0, out.dim - e));
        const __m512i pair = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, y + e));
        sum = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(some, x + e),
                              as_float(_mm512_slli_epi32(pair, 16)), sum);
      }
    } else {
      for (int64_t e = 0; e < out.dim; e += kPair) {
        const __m512i x = out.at(r, e), y = dout.at(r, e);
        sum = _mm512_fmadd_ps(as_float(_mm512_slli_epi32(x, 16)),
                              as_float(_mm512_slli_epi32(y, 16)), sum);
        sum = _mm512_fmadd_ps(as_float(_mm512_and_si512(x, high)),
                              as_float(_mm512_and_si512(y, high)), sum);
      }
    }
    const int64_t row = at + item.q_begin + r;
    c.made_delta[row] = _mm512_reduce_add_ps(sum) - (c.dlse ? c.dlse[row] : 0);
  }
}

/// Packs the item's keys, and sets their gradients to zero. Returns whether K has rows that
/// pack_pairs leaves out.
static bool start_item(const Backward& b) {
  const AttentionProblem& p = b.c.problem;
  const int64_t padded = b.strips() * kStrip;
  const Rows k = b.key_rows(b.c.k, b.keys(), p.head_dim);
  const Rows v = b.key_rows(b.c.v, b.keys(), p.head_dim_v);
  pack_rows(k, padded, b.s.k);
  pack_rows(v, padded, b.s.v);
  // K's pairs stand in dK's room for the moment.
  auto* const pairs = reinterpret_cast<Bf16*>(b.s.dk);
  const bool nonfinite = pack_pairs<false>(k, padded, pairs, b.s.k_nonfinite);
  for (int64_t t = 0; t < padded * b.d_blocks * kPair; t += kTileBf16) {
    __m512i x[16];
    STROBE_UNROLL for (int i = 0; i < 16; ++i) x[i] = _mm512_load_si512(pairs + t + i * kPair);
    transpose(x);
    STROBE_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(b.s.kt + t + i * kPair, x[i]);
  }
  __builtin_memset(b.s.dk, 0, static_cast<size_t>(padded * b.d_blocks * kPair) * sizeof(float));
  __builtin_memset(b.s.dv, 0, static_cast<size_t>(padded * b.dv_blocks * kPair) * sizeof(float));
  return nonfinite;
}

/// Whether the tile products may start at lse and delta. Scores must be scale * q.k, without
/// dropout; lse / scale must be a number of an ordinary size, and lse's rounding error small beside
/// that of a weight.
static bool may_start_at_lse(const Backward& b, const QueryTile& t) {
  const ScoreOptions& options = t.scorer.options;
  if (!options.linear || options.dropout) return false;
  if (!(__builtin_fabsf(options.scale) > 1e-20f)) return false;
  const float* const lse = b.c.lse + b.c.lse_index(b.sequence, t.head) + t.queries.begin;
  return !any_large(lse, t.queries.size());
}

/// Packs a tile's queries. Returns whether Q or dO has rows that pack_pairs leaves out.
static bool start_query_tile(const Backward& b, const QueryTile& t) {
  const AttentionProblem& p = b.c.problem;
  const int64_t n = t.queries.size(), padded = t.sub_tiles() * kSubTile;
  const Rows q = b.query_rows(b.c.q, t.head, t.queries, p.head_dim);
  const Rows dout = b.query_rows(b.c.dout, t.head, t.queries, p.head_dim_v);
  pack_transposed(q, padded, b.s.q);
  pack_transposed(dout, padded, b.s.dout);
  bool nonfinite = pack_pairs<true>(q, padded, b.s.q_pairs, b.s.q_nonfinite);
  nonfinite |= pack_pairs<true>(dout, padded, b.s.dout_pairs, b.s.dout_nonfinite);
  const int64_t at = b.c.lse_index(b.sequence, t.head) + t.queries.begin;
  const float lse_factor = t.starts_at_lse ? -1 / t.scorer.options.scale : -1;
  for (int64_t r = 0; r < padded; ++r) {
    b.s.lse[r] = r < n ? canonical_nan(b.c.lse[at + r] * lse_factor) : 0;
    b.s.over_sum[r] = 1;
    if (!t.starts_at_lse && large_lanes(b.c.lse + at + r, min64(n - r, 1)) != 0) {
      b.s.lse[r] = canonical_nan(-b.c.row_max[at + r]);
      b.s.over_sum[r] = canonical_nan(1 / b.c.row_sum[at + r]);
    }
    b.s.delta[r] = r < n ? canonical_nan(-b.c.delta[at + r]) : 0;
  }
  return nonfinite;
}

/// Writes a query tile's dQ from its transposed tiles.
static void write_dq(const Backward& b, const QueryTile& t, const float* dq) {
  const AttentionProblem& p = b.c.problem;
  const RowView rows = b.c.query_rows(b.c.dq, b.sequence, t.head);
  const __m512 scale = set(p.scale);
  for (int64_t q = 0; q < t.queries.size(); q += kTile) {
    for (int64_t e = 0; e < b.d_blocks; ++e) {
      const float* const low = dq + (e * 2 * (kBackwardTileQ / kTile) + q / kTile) * kTileFloat;
      const float* const high = low + kBackwardTileQ / kTile * kTileFloat;
      __m512i x[16], y[16];
      STROBE_UNROLL for (int i = 0; i < 16; ++i) {
        x[i] = as_int(load(low + i * kTile));
        y[i] = as_int(load(high + i * kTile));
      }
      transpose(x);
      transpose(y);
      for (int64_t r = 0; r < min64(kTile, t.queries.size() - q); ++r) {
        __m512 first, second;
        pair_columns(as_float(x[r]), as_float(y[r]), first, second);
        write_gradient(p, first, second, scale, p.head_dim, rows.row(t.queries.begin + q + r),
                       e * kPair);
      }
    }
  }
}

/// Writes rows of dK or dV from their tiles.
static void write_rows(const Backward& b, const Tensor& tensor, const float* sum, int64_t blocks,
                       int64_t dim, float factor) {
  const RowView rows = b.c.key_rows(tensor, b.sequence, b.item.head_kv);
  for (int64_t r = 0; r < b.keys().size(); ++r) {
    const float* const at = sum + r / kStrip * kStrip * blocks * kPair +
                            r % kStrip / kTile * 2 * kTileFloat + r % kTile * kTile;
    for (int64_t e = 0; e < blocks; ++e) {
      __m512 first, second;
      pair_columns(load(at + e * 4 * kTileFloat), load(at + (e * 4 + 1) * kTileFloat), first,
                   second);
      write_gradient(b.c.problem, first, second, set(factor), dim, rows.row(b.item.k_begin + r),
                     e * kPair);
    }
  }
}

/// The sum of a tile with less than 128 queries is stored as [dimension][query]. This adds it to
/// dQ^T, or stores dQ^T in it.
template <bool kToSum>
static void add_ragged(const Backward& b, const QueryTile& t, float* sum, float* dq) {
  const int64_t n = t.queries.size();
  for (int64_t e = 0; e < b.d_blocks * kPair; ++e) {
    for (int64_t q = 0; q < n; q += kTile) {
      float* const tile =
          dq + (e / kTile * (kBackwardTileQ / kTile) + q / kTile) * kTileFloat + e % kTile * kTile;
      float* const row = sum + e * n + q;
      const auto lane = static_cast<__mmask16>(lanes(0, n - q));
      if constexpr (kToSum) {
        _mm512_mask_storeu_ps(row, lane, load(tile));
      } else {
        store(tile, _mm512_add_ps(load(tile), _mm512_maskz_loadu_ps(lane, row)));
      }
    }
  }
}

template <int kSteps>
static void backward_tile(const Backward& b, const QueryTile& t, Addition addition,
                          bool k_nonfinite) {
  const bool q_nonfinite = start_query_tile(b, t);
  BackwardTile<kSteps> tile(b, t, k_nonfinite, q_nonfinite);
  tile.run_strips();

  uint32_t* const turn = turn_of(b.c, b.item.batch, t.head, t.queries.begin);
  float* const sum =
      b.c.dq_sum + (b.c.lse_index(b.sequence, t.head) + t.queries.begin) * b.c.dq_stride;
  if (t.queries.size() == kBackwardTileQ) {
    if (!addition.first) wait_turn(turn, addition.order);
    tile.run_dq(addition.first ? nullptr : sum, addition.last ? b.s.dq : sum);
  } else {
    tile.run_dq(nullptr, b.s.dq);
    if (!addition.first) {
      wait_turn(turn, addition.order);
      add_ragged<false>(b, t, sum, b.s.dq);
    }
    if (!addition.last) add_ragged<true>(b, t, sum, b.s.dq);
  }
  if (addition.last) {
    write_dq(b, t, b.s.dq);
  } else {
    pass_turn(turn, addition.order);
  }
}

static void backward_block(const BackwardContext& c, const BackwardItem& item, std::byte* scratch) {
  configure_tiles();
  Arena arena(scratch);
  const AttentionProblem& p = c.problem;
  const Backward b{c, c.sequence_of_all_heads(item.batch), item, carve_backward(arena, c)};
  const bool k_nonfinite = start_item(b);
  const Mask& mask = b.sequence.mask;
  const int64_t item_block = item.k_begin / c.block_k;
  // Where there are no queries, there may be billions of heads.
  const int64_t heads = mask.seqlen_q > 0 ? c.group() : 0;
  for (int64_t head = item.head_kv * c.group(); head < item.head_kv * c.group() + heads; ++head) {
    QueryTile t{head, {0, 0}, Scorer(score_options(c, item.batch, head)), false, 0};
    const BlockWalk tiles = queries_of(c, b.sequence, head, b.keys(), kBackwardTileQ);
    for (int64_t n = tiles.begin; n < tiles.end; n = tiles.after(n)) {
      t.queries = block_at({0, mask.seqlen_q}, tiles.block(n) * kBackwardTileQ, kBackwardTileQ);
      const BlockWalk blocks = keys_of(c, b.sequence, head, t.queries, c.block_k);
      if (!blocks.visits(item_block)) continue;
      const Addition addition = addition_at(blocks, blocks.rank(item_block));
      t.starts_at_lse = may_start_at_lse(b, t);
      t.few = 0;
      for (int64_t i = 0; i < t.sub_tiles(); ++i) {
        const Range rows = t.sub_tile(i);
        const BlockWalk walk = keys_of(c, b.sequence, head, rows, kLeastWalkBlock);
        t.few |= static_cast<uint32_t>(splits_weights(c, b.sequence, head, rows, walk)) << i;
      }
      if (b.d_blocks + b.dv_blocks <= 3) {
        backward_tile<2>(b, t, addition, k_nonfinite);
      } else {
        backward_tile<1>(b, t, addition, k_nonfinite);
      }
    }
  }
  write_rows(b, c.dk, b.s.dk, b.d_blocks, p.head_dim, p.scale);
  write_rows(b, c.dv, b.s.dv, b.dv_blocks, p.head_dim_v, 1);
  tile_release();
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_BACKWARD_ITEM_H_
