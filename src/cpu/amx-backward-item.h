// What the backward pass does once for each item and query tile: copies of the operands, dQ's way
// from item to item, the results.
#ifndef STROBE_CPU_AMX_BACKWARD_ITEM_H_
#define STROBE_CPU_AMX_BACKWARD_ITEM_H_

#include "cpu/amx-backward.h"

namespace strobe::cpu::amx {

static Tiles backward_tiles(const AttentionProblem& p) {
  // K, V, K^T, dK, dV and dS of an item stay in L2: 1.3 MB at 512 keys and head_dim 128.
  const int64_t block = p.head_dim + p.head_dim_v > 256 ? kBackwardBlock / 2 : kBackwardBlock;
  return {kBackwardTileQ, kStrip, block};
}

static size_t backward_scratch(const BackwardContext& context) {
  Arena arena;
  carve_backward(arena, context);
  return arena.used();
}

static void backward_delta(const BackwardContext& c, const ForwardItem& item, std::byte*) {
  const AttentionProblem& p = c.problem;
  const Sequence sequence = c.sequence(item.batch);
  const int64_t at = sequence.lse_row + item.head * c.sequences.lse_head_stride,
                n = item.q_end - item.q_begin;
  const Rows out(c.out, item.batch, item.head, sequence.q_row + item.q_begin, n, p.head_dim_v);
  const Rows dout(c.dout, item.batch, item.head, sequence.q_row + item.q_begin, n, p.head_dim_v);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  for (int64_t r = 0; r < n; ++r) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t e = 0; e < out.dim; e += kPair) {
      const __m512i x = out.at(r, e), y = dout.at(r, e);
      sum = _mm512_fmadd_ps(as_float(_mm512_slli_epi32(x, 16)), as_float(_mm512_slli_epi32(y, 16)),
                            sum);
      sum = _mm512_fmadd_ps(as_float(_mm512_and_si512(x, high)),
                            as_float(_mm512_and_si512(y, high)), sum);
    }
    const int64_t row = at + item.q_begin + r;
    c.delta[row] = _mm512_reduce_add_ps(sum) - (c.dlse ? c.dlse[row] : 0);
  }
  for (int64_t q = item.q_begin; q < item.q_end; q += kBackwardTileQ) {
    const Range tile{q, min64(q + kBackwardTileQ, item.q_end)};
    if (!sequence.mask.kv_range(tile).empty()) continue;
    for (int64_t r = tile.begin; r < tile.end; ++r) {
      __builtin_memset(c.dq.at(item.batch, sequence.q_row + r, item.head), 0,
                       static_cast<size_t>(p.head_dim) * sizeof(Bf16));
    }
  }
}

/// Copies of the item's keys, and zeros for their gradients. Returns whether K has rows that
/// pack_pairs leaves out.
static bool start_item(const Backward& b) {
  const AttentionProblem& p = b.c.problem;
  const int64_t n = b.item.k_end - b.item.k_begin, padded = b.strips() * kStrip;
  const Rows k(b.c.k, b.item.batch, b.item.head_kv, b.sequence.k_row + b.item.k_begin, n,
               p.head_dim);
  const Rows v(b.c.v, b.item.batch, b.item.head_kv, b.sequence.k_row + b.item.k_begin, n,
               p.head_dim_v);
  pack_rows(k, padded, b.s.k);
  pack_rows(v, padded, b.s.v);
  // K's pairs pass through dK's room.
  auto* const pairs = reinterpret_cast<Bf16*>(b.s.dk);
  const bool special = pack_pairs(k, padded, pairs, b.s.k_special);
  for (int64_t t = 0; t < padded * b.d_blocks * kPair; t += kTileBf16) {
    __m512i x[16];
    STROBE_UNROLL for (int i = 0; i < 16; ++i) x[i] = _mm512_load_si512(pairs + t + i * kPair);
    transpose(x);
    STROBE_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(b.s.kt + t + i * kPair, x[i]);
  }
  __builtin_memset(b.s.dk, 0, static_cast<size_t>(padded * b.d_blocks * kPair) * sizeof(float));
  __builtin_memset(b.s.dv, 0, static_cast<size_t>(padded * b.dv_blocks * kPair) * sizeof(float));
  return special;
}

/// Whether the tile's scores may be computed with lse as the product's initial value: lse / scale
/// has to be a number of an ordinary size, and lse's rounding error small beside a weight's.
static bool lse_may_start(const Backward& b, const QueryTile& t) {
  if (!(__builtin_fabsf(t.rule.scale) > 1e-20f)) return false;
  const float* const lse =
      b.c.lse + b.sequence.lse_row + t.head * b.c.sequences.lse_head_stride + t.queries.begin;
  uint32_t large = 0;
  for (int64_t r = 0; r < t.queries.size(); r += kTile) {
    const auto lane = static_cast<__mmask16>(lanes(0, t.queries.size() - r));
    const __m512 x = _mm512_abs_ps(_mm512_maskz_loadu_ps(lane, lse + r));
    // Infinity stands for a row that sees nothing.
    large |= _mm512_cmp_ps_mask(x, set(kLargeScore), _CMP_GE_OQ) &
             _mm512_cmp_ps_mask(x, set(kInfinity), _CMP_LT_OQ);
  }
  return large == 0;
}

