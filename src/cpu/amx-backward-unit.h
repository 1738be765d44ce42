// What the functions of the backward pass know of an item and a query tile, and the vector work of
// a unit (32 keys x 32 queries). amx-backward.h describes the whole pass.
#ifndef STROBE_CPU_AMX_BACKWARD_UNIT_H_
#define STROBE_CPU_AMX_BACKWARD_UNIT_H_

#include "cpu/amx-pack.h"
#include "cpu/amx-score.h"
#include "cpu/walks.h"

namespace strobe::cpu::amx {

constexpr int64_t kBackwardTileQ = 128;
constexpr int64_t kStrip = 32;                            // keys
constexpr int64_t kSubTile = 32;                          // queries
constexpr int64_t kSubTiles = kBackwardTileQ / kSubTile;  // of a query tile
constexpr int64_t kBackwardBlock = 512;
constexpr int64_t kUnitTiles = 2 * kTileBf16;  // P or dS of a unit

/// Which sub-tiles of a query tile see a strip (they are consecutive), which of them see only a
/// part of it, and whose P and dS are split for dK and dV (kFewKeys, kFewQueries).
struct StripPlan {
  Range seen;
  uint32_t masked, split;
};

struct BackwardScratch {
  Bf16 *k, *v;            // rows
  Bf16* kt;               // [strip][head_dim / 16] tiles [16 dimensions][pairs of keys]
  uint32_t* k_nonfinite;  // of the strips
  float *dk, *dv;         // [strip][dim / 32] blocks of 2 x 2 tiles
  Bf16 *q, *dout;         // transposed, of the query tile
  Bf16 *q_pairs, *dout_pairs;
  uint32_t *q_nonfinite, *dout_nonfinite;  // of the sub-tiles
  float *lse, *delta;                      // [tile_q]: the products' initial values
  float* over_sum;                         // [tile_q]: 1; 1 / row_sum where lse holds row_max
  float *s, *dp;                           // [2] 2 x 2 tiles
  Bf16 *p, *ds;                            // [sub-tile] A operands of a strip: 2 tiles
  Bf16* ds_pairs;                          // [strip][sub-tile] B operands: 2 tiles
  Bf16 *p_low, *ds_low, *ds_pairs_low;     // their low parts, of units that are split
  float* bias;                             // of a unit: [key][query]
  float* dq;        // dQ^T of the query tile: [head_dim / 16][tile_q / 16] tiles
  float* spare;     // a tile that is written and never read
  StripPlan* plan;  // [strip]
};

STROBE_AMX BackwardScratch carve_backward(Arena& arena, const BackwardContext& c) {
  const AttentionProblem& p = c.problem;
  const int64_t keys = round_up(c.block_k, kStrip);
  const int64_t d = padded_dim(p.head_dim), dv = padded_dim(p.head_dim_v);
  BackwardScratch s;
  s.k = arena.take<Bf16>(keys * d);
  s.v = arena.take<Bf16>(keys * dv);
  s.kt = arena.take<Bf16>(keys * d);
  s.k_nonfinite = arena.take<uint32_t>(keys / kStrip);
  s.dk = arena.take<float>(keys * d);
  s.dv = arena.take<float>(keys * dv);
  s.q = arena.take<Bf16>(kBackwardTileQ * d);
  s.dout = arena.take<Bf16>(kBackwardTileQ * dv);
  s.q_pairs = arena.take<Bf16>(kBackwardTileQ * d);
  s.dout_pairs = arena.take<Bf16>(kBackwardTileQ * dv);
  s.q_nonfinite = arena.take<uint32_t>(kSubTiles);
  s.dout_nonfinite = arena.take<uint32_t>(kSubTiles);
  s.lse = arena.take<float>(kBackwardTileQ);
  s.delta = arena.take<float>(kBackwardTileQ);
  s.over_sum = arena.take<float>(kBackwardTileQ);
  s.ds_pairs = arena.take<Bf16>(keys * kBackwardTileQ);
  s.dq = arena.take<float>(kBackwardTileQ * d);
  s.s = arena.take<float>(2 * 4 * kTileFloat);
  s.dp = arena.take<float>(2 * 4 * kTileFloat);
  s.p = arena.take<Bf16>(kSubTiles * kUnitTiles);
  s.ds = arena.take<Bf16>(kSubTiles * kUnitTiles);
  s.p_low = arena.take<Bf16>(kSubTiles * kUnitTiles);
  s.ds_low = arena.take<Bf16>(kSubTiles * kUnitTiles);
  s.ds_pairs_low = arena.take<Bf16>(keys * kBackwardTileQ);
  s.spare = arena.take<float>(kTileFloat);
  s.plan = arena.take<StripPlan>(keys / kStrip);
  s.bias = arena.take<float>(p.has_bias ? kStrip * kSubTile : 0);
  return s;
}

/// What the functions of an item share.
struct Backward {
  const BackwardContext& c;
  const Sequence sequence;
  const BackwardItem item;
  const BackwardScratch s;
  const int64_t d_blocks = padded_dim(c.problem.head_dim) / kPair;  // of 32
  const int64_t dv_blocks = padded_dim(c.problem.head_dim_v) / kPair;

