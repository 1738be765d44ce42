// The forward pass with the online softmax of the paper, one unit of 32 queries and 128 keys after
// the other and nothing overlapped. It serves scores other than scale * q.k, dropout, queries that
// see few keys, and rows that amx-forward.h gave up.
//
// O is divided by the sum of the weights as they are multiplied with V, that is, rounded to bf16:
// where one weight outweighs the rest, its rounding error is in both and cancels. lse is made of
// the sum of the weights before rounding.
#ifndef STROBE_CPU_AMX_FORWARD_ONLINE_H_
#define STROBE_CPU_AMX_FORWARD_ONLINE_H_

#include "cpu/amx-forward.h"
#include "cpu/amx-score.h"

namespace strobe::cpu::amx {

/// S of a unit.
///
/// amx-forward.h keeps 16 lanes of `reference` and `sum` for each row. Here the first lane holds
/// the running maximum of the scores (`reference`) and the sum of the weights (`sum`), and the
/// second lane of `sum` the sum of the weights rounded to bf16.
STROBE_AMX void online_scores(const Forward& f, const Unit& u) {
  const int64_t n = f.d_blocks;
  const Bf16* const q = f.s.q + u.tile * kForwardTileQ * n * kPair;
  for (int64_t g = 0; g < u.groups; ++g) {
    const Bf16* const k = f.s.k + (u.key_in_block + g * kGroup) * n * kPair;
    tile_zero<0>();
    tile_zero<1>();
    tile_zero<2>();
    tile_zero<3>();
    for (int64_t d = 0; d < n; ++d) {
      tile_load<4>(q + d * kTileBf16);
      tile_load<5>(q + (n + d) * kTileBf16);
      tile_load<6>(k + d * kTileBf16);
      tile_load<7>(k + (n + d) * kTileBf16);
      multiply_quad();
    }
    float* const s = f.s.s + g * kForwardTileQ * kGroup;
    store_quad({s, kTile, kTile * kGroup, kGroup * 4});
  }
}

/// Weights of a unit; their low parts where they are split.
STROBE_AMX Bf16* online_weights_at(const Forward& f, bool low) {
  return f.s.p + (low ? kForwardTileQ * kUnit : 0);
}

STROBE_AMX void online_output(const Forward& f, const Unit& u) {
  const bool split = f.few_keys(u.tile);
  const int64_t n = f.dv_blocks;
  for (int64_t b = 0; b < n; ++b) {
    float* const o = f.o_tile(u.tile) + b * 4 * kTileFloat;
    tile_load<0>(o);
    tile_load<1>(o + kTileFloat);
    tile_load<2>(o + 2 * kTileFloat);
    tile_load<3>(o + 3 * kTileFloat);
    for (int64_t g = 0; g < u.groups; ++g) {
      const Bf16* const p = online_weights_at(f, false) + g * 2 * kTileBf16;
      const Bf16* const v = f.s.v + ((u.key_in_block + g * kGroup) * n + b * kGroup) * kPair;
      tile_load<4>(p);
      tile_load<5>(p + kTileBf16);
      tile_load<6>(v);
      tile_load<7>(v + kTileBf16);
      multiply_quad();
      if (!split) continue;
      const Bf16* const low = online_weights_at(f, true) + g * 2 * kTileBf16;
      tile_load<4>(low);
      tile_load<5>(low + kTileBf16);
      multiply_quad();
    }
    store_quad({o, kTileFloat, 2 * kTileFloat});
  }
}

/// Turns the scores of the unit into weights times 2^-lower, and scales O and the sums so far to
/// the new maximum.
static void online_weights(const Forward& f, const Scorer& scorer, const Unit& u, int lower) {
  const ScoreOptions& options = scorer.options;
  const Range tile = f.tile(u.tile);
  const Mask& mask = f.sequence.mask;
  const bool split = f.few_keys(u.tile);
  const RoundToPairs to_pairs;
  PairBits pairs_of[kUnitGroups];
  for (int64_t g = 0; g < u.groups; ++g) {
    pairs_of[g] = pair_bits(f.c, f.sequence, f.item.head, f.query(tile.begin), u.key + g * kGroup);
  }
  // Rows of P past the last query keep what they have: no result depends on them.
  for (int64_t r = 0; r < tile.size(); ++r) {
    const int64_t query = f.query(tile.begin + r);
    float* const at = f.s.s + r * kGroup;
    const __m512i position = same(mask.position(query));
    const bool biased = f.c.bias.data != nullptr;
    const BiasRow bias = f.c.bias.row(f.item.batch, f.item.head, query);

    __m512 largest = set(-kInfinity);
    for (int64_t j = 0; j < u.groups * kGroup; j += kTile) {
      float* const s = at + j / kGroup * kForwardTileQ * kGroup + j % kGroup;
      __m512 x = scorer(load(s), position, count_from(u.key + j)).value;
      const uint32_t group = f.seen_keys(pairs_of[j / kGroup], query, u.key + j / kGroup * kGroup);
      const auto lane = static_cast<__mmask16>(group >> j % kGroup);
      if (biased) x = add_bias(x, load_bias(bias, u.key + j, lane));
      const __m512 score = _mm512_mask_mov_ps(set(-kInfinity), lane, x);
      store(s, score);
      largest = _mm512_max_ps(score, largest);  // NaN does not take part: it shows in the sum
    }
    float* const maximum = f.s.reference + (u.tile * kForwardTileQ + r) * kTile;
    float* const sum = f.s.sum + (u.tile * kForwardTileQ + r) * kTile;
    const float now = _mm512_reduce_max_ps(largest);
    if (now > *maximum) {
      if (*maximum != -kInfinity) {
        const __m512 rescale = exp2(set((*maximum - now) * kLog2e));
        *sum *= _mm512_cvtss_f32(rescale);
        sum[1] *= _mm512_cvtss_f32(rescale);
        float* const o = f.o_tile(u.tile) + r / kTile * 2 * kTileFloat + r % kTile * kTile;
        for (int64_t b = 0; b < f.dv_blocks * 4; b += 4) {
          for (int64_t h = 0; h < 2; ++h) {
            float* const row = o + (b + h) * kTileFloat;
            store(row, _mm512_mul_ps(load(row), rescale));
          }
        }
      }
      *maximum = now;
    }
    // A row that has seen no finite score yet has nothing to subtract: -inf - -inf would be NaN.
    const __m512 reference = set(*maximum == -kInfinity ? 0 : *maximum);
    uint32_t kept[kUnitGroups];
    if (options.dropout) kept_keys(options, query, u.key, kept);
    __m512 total = _mm512_setzero_ps(), rounded_total = total;
    for (int64_t g = 0; g < u.groups; ++g) {
      const float* const s = at + g * kForwardTileQ * kGroup;
      const __m512 log2e = set(kLog2e), less = set(static_cast<float>(lower));
      __m512 a = exp2(_mm512_fmsub_ps(_mm512_sub_ps(load(s), reference), log2e, less));
      __m512 b = exp2(_mm512_fmsub_ps(_mm512_sub_ps(load(s + kTile), reference), log2e, less));
      const __m512 both = _mm512_add_ps(a, b);
      __m512i pairs = to_pairs(a, b);
      total = _mm512_add_ps(total, both);
      rounded_total =
          split ? total
                : _mm512_add_ps(rounded_total, _mm512_add_ps(round_to_bf16(a), round_to_bf16(b)));
      if (options.dropout) {
        // The sums stay those of all weights: dropout comes after the softmax.
        a = _mm512_maskz_mov_ps(static_cast<__mmask16>(kept[g]), a);
        b = _mm512_maskz_mov_ps(static_cast<__mmask16>(kept[g] >> 16), b);
        pairs = to_pairs(a, b);
      }
      const int64_t row = (g * kForwardTileQ + r) * kPair;
      _mm512_store_si512(online_weights_at(f, false) + row, pairs);
      if (split) {
        _mm512_store_si512(online_weights_at(f, true) + row, to_pairs(low_part(a), low_part(b)));
      }
    }
    *sum += _mm512_reduce_add_ps(total);
    sum[1] += _mm512_reduce_add_ps(rounded_total);
  }
}

/// Packs the groups of a super-block that some of the tiles visit. Returns whether V has rows that
/// pack_pairs leaves out.
STROBE_AMX bool pack_keys(const Forward& f, Range block, Range tiles) {
  static_assert(kGroup * 32 >= 1024);
  const int64_t groups = ceil_div(block.size(), kGroup);
  uint32_t visited = 0;
  for (int64_t t = tiles.begin; t < tiles.end; ++t) {
    const BlockWalk all = f.groups(f.tile(t));
    const BlockWalk walk = all.within(block.begin / kGroup, block.begin / kGroup + groups);
    if (walk.is_convex()) {
      visited |= lanes(walk.begin - block.begin / kGroup, walk.end - block.begin / kGroup);
      continue;
    }
    for (int64_t place = walk.begin; place < walk.end; place = walk.after(place)) {
      visited |= 1u << (walk.block(place) - block.begin / kGroup);
    }
  }
  bool nonfinite = false;
  for (int64_t g = 0; g < groups; ++g) {
    if (!(visited >> g & 1)) continue;
    const int64_t first = g;
    while (g + 1 < groups && (visited >> (g + 1) & 1)) ++g;
    const Range run =
        intersect({block.begin + first * kGroup, block.begin + (g + 1) * kGroup}, block);
    const int64_t padded = round_up(run.size(), kGroup);
    const int64_t d = f.d_blocks * kPair, dv = f.dv_blocks * kPair;
    pack_transposed(f.k_rows(run), padded, f.s.k + first * kGroup * d);
    nonfinite |= pack_pairs<false>(f.v_rows(run), padded, f.s.v + first * kGroup * dv,
                                   f.s.nonfinite + first);
  }
  return nonfinite;
}

/// Weighs and sums tiles [tile, tile_end): leaves O, the maximum and the sums of their rows.
/// lower: weights are 2^-lower of what they are against the maximum.
static void online_tiles(const Forward& f, int64_t tile, int64_t tile_end, int lower) {
  const Scorer scorer(score_options(f.c, f.item.batch, f.item.head));
  for (int64_t r = tile * kForwardTileQ; r < tile_end * kForwardTileQ; ++r) {
    f.s.reference[r * kTile] = -kInfinity;
    f.s.sum[r * kTile] = f.s.sum[r * kTile + 1] = 0;
  }
  for (int64_t t = tile; t < tile_end; ++t) {
    __builtin_memset(f.o_tile(t), 0,
                     static_cast<size_t>(kForwardTileQ * f.dv_blocks * kPair) * sizeof(float));
  }
  const Range keys = f.keys({f.tile(tile).begin, f.tile(tile_end - 1).end});
  const int64_t size = super_block(f.c.problem);
  for (Range block = block_at(keys, keys.begin / kGroup * kGroup, size); !block.empty();
       block = block_at(keys, block.end, size)) {
    const bool nonfinite = pack_keys(f, block, {tile, tile_end});
    Units units(f, block, tile, tile_end);
    for (Unit u; units.next(u);) {
      online_scores(f, u);
      online_weights(f, scorer, u, lower);
      if (nonfinite) add_nonfinite(f, u, f.s.p, f.o_tile(u.tile));
      online_output(f, u);
    }
  }
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_FORWARD_ONLINE_H_