/// Copies of a tile's queries. Returns whether Q or dO has rows that pack_pairs leaves out.
static bool start_query_tile(const Backward& b, const QueryTile& t) {
  const AttentionProblem& p = b.c.problem;
  const int64_t n = t.queries.size(), padded = t.sub_tiles() * kSubTile;
  const int64_t row = b.sequence.q_row + t.queries.begin;
  const Rows q(b.c.q, b.item.batch, t.head, row, n, p.head_dim);
  const Rows dout(b.c.dout, b.item.batch, t.head, row, n, p.head_dim_v);
  pack_columns(q, padded, b.s.q);
  pack_columns(dout, padded, b.s.dout);
  bool special = pack_pairs(q, padded, b.s.q_pairs, b.s.q_special);
  special |= pack_pairs(dout, padded, b.s.dout_pairs, b.s.dout_special);
  const int64_t at = b.sequence.lse_row + t.head * b.c.sequences.lse_head_stride + t.queries.begin;
  const float lse_factor = t.rule.plain ? -1 / t.rule.scale : -1;
  for (int64_t r = 0; r < padded; ++r) {
    b.s.lse[r] = r < n ? plain_nan(b.c.lse[at + r] * lse_factor) : 0;
    b.s.delta[r] = r < n ? plain_nan(-b.c.delta[at + r]) : 0;
  }
  return special;
}

/// Writes a query tile's dQ from its transposed tiles.
static void write_dq(const Backward& b, const QueryTile& t, const float* dq) {
  const AttentionProblem& p = b.c.problem;
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
        auto* const to = reinterpret_cast<Bf16*>(
            b.c.dq.at(b.item.batch, b.sequence.q_row + t.queries.begin + q + r, t.head));
        __m512 first, second;
        pair_columns(as_float(x[r]), as_float(y[r]), first, second);
        write_block(first, second, scale, p.head_dim - e * kPair, to + e * kPair);
      }
    }
  }
}

/// Rows of dK or dV from their tiles.
static void write_rows(const Backward& b, const Tensor& tensor, const float* sum, int64_t blocks,
                       int64_t dim, float factor) {
  for (int64_t r = 0; r < b.item.k_end - b.item.k_begin; ++r) {
    const float* const at = sum + r / kStrip * kStrip * blocks * kPair +
                            r % kStrip / kTile * 2 * kTileFloat + r % kTile * kTile;
    auto* const to = reinterpret_cast<Bf16*>(
        tensor.at(b.item.batch, b.sequence.k_row + b.item.k_begin + r, b.item.head_kv));
    for (int64_t e = 0; e < blocks; ++e) {
      __m512 first, second;
      pair_columns(load(at + e * 4 * kTileFloat), load(at + (e * 4 + 1) * kTileFloat), first,
                   second);
      write_block(first, second, set(factor), dim - e * kPair, to + e * kPair);
    }
  }
}

/// The sum of a tile with less than 128 queries stands as [dimension][query]: adds it to dQ^T, or
/// the other way round.
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
static void backward_tile(const Backward& b, const QueryTile& t, Visit turn, bool k_special) {
  const bool q_special = start_query_tile(b, t);
  BackwardTile<kSteps> tile(b, t, k_special, q_special);
  tile.run_strips();

  uint32_t* const counter = turn_of(b.c, b.item.batch, t.head, t.queries.begin);
  float* const sum =
      b.c.dq_sum + (b.sequence.lse_row + t.head * b.c.sequences.lse_head_stride + t.queries.begin) *
                       b.c.dq_stride;
  if (t.queries.size() == kBackwardTileQ) {
    if (!turn.first) wait_turn(counter, turn.order);
    tile.run_dq(turn.first ? nullptr : sum, turn.last ? b.s.dq : sum);
  } else {
    tile.run_dq(nullptr, b.s.dq);
    if (!turn.first) {
      wait_turn(counter, turn.order);
      add_ragged<false>(b, t, sum, b.s.dq);
    }
    if (!turn.last) add_ragged<true>(b, t, sum, b.s.dq);
  }
  if (turn.last) {
    write_dq(b, t, b.s.dq);
  } else {
    pass_turn(counter, turn.order);
  }
}

static void backward_block(const BackwardContext& c, const BackwardItem& item, std::byte* scratch) {
  configure_tiles();
  Arena arena(scratch);
  const AttentionProblem& p = c.problem;
  const Backward b{c,
                   c.sequence(item.batch),
                   item,
                   carve_backward(arena, c),
                   padded_dim(p.head_dim) / kPair,
                   padded_dim(p.head_dim_v) / kPair};
  const bool k_special = start_item(b);
  const Mask& mask = b.sequence.mask;
  const Range queries = mask.q_range(b.keys());
  const int64_t group = p.heads / p.heads_kv;
  // Without queries there may be billions of heads.
  const int64_t heads = mask.seqlen_q > 0 ? group : 0;
  for (int64_t head = item.head_kv * group; head < item.head_kv * group + heads; ++head) {
    QueryTile t{head, {0, 0}, ScoreRule(c, item.batch, head), 0};
    const bool plain = t.rule.plain;
    for (int64_t q = queries.begin / kBackwardTileQ * kBackwardTileQ; q < queries.end;
         q += kBackwardTileQ) {
      t.queries = {q, min64(q + kBackwardTileQ, mask.seqlen_q)};
      const Visit turn = visit(c, mask, t.queries, item.k_begin);
      if (turn.none) continue;
      t.rule.plain = plain && lse_may_start(b, t);
      t.few = 0;
      for (int64_t n = 0; n < t.sub_tiles(); ++n) {
        t.few |= static_cast<uint32_t>(mask.kv_range(t.sub_tile(n)).size() <= kFewKeys) << n;
      }
      if (b.d_blocks + b.dv_blocks <= 3) {
        backward_tile<2>(b, t, turn, k_special);
      } else {
        backward_tile<1>(b, t, turn, k_special);
      }
    }
  }
  write_rows(b, c.dk, b.s.dk, b.d_blocks, p.head_dim, p.scale);
  write_rows(b, c.dv, b.s.dv, b.dv_blocks, p.head_dim_v, 1);
  _tile_release();
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_BACKWARD_ITEM_H_