  /// Rows of the item's key head, or of one of its query heads.
  STROBE_INLINE Rows key_rows(const Tensor& t, Range rows, int64_t dim) const {
    return Rows(c.key_rows(t, sequence, item.head_kv), rows, dim);
  }
  STROBE_INLINE Rows query_rows(const Tensor& t, int64_t head, Range rows, int64_t dim) const {
    return Rows(c.query_rows(t, sequence, head), rows, dim);
  }
  STROBE_INLINE Range keys() const { return {item.k_begin, item.k_end}; }
  STROBE_INLINE int64_t strips() const { return ceil_div(item.k_end - item.k_begin, kStrip); }
  STROBE_INLINE Range strip(int64_t n) const {
    const int64_t begin = item.k_begin + n * kStrip;
    return {begin, min64(begin + kStrip, item.k_end)};
  }
  STROBE_INLINE int64_t ds_pairs_at(int64_t n, int64_t sub_tile) const {
    return (n * kSubTiles + sub_tile) * kUnitTiles;
  }
  STROBE_INLINE Bf16* ds_pairs(int64_t n, int64_t sub_tile) const {
    return s.ds_pairs + ds_pairs_at(n, sub_tile);
  }
};

/// The bias of a unit, to b.s.bias. Pairs past its last key or query have 0.
static void load_bias_unit(const Backward& b, int64_t head, Range queries, Range keys) {
  for (int64_t q = 0; q < kSubTile; q += kTile) {
    for (int64_t k = 0; k < kStrip; k += kTile) {
      const auto lane = static_cast<__mmask16>(lanes(0, keys.size() - k));
      __m512i x[kTile];
      for (int64_t i = 0; i < kTile; ++i) {
        const int64_t query = queries.begin + q + i;
        x[i] = _mm512_setzero_si512();
        if (query >= queries.end) continue;
        const BiasRow row = b.c.bias.row(b.item.batch, head, query);
        x[i] = as_int(load_bias(row, keys.begin + k, lane));
      }
      transpose(x);
      for (int64_t i = 0; i < kTile; ++i) store(b.s.bias + (k + i) * kSubTile + q, as_float(x[i]));
    }
  }
}

/// A query tile of one head, and what the item has to know of it.
struct QueryTile {
  int64_t head;
  Range queries;
  Scorer scorer;
  bool starts_at_lse;  // lse and delta are the initial values of the tile products
  uint32_t few;        // sub-tiles whose weights and gradients are split everywhere (kFewKeys)

