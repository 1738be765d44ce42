// FlashAttention-2's backward pass for one instruction set (arXiv:2307.08691, algorithm 2), in
// float32 or with products of bf16 pairs.
//
// Layout. An item owns a block of keys; keys lie along the vector lanes of the score tiles. For
// each tile of queries and each group of 64 keys of the block
//
//     S  [queries][keys] = Q [queries][head_dim] K^T        P = exp(S - lse)
//     dP [queries][keys] = dO[queries][dim_v]    V^T        dS = P * (dP - delta)
//     dV [keys][dim_v]    += P^T  dO
//     dK [keys][head_dim] += dS^T Q
//     dQ [queries][head_dim] += dS K
//
// K^T and V^T are made once per item. Everything else is read as it lies in memory. That holds for
// a transposed P or dS too, because the micro-kernel broadcasts single elements of its left
// operand. Several items add to the dQ of a query tile: see turnstile.h.
//
// Pairs of bf16 (kPairs) are pairs of dimensions in S and dP, of queries in dV and dK, of keys in
// dQ. So Q, dO, K, P and dS exist packed by rows, and Q, dO and dS as rows as well. Their float32
// rows stay for what has few terms (score.h) and for infinities and NaN.
#ifndef STROBE_CPU_BACKWARD_INL_H_
#define STROBE_CPU_BACKWARD_INL_H_

#include "cpu/decode-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/large-lse-inl.h"
#include "cpu/score-inl.h"
#include "cpu/turnstile.h"

