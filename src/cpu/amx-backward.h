// The backward pass with AMX, bf16 (arXiv:2307.08691, algorithm 2).
//
// An item owns a block of up to 512 keys and takes one tile of 128 queries after the other. Scores
// are computed transposed, 32 keys x 32 queries (a unit) at a time, with queries along the lanes.
//
//     S = K Q^T - lse / scale         dP = V dO^T - delta       a unit: tile products, float32
//     P = exp2(scale * S)             dS = P * dP               a unit: vectors
//     dV += P dO                      dK += dS Q                32 keys (a strip) x 128 queries
//     dQ^T += K^T dS                                            all keys of the item x 32 queries
//
// lse and delta enter as the products' initial values. P and dS are written as A operands (rows of
// keys, with the pairs of queries q and q + 16 that one shuffle makes), dS also as a B operand
// (pairs of keys k and k + 16). Several items add to the dQ of a query tile (turnstile.h); between
// them it stays transposed and in tiles.
//
// For queries that see few keys (kFewKeys), P and dS are split into two bf16 values each, and dV,
// dK and dQ get a second product, of the low parts; for keys that few queries see (kFewQueries), dV
// and dK do. Where a sub-tile (32 queries) has 16 queries or fewer, the low parts for dV and dK
// stand in the places of the queries that are missing, and there is no second product.
//
// Pipeline. S is computed two units ahead of P and dS, dP one unit ahead, and the vector work of a
// unit is issued between the tile instructions of those two products.
#ifndef STROBE_CPU_AMX_BACKWARD_H_
#define STROBE_CPU_AMX_BACKWARD_H_

#include "cpu/amx-backward-unit.h"
#include "cpu/amx-product.h"
#include "cpu/turnstile.h"