  STROBE_INLINE bool few_keys(int64_t n) const { return (few >> n & 1) != 0; }
  STROBE_INLINE Range sub_tile(int64_t n) const {
    const int64_t begin = queries.begin + n * kSubTile;
    return {begin, min64(begin + kSubTile, queries.end)};
  }
  STROBE_INLINE int64_t sub_tiles() const { return ceil_div(queries.size(), kSubTile); }
  /// Whether half of the sub-tile's queries are missing. Their places in P and dS, where these are
  /// A operands, hold the low parts of the others then, and the pairs of Q and dO have rows that
  /// meet them: splitting needs no product more.
  STROBE_INLINE bool folds(int64_t n) const { return sub_tile(n).size() <= kTile; }
};

static void plan_strips(const Backward& b, const QueryTile& t) {
  const int64_t first = t.queries.begin / kSubTile, first_strip = b.item.k_begin / kStrip;
  for (int64_t n = 0; n < b.strips(); ++n) b.s.plan[n] = {};
  const BlockWalk strips = keys_of(b.c, b.sequence, t.head, t.queries, kStrip)
                               .within(first_strip, first_strip + b.strips());
  for (int64_t place = strips.begin; place < strips.end; place = strips.after(place)) {
    const int64_t n = strips.block(place) - first_strip;
    StripPlan& plan = b.s.plan[n];
    const Range keys = b.strip(n);
    const IntervalWalk<int64_t> walk = query_walk(b.sequence.mask, keys, kSubTile);
    Range seen = intersect({walk.begin, walk.end}, {first, first + t.sub_tiles()});
    // A mask's block of queries may begin or end inside the tile, whose sub-tiles it halves.
    const auto pair_of = [&](int64_t i) {
      return pair_bits(b.c, b.sequence, t.head, i * kSubTile, keys.begin);
    };
    const bool partial = b.c.mask && !strips.is_full(place);
    while (partial && !seen.empty() && !pair_of(seen.begin).some) ++seen.begin;
    while (partial && !seen.empty() && !pair_of(seen.end - 1).some) --seen.end;
    if (seen.empty()) continue;
    plan.seen = {seen.begin - first, seen.end - first};
    for (int64_t i = seen.begin; i < seen.end; ++i) {
      const bool whole = keys.size() == kStrip && walk.is_full(i) && !(partial && pair_of(i).bits);
      plan.masked |= static_cast<uint32_t>(!whole) << (i - first);
    }
    // The strip and its mask alone decide, and not the query tile.
    plan.split = seen_by_few(b.c, b.sequence, t.head, keys) ? ~0u : t.few;
  }
}

struct BackwardUnit {
  int64_t strip, sub_tile;
};

/// The vector work of a unit: rows k and k + 16 of S and dP become rows of P and dS.
template <int kSteps>  // pairs of rows issued with each tile product
class Gradients {
 public:
  using Constants = WeightConstants;

  STROBE_INLINE Gradients(const Backward& b, const QueryTile& t)
      : b_(b), t_(t), constants_{FastExp2(b.c.problem.scale * kLog2e), {}} {}

  STROBE_INLINE Constants constants() const { return constants_; }

