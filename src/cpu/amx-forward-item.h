// What the forward pass does once for each item: it packs Q, K and V, finds the rows' references
// and writes the results.
#ifndef STROBE_CPU_AMX_FORWARD_ITEM_H_
#define STROBE_CPU_AMX_FORWARD_ITEM_H_

#include "cpu/amx-forward-online.h"
#include "cpu/amx-forward.h"

namespace strobe::cpu::amx {

static Tiles forward_tiles(const AttentionProblem& p) {
  // To pack a block of K and V costs as much as the scores of 30 to 60 queries with it, so that an
  // item should have many queries. O, Q and a super-block of K and V should stay in L2: 1.4 MB at
  // head_dim 128.
  // With batch_invariant a tile has several nodes of O.
  const int64_t block = p.head_dim + p.head_dim_v > 256 ? 512 : 1024;
  return {kForwardTileQ, kUnit, own_rows(p) ? block / 2 : block};
}

static size_t forward_scratch(const ForwardContext& context) {
  Arena arena;
  carve_forward(arena, context, context.block_q);
  return arena.used();
}

/// Minus the largest of 16 finite scores of 16 queries; 0 where there is none. scores: row by row.
/// ends: behind the last of its scores that each query sees; begins: the first one.
STROBE_AMX __m512 reference_of(const float* scores, __m512i begins, __m512i ends, float scale) {
  __m512i lanes_of[16];
  STROBE_UNROLL for (int i = 0; i < 16; ++i) lanes_of[i] = as_int(load(scores + i * kTile));
  transpose(lanes_of);
  // The reference is the largest score after the scale: the smallest product if the scale is
  // negative.
  const __m512i sign = _mm512_set1_epi32(scale < 0 ? INT32_MIN : 0);
  __m512 largest = set(-kInfinity);
  STROBE_UNROLL for (int i = 0; i < 16; ++i) {
    const __m512 x = as_float(_mm512_xor_si512(lanes_of[i], sign));
    const __m512i key = _mm512_set1_epi32(i);
    const __mmask16 seen = _mm512_cmpgt_epi32_mask(ends, key) &
                           static_cast<__mmask16>(~_mm512_cmpgt_epi32_mask(begins, key)) &
                           _mm512_cmp_ps_mask(x, set(kInfinity), _CMP_LT_OQ);
    largest = _mm512_mask_max_ps(largest, seen, largest, x);
  }
  const __mmask16 found = _mm512_cmp_ps_mask(largest, set(-kInfinity), _CMP_GT_OQ);
  const __m512i minus = _mm512_set1_epi32(scale < 0 ? 0 : INT32_MIN);
  return as_float(_mm512_maskz_xor_epi32(found, as_int(largest), minus));
}

/// The scores of a tile with 16 keys, whose columns are at k: [query][key] at f.s.s.
STROBE_AMX void score_first_keys(const Forward& f, int64_t t, const Bf16* k) {
  const int64_t n = f.d_blocks;
  const Bf16* const q = f.s.q + t * kForwardTileQ * n * kPair;
  tile_zero<0>();
  tile_zero<1>();
  for (int64_t d = 0; d < n; ++d) {
    tile_load<4>(q + d * kTileBf16);
    tile_load<5>(q + (n + d) * kTileBf16);
    tile_load<6>(k + d * kTileBf16);
    tile_multiply<0, 4, 6>();
    tile_multiply<1, 5, 6>();
  }
  tile_store<0>(f.s.s);
  tile_store<1>(f.s.s + kTileFloat);
}

/// Fills in the references of a tile. Where all of its queries see the sequence's first key (with a
/// mask as data: all keys of the tile's first group), the reference is minus the largest score with
/// the first 16 keys (of that group); else it is minus the score with the first key that the query
/// sees. block: the super-block in which the tile begins; it is packed.
static void fill_reference(const Forward& f, Range block, int64_t t) {
  const Range tile = f.tile(t), first = f.sequence.mask.row(tile.begin),
              last = f.sequence.mask.row(tile.end - 1);
  alignas(64) float reference[kForwardTileQ] = {};
  // The tile alone decides which of the two, and not what its item has packed of K: otherwise bits
  // would depend on the cut into items.
  const BlockWalk walk = f.groups(tile);
  const bool full = f.c.mask && !walk.empty() && walk.is_full(walk.begin);
  if (full || (!f.c.mask && first.begin == 0 && last.begin == 0 && block.begin == 0 &&
               block.end > 0 && walk.visits(0))) {
    const int64_t group = full ? walk.block(walk.begin) * kGroup - block.begin : 0;
    score_first_keys(f, t, f.s.k + group * f.d_blocks * kPair);
    const bool all = full || f.sequence.mask.full_range(tile).contains({0, kTile});
    for (int64_t half = 0; half < kForwardTileQ; half += kTile) {
      alignas(64) int32_t ends[kTile];
      for (int64_t r = 0; r < kTile; ++r) {
        const int64_t query = min64(tile.begin + half + r, tile.end - 1);
        ends[r] = all ? kTile : static_cast<int32_t>(min64(f.sequence.mask.row(query).end, kTile));
      }
      store(reference + half, reference_of(f.s.s + half * kTile, _mm512_setzero_si512(),
                                           _mm512_load_si512(ends), f.c.problem.scale));
    }
  } else {
    for (int64_t r = 0; r < tile.size(); ++r) {
      const int64_t query = tile.begin + r;
      const int64_t key = first_seen_key(f.c, f.sequence, f.item.head, walk, query, kGroup);
      if (key < 0) continue;
      const Rows q = f.q_rows({query, query + 1});
      const Rows k = f.k_rows({key, key + 1});
      __m512 sum = _mm512_setzero_ps();
      for (int64_t d = 0; d < q.dim; d += kPair) {
        sum = _mm512_dpbf16_ps(sum, (__m512bh)q.at(0, d), (__m512bh)k.at(0, d));
      }
      const float score = _mm512_reduce_add_ps(sum);
      reference[r] = __builtin_isfinite(score) ? -score : 0;
    }
  }
  for (int64_t r = 0; r < kForwardTileQ; ++r) store(f.reference(t) + r * kTile, set(reference[r]));
}

/// Whether a tile begins in a super-block: by the rule alone, tiles are taken to do so in the first
/// one of their item. keys: of the item.
STROBE_AMX bool begins_in(const Forward& f, Range block, Range keys, int64_t t) {
  if (!f.c.mask) return block.begin <= keys.begin;
  const BlockWalk walk = f.groups(f.tile(t));
  return block.contains(walk.empty() ? keys.begin : walk.block(walk.begin) * kGroup);
}

/// Writes row `r` of a tile times `factor`. empty: it sees no key, and O holds nothing: zeros are
/// written. Returns whether all of the row is finite.
STROBE_AMX bool write_row(const Forward& f, int64_t tile, int64_t r, bool empty, float factor) {
  const int64_t dv = f.c.problem.head_dim_v, row = f.tile(tile).begin + r;
  const float* const o = f.o_tile(tile) + r / kTile * 2 * kTileFloat + r % kTile * kTile;
  const RowView rows = f.c.query_rows(f.c.out, f.sequence, f.head(row));
  auto* const out = reinterpret_cast<Bf16*>(rows.row(f.query(row)));
  if (empty) {
    __builtin_memset(out, 0, static_cast<size_t>(dv) * sizeof(Bf16));
    return true;
  }
  return write_tile_row(o, set(factor), dv, out, f.s.own != nullptr);
}

/// The sums of 16 rows of 16 values.
STROBE_AMX __m512 sum_rows(const float* rows) {
  __m512i lanes_of[16];
  STROBE_UNROLL for (int i = 0; i < 16; ++i) lanes_of[i] = as_int(load(rows + i * kTile));
  transpose(lanes_of);
  __m512 sum = as_float(lanes_of[0]);
  STROBE_UNROLL for (int i = 1; i < 16; ++i) sum = _mm512_add_ps(sum, as_float(lanes_of[i]));
  return sum;
}

/// SinkShare of 16 rows, whose sums of keys are `of_keys`.
struct SinkLanes {
  __m512 keys, sum, reference;