namespace strobe::cpu::STROBE_ISA {

constexpr int64_t kBackwardTileQ = 64;
constexpr int64_t kBackwardTileK = 64;  // P and dS take 16 KB each
// Keys of an item at head_dim 64. K, V, their transposes, dK and dV of a block should stay in L2.
// At 512 keys they take 655 KB, which suits every CPU with AVX-512 (1 MB and more); others may have
// 512 KB.
#if HWY_TARGET == HWY_AVX3
constexpr int64_t kBackwardBlock = 512;
#else
constexpr int64_t kBackwardBlock = 256;
#endif

static Tiles backward_tiles(const AttentionProblem& p) {
  const int64_t block = p.head_dim + p.head_dim_v > 256   ? kBackwardBlock / 4
                        : p.head_dim + p.head_dim_v > 128 ? kBackwardBlock / 2
                                                          : kBackwardBlock;
  return {kBackwardTileQ, kBackwardTileK, block};
}

struct BackwardScratch {
  float *k, *kt, *vt, *dk, *dv;  // of the block
  float *q, *dout, *dq;          // of the query tile
  float *p, *ds;                 // [tile_q][tile_k]
  float* bias;                   // likewise
  int64_t block;                 // keys of the block, whole groups: from a row of kt to the next
  // Pairs along the columns, [rows][row_pairs], and along the rows, [rows / 2][columns].
  Pair *q_rows, *dout_rows, *ds_rows;
  Pair *k_pairs, *q_pairs, *dout_pairs, *p_pairs, *ds_pairs;
};

/// keys: of a block.
STROBE_SIMD BackwardScratch carve_backward(Arena& arena, const BackwardContext& c, int64_t keys) {
  const AttentionProblem& p = c.problem;
  const int64_t d = round_up(p.head_dim, kLanes), dv = round_up(p.head_dim_v, kLanes);
  const int64_t block = round_up(keys, kBackwardTileK);
  BackwardScratch s;
  s.block = block;
  s.k = arena.take<float>(block * d);
  s.kt = arena.take<float>(p.head_dim * block);
  s.vt = arena.take<float>(p.head_dim_v * block);
  s.dk = arena.take<float>(block * d);
  s.dv = arena.take<float>(block * dv);
  s.q = arena.take<float>(kBackwardTileQ * d);
  s.dout = arena.take<float>(kBackwardTileQ * dv);
  s.dq = arena.take<float>(kBackwardTileQ * d);
  s.p = arena.take<float>(kBackwardTileQ * kBackwardTileK);
  s.ds = arena.take<float>(kBackwardTileQ * kBackwardTileK);
  s.bias = arena.take<float>(p.has_bias ? kBackwardTileQ * kBackwardTileK : 0);
  const int64_t tile_q = kPairs ? kBackwardTileQ : 0;
  s.q_rows = arena.take<Pair>(tile_q * row_pairs(p.head_dim));
  s.dout_rows = arena.take<Pair>(tile_q * row_pairs(p.head_dim_v));
  s.ds_rows = arena.take<Pair>(tile_q * row_pairs(kBackwardTileK));
  s.k_pairs = arena.take<Pair>(kPairs ? block / 2 * d : 0);
  s.q_pairs = arena.take<Pair>(tile_q / 2 * d);
  s.dout_pairs = arena.take<Pair>(tile_q / 2 * dv);
  s.p_pairs = arena.take<Pair>(tile_q / 2 * kBackwardTileK);
  s.ds_pairs = arena.take<Pair>(tile_q / 2 * kBackwardTileK);
  return s;
}

/// What dbias_block needs besides: its piece.
STROBE_SIMD float* carve_dbias(Arena& arena, const AttentionProblem& p) {
  return arena.take<float>(p.has_dbias ? kDbiasTile * kDbiasTile : 0);
}

static size_t backward_scratch(const BackwardContext& context) {
  Arena arena;
  carve_backward(arena, context, context.block_k);
  carve_dbias(arena, context.problem);  // whose own block is one group of keys
  const size_t own = arena.used();
  const size_t row_sums = forward_scratch(context.forward(kForwardTileQ));  // find_row_sums
  return own > row_sums ? own : row_sums;
}

static void backward_delta(const BackwardContext& c, const ForwardItem& item, std::byte* scratch) {
  const AttentionProblem& p = c.problem;
  const Sequence sequence = c.sequence(item.batch, item.head);
  const int64_t at = c.lse_index(sequence, item.head);
  const RowView out_rows = c.query_rows(c.out, sequence, item.head);
  const RowView dout_rows = c.query_rows(c.dout, sequence, item.head);
  find_row_sums(c, item, scratch);
  if (!c.made_delta) return;
  const hn::ScalableTag<double> f64;
  const hn::Rebind<float, decltype(f64)> half;
  const auto kHalf = static_cast<int64_t>(hn::Lanes(f64));
  const int64_t width = round_up(p.head_dim_v, kLanes);
  HWY_ALIGN float out[256 + kLanes], dout[256 + kLanes];
  for (int64_t q = item.q_begin; q < item.q_end; ++q) {
    load_rows(out_rows, {q, q + 1}, p.head_dim_v, out, 0);
    load_rows(dout_rows, {q, q + 1}, p.head_dim_v, dout, 0);
    // In float64: an error of delta is in the gradients of all keys of the row alike. In dQ it is
    // multiplied by the sum of the keys, which is far larger than their differences.
    const auto product = [&](int64_t i, auto sum) __attribute__((always_inline)) {
      return hn::MulAdd(hn::PromoteTo(f64, hn::Load(half, out + i)),
                        hn::PromoteTo(f64, hn::Load(half, dout + i)), sum);
    };
    auto even = hn::Zero(f64), odd = hn::Zero(f64);
    int64_t i = 0;
    for (; i + 2 * kHalf <= width; i += 2 * kHalf) {
      even = product(i, even);
      odd = product(i + kHalf, odd);
    }
    if (i < width) even = product(i, even);
    const double dlse = c.dlse ? static_cast<double>(c.dlse[at + q]) : 0;
    c.made_delta[at + q] =
        static_cast<float>(hn::GetLane(hn::SumOfLanes(f64, hn::Add(even, odd))) - dlse);
  }
}

/// What dS is the derivative by.
enum class DsOf {
  kProduct,  // scale * q.k
  kScore,    // the score, which the bias is a term of
};

/// P and dS of one row. In: `width` products q.k in `s` and dP in `dp`, whole vectors; out: P
/// (after dropout) and dS in their places. seen: the keys that the query sees, counted from
/// key_begin; bits: kBits: of the keys, one each. bias: of these keys; null: none.
template <bool kLinear, Hides kHides, DsOf kOf>
static void backward_row(const ScoreOptions& options, int64_t query, int64_t position,
                         int64_t key_begin, Range seen, const uint32_t* bits,
                         const RowSoftmax& softmax, float delta, const float* bias, int64_t width,
                         float* s, float* dp) {
  constexpr bool kMasked = kHides != Hides::kNothing;
  const Scorer scorer{options};
  const VF reference = set(softmax.reference), over_sum = set(softmax.over_sum),
           vdelta = set(delta);
  for (int64_t j = 0; j < width; j += kLanes) {
    VF grad = load(dp + j);
    Score score{load(s + j), set(1)};
    if (kLinear || options.linear) {
      // Scaled before lse is taken away, as in forward: a row's one large weight is exactly 1
      // again.
      score.value = hn::Mul(score.value, set(softmax.factor));
    } else {
      score = scorer(score.value, same(position), count_from(key_begin + j));
      if (bias) score.value = add_bias(score.value, load(bias + j));
    }
    const VF p = hn::Mul(exp2(hn::Sub(score.value, reference), softmax.unit), over_sum);
    VF dropped = p;
    if constexpr (!kLinear) {
      if (options.dropout) {
        // Multiplied, not chosen: a NaN that is dropped stays one, as in standard attention.
        const auto kept = kept_keys(options, query, hn::BitCast(u32, count_from(key_begin + j)));
        const VF scale = hn::IfThenElseZero(kept, set(options.generator.keep_scale));
        dropped = hn::Mul(p, scale);
        grad = hn::Mul(grad, scale);
      }
    }
    VF ds = hn::Mul(p, hn::Sub(grad, vdelta));
    if constexpr (!kLinear && kOf == DsOf::kProduct) ds = hn::Mul(ds, score.derivative);
    if constexpr (kMasked) {
      auto lanes = sees(same(seen.begin - 1), same(seen.end), count_from(j));
      if constexpr (kHides == Hides::kBits) {
        lanes = hn::And(lanes, bit_lanes(bits[j / 32] >> (j % 32)));
      }
      dropped = hn::IfThenElseZero(lanes, dropped);
      ds = hn::IfThenElseZero(lanes, ds);
    }
    if (!kLinear && bias) {
      const auto lanes = shown(load(bias + j));
      dropped = hn::IfThenElseZero(lanes, dropped);
      ds = hn::IfThenElseZero(lanes, ds);
    }
    store(dropped, s + j);
    store(ds, dp + j);
  }
}

/// C += A B where an operand holds an infinity or a NaN and some of A's elements are hidden.
/// seen(row): the part of the summed dimension that A has in a row, but for elements that
/// hides(row, element) hides. It touches nothing else, so that 0 * NaN reaches no other row. Rounds
/// as gemm does.
template <typename T, typename Seen, typename HidesPair>
STROBE_SIMD void add_seen_only(const Gemm<T>& g, int64_t rows, int64_t columns, const Seen& seen,
                               const HidesPair& hides) {
  for (int64_t r = 0; r < rows; ++r) {
    const Range range = seen(r);
    const auto has = [&](int64_t i) __attribute__((always_inline)) {
      return hn::FirstN(f32, range.contains(i) && !hides(r, i) ? kLanes : 0);
    };
    for (int64_t e = 0; e < columns; e += kLanes) {
      VF sum = hn::Zero(f32);
      for (int64_t n = range.begin / kValues<T>; n * kValues<T> < range.end; ++n) {
        const int64_t first = n * kValues<T>;
        const VU keep = kept_values<T>(has(first), has(first + kValues<T> - 1));
        sum = add_products(same_in_all(g.a[r * g.a_row + n * g.a_col]),
                           part(elements(g.b + n * g.b_row + e), keep), sum);
      }
      float* const c = g.c + r * g.c_row + e;
      store(hn::Add(load(c), sum), c);
    }
  }
}

/// What the weights and their gradients of one tile and group add to dV, dK and dQ: each a product
/// whose summed dimension are the queries, the queries and the keys. shows(query, key): whether a
/// mask as data and a bias let the query see the key; ahead: fetched meanwhile.
template <typename T, typename Shows>
STROBE_SIMD void add_gradients(const Mask& mask, Range queries, Range keys, bool seen_only,
                               const Shows& shows, const AttentionProblem& p, const Gemm<T>& dv,
                               const Gemm<T>& dk, const Gemm<T>& dq, RowsAhead& ahead) {
  const int64_t d = round_up(p.head_dim, kLanes), d_v = round_up(p.head_dim_v, kLanes);
  const int64_t rows = queries.size(), columns = keys.size();
  if (seen_only) {
    const auto seeing = [&](int64_t row) __attribute__((always_inline)) {
      const int64_t key = keys.begin + row;
      const Range all = intersect(mask.q_range({key, key + 1}), queries);
      return Range{all.begin - queries.begin, all.end - queries.begin};
    };
    const auto seen = [&](int64_t row) __attribute__((always_inline)) {
      const Range all = intersect(mask.row(queries.begin + row), keys);
      return Range{all.begin - keys.begin, all.end - keys.begin};
    };
    const auto hides_key = [&](int64_t row, int64_t key) __attribute__((always_inline)) {
      return !shows(queries.begin + row, keys.begin + key);
    };
    const auto hides_query = [&](int64_t key, int64_t row) __attribute__((always_inline)) {
      return hides_key(row, key);
    };
    add_seen_only(dv, columns, d_v, seeing, hides_query);
    add_seen_only(dk, columns, d, seeing, hides_query);
    add_seen_only(dq, rows, d, seen, hides_key);
  } else {
    gemm<Old::kAdd>(dv, columns, d_v / kLanes, ceil_div(rows, kValues<T>), ahead);
    gemm<Old::kAdd>(dk, columns, d / kLanes, ceil_div(rows, kValues<T>), ahead);
    gemm<Old::kAdd>(dq, rows, d / kLanes, ceil_div(columns, kValues<T>), ahead);
  }
}

STROBE_SIMD bool any_large(const float* lse, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    if (is_large(lse[r])) return true;
  }
  return false;
}