  STROBE_INLINE void begin(BackwardUnit u, const float* s, const float* dp) {
    unit_ = u;
    s_ = s;
    dp_ = dp;
    p_ = b_.s.p + u.sub_tile * kUnitTiles;
    ds_ = b_.s.ds + u.sub_tile * kUnitTiles;
    ds_pairs_ = b_.ds_pairs(u.strip, u.sub_tile);
    left_ = kTile;
    slow_ = !t_.starts_at_lse || masked() || split();
  }
  STROBE_INLINE bool start() {
    if (left_ == 0) return false;
    if (!slow_) return true;
    finish_slowly();
    return false;
  }
  template <int kSlot>
  STROBE_INLINE void slot(const Constants& constants) {
    STROBE_UNROLL for (int i = kSlot * kSteps; i < (kSlot + 1) * kSteps; ++i) {
      __m512 p[2][2], ds[2][2];  // [row k, k + 16][queries 0-15, 16-31]
      STROBE_UNROLL for (int j = 0; j < 4; ++j) {
        p[j / 2][j % 2] = constants.exp2(load(s_ + i * kTile + j * kTileFloat));
        ds[j / 2][j % 2] = _mm512_mul_ps(p[j / 2][j % 2], load(dp_ + i * kTile + j * kTileFloat));
      }
      write(i, p, ds, constants.pairs, p_, ds_, ds_pairs_);
    }
  }
  STROBE_INLINE void advance() {
    s_ += 4 * kSteps * kTile;
    dp_ += 4 * kSteps * kTile;
    p_ += 4 * kSteps * kPair;
    ds_ += 4 * kSteps * kPair;
    ds_pairs_ += 4 * kSteps * kPair;
    left_ -= 4 * kSteps;
  }
  STROBE_INLINE static void written() {}
  STROBE_INLINE void finish(const Constants& constants) {
    while (start()) {
      slot<0>(constants);
      slot<1>(constants);
      slot<2>(constants);
      slot<3>(constants);
      advance();
    }
  }

 private:
  STROBE_INLINE bool masked() const {
    return (b_.s.plan[unit_.strip].masked >> unit_.sub_tile & 1) != 0;
  }
  STROBE_INLINE bool split() const {
    return (b_.s.plan[unit_.strip].split >> unit_.sub_tile & 1) != 0;
  }
  STROBE_INLINE static void write(int64_t i, const __m512 (&p)[2][2], const __m512 (&ds)[2][2],
                                  const RoundToPairs& pairs, Bf16* to_p, Bf16* to_ds,
                                  Bf16* to_ds_pairs) {
    _mm512_store_si512(to_p + i * kPair, pairs(p[0][0], p[0][1]));
    _mm512_store_si512(to_p + kTileBf16 + i * kPair, pairs(p[1][0], p[1][1]));
    _mm512_store_si512(to_ds + i * kPair, pairs(ds[0][0], ds[0][1]));
    _mm512_store_si512(to_ds + kTileBf16 + i * kPair, pairs(ds[1][0], ds[1][1]));
    _mm512_store_si512(to_ds_pairs + i * kPair, pairs(ds[0][0], ds[1][0]));
    _mm512_store_si512(to_ds_pairs + kTileBf16 + i * kPair, pairs(ds[0][1], ds[1][1]));
  }
  /// The low parts of row `row` of the unit, and of row + 16.
  __attribute__((noinline)) void write_low(int64_t row, const __m512 (&p)[2][2],
                                           const __m512 (&ds)[2][2]) {
    __m512 p_low[2][2], ds_low[2][2];
    for (int64_t j = 0; j < 4; ++j) {
      p_low[j / 2][j % 2] = low_part(p[j / 2][j % 2]);
      ds_low[j / 2][j % 2] = low_part(ds[j / 2][j % 2]);
    }
    const int64_t at = unit_.sub_tile * kUnitTiles;
    write(row, p_low, ds_low, RoundToPairs(), b_.s.p_low + at, b_.s.ds_low + at,
          b_.s.ds_pairs_low + b_.ds_pairs_at(unit_.strip, unit_.sub_tile));
  }