  STROBE_INLINE SinkLanes(__m512 sink, __m512 reference_of_keys, __m512 of_keys)
      : keys(set(1)), sum(of_keys), reference(reference_of_keys) {
    if (_mm512_cmpneq_ps_mask(sink, set(-kInfinity)) == 0) return;
    const __m512 above = _mm512_sub_ps(sink, reference_of_keys);
    const __mmask16 is_above = _mm512_cmp_ps_mask(above, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512 smaller = exp2(_mm512_mul_ps(_mm512_abs_ps(above), set(-kLog2e)));
    keys = _mm512_mask_mov_ps(keys, is_above, smaller);
    sum = _mm512_fmadd_ps(of_keys, keys, _mm512_mask_mov_ps(smaller, is_above, set(1)));
    reference = _mm512_mask_mov_ps(reference, is_above, sink);
  }
};

/// Writes the rows among `rows` of a tile that the pipeline could compute. Returns the others of
/// them, one bit for each.
static uint32_t finish_tile(const Forward& f, int64_t t, uint32_t rows) {
  const Range tile = f.tile(t);
  const BlockWalk walk = f.groups(tile);
  // In an interval's walk, rows that see nothing are the first or the last of a sequence.
  const bool some_empty = walk.is_convex() ? f.sees_none(walk, f.query(tile.begin)) ||
                                                 f.sees_none(walk, f.query(tile.end - 1))
                                           : !walk.has_full();
  uint32_t failed = 0;
  for (int64_t half = 0; half < tile.size(); half += kTile) {
    const int64_t at = (t * kForwardTileQ + half) * kTile, n = min64(kTile, tile.size() - half);
    const __m512 sum = f.s.own ? load(f.sums(f.o_tile(t)) + half) : sum_rows(f.s.sum + at);
    const __m512i first_lanes =
        _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    const __m512 reference = _mm512_mul_ps(set(-f.c.problem.scale),
                                           _mm512_i32gather_ps(first_lanes, f.s.reference + at, 4));

    __mmask16 empty = 0;
    for (int64_t r = 0; some_empty && r < n; ++r) {
      if (f.sees_none(walk, f.query(tile.begin + half + r)))
        empty |= static_cast<__mmask16>(1u << r);
    }
    // The reference's own weight is 1, so a smaller sum is as wrong as a sum that leaves O little
    // room before it overflows. A reference that is too large has left its rounding errors in all
    // scores of the row.
    const __mmask16 good = _mm512_cmp_ps_mask(sum, set(0.5f), _CMP_GT_OQ) &
                           _mm512_cmp_ps_mask(sum, set(0x1p64f), _CMP_LT_OQ) &
                           _mm512_cmp_ps_mask(_mm512_abs_ps(reference), set(kLargeLse), _CMP_LT_OQ);
    alignas(64) float factor[kTile], lse[kTile], sinks[kTile];
    for (int64_t r = 0; r < kTile; ++r) {
      sinks[r] = f.c.sink(f.head(min64(tile.begin + half + r, tile.end - 1)));
    }
    const __m512 sink = load(sinks);
    const SinkLanes with(sink, reference, sum);
    store(factor, _mm512_maskz_div_ps(good & ~empty, with.keys, with.sum));
    if (f.c.lse) {
      const __m512 x = f.c.sinks_in_lse ? _mm512_add_ps(with.reference, log(with.sum))
                                        : _mm512_add_ps(reference, log(sum));
      const __m512 of_empty = f.c.sinks_in_lse ? sink : set(-kInfinity);
      store(lse, _mm512_mask_mov_ps(x, empty, of_empty));
    }
    for (int64_t r = 0; r < n; ++r) {
      if (!(rows >> (half + r) & 1)) continue;
      if (f.c.lse) *f.lse(tile.begin + half + r) = lse[r];
      const bool is_empty = empty >> r & 1;
      const bool done = (good | empty) >> r & 1 && write_row(f, t, half + r, is_empty, factor[r]);
      failed |= static_cast<uint32_t>(!done) << (half + r);
    }
  }
  return failed;
}

/// Writes the rows among `rows` of a tile that amx-forward-online.h computed. Returns those whose
/// weights are finite and O is not.
static uint32_t finish_online(const Forward& f, int64_t t, uint32_t rows, int lower) {
  const Range tile = f.tile(t);
  const BlockWalk walk = f.groups(tile);
  uint32_t failed = 0;
  for (int64_t r = 0; r < tile.size(); ++r) {
    if (!(rows >> r & 1)) continue;
    const int64_t at = (t * kForwardTileQ + r) * kTile;
    const float sum = f.s.sum[at];
    const int64_t query = f.query(tile.begin + r);
    const bool empty = f.sees_none(walk, query) || (sum == 0 && f.bias_hides_all(walk, query));
    const RowEnd end =
        RowEnd::of(f.c, f.head(tile.begin + r), static_cast<double>(f.s.reference[at]), empty);
    const float keep_scale = f.c.dropout.enabled() ? f.c.dropout.keep_scale : 1;
    const float factor = end.factor(f.s.sum[at + 1], keep_scale, __builtin_ldexpf(1, -lower));
    const bool finite = write_row(f, t, r, empty, factor);
    failed |= static_cast<uint32_t>(!finite && sum > 0 && __builtin_isfinite(sum)) << r;
    if (f.c.lse) *f.lse(tile.begin + r) = end.lse(__builtin_ldexpf(sum, lower));
  }
  return failed;
}

/// finish_online, and once more for the rows whose O overflowed.
static void finish_online_tile(const Forward& f, int64_t t, uint32_t rows) {
  rows = finish_online(f, t, rows, 0);
  if (rows == 0) return;
  // O may have passed float32's largest value although the mean, after the division, has not. With
  // weights whose sum stays below 1 it cannot. (If V holds infinities or NaN, the result is the
  // same as before.)
  // Rows of their own must not know how many keys there are that they do not see: no sequence has
  // 2^31.
  const int lower =
      f.s.own ? 31
              : 64 - __builtin_clzll(static_cast<unsigned long long>(f.sequence.mask.seqlen_k));
  online_tiles(f, t, t + 1, lower);
  finish_online(f, t, rows, lower);
}

/// What a super-block, which is packed, gives to tiles.
static void run_pipeline(const Forward& f, Range block, Range tiles, bool nonfinite) {
  // One row (two vectors) of weights takes the vector ports about as long as two tile products
  // take. A unit has 32 rows, and 4 products for each block of 32 of either head dim.
  const int64_t rows = 8 / (f.d_blocks + f.dv_blocks);
  if (rows >= 4) {
    ForwardPipeline<4>(f, block, tiles, nonfinite).run();
  } else if (rows >= 2) {
    ForwardPipeline<2>(f, block, tiles, nonfinite).run();
  } else {
    ForwardPipeline<1>(f, block, tiles, nonfinite).run();
  }
}

STROBE_AMX void clear_lane_sums(const Forward& f, Range tiles) {
  __builtin_memset(f.s.sum + tiles.begin * kForwardTileQ * kTile, 0,
                   static_cast<size_t>(tiles.size() * kForwardTileQ * kTile) * sizeof(float));
}

/// Computes tiles of queries that see many keys, whose scores are scale * q.k, without dropout.
static void pipeline_tiles(const Forward& f, Range tiles) {
  clear_lane_sums(f, tiles);
  const Range keys = f.keys({f.tile(tiles.begin).begin, f.tile(tiles.end - 1).end});
  const int64_t size = super_block(f.c.problem);
  for (Range block = block_at(keys, keys.begin / kGroup * kGroup, size); !block.empty();
       block = block_at(keys, block.end, size)) {
    const bool nonfinite = pack_keys(f, block, tiles);
    for (int64_t t = tiles.begin; t < tiles.end; ++t) {
      if (begins_in(f, block, keys, t)) fill_reference(f, block, t);
    }
    run_pipeline(f, block, tiles, nonfinite);
  }
  for (int64_t t = tiles.begin; t < tiles.end; ++t) {
    const uint32_t failed = finish_tile(f, t, ~0u);
    if (failed == 0) continue;
    online_tiles(f, t, t + 1, 0);
    finish_online_tile(f, t, failed);
  }
}

STROBE_AMX void pack_queries(const Forward& f, int64_t tiles) {
  for (int64_t t = 0; t < tiles; ++t) {
    pack_rows(f.q_rows(f.tile(t)), kForwardTileQ, f.s.q + t * kForwardTileQ * f.d_blocks * kPair);
  }
}

static void own_block(const Forward& f, int64_t tiles);  // amx-forward-own.h

static void forward_block(const ForwardContext& c, const ForwardItem& item, std::byte* scratch) {
  configure_tiles();
  Arena arena(scratch);
  const Forward f{c, c.sequence(item.batch, item.head), item, carve_forward(arena, c, c.block_q)};
  const int64_t tiles = ceil_div(item.q_end - item.q_begin, kForwardTileQ);
  pack_queries(f, tiles);
  if (f.s.own) {
    own_block(f, tiles);
    return tile_release();
  }
  f.find_few(tiles);
  // Each tile's way depends on the tile alone, so that its bits do not depend on the item that it
  // is in. Tiles next to each other that go the same way share the packed K and V.
  const ScoreOptions options = score_options(c, item.batch, item.head);
  const bool always_online = !options.linear || options.dropout;
  const auto goes_online = [&](int64_t t) { return always_online || f.few_keys(t); };
  for (Range run{0, 0}; run.begin < tiles; run.begin = run.end) {
    const bool online = goes_online(run.begin);
    for (run.end = run.begin + 1; run.end < tiles && goes_online(run.end) == online;) ++run.end;
    if (online) {
      online_tiles(f, run.begin, run.end, 0);
      for (int64_t t = run.begin; t < run.end; ++t) finish_online_tile(f, t, ~0u);
    } else {
      pipeline_tiles(f, run);
    }
  }
  tile_release();
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_FORWARD_ITEM_H_