/// The products q.k of a sequence whose forward was decoded, as decode-inl.h rounds them: the one
/// large weight of a row is then exactly 1 again. Rows whose maximum and sum large-lse-inl.h found
/// keep the rounding that those have. q: the queries' rows; k: the keys'.
static void decoded_scores(const float* q, const float* k, int64_t dim, int64_t rows, int64_t keys,
                           const float* lse, float* scores) {
  for (int64_t r = 0; r < rows; ++r) {
    if (is_large(lse[r])) continue;
    for (int64_t j = 0; j < keys; j += kDecodeMicroKeys) {
      VF sum[kDecodeMicroKeys];
      for (int i = 0; i < kDecodeMicroKeys; ++i) {
        const float* const key = k + min64(j + i, keys - 1) * dim;
        sum[i] = hn::Zero(f32);
        for (int64_t e = 0; e < dim; e += kLanes) {
          sum[i] = hn::MulAdd(load(key + e), load(q + r * dim + e), sum[i]);
        }
      }
      store_sums(sum, scores + r * kBackwardTileK + j);
    }
  }
}

/// Some queries of a tile and, in pairs, what makes the first and the last pair whole: the mask
/// hides the keys from those that are added.
STROBE_SIMD Range whole_pairs(Range queries, Range tile) {
  if (!kPairs || queries.empty()) return queries;
  queries.begin -= (queries.begin - tile.begin) % 2;
  queries.end += (queries.end - tile.begin) % 2;
  return intersect(queries, tile);
}

