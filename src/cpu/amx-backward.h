// The backward pass with AMX, bf16 (arXiv:2307.08691, algorithm 2).
//
// An item owns a block of up to 512 keys and meets one tile of 128 queries after the other. Scores
// are computed transposed, 32 keys x 32 queries (a unit) at a time; queries lie along the lanes.
//
//     S = K Q^T - lse / scale         dP = V dO^T - delta       a unit: tile products, float32
//     P = exp2(scale * S)             dS = P * dP               a unit: vectors
//     dV += P dO                      dK += dS Q                32 keys (a strip) x 128 queries
//     dQ^T += K^T dS                                            all keys of the item x 32 queries
//
// lse and delta enter as the products' initial values. P and dS are written as A operands (rows of
// keys, the pairs of queries q and q + 16 being what one shuffle makes), dS also as a B operand
// (pairs of keys k and k + 16). dQ crosses items: see turnstile.h; it travels transposed, in tiles.
//
// Pipeline. S is computed two units ahead of P and dS, dP one unit ahead, and the vector work of a
// unit is issued between the tile instructions of those two products.
#ifndef STROBE_CPU_AMX_BACKWARD_H_
#define STROBE_CPU_AMX_BACKWARD_H_

#include "cpu/amx-product.h"
#include "cpu/amx-score.h"
#include "cpu/turnstile.h"

namespace strobe::cpu::amx {

constexpr int64_t kBackwardTileQ = 128;
constexpr int64_t kStrip = 32;                            // keys
constexpr int64_t kSubTile = 32;                          // queries
constexpr int64_t kSubTiles = kBackwardTileQ / kSubTile;  // of a query tile
constexpr int64_t kBackwardBlock = 512;
constexpr int64_t kUnitTiles = 2 * kTileBf16;  // P or dS of a unit

/// Which sub-tiles of a query tile see a strip (consecutive ones), and which of them not all of it.
struct StripPlan {
  int64_t begin, end;
  uint32_t masked;
};

struct BackwardScratch {
  Bf16 *k, *v;          // rows
  Bf16* kt;             // [strip][head_dim / 16] tiles [16 dimensions][pairs of keys]
  uint32_t* k_special;  // of the strips
  float *dk, *dv;       // [strip][dim / 32] blocks of 2 x 2 tiles
  Bf16 *q, *dout;       // columns of the query tile
  Bf16 *q_pairs, *dout_pairs;
  uint32_t *q_special, *dout_special;  // of the sub-tiles
  float *lse, *delta;                  // [tile_q]: the products' initial values
  float *s, *dp;                       // [2] 2 x 2 tiles
  Bf16 *p, *ds;                        // [sub-tile] A operands of a strip: 2 tiles
  Bf16* ds_pairs;                      // [strip][sub-tile] B operands: 2 tiles
  float* dq;                           // dQ^T of the query tile: [head_dim / 16][tile_q / 16] tiles
  float* spare;                        // a tile that nobody reads
  StripPlan* plan;                     // [strip]
};

STROBE_AMX BackwardScratch carve_backward(Arena& arena, const BackwardContext& c) {
  const AttentionProblem& p = c.problem;
  const int64_t keys = round_up(c.block_k, kStrip);
  const int64_t d = padded_dim(p.head_dim), dv = padded_dim(p.head_dim_v);
  BackwardScratch s;
  s.k = arena.take<Bf16>(keys * d);
  s.v = arena.take<Bf16>(keys * dv);
  s.kt = arena.take<Bf16>(keys * d);
  s.k_special = arena.take<uint32_t>(keys / kStrip);
  s.dk = arena.take<float>(keys * d);
  s.dv = arena.take<float>(keys * dv);
  s.q = arena.take<Bf16>(kBackwardTileQ * d);
  s.dout = arena.take<Bf16>(kBackwardTileQ * dv);
  s.q_pairs = arena.take<Bf16>(kBackwardTileQ * d);
  s.dout_pairs = arena.take<Bf16>(kBackwardTileQ * dv);
  s.q_special = arena.take<uint32_t>(kSubTiles);
  s.dout_special = arena.take<uint32_t>(kSubTiles);
  s.lse = arena.take<float>(kBackwardTileQ);
  s.delta = arena.take<float>(kBackwardTileQ);
  s.ds_pairs = arena.take<Bf16>(keys * kBackwardTileQ);
  s.dq = arena.take<float>(kBackwardTileQ * d);
  s.s = arena.take<float>(2 * 4 * kTileFloat);
  s.dp = arena.take<float>(2 * 4 * kTileFloat);
  s.p = arena.take<Bf16>(kSubTiles * kUnitTiles);
  s.ds = arena.take<Bf16>(kSubTiles * kUnitTiles);
  s.spare = arena.take<float>(kTileFloat);
  s.plan = arena.take<StripPlan>(keys / kStrip);
  return s;
}

/// What the functions of an item share.
struct Backward {
  const BackwardContext& c;
  const Sequence sequence;
  const BackwardItem item;
  const BackwardScratch s;
  const int64_t d_blocks, dv_blocks;  // of 32