  /// Units at the mask's edge, those that are split, and those whose products do not start at lse.
  __attribute__((noinline)) void finish_slowly() {
    const Mask& mask = b_.sequence.mask;
    const Range queries = t_.sub_tile(unit_.sub_tile), keys = b_.strip(unit_.strip);
    const FastExp2 fast_exp2(b_.c.problem.scale * kLog2e);
    const ScoreOptions& options = t_.scorer.options;
    const bool some_masked = masked(), folds = split() && t_.folds(unit_.sub_tile);
    const bool writes_low = split() && (!folds || t_.few_keys(unit_.sub_tile));
    const PairBits pair = pair_bits(b_.c, b_.sequence, t_.head, queries.begin, keys.begin);
    const HeadMask data = b_.c.mask_of(b_.sequence, t_.head);
    uint32_t kept[kStrip];
    if (options.dropout) kept_queries(options, queries.begin, keys.begin, kept);
    const bool biased = b_.c.bias.data != nullptr;
    if (biased) load_bias_unit(b_, t_.head, queries, keys);
    for (int64_t i = kTile - left_; i < kTile; ++i) {
      __m512 p[2][2], ds[2][2];
      for (int64_t j = 0; j < 4; ++j) {
        const int64_t key = keys.begin + i + j / 2 * kTile, query = queries.begin + j % 2 * kTile;
        const Range seeing = !some_masked     ? queries
                             : key < keys.end ? intersect(mask.q_range({key, key + 1}), queries)
                                              : Range{0, 0};
        auto seen = static_cast<__mmask16>(lanes(seeing.begin - query, seeing.end - query));
        if (pair.by_key && key < keys.end) {
          seen &= static_cast<__mmask16>(*data.key_words(pair, query, key) >> (query % 32));
        }
        const __m512 s = load(s_ + (i - kTile + left_) * kTile + j * kTileFloat);
        const __m512 dp = load(dp_ + (i - kTile + left_) * kTile + j * kTileFloat);
        if (t_.starts_at_lse) {
          p[j / 2][j % 2] = fast_exp2.masked(s, seen);
          ds[j / 2][j % 2] = _mm512_maskz_mul_ps(seen, p[j / 2][j % 2], dp);
          continue;
        }
        Score score = t_.scorer(s, count_from(mask.position(query)), same(key));
        if (biased) {
          const __m512 bias = load(b_.s.bias + (i + j / 2 * kTile) * kSubTile + j % 2 * kTile);
          score.value = add_bias(score.value, bias);
          seen = static_cast<__mmask16>(seen & shown(bias));
        }
        const int64_t at = unit_.sub_tile * kSubTile + j % 2 * kTile;
        // No weight is more than 1, except by lse's rounding error. NaN stays.
        const __m512 bounded = _mm512_min_ps(
            set(1),
            exp2(_mm512_mul_ps(_mm512_add_ps(score.value, load(b_.s.lse + at)), set(kLog2e))));
        const __m512 whole = _mm512_mul_ps(bounded, load(b_.s.over_sum + at));
        __m512 weight = whole, gradient = dp;
        if (options.dropout) {
          const auto keep = static_cast<__mmask16>(kept[i + j / 2 * kTile] >> (j % 2 * kTile));
          // Multiplied by 0 where dropped, as in standard attention: NaN stays NaN.
          const __m512 scale = _mm512_maskz_mov_ps(keep, set(options.generator.keep_scale));
          weight = _mm512_mul_ps(weight, scale);
          gradient = _mm512_mul_ps(gradient, scale);
        }
        gradient = _mm512_mul_ps(whole, _mm512_add_ps(gradient, load(b_.s.delta + at)));
        p[j / 2][j % 2] = _mm512_maskz_mov_ps(seen, weight);
        ds[j / 2][j % 2] = _mm512_maskz_mul_ps(seen, gradient, score.derivative);
      }
      if (writes_low) write_low(i, p, ds);
      if (folds) {
        for (auto& row : p) row[1] = low_part(row[0]);
        for (auto& row : ds) row[1] = low_part(row[0]);
      }
      write(i - kTile + left_, p, ds, RoundToPairs(), p_, ds_, ds_pairs_);
    }
    left_ = 0;
  }

  const Backward& b_;
  const QueryTile& t_;
  const Constants constants_;
  BackwardUnit unit_{};
  const float *s_ = nullptr, *dp_ = nullptr;
  Bf16 *p_ = nullptr, *ds_ = nullptr, *ds_pairs_ = nullptr;
  int64_t left_ = 0;  // pairs of rows
  bool slow_ = false;
};

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_BACKWARD_UNIT_H_