/// The pairs of a tile of queries and a group of keys.
struct BackwardPairs {
  Range tile, queries;  // queries: of the tile, those that see some of the keys, in whole_pairs
  Range keys;
  int64_t key_offset;  // of the group in the block
  bool masked;         // some of the queries do not see some of the keys, or there are fewer keys
                       // than a group may have: lanes past the last key count as masked
  PairBits data;       // what a mask as data says of them

  /// full: there are as many keys as a group may have, and all of the tile's queries see them.
  STROBE_INLINE BackwardPairs(const Context& c, const Sequence& sequence, int64_t head, Range tile_,
                              Range keys_, int64_t block, bool full)
      : tile(tile_),
        queries(full ? tile_ : whole_pairs(intersect(sequence.mask.q_range(keys_), tile_), tile_)),
        keys(keys_),
        key_offset(keys_.begin - block),
        masked(false),
        data(full ? PairBits{true, nullptr, nullptr}
                  : pair_bits(c, sequence, head, tile_.begin, keys_.begin)) {
    masked = !full && (data.bits || !sequence.mask.full_range(queries).contains(keys) ||
                       keys.size() < kBackwardTileK);
  }
};

/// P and dS of the pairs, which are some, to s.p and s.ds.
template <DsOf kOf>
STROBE_SIMD void backward_scores(const BackwardContext& c, const ScoreOptions& options,
                                 const Sequence& sequence, int64_t head, const BackwardPairs& pairs,
                                 const BackwardScratch& s) {
  const AttentionProblem& p = c.problem;
  const Mask& mask = sequence.mask;
  const Range queries = pairs.queries, keys = pairs.keys;
  const int64_t d = round_up(p.head_dim, kLanes), dv = round_up(p.head_dim_v, kLanes);
  const int64_t n = queries.size(), r0 = queries.begin - pairs.tile.begin;
  const float* const q = s.q + r0 * d;
  float* const weights = s.p + r0 * kBackwardTileK;
  const int64_t vectors = ceil_div(keys.size(), kLanes);
  float* const ds = s.ds + r0 * kBackwardTileK;
  const int64_t lse_at = c.lse_index(sequence, head);
  const float* const lse = c.lse + lse_at + queries.begin;
  // Of bf16, decoding sums the dimensions in another order; its errors are the smaller ones there.
  const bool decoded = mask.seqlen_q <= most_decoded(p) && !c.mask && !c.bias.data &&
                       !options.dropout && !p.batch_invariant && p.dtype == STROBE_FLOAT32;
  if constexpr (kPairs) {
    const int64_t dp = row_pairs(p.head_dim), dvp = row_pairs(p.head_dim_v);
    gemm<Old::kDrop>(Gemm<Pair>{s.q_rows + r0 * dp, dp, 1, as_pairs(s.kt) + pairs.key_offset,
                                s.block, weights, kBackwardTileK},
                     n, vectors, ceil_div(p.head_dim, 2));
    gemm<Old::kDrop>(Gemm<Pair>{s.dout_rows + r0 * dvp, dvp, 1, as_pairs(s.vt) + pairs.key_offset,
                                s.block, ds, kBackwardTileK},
                     n, vectors, ceil_div(p.head_dim_v, 2));
  } else {
    if (!decoded || any_large(lse, n)) {
      gemm<Old::kDrop>({q, d, 1, s.kt + pairs.key_offset, s.block, weights, kBackwardTileK}, n,
                       vectors, p.head_dim);
    }
    gemm<Old::kDrop>(
        {s.dout + r0 * dv, dv, 1, s.vt + pairs.key_offset, s.block, ds, kBackwardTileK}, n, vectors,
        p.head_dim_v);
  }

  if (decoded) decoded_scores(q, s.k + pairs.key_offset * d, d, n, keys.size(), lse, weights);
  const HeadMask data = c.mask_of(sequence, head);
  const bool linear = options.linear && !options.dropout;
  const auto row = [&]<bool kLinear>() __attribute__((always_inline)) {
    return !pairs.masked      ? backward_row<kLinear, Hides::kNothing, kOf>
           : !pairs.data.bits ? backward_row<kLinear, Hides::kOutside, kOf>
                              : backward_row<kLinear, Hides::kBits, kOf>;
  };
  const auto run = linear ? row.template operator()<true>() : row.template operator()<false>();
  for (int64_t i = queries.begin; i < queries.end; ++i) {
    Range seen = intersect(mask.row(i), keys);
    seen = {seen.begin - keys.begin, seen.end - keys.begin};
    const int64_t at = (i - pairs.tile.begin) * kBackwardTileK;
    const uint32_t* const bits = pairs.data.bits ? data.words(pairs.data, i, keys.begin) : nullptr;
    const float* bias = nullptr;
    if (c.bias.data) {
      load_bias(c.bias.row(sequence.batch, head, i), keys, s.bias + at);
      bias = s.bias + at;
    }
    run(options, i, mask.position(i), keys.begin, seen, bits, row_softmax(c, options, lse_at + i),
        c.delta[lse_at + i], bias, vectors * kLanes, s.p + at, s.ds + at);
  }
}