  STROBE_INLINE Range keys() const { return {item.k_begin, item.k_end}; }
  STROBE_INLINE int64_t strips() const { return ceil_div(item.k_end - item.k_begin, kStrip); }
  STROBE_INLINE Range strip(int64_t n) const {
    const int64_t begin = item.k_begin + n * kStrip;
    return {begin, min64(begin + kStrip, item.k_end)};
  }
  STROBE_INLINE Bf16* ds_pairs(int64_t n, int64_t sub_tile) const {
    return s.ds_pairs + (n * kSubTiles + sub_tile) * kUnitTiles;
  }
};

/// A query tile of one head, as the item meets it.
struct QueryTile {
  int64_t head;
  Range queries;
  ScoreRule rule;

  STROBE_INLINE Range sub_tile(int64_t n) const {
    const int64_t begin = queries.begin + n * kSubTile;
    return {begin, min64(begin + kSubTile, queries.end)};
  }
  STROBE_INLINE int64_t sub_tiles() const { return ceil_div(queries.size(), kSubTile); }
};

static void plan_strips(const Backward& b, const QueryTile& t) {
  const Mask& mask = b.sequence.mask;
  for (int64_t n = 0; n < b.strips(); ++n) {
    StripPlan& plan = b.s.plan[n];
    plan = {0, 0, 0};
    const Range keys = b.strip(n), seen = intersect(mask.q_range(keys), t.queries);
    if (seen.empty()) continue;
    plan.begin = (seen.begin - t.queries.begin) / kSubTile;
    plan.end = ceil_div(seen.end - t.queries.begin, kSubTile);
    for (int64_t i = plan.begin; i < plan.end; ++i) {
      const Range queries = t.sub_tile(i);
      const bool whole = queries.size() == kSubTile && keys.size() == kStrip &&
                         mask.full_range(queries).contains(keys);
      plan.masked |= static_cast<uint32_t>(!whole) << i;
    }
  }
}

struct BackwardUnit {
  int64_t strip, sub_tile;
};

/// The vector work of a unit: rows k and k + 16 of S and dP become rows of P and dS.
template <int kSteps>  // pairs of rows issued with each tile product
class Gradients {
 public:
  struct Constants {
    FastExp2 exp2;
    TruncateToPairs pairs;
  };

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
    slow_ = !t_.rule.plain || (b_.s.plan[u.strip].masked >> u.sub_tile & 1) != 0;
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
      write(i, p, ds, constants.pairs);
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
  template <typename Pairs>
  STROBE_INLINE void write(int64_t i, const __m512 (&p)[2][2], const __m512 (&ds)[2][2],
                           const Pairs& pairs) {
    _mm512_store_si512(p_ + i * kPair, pairs(p[0][0], p[0][1]));
    _mm512_store_si512(p_ + kTileBf16 + i * kPair, pairs(p[1][0], p[1][1]));
    _mm512_store_si512(ds_ + i * kPair, pairs(ds[0][0], ds[0][1]));
    _mm512_store_si512(ds_ + kTileBf16 + i * kPair, pairs(ds[1][0], ds[1][1]));
    _mm512_store_si512(ds_pairs_ + i * kPair, pairs(ds[0][0], ds[1][0]));
    _mm512_store_si512(ds_pairs_ + kTileBf16 + i * kPair, pairs(ds[0][1], ds[1][1]));
  }