namespace strobe::cpu::amx {

/// Adds weight * row for the rows that pack_pairs left out, pair by pair: dV += P dO, dK += dS Q.
static void add_nonfinite_rows(const Backward& b, const QueryTile& t, int64_t strip,
                               Range sub_tiles, const uint32_t* nonfinite, const Bf16* weights,
                               const Tensor& tensor, int64_t dim, float* sum) {
  const Range keys = b.strip(strip);
  for (int64_t n = sub_tiles.begin; n < sub_tiles.end; ++n) {
    for (int64_t i = 0; i < kSubTile; ++i) {
      if (!(nonfinite[n] >> i & 1)) continue;
      const int64_t query = t.queries.begin + n * kSubTile + i;
      const Rows row = b.query_rows(tensor, t.head, {query, query + 1}, dim);
      for (int64_t j = 0; j < keys.size(); ++j) {
        if (!pair_is_seen(b.c, b.sequence, t.head, query, keys.begin + j)) continue;
        const Bf16 weight = weights[n * kUnitTiles + j * kPair + i % 16 * 2 + i / 16];
        add_row_to_tiles(row, weight, sum + j / kTile * 2 * kTileFloat + j % kTile * kTile);
      }
    }
  }
}

/// The same for dQ^T += K^T dS of a sub-tile.
static void add_nonfinite_keys(const Backward& b, const QueryTile& t, int64_t sub_tile,
                               Range strips, float* dq) {
  const Range queries = t.sub_tile(sub_tile);
  for (int64_t n = strips.begin; n < strips.end; ++n) {
    const uint32_t nonfinite = b.s.k_nonfinite[n];
    for (int64_t j = 0; j < kStrip; ++j) {
      if (!(nonfinite >> j & 1)) continue;
      const int64_t key = b.item.k_begin + n * kStrip + j;
      const Rows row = b.key_rows(b.c.k, {key, key + 1}, b.c.problem.head_dim);
      for (int64_t i = 0; i < queries.size(); ++i) {
        if (!pair_is_seen(b.c, b.sequence, t.head, queries.begin + i, key)) continue;
        const Bf16 bits =
            b.ds_pairs(n, sub_tile)[i / 16 * kTileBf16 + (j % 16 * 16 + i % 16) * 2 + j / 16];
        const float ds = to_float(bits);
        for (int64_t e = 0; e < row.dim; ++e) {
          const float value = to_float(row.data(0)[e]);
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
  STROBE_INLINE BackwardTile(const Backward& b, const QueryTile& t, bool k_nonfinite,
                             bool q_nonfinite)
      : b_(b), t_(t), k_nonfinite_(k_nonfinite), q_nonfinite_(q_nonfinite), products_(b.s.spare) {}

  /// dV and dK, and dS of all strips for dQ.
  STROBE_INLINE void run_strips() {
    plan_strips(b_, t_);
    Gradients<kSteps> work(b_, t_);
    const typename Gradients<kSteps>::Constants constants = work.constants();
    // Three units are in the pipeline: `unit`, whose P and dS are made now; `next`, whose S is
    // there and whose dP is computed now; and `last`, whose S is computed now.
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
      const Range some = strips_of(n, 0);
      for (int64_t e = 0; e < b_.d_blocks; ++e) {
        const int64_t at = (e * 2 * (kBackwardTileQ / kTile) + n * 2) * kTileFloat;
        const int64_t down = kBackwardTileQ / kTile * kTileFloat;
        Quad<const float> in = {from ? from + at : nullptr, kTileFloat, down};
        const Quad<float> out = {to + at, kTileFloat, down};
        if (some.empty()) {
          for (int i = 0; i < 4; ++i) copy_tile(from ? in.at(i) : nullptr, out.at(i));
          continue;
        }
        for (Range strips = some; !strips.empty(); strips = strips_of(n, strips.end)) {
          const Bf16* const kt = b_.s.kt + (strips.begin * b_.d_blocks + e) * kUnitTiles;
          Product m = {{kt, b_.d_blocks * kUnitTiles, kTileBf16},
                       {b_.ds_pairs(strips.begin, n), kSubTiles * kUnitTiles, kTileBf16},
                       in,
                       out,
                       strips.size()};
          const Bf16* const low = b_.s.ds_pairs_low + b_.ds_pairs_at(strips.begin, n);
          const bool split = t_.few_keys(n), one_strip = strips.size() == 1;
          if (split && one_strip) {
            m.a.step = 0;
            m.b.step = low - m.b.tile;
            m.steps = 2;
          }
          products_.multiply<true>(m, idle, {});
          in = {out.tile, out.right, out.down};
          if (!split || one_strip) continue;
          m.b.tile = low;
          m.in = in;
          products_.multiply<true>(m, idle, {});
        }
      }
    }
    products_.flush();
    if (k_nonfinite_) {
      for (int64_t n = 0; n < t_.sub_tiles(); ++n) {
        for (Range strips = strips_of(n, 0); !strips.empty(); strips = strips_of(n, strips.end)) {
          add_nonfinite_keys(b_, t_, n, strips, to);
        }
      }
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
    while (strip < b_.strips() && b_.s.plan[strip].seen.empty()) ++strip;
    return {strip, strip < b_.strips() ? b_.s.plan[strip].seen.begin : 0};
  }
  STROBE_INLINE BackwardUnit after(BackwardUnit u) const {
    if (u.strip == b_.strips()) return u;
    if (u.sub_tile + 1 < b_.s.plan[u.strip].seen.end) return {u.strip, u.sub_tile + 1};
    return first_unit(u.strip + 1);
  }
  /// The next strips, from `strip` on, that a sub-tile sees and that follow each other. Of a mask's
  /// interval they are all.
  STROBE_INLINE Range strips_of(int64_t sub_tile, int64_t strip) const {
    while (strip < b_.strips() && !b_.s.plan[strip].seen.contains(sub_tile)) ++strip;
    Range strips{strip, strip};
    while (strips.end < b_.strips() && b_.s.plan[strips.end].seen.contains(sub_tile)) ++strips.end;
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
  /// to [keys][queries] = keys queries^T + initial [queries], where the products start at lse.
  template <typename Work>
  STROBE_INLINE void transposed(BackwardUnit u, int64_t blocks, const Bf16* keys,
                                const Bf16* queries, const float* initial, float* to, Work& work,
                                const typename Work::Constants& constants) {
    const float* const in = t_.starts_at_lse ? initial + u.sub_tile * kSubTile : nullptr;
    const int64_t unit = kStrip * blocks * kPair, other = blocks * kTileBf16;
    static_assert(kStrip == kSubTile);
    const Product m = {{keys + u.strip * unit, kTileBf16, other},
                       {queries + u.sub_tile * unit, kTileBf16, other},
                       {in, kTile, 0, 0},
                       {to, kTileFloat, 2 * kTileFloat},
                       blocks};
    products_.multiply<true>(m, work, constants);
  }

  /// dV += P dO and dK += dS Q.
  STROBE_INLINE void finish_strip(int64_t strip) {
    const Range seen = b_.s.plan[strip].seen;
    const int64_t d = b_.d_blocks, dv = b_.dv_blocks;
    float* const dv_sum = b_.s.dv + strip * kStrip * dv * kPair;
    float* const dk_sum = b_.s.dk + strip * kStrip * d * kPair;
    uint32_t split = b_.s.plan[strip].split;
    if (t_.folds(seen.end - 1)) split &= ~(1u << (seen.end - 1));
    if (seen.size() == 1 && (split >> seen.begin & 1)) {
      add_rows(b_.s.p, b_.s.p_low, b_.s.dout_pairs, dv, seen, dv_sum);
      add_rows(b_.s.ds, b_.s.ds_low, b_.s.q_pairs, d, seen, dk_sum);
    } else {
      add_rows(b_.s.p, nullptr, b_.s.dout_pairs, dv, seen, dv_sum);
      add_rows(b_.s.ds, nullptr, b_.s.q_pairs, d, seen, dk_sum);
      for (int64_t n = seen.begin; n < seen.end; ++n) {
        if (!(split >> n & 1)) continue;
        add_rows(b_.s.p_low, nullptr, b_.s.dout_pairs, dv, {n, n + 1}, dv_sum);
        add_rows(b_.s.ds_low, nullptr, b_.s.q_pairs, d, {n, n + 1}, dk_sum);
      }
    }
    if (q_nonfinite_) {
      products_.flush();
      add_nonfinite_rows(b_, t_, strip, seen, b_.s.dout_nonfinite, b_.s.p, b_.c.dout,
                         b_.c.problem.head_dim_v, dv_sum);
      add_nonfinite_rows(b_, t_, strip, seen, b_.s.q_nonfinite, b_.s.ds, b_.c.q,
                         b_.c.problem.head_dim, dk_sum);
    }
  }
  /// low: the low parts of the weights, where one sub-tile is all; a second step of each product.
  STROBE_INLINE void add_rows(const Bf16* weights, const Bf16* low, const Bf16* rows,
                              int64_t blocks, Range seen, float* sum) {
    Idle idle;
    for (int64_t e = 0; e < blocks; ++e) {
      float* const at = sum + e * 4 * kTileFloat;
      const Bf16* const tile = rows + (seen.begin * blocks + e) * kUnitTiles;
      const Product m = {
          {weights + seen.begin * kUnitTiles, low ? low - weights : kUnitTiles, kTileBf16},
          {tile, low ? 0 : blocks * kUnitTiles, kTileBf16},
          {at, kTileFloat, 2 * kTileFloat},
          {at, kTileFloat, 2 * kTileFloat},
          low ? 2 : seen.size()};
      products_.multiply<false>(m, idle, {});
    }
  }

  const Backward& b_;
  const QueryTile& t_;
  const bool k_nonfinite_, q_nonfinite_;
  Products products_;
};

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_BACKWARD_H_