/// A query tile as backward_step finds it.
struct BackwardTile {
  Range queries;
  bool nonfinite;  // Q or dO of the tile or K of the block holds an infinity or a NaN
  bool few_keys;   // its weights stay float32
};

/// One tile of queries against one group of keys of the block: the step of the algorithm.
/// few_queries: the group's weights stay float32; ahead: fetched meanwhile.
static void backward_step(const BackwardContext& c, const ScoreOptions& options,
                          const Sequence& sequence, int64_t head, const BackwardTile& tile,
                          const BackwardPairs& pairs, bool few_queries, RowsAhead& ahead,
                          const BackwardScratch& s) {
  if (pairs.queries.empty()) return;
  backward_scores<DsOf::kProduct>(c, options, sequence, head, pairs, s);
  const AttentionProblem& p = c.problem;
  const Mask& mask = sequence.mask;
  const Range queries = pairs.queries, keys = pairs.keys;
  const int64_t d = round_up(p.head_dim, kLanes), dv = round_up(p.head_dim_v, kLanes);
  const int64_t n = queries.size(), r0 = queries.begin - tile.queries.begin,
                key_offset = pairs.key_offset;
  const HeadMask data = c.mask_of(sequence, head);
  constexpr int64_t kRow = kBackwardTileK;
  const float *const weights = s.p + r0 * kRow, *const ds = s.ds + r0 * kRow;
  const float* const bias = c.bias.data ? s.bias + r0 * kRow : nullptr;
  const bool seen_only = (pairs.masked || bias) && tile.nonfinite;
  const auto shows = [&](int64_t query, int64_t key) __attribute__((always_inline)) {
    if (pairs.data.bits && (*data.words(pairs.data, query, key) >> (key % 32) & 1) == 0)
      return false;
    return !bias || bias[(query - queries.begin) * kRow + key - keys.begin] != -kInfinity;
  };
  float *const s_dv = s.dv + key_offset * dv, *const s_dk = s.dk + key_offset * d,
               *const s_dq = s.dq + r0 * d;
  if (kPairs && !tile.few_keys && !few_queries) {
    pack_rows(weights, kRow, n, ceil_div(keys.size(), kLanes), s.p_pairs, kRow);
    pack_rows(ds, kRow, n, ceil_div(keys.size(), kLanes), s.ds_pairs, kRow);
    pack_columns(ds, kRow, n, kRow, s.ds_rows);
    add_gradients(
        mask, queries, keys, seen_only, shows, p,
        Gemm<Pair>{s.p_pairs, 1, kRow, s.dout_pairs + r0 / 2 * dv, dv, s_dv, dv},
        Gemm<Pair>{s.ds_pairs, 1, kRow, s.q_pairs + r0 / 2 * d, d, s_dk, d},
        Gemm<Pair>{s.ds_rows, row_pairs(kRow), 1, s.k_pairs + key_offset / 2 * d, d, s_dq, d},
        ahead);
  } else {
    add_gradients(mask, queries, keys, seen_only, shows, p,
                  Gemm<float>{weights, 1, kRow, s.dout + r0 * dv, dv, s_dv, dv},
                  Gemm<float>{ds, 1, kRow, s.q + r0 * d, d, s_dk, d},
                  Gemm<float>{ds, kRow, 1, s.k + key_offset * d, d, s_dq, d}, ahead);
  }
}