  /// Units at the mask's edge, and rules other than a scale.
  __attribute__((noinline)) void finish_slowly() {
    const Mask& mask = b_.sequence.mask;
    const Range queries = t_.sub_tile(unit_.sub_tile), keys = b_.strip(unit_.strip);
    const FastExp2 exp2(b_.c.problem.scale * kLog2e);
    uint32_t keep[kStrip];
    if (t_.rule.dropout) t_.rule.keep_queries(queries.begin, keys.begin, keep);
    for (int64_t i = kTile - left_; i < kTile; ++i) {
      __m512 p[2][2], ds[2][2];
      for (int64_t j = 0; j < 4; ++j) {
        const int64_t key = keys.begin + i + j / 2 * kTile, query = queries.begin + j % 2 * kTile;
        const Range seeing =
            key < keys.end ? intersect(mask.q_range({key, key + 1}), queries) : Range{0, 0};
        const auto seen = static_cast<__mmask16>(lanes(seeing.begin - query, seeing.end - query));
        const __m512 s = load(s_ + (i - kTile + left_) * kTile + j * kTileFloat);
        const __m512 dp = load(dp_ + (i - kTile + left_) * kTile + j * kTileFloat);
        if (t_.rule.plain) {
          p[j / 2][j % 2] = exp2.masked(s, seen);
          ds[j / 2][j % 2] = _mm512_maskz_mul_ps(seen, p[j / 2][j % 2], dp);
          continue;
        }
        __m512 slope;
        const auto lane = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const auto distance = static_cast<float>(mask.position(query) - key);
        const __m512 score = t_.rule.apply(s, _mm512_add_ps(set(distance), lane), slope);
        const float* const lse = b_.s.lse + unit_.sub_tile * kSubTile + j % 2 * kTile;
        const float* const delta = b_.s.delta + unit_.sub_tile * kSubTile + j % 2 * kTile;
        __m512 weight = exp2_exact(_mm512_mul_ps(_mm512_add_ps(score, load(lse)), set(kLog2e)));
        __m512 gradient = dp;
        const __m512 whole = weight;
        if (t_.rule.dropout) {
          const auto kept = static_cast<__mmask16>(keep[i + j / 2 * kTile] >> (j % 2 * kTile));
          const __m512 scale = set(t_.rule.generator.keep_scale);
          weight = _mm512_maskz_mul_ps(kept, weight, scale);
          gradient = _mm512_maskz_mul_ps(kept, gradient, scale);
        }
        gradient = _mm512_mul_ps(whole, _mm512_add_ps(gradient, load(delta)));
        p[j / 2][j % 2] = _mm512_maskz_mov_ps(seen, weight);
        ds[j / 2][j % 2] = _mm512_maskz_mul_ps(seen, gradient, slope);
      }
      const int64_t at = i - kTile + left_;
      if (t_.rule.plain) {
        write(at, p, ds, TruncateToPairs());
      } else {
        write(at, p, ds, RoundToPairs());
      }
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

/// Adds weight * row for the rows that pack_pairs left out, pair by pair: dV += P dO, dK += dS Q.
static void add_special_rows(const Backward& b, const QueryTile& t, int64_t strip, Range sub_tiles,
                             const uint32_t* special, const Bf16* weights, const Tensor& tensor,
                             int64_t dim, float* sum) {
  const Range keys = b.strip(strip);
  for (int64_t n = sub_tiles.begin; n < sub_tiles.end; ++n) {
    for (int64_t i = 0; i < kSubTile; ++i) {
      if (!(special[n] >> i & 1)) continue;
      const int64_t query = t.queries.begin + n * kSubTile + i;
      const Rows row(tensor, b.item.batch, t.head, b.sequence.q_row + query, 1, dim);
      for (int64_t j = 0; j < keys.size(); ++j) {
        if (!b.sequence.mask.allows(query, keys.begin + j)) continue;
        const Bf16 weight = weights[n * kUnitTiles + j * kPair + i % 16 * 2 + i / 16];
        add_row_to_tiles(row, weight, sum + j / kTile * 2 * kTileFloat + j % kTile * kTile);
      }
    }
  }
}

/// The same for dQ^T += K^T dS of a sub-tile.
static void add_special_keys(const Backward& b, const QueryTile& t, int64_t sub_tile, Range strips,
                             float* dq) {
  const Range queries = t.sub_tile(sub_tile);
  for (int64_t n = strips.begin; n < strips.end; ++n) {
    const uint32_t special = b.s.k_special[n];
    for (int64_t j = 0; j < kStrip; ++j) {
      if (!(special >> j & 1)) continue;
      const int64_t key = b.item.k_begin + n * kStrip + j;
      const Rows row(b.c.k, b.item.batch, b.item.head_kv, b.sequence.k_row + key, 1,
                     b.c.problem.head_dim);
      for (int64_t i = 0; i < queries.size(); ++i) {
        if (!b.sequence.mask.allows(queries.begin + i, key)) continue;
        const uint32_t bits =
            b.ds_pairs(n, sub_tile)[i / 16 * kTileBf16 + (j % 16 * 16 + i % 16) * 2 + j / 16];
        const float ds =
            _mm512_cvtss_f32(as_float(_mm512_set1_epi32(static_cast<int>(bits << 16))));
        for (int64_t e = 0; e < row.dim; ++e) {
          const uint32_t k = row.data[e];
          const float value =
              _mm512_cvtss_f32(as_float(_mm512_set1_epi32(static_cast<int>(k << 16))));
          const int64_t column = pair_column(e % kPair);
          float* const tile = dq + ((e / kPair * 2 + column / kTile) * (kBackwardTileQ / kTile) +
                                    sub_tile * 2 + i / kTile) *
                                       kTileFloat;
          tile[column % kTile * kTile + i % kTile] += ds * value;
        }
      }
    }
  }
}

template <int kSteps>
class BackwardTile {
 public:
  STROBE_INLINE BackwardTile(const Backward& b, const QueryTile& t, bool k_special, bool q_special)
      : b_(b), t_(t), k_special_(k_special), q_special_(q_special), products_(b.s.spare) {}

  /// dV and dK, and dS of all strips for dQ.
  STROBE_INLINE void run_strips() {
    plan_strips(b_, t_);
    Gradients<kSteps> work(b_, t_);
    const typename Gradients<kSteps>::Constants constants = work.constants();
    // The units at hand: this one, whose P and dS are made; the next, whose S is there and dP
    // comes; and the one after, whose S comes.
    BackwardUnit unit = first_unit(0), next = after(unit), last = after(next);
    if (unit.strip == b_.strips()) return;
    Idle idle;
    scores(unit, 0, idle, {});
    gradients(unit, 0, idle, {});
    if (next.strip < b_.strips()) {
      scores(next, 1, idle, {});
    } else {
      products_.flush();
    }
    for (int64_t n = 0; unit.strip < b_.strips(); ++n) {
      work.begin(unit, s_slot(n), dp_slot(n));
      if (next.strip < b_.strips()) gradients(next, n + 1, work, constants);
      if (last.strip < b_.strips()) {
        scores(last, n + 2, work, constants);
      } else {
        products_.flush();
      }
      work.finish(constants);
      if (next.strip != unit.strip) finish_strip(unit.strip);
      unit = next;
      next = last;
      last = after(last);
    }
    products_.flush();
  }

  /// dQ^T (`to`) = `from` + K^T dS, in tiles; `from` null: zero.
  STROBE_INLINE void run_dq(const float* from, float* to) {
    Idle idle;
    for (int64_t n = 0; n < t_.sub_tiles(); ++n) {
      const Range strips = strips_of(n);
      for (int64_t e = 0; e < b_.d_blocks; ++e) {
        const int64_t at = (e * 2 * (kBackwardTileQ / kTile) + n * 2) * kTileFloat;
        const int64_t down = kBackwardTileQ / kTile * kTileFloat;
        const Quad<const float> in = from ? Quad<const float>{from + at, kTileFloat, down}
                                          : Quad<const float>{nullptr, 0, 0};
        const Quad<float> out = {to + at, kTileFloat, down};
        if (strips.empty()) {
          for (int i = 0; i < 4; ++i) copy_tile(from ? in.at(i) : nullptr, out.at(i));
          continue;
        }
        const Product m = {b_.s.kt + (strips.begin * b_.d_blocks + e) * kUnitTiles,
                           b_.ds_pairs(strips.begin, n),
                           b_.d_blocks * kUnitTiles,
                           kTileBf16,
                           kSubTiles * kUnitTiles,
                           kTileBf16,
                           in,
                           64,
                           out,
                           64,
                           strips.size()};
        products_.multiply<true>(m, idle, {});
      }
    }
    products_.flush();
    if (k_special_) {
      for (int64_t n = 0; n < t_.sub_tiles(); ++n) add_special_keys(b_, t_, n, strips_of(n), to);
    }
  }

 private:
  STROBE_INLINE static void copy_tile(const float* from, float* to) {
    for (int64_t i = 0; i < kTileFloat; i += kTile) {
      store(to + i, from ? load(from + i) : _mm512_setzero_ps());
    }
  }

  /// The first unit of a strip or those after it; strip == strips() where there is none.
  STROBE_INLINE BackwardUnit first_unit(int64_t strip) const {
    while (strip < b_.strips() && b_.s.plan[strip].begin == b_.s.plan[strip].end) ++strip;
    return {strip, strip < b_.strips() ? b_.s.plan[strip].begin : 0};
  }
  STROBE_INLINE BackwardUnit after(BackwardUnit u) const {
    if (u.strip == b_.strips()) return u;
    if (u.sub_tile + 1 < b_.s.plan[u.strip].end) return {u.strip, u.sub_tile + 1};
    return first_unit(u.strip + 1);
  }
  /// The strips that a sub-tile sees; consecutive.
  STROBE_INLINE Range strips_of(int64_t sub_tile) const {
    Range strips{0, 0};
    for (int64_t n = 0; n < b_.strips(); ++n) {
      const StripPlan& plan = b_.s.plan[n];
      if (sub_tile < plan.begin || sub_tile >= plan.end) continue;
      if (strips.empty()) strips.begin = n;
      strips.end = n + 1;
    }
    return strips;
  }

  STROBE_INLINE float* s_slot(int64_t n) const { return b_.s.s + n % 2 * 4 * kTileFloat; }
  STROBE_INLINE float* dp_slot(int64_t n) const { return b_.s.dp + n % 2 * 4 * kTileFloat; }

  /// S of a unit, the n-th of the query tile.
  template <typename Work>
  STROBE_INLINE void scores(BackwardUnit u, int64_t n, Work& work,
                            const typename Work::Constants& constants) {
    transposed(u, b_.d_blocks, b_.s.k, b_.s.q, b_.s.lse, s_slot(n), work, constants);
  }
  /// dP of a unit, the n-th of the query tile.
  template <typename Work>
  STROBE_INLINE void gradients(BackwardUnit u, int64_t n, Work& work,
                               const typename Work::Constants& constants) {
    transposed(u, b_.dv_blocks, b_.s.v, b_.s.dout, b_.s.delta, dp_slot(n), work, constants);
  }
  /// to [keys][queries] = keys queries^T + initial [queries], where the rule is plain.
  template <typename Work>
  STROBE_INLINE void transposed(BackwardUnit u, int64_t blocks, const Bf16* keys,
                                const Bf16* queries, const float* initial, float* to, Work& work,
                                const typename Work::Constants& constants) {
    const Product m = {keys + u.strip * kStrip * blocks * kPair,
                       queries + u.sub_tile * kSubTile * blocks * kPair,
                       kTileBf16,
                       blocks * kTileBf16,
                       kTileBf16,
                       blocks * kTileBf16,
                       {t_.rule.plain ? initial + u.sub_tile * kSubTile : nullptr, kTile, 0},
                       0,
                       {to, kTileFloat, 2 * kTileFloat},
                       64,
                       blocks};
    products_.multiply<true>(m, work, constants);
  }

  /// dV += P dO and dK += dS Q.
  STROBE_INLINE void finish_strip(int64_t strip) {
    const Range seen = {b_.s.plan[strip].begin, b_.s.plan[strip].end};
    const int64_t d = b_.d_blocks, dv = b_.dv_blocks;
    float* const dv_sum = b_.s.dv + strip * kStrip * dv * kPair;
    float* const dk_sum = b_.s.dk + strip * kStrip * d * kPair;
    add_rows(b_.s.p, b_.s.dout_pairs, dv, seen, dv_sum);
    add_rows(b_.s.ds, b_.s.q_pairs, d, seen, dk_sum);
    if (q_special_) {
      products_.flush();
      add_special_rows(b_, t_, strip, seen, b_.s.dout_special, b_.s.p, b_.c.dout,
                       b_.c.problem.head_dim_v, dv_sum);
      add_special_rows(b_, t_, strip, seen, b_.s.q_special, b_.s.ds, b_.c.q, b_.c.problem.head_dim,
                       dk_sum);
    }
  }
  STROBE_INLINE void add_rows(const Bf16* weights, const Bf16* rows, int64_t blocks, Range seen,
                              float* sum) {
    Idle idle;
    for (int64_t e = 0; e < blocks; ++e) {
      float* const at = sum + e * 4 * kTileFloat;
      const Product m = {weights + seen.begin * kUnitTiles,
                         rows + (seen.begin * blocks + e) * kUnitTiles,
                         kUnitTiles,
                         kTileBf16,
                         blocks * kUnitTiles,
                         kTileBf16,
                         {at, kTileFloat, 2 * kTileFloat},
                         64,
                         {at, kTileFloat, 2 * kTileFloat},
                         64,
                         seen.size()};
      products_.multiply<false>(m, idle, {});
    }
  }

  const Backward& b_;
  const QueryTile& t_;
  const bool k_special_, q_special_;
  Products products_;
};

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_BACKWARD_H_