/// Writes a row of a gradient: from[0, dim) * factor, added to what is there where the problem says
/// so. rows: of the tensor.
STROBE_SIMD void write_gradient(const AttentionProblem& p, const RowView& rows, int64_t row,
                                int64_t dim, const float* from, float factor) {
  if (!p.accumulate) return store_row(rows, row, dim, from, factor);
  HWY_ALIGN float sum[256 + kLanes];
  load_rows(rows, {row, row + 1}, dim, sum, 0);
  for (int64_t e = 0; e < dim; e += kLanes) {
    store(hn::MulAdd(load(from + e), set(factor), load(sum + e)), sum + e);
  }
  store_row(rows, row, dim, sum, 1);
}

/// Adds the tile's dQ to the sum over key blocks; the last block to add writes the result.
STROBE_SIMD void hand_over_dq(const BackwardContext& c, const Sequence& sequence, int64_t head,
                              Range tile, Addition addition, float* dq) {
  const AttentionProblem& p = c.problem;
  const int64_t d = c.dq_stride;
  float* const sum = c.dq_sum + (c.lse_index(sequence, head) + tile.begin) * d;
  const int64_t n = tile.size() * d;
  uint32_t* const turn = turn_of(c, sequence.batch, head, tile.begin);
  if (!addition.first) {
    wait_turn(turn, addition.order);
#if !STROBE_BREAK_KERNEL_DQ
    for (int64_t i = 0; i < n; i += kLanes) store(hn::Add(load(sum + i), load(dq + i)), dq + i);
#endif
  }
  if (addition.last) {
    const RowView rows = c.query_rows(c.dq, sequence, head);
    for (int64_t r = 0; r < tile.size(); ++r) {
      write_gradient(p, rows, tile.begin + r, p.head_dim, dq + r * d, p.scale);
    }
    return;
  }
  for (int64_t i = 0; i < n; i += kLanes) store(load(dq + i), sum + i);
  pass_turn(turn, addition.order);
}

/// Rows that are loaded of so many keys: whole vectors of lanes, and as many as a transpose takes.
STROBE_SIMD int64_t padded_keys(int64_t keys) { return round_up(keys, kTransposeRows); }
static_assert(kTransposeRows % kLanes == 0 && kBackwardTileK % kTransposeRows == 0);

/// K, K^T and V^T of a block, with zeros past the last key up to padded_keys. V as it is read
/// stands in dV's room for the moment.
STROBE_SIMD void load_key_block(const BackwardContext& c, const Sequence& sequence, int64_t head_kv,
                                Range block, const BackwardScratch& s) {
  const AttentionProblem& p = c.problem;
  const int64_t d = round_up(p.head_dim, kLanes), dv = round_up(p.head_dim_v, kLanes);
  const int64_t keys = block.size(), padded = padded_keys(keys);
  load_rows(c.key_rows(c.k, sequence, head_kv), block, p.head_dim, s.k, d);
  load_rows(c.key_rows(c.v, sequence, head_kv), block, p.head_dim_v, s.dv, dv);
  __builtin_memset(s.k + keys * d, 0, static_cast<size_t>((padded - keys) * d) * sizeof(float));
  __builtin_memset(s.dv + keys * dv, 0, static_cast<size_t>((padded - keys) * dv) * sizeof(float));
  for (int64_t r = 0; r < padded; r += kTransposeRows) {
    transpose_rows(s.k + r * d, d, p.head_dim, 1, s.kt + r, s.block);
    transpose_rows(s.dv + r * dv, dv, p.head_dim_v, 1, s.vt + r, s.block);
  }
  if constexpr (kPairs) {
    pack_rows(s.kt, s.block, p.head_dim, padded / kLanes, as_pairs(s.kt), s.block);
    pack_rows(s.vt, s.block, p.head_dim_v, padded / kLanes, as_pairs(s.vt), s.block);
  }
}

/// Q and dO of a tile.
STROBE_SIMD void load_query_tile(const BackwardContext& c, const Sequence& sequence, int64_t head,
                                 Range tile, const BackwardScratch& s) {
  const AttentionProblem& p = c.problem;
  const int64_t d = round_up(p.head_dim, kLanes), dv = round_up(p.head_dim_v, kLanes);
  load_rows(c.query_rows(c.q, sequence, head), tile, p.head_dim, s.q, d);
  load_rows(c.query_rows(c.dout, sequence, head), tile, p.head_dim_v, s.dout, dv);
  if constexpr (kPairs) {
    pack_columns(s.q, d, tile.size(), d, s.q_rows);
    pack_columns(s.dout, dv, tile.size(), dv, s.dout_rows);
  }
}

static void backward_block(const BackwardContext& c, const BackwardItem& item, std::byte* scratch) {
  const AttentionProblem& p = c.problem;
  Arena arena(scratch);
  const BackwardScratch s = carve_backward(arena, c, c.block_k);
  const Sequence sequence = c.sequence_of_all_heads(item.batch);
  const int64_t d = round_up(p.head_dim, kLanes), dv = round_up(p.head_dim_v, kLanes);
  const int64_t keys = item.k_end - item.k_begin;
  const Range item_keys{item.k_begin, item.k_end};

  static_assert(kBackwardBlock / kBackwardTileK <= 32);
  const auto group_keys = [&](int64_t g) __attribute__((always_inline)) {
    return block_at(item_keys, item.k_begin + g * kBackwardTileK, kBackwardTileK);
  };

  load_key_block(c, sequence, item.head_kv, item_keys, s);
  if constexpr (kPairs) pack_rows(s.k, d, padded_keys(keys), d / kLanes, s.k_pairs, d);
  __builtin_memset(s.dk, 0, static_cast<size_t>(keys * d) * sizeof(float));
  __builtin_memset(s.dv, 0, static_cast<size_t>(keys * dv) * sizeof(float));
  const bool k_nonfinite = any_nonfinite(s.k, keys, d, d);

  const Mask& mask = sequence.mask;
  const int64_t item_block = item.k_begin / c.block_k;
  // Where there are no queries, there may be billions of heads.
  const int64_t heads = mask.seqlen_q > 0 ? c.group() : 0;
  for (int64_t head = item.head_kv * c.group(); head < item.head_kv * c.group() + heads; ++head) {
    const ScoreOptions options = score_options(c, item.batch, head);
    uint32_t few_queries = 0;  // groups
    for (int64_t g = 0; kPairs && g * kBackwardTileK < keys; ++g) {
      few_queries |= static_cast<uint32_t>(seen_by_few(c, sequence, head, group_keys(g))) << g;
    }
    const BlockWalk tiles = queries_of(c, sequence, head, item_keys, kBackwardTileQ);
    const RowView q_rows = c.query_rows(c.q, sequence, head);
    const RowView dout_rows = c.query_rows(c.dout, sequence, head);
    for (int64_t n = tiles.begin; n < tiles.end; n = tiles.after(n)) {
      const Range tile =
          block_at({0, mask.seqlen_q}, tiles.block(n) * kBackwardTileQ, kBackwardTileQ);
      const BlockWalk blocks = keys_of(c, sequence, head, tile, c.block_k);
      if (!blocks.visits(item_block)) continue;
      const int64_t rows = tile.size();
      load_query_tile(c, sequence, head, tile, s);
      if constexpr (kPairs) {
        pack_rows(s.q, d, rows, d / kLanes, s.q_pairs, d);
        pack_rows(s.dout, dv, rows, dv / kLanes, s.dout_pairs, dv);
      }
      // Whether its weights stay float32 is not for the item to decide: all groups are asked.
      const BlockWalk all_groups = keys_of(c, sequence, head, tile, kBackwardTileK);
      const BackwardTile step_tile{
          tile,
          k_nonfinite || any_nonfinite(s.q, rows, d, d) || any_nonfinite(s.dout, rows, dv, dv),
          kPairs && sees_few_keys(c, sequence, head, tile, all_groups)};
      __builtin_memset(s.dq, 0, static_cast<size_t>(rows * d) * sizeof(float));
      const BlockWalk groups =
          all_groups.within(item.k_begin / kBackwardTileK, ceil_div(item.k_end, kBackwardTileK));
      // Of the next tile, if it is one that has to do with the item; while the first group is
      // computed.
      RowsAhead ahead;
      if (const int64_t after = tiles.after(n); after < tiles.end) {
        const Range next =
            block_at({0, mask.seqlen_q}, tiles.block(after) * kBackwardTileQ, kBackwardTileQ);
        ahead = {q_rows,
                 p.head_dim,
                 dout_rows,
                 p.head_dim_v,
                 next,
                 micro_kernels(kBackwardTileK, d / kLanes + dv / kLanes) +
                     micro_kernels(rows, d / kLanes)};
      }
      for (int64_t g = groups.begin; g < groups.end; g = groups.after(g)) {
        const int64_t n_group = groups.block(g) - item.k_begin / kBackwardTileK;
        const BackwardPairs pairs(c, sequence, head, tile, group_keys(n_group), item.k_begin,
                                  groups.is_full(g));
        backward_step(c, options, sequence, head, step_tile, pairs,
                      (few_queries >> n_group & 1) != 0, ahead, s);
      }
      hand_over_dq(c, sequence, head, tile, addition_at(blocks, blocks.rank(item_block)), s.dq);
    }
  }
  const RowView dk_rows = c.key_rows(c.dk, sequence, item.head_kv);
  const RowView dv_rows = c.key_rows(c.dv, sequence, item.head_kv);
  for (int64_t r = 0; r < keys; ++r) {
    write_gradient(p, dk_rows, item.k_begin + r, p.head_dim, s.dk + r * d, p.scale);
    write_gradient(p, dv_rows, item.k_begin + r, p.head_dim_v, s.dv + r * dv, 1);
  }
}

/// dS of one tile's pairs, added to a piece of dbias: to its rows, or to its one row, where all
/// queries share that. There the tile's rows are summed first: one long chain of additions rounds
/// more.
STROBE_SIMD void add_to_dbias(const BackwardPairs& pairs, bool one_row, const float* ds,
                              float* piece) {
  const int64_t begin = pairs.queries.begin - pairs.tile.begin;
  const int64_t end = pairs.queries.end - pairs.tile.begin;
  for (int64_t j = 0; j < pairs.keys.size(); j += kLanes) {
    VF sum = hn::Zero(f32);
    for (int64_t r = begin; r < end; ++r) {
      const VF x = load(ds + r * kBackwardTileK + j);
      float* const at = piece + r * kDbiasTile + j;
      if (one_row) {
        sum = hn::Add(sum, x);
      } else {
        store(hn::Add(load(at), x), at);
      }
    }
    if (one_row) store(hn::Add(load(piece + j), sum), piece + j);
  }
}

static void dbias_block(const BackwardContext& c, const DbiasItem& item, std::byte* scratch) {
  static_assert(kDbiasTile == kBackwardTileQ && kDbiasTile == kBackwardTileK);
  const AttentionProblem& p = c.problem;
  Arena arena(scratch);
  const BackwardScratch s = carve_backward(arena, c, kDbiasTile);
  float* const piece = carve_dbias(arena, p);
  __builtin_memset(piece, 0, sizeof(float) * kDbiasTile * kDbiasTile);
  // Row 0 of a bias that has one row is that of all queries.
  const bool one_row = p.bias_seqlen_q == 1;
  const auto shared = [](int64_t extent, int64_t index, int64_t all) {
    return extent == 1 ? Range{0, all} : Range{index, index + 1};
  };
  const Range batches = shared(p.bias_batch, item.batch, p.batch);
  for (int64_t batch = batches.begin; batch < batches.end; ++batch) {
    const Sequence sequence = c.sequence_of_all_heads(batch);
    const Range keys = intersect(item.keys, {0, sequence.mask.seqlen_k});
    const Range queries =
        intersect(one_row ? Range{0, INT64_MAX} : item.rows, {0, sequence.mask.seqlen_q});
    if (keys.empty() || queries.empty()) continue;
    const Range heads = shared(p.bias_heads, item.head, p.heads);
    int64_t loaded = -1;  // the key head
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      const ScoreOptions options = score_options(c, batch, head);
      for (int64_t q = queries.begin; q < queries.end; q += kBackwardTileQ) {
        const Range tile{q, min64(q + kBackwardTileQ, queries.end)};
        if (c.mask && c.mask_of(sequence, head).queries.over_capacity(q / c.mask_layout.block_q)) {
          // Its queries' blocks of keys are not known: all that is theirs is NaN.
          const int64_t first = one_row ? 0 : q - item.rows.begin;
          for (int64_t n = 0; n < (one_row ? 1 : tile.size()) * kDbiasTile; ++n) {
            piece[first * kDbiasTile + n] = __builtin_nanf("");
          }
          continue;
        }
        const BlockWalk groups = keys_of(c, sequence, head, tile, kBackwardTileK);
        const int64_t group = keys.begin / kBackwardTileK;
        if (!groups.visits(group)) continue;
        const BackwardPairs pairs(c, sequence, head, tile, keys, keys.begin,
                                  groups.is_full(groups.rank(group)));
        if (pairs.queries.empty()) continue;
        if (loaded != c.head_kv(head)) {
          loaded = c.head_kv(head);
          load_key_block(c, sequence, loaded, keys, s);
        }
        load_query_tile(c, sequence, head, tile, s);
        backward_scores<DsOf::kScore>(c, options, sequence, head, pairs, s);
        add_to_dbias(pairs, one_row, s.ds, piece);
      }
    }
  }
  for (int64_t row = item.rows.begin; row < item.rows.end; ++row) {
    const BiasRow to = c.dbias.row(item.batch, item.head, row);
    for_dtype(
        to.dtype, [&]<typename T>(T*) __attribute__((always_inline)) {
          spread_from_float(piece + (row - item.rows.begin) * kDbiasTile, to.step, item.keys.size(),
                            reinterpret_cast<T*>(const_cast<std::byte*>(to.at(item.keys.begin))));
        });
  }
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_BACKWARD_INL_H_
