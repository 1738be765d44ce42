// FlashAttention-2's forward pass for one instruction set (arXiv:2307.08691, algorithm 1), in
// float32 or with products of bf16 pairs.
//
// Layout. Everything is transposed: queries lie along the vector lanes. For a tile of 64 queries
// and a block of keys
//
//     S^T [keys][queries]  = K  [keys][head_dim]    Q^T [head_dim][queries]
//     O^T [dim_v][queries] += V^T [dim_v][keys]     P^T [keys][queries]
//
// so that the maximum, the sum and the rescaling of a row of the softmax are vertical vector
// operations with one query in a lane. K and V are read as they lie in memory, an element at a
// time. Only Q and O are transposed, once per item.
//
// Pairs of bf16 (kPairs) are pairs of dimensions in S and of keys in O: of K two neighbours of a
// row are an element, Q^T, V and P^T are packed by rows. Pairs of keys begin at even positions of
// the sequence, so that what is added together does not depend on the item. A tile with a query
// that sees few keys has its product with V in float32.
//
// An item owns block_q queries of one head. It cuts them into several tiles, which share the
// conversion of each block of K and V.
//
// With batch_invariant decoding gives a row the same bits. There each chunk of blocks is gone
// through on its own, and chunks are merged along a tree (key_tree.h), which decoding can share
// out; blocks have as many keys as those of decoding.
#ifndef STROBE_CPU_FORWARD_INL_H_
#define STROBE_CPU_FORWARD_INL_H_

#include "cpu/cache-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/key_tree.h"
#include "cpu/score-inl.h"
#include "cpu/walks.h"

namespace strobe::cpu::STROBE_ISA {

constexpr int64_t kForwardTileQ = 64;  // S^T's row: four AVX-512 vectors
constexpr int64_t kForwardTileK =
    96;  // S^T takes 24 KB: it stays in a 32 KB L1; a multiple of the micro-kernel's rows
constexpr int64_t kMaskedTileK = 64;
static_assert(kMaskedTileK == kDecodeKeys);
constexpr int64_t kForwardBlock = 384;

/// Keys of a block. Those of a mask as data lie each in one of the mask's blocks, and so do tiles.
STROBE_SIMD int64_t forward_tile_k(const AttentionProblem& p) {
  if (p.batch_invariant) return kDecodeKeys;
  return p.mask.kind == STROBE_MASK_NONE ? kForwardTileK : kMaskedTileK;
}

static Tiles forward_tiles(const AttentionProblem& p) {
  // O^T and Q^T of all tiles of an item should stay in L2 beside a block of K and V: 384 KB at
  // head_dim 128.
  const int64_t block = p.head_dim + p.head_dim_v > 256 ? kForwardBlock / 2 : kForwardBlock;
  // Which rows of pairs of bf16 see few keys is a question of whole tiles.
  return {kForwardTileQ, forward_tile_k(p), block, kPairs ? 0 : kForwardTileQ / 4};
}

/// Running state of one tile's softmax: arrays of tile_q floats.
struct ForwardTile {
  float *qt, *ot;  // [head_dim][tile_q], [head_dim_v, whole transposes][tile_q]
  float *max, *sum;
  // Results of several chunks of keys, one behind the other as `at_node` has them. ot, max and sum
  // are those of the chunk at hand, or of all keys.
  float* nodes;
  KeyTree tree;
  int64_t chunk;          // at hand; -1: none, which it always is without batch_invariant
  int32_t *before, *end;  // each query sees the keys j with before < j < end
  Range queries;
  Range keys, full_keys;
  int64_t size;     // keys of a block
  BlockWalk walk;   // blocks of so many keys
  int64_t vectors;  // that hold queries
  bool few_keys;    // its weights stay float32
};

/// What is hidden from a tile of some keys: nothing; what lies outside the queries' intervals
/// (ForwardTile's before and end); and those pairs too that have no bit.
enum class Hides { kNothing, kOutside, kBits };
struct Hidden {
  Hides what;
  const uint32_t* bits;  // kBits: of the first key; of 32 queries, of which the tile's first is one
  int64_t stride;        // words from a key to the next
  int64_t first;         // which of them

  /// The lanes of a vector of the tile's queries, from query `at` of the tile on, that have a bit
  /// for key j.
  STROBE_INLINE hn::Mask<F> has_bit(int64_t j, int64_t at) const {
    const int64_t bit = first + at;
    return bit_lanes(bits[j * stride + bit / 32] >> (bit % 32));
  }
};

struct ForwardScratch {
  ForwardTile* tiles;
  float *k, *v, *pt, *alpha, *rows;
  float *bias, *bias_rows;  // of a tile and a block of keys: as pt lies; some rows of it
  Pair* v_pairs;
};

/// From a row of O to the next, where O^T has been transposed.
STROBE_SIMD int64_t sums_row(const AttentionProblem& p) {
  return round_up(p.head_dim_v, kTransposeRows);
}

/// The tile's ot, max and sum are those at a place of the tree's stack.
STROBE_SIMD int64_t node_floats(const AttentionProblem& p) {
  return (sums_row(p) + 2) * kForwardTileQ;
}
STROBE_SIMD void at_node(const AttentionProblem& p, ForwardTile& tile, int64_t place) {
  tile.ot = tile.nodes + place * node_floats(p);
  tile.max = tile.ot + sums_row(p) * kForwardTileQ;
  tile.sum = tile.max + kForwardTileQ;
}

STROBE_SIMD ForwardScratch carve_forward(Arena& arena, const ForwardContext& c) {
  const AttentionProblem& p = c.problem;
  const int64_t tiles = ceil_div(c.block_q, kForwardTileQ);
  const int64_t d = round_up(p.head_dim, kLanes), dv = round_up(p.head_dim_v, kLanes);
  const int64_t row_v = sums_row(p);
  ForwardScratch s;
  s.tiles = arena.take<ForwardTile>(tiles);
  s.k = arena.take<float>(kForwardTileK * d);
  s.v = arena.take<float>(kForwardTileK * dv);
  s.pt = arena.take<float>(kForwardTileK * kForwardTileQ);
  s.alpha = arena.take<float>(kForwardTileQ);
  s.rows = arena.take<float>(kTransposeRows * (d > row_v ? d : row_v));
  s.bias = arena.take<float>(p.has_bias ? kForwardTileK * kForwardTileQ : 0);
  s.bias_rows = arena.take<float>(p.has_bias ? kTransposeRows * kForwardTileK : 0);
  s.v_pairs = arena.take<Pair>(kPairs ? kForwardTileK / 2 * dv : 0);
  const int64_t chunks = ceil_div(p.seqlen_k, kDecodeKeys * kChunkBlocks);
  const int64_t nodes = 1 + (p.batch_invariant ? KeyTree::levels(chunks) : 0);
  for (int64_t t = 0; t < tiles; ++t) {
    float* const qt = arena.take<float>(p.head_dim * kForwardTileQ);
    float* const results = arena.take<float>(nodes * node_floats(p));
    int32_t* const before = arena.take<int32_t>(kForwardTileQ);
    int32_t* const end = arena.take<int32_t>(kForwardTileQ);
    if (!s.tiles) continue;
    s.tiles[t] = {};
    s.tiles[t].qt = qt;
    s.tiles[t].nodes = results;
    s.tiles[t].before = before;
    s.tiles[t].end = end;
  }
  return s;
}

static size_t forward_scratch(const ForwardContext& context) {
  Arena arena;
  carve_forward(arena, context);
  return arena.used();
}

/// O^T of the vectors that hold queries: 0, up to the last row that transpose_sums reads.
STROBE_SIMD void clear_sums(const AttentionProblem& p, const ForwardTile& tile) {
  for (int64_t e = 0; e < sums_row(p); ++e) {
    for (int64_t v = 0; v < tile.vectors; ++v)
      store(hn::Zero(f32), tile.ot + e * kForwardTileQ + v * kLanes);
  }
}
/// The result of no keys.
STROBE_SIMD void clear_results(const AttentionProblem& p, const ForwardTile& tile) {
  for (int64_t r = 0; r < kForwardTileQ; r += kLanes) {
    store(set(-kInfinity), tile.max + r);
    store(hn::Zero(f32), tile.sum + r);
  }
  clear_sums(p, tile);
}

/// Merges the results of some keys with those of the keys after them.
static void merge_nodes(const AttentionProblem& p, const ScoreOptions& options, ForwardTile tile,
                        int64_t place) {
  ForwardTile more = tile;
  at_node(p, tile, place);
  at_node(p, more, place + 1);
  const float unit = score_unit(options) * kLog2e;
  for (int64_t at = 0; at < tile.vectors * kLanes; at += kLanes) {
    const Merging merging(load(tile.max + at), load(more.max + at), unit);
    for (int64_t i = at; i < p.head_dim_v * kForwardTileQ; i += kForwardTileQ)
      store(merging.out(load(tile.ot + i), load(more.ot + i)), tile.ot + i);
    store(merging.sum(load(tile.sum + at), load(more.sum + at)), tile.sum + at);
    store(merging.max, tile.max + at);
  }
}
/// The chunk at hand ends.
STROBE_SIMD void end_chunk(const AttentionProblem& p, const ScoreOptions& options,
                           ForwardTile& tile) {
  if (tile.chunk < 0) return;
  tile.tree.add(0, tile.chunk, [&](int64_t place) { merge_nodes(p, options, tile, place); });
  tile.chunk = -1;
}
/// Goes to the chunk that has a block.
STROBE_SIMD void enter_chunk(const AttentionProblem& p, const ScoreOptions& options,
                             ForwardTile& tile, int64_t block) {
  const int64_t chunk = block / kChunkBlocks;
  if (chunk == tile.chunk) return;
  end_chunk(p, options, tile);
  tile.chunk = chunk;
  at_node(p, tile, tile.tree.top());
  clear_results(p, tile);
}
/// All chunks have been: the tile's results are those of all keys.
STROBE_SIMD void end_chunks(const AttentionProblem& p, const ScoreOptions& options,
                            ForwardTile& tile) {
  end_chunk(p, options, tile);
  tile.tree.end([&](int64_t place) { merge_nodes(p, options, tile, place); });
  tile.tree = {};
  at_node(p, tile, 0);
}

STROBE_SIMD void start_tile(const ForwardContext& c, const Sequence& sequence,
                            const ForwardItem& item, int64_t q_begin, float* rows,
                            ForwardTile& tile) {
  const AttentionProblem& p = c.problem;
  const int64_t d_padded = round_up(p.head_dim, kLanes);
  tile.queries = {q_begin, min64(q_begin + kForwardTileQ, item.q_end)};
  tile.keys = sequence.mask.kv_range(tile.queries);
  tile.full_keys = sequence.mask.full_range(tile.queries);
  tile.size = forward_tile_k(p);
  tile.walk = keys_of(c, sequence, item.head, tile.queries, tile.size);
  const int64_t n = tile.queries.size();
  tile.vectors = ceil_div(n, kLanes);
  const float factor = q_factor(score_options(c, item.batch, item.head));
  for (int64_t r = 0; r < n; r += kTransposeRows) {
    const int64_t some = min64(n - r, kTransposeRows);
    if (some < kTransposeRows) {
      __builtin_memset(rows, 0, static_cast<size_t>(kTransposeRows * d_padded) * sizeof(float));
    }
    load_query_rows(c, sequence, item.head, {q_begin + r, q_begin + r + some}, rows, d_padded);
    transpose_rows(rows, d_padded, p.head_dim, factor, tile.qt + r, kForwardTileQ);
  }
  if constexpr (kPairs) {
    pack_rows(tile.qt, kForwardTileQ, p.head_dim, tile.vectors, as_pairs(tile.qt), kForwardTileQ);
  }
  tile.few_keys = kPairs && sees_few_keys(c, sequence, item.head, tile.queries, tile.walk);
  for (int64_t r = 0; r < kForwardTileQ; ++r) {
    const Range seen = r < n ? sequence.mask.row(q_begin + r) : Range{0, 0};
    tile.before[r] = static_cast<int32_t>(seen.begin - 1);
    tile.end[r] = static_cast<int32_t>(seen.end);
  }
  tile.tree = {};
  tile.chunk = -1;
  at_node(p, tile, 0);
  clear_results(p, tile);
}

/// The bias of a tile's queries and of `keys`, which are a block's, to s.bias.
STROBE_SIMD void load_bias_tile(const Context& c, const Sequence& sequence, int64_t head,
                                const ForwardTile& tile, Range keys, const ForwardScratch& s) {
  for (int64_t r = 0; r < tile.queries.size(); r += kTransposeRows) {
    for (int64_t i = 0; i < kTransposeRows; ++i) {
      // Lanes past the last query take its bias: no result depends on them.
      const int64_t query = min64(tile.queries.begin + r + i, tile.queries.end - 1);
      load_bias(c.bias.row(sequence.batch, head, query), keys, s.bias_rows + i * kForwardTileK);
    }
    transpose_rows(s.bias_rows, kForwardTileK, keys.size(), 1, s.bias + r, kForwardTileQ);
  }
}

/// Softmax of kVectors vectors of the tile's queries, from the query `first` on: scores become
/// weights, the running maximum and sum take in the new keys, and alpha becomes what the old sum
/// and O have to be multiplied by. bias: as pt lies; null: none. Returns whether any alpha differs
/// from 1.
template <int kVectors, bool kLinear, Hides kHides>
static bool softmax_panel(const ScoreOptions& options, const ForwardTile& tile,
                          const Sequence& sequence, Range keys, const Hidden& hidden,
                          const float* bias, int64_t first, float* pt, float* alpha) {
  constexpr bool kMasked = kHides != Hides::kNothing;
  const Scorer score{options};
  VF max[kVectors], old[kVectors];
  VI before[kVectors], end[kVectors], position[kVectors];
  STROBE_UNROLL for (int v = 0; v < kVectors; ++v) {
    const int64_t at = first + v * kLanes;
    max[v] = old[v] = load(tile.max + at);
    if constexpr (kMasked) {
      before[v] = hn::Load(i32, tile.before + at);
      end[v] = hn::Load(i32, tile.end + at);
    }
    if constexpr (!kLinear) {
      position[v] = count_from(sequence.mask.position(tile.queries.begin + at));
    }
  }
  const int64_t n = keys.size();
  for (int64_t j = 0; j < n; ++j) {
    float* const row = pt + j * kForwardTileQ + first;
    [[maybe_unused]] const VI key = same(keys.begin + j);
    STROBE_UNROLL for (int v = 0; v < kVectors; ++v) {
      VF s = load(row + v * kLanes);
      if constexpr (!kLinear) {
        s = score(s, position[v], key).value;
        if (bias) s = add_bias(s, load(bias + j * kForwardTileQ + first + v * kLanes));
      }
      if constexpr (kMasked) s = hn::IfThenElse(sees(before[v], end[v], key), s, set(-kInfinity));
      if constexpr (kHides == Hides::kBits) {
        s = hn::IfThenElse(hidden.has_bit(j, first + v * kLanes), s, set(-kInfinity));
      }
      if constexpr (!kLinear || kMasked) store(s, row + v * kLanes);
      // Max gives its second operand where s is NaN: a NaN score shows in the sum.
      max[v] = hn::Max(s, max[v]);
    }
  }
  // The difference is taken before it is scaled: it is exact where two scores are large and close.
  const float unit = score_unit(options) * kLog2e;
  VF sum[kVectors], reference[kVectors];
  bool changed = false;
  STROBE_UNROLL for (int v = 0; v < kVectors; ++v) {
    const int64_t at = first + v * kLanes;
    // A query that has seen no finite score yet has nothing to subtract: -inf - -inf would be NaN.
    reference[v] = hn::IfThenZeroElse(hn::Eq(max[v], set(-kInfinity)), max[v]);
    const VF a = exp2(hn::Sub(old[v], reference[v]), unit);
    changed |= !hn::AllTrue(f32, hn::Eq(old[v], max[v]));
    store(a, alpha + at);
    store(max[v], tile.max + at);
    sum[v] = hn::Zero(f32);  // of this block alone: one long chain of additions rounds more
  }
  for (int64_t j = 0; j < n; ++j) {
    float* const row = pt + j * kForwardTileQ + first;
    STROBE_UNROLL for (int v = 0; v < kVectors; ++v) {
      const VF p = exp2(hn::Sub(load(row + v * kLanes), reference[v]), unit);
      sum[v] = hn::Add(sum[v], p);
      store(p, row + v * kLanes);
    }
  }
  STROBE_UNROLL for (int v = 0; v < kVectors; ++v) {
    const int64_t at = first + v * kLanes;
    store(hn::MulAdd(load(tile.sum + at), load(alpha + at), sum[v]), tile.sum + at);
  }

  if (options.dropout) {
    // The sum stays that of all weights: dropout comes after the softmax.
    const VF scale = set(options.generator.keep_scale);
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = first + v * kLanes;
      KeptQueries kept(options, hn::BitCast(u32, count_from(tile.queries.begin + at)));
      for (int64_t j = 0; j < n; ++j) {
        float* const p = pt + j * kForwardTileQ + at;
        store(hn::IfThenElseZero(kept(keys.begin + j), hn::Mul(load(p), scale)), p);
      }
    }
  }
  return changed;
}

template <bool kLinear, Hides kHides>
static bool softmax(const ScoreOptions& options, const ForwardTile& tile, const Sequence& sequence,
                    Range keys, const Hidden& hidden, const float* bias, float* pt, float* alpha) {
  bool changed = false;
  int64_t v = 0;
  for (; v + kMicroVectors <= tile.vectors; v += kMicroVectors) {
    changed |= softmax_panel<kMicroVectors, kLinear, kHides>(options, tile, sequence, keys, hidden,
                                                             bias, v * kLanes, pt, alpha);
  }
  for (; v < tile.vectors; ++v) {
    changed |= softmax_panel<1, kLinear, kHides>(options, tile, sequence, keys, hidden, bias,
                                                 v * kLanes, pt, alpha);
  }
  return changed;
}

/// O^T += V^T P^T for a block where V holds an infinity or a NaN and some pairs are hidden: the
/// product 0 * NaN must not reach a query that does not see the key. Rounds as gemm does.
/// bias: as pt lies; null: none.
template <typename T>
static void accumulate_seen_only(const ForwardTile& tile, Range keys, const Hidden& hidden,
                                 const float* bias, const Gemm<T>& product, int64_t dim_v) {
  for (int64_t at = 0; at < tile.vectors * kLanes; at += kLanes) {
    const VI before = hn::Load(i32, tile.before + at), end = hn::Load(i32, tile.end + at);
    const auto sees_key = [&](int64_t j) __attribute__((always_inline)) {
      hn::Mask<F> seen = sees(before, end, same(j));
      if (hidden.what == Hides::kBits) seen = hn::And(seen, hidden.has_bit(j - keys.begin, at));
      if (!bias) return seen;
      return hn::And(seen, shown(load(bias + (j - keys.begin) * kForwardTileQ + at)));
    };
    const VF alpha = load(product.alpha + at);
    for (int64_t e = 0; e < dim_v; ++e) {
      float* const ot = product.c + e * product.c_row + at;
      const T *v = product.a + e * product.a_row, *pt = product.b + at;
      VF sum = hn::Zero(f32);
      for (int64_t j = keys.begin; j < keys.end; j += kValues<T>) {
        const VU seen = kept_values<T>(sees_key(j), sees_key(j + kValues<T> - 1));
        sum = add_products(part(same_in_all(*v), seen), elements(pt), sum);
        v += product.a_col;
        pt += product.b_row;
      }
      store(hn::MulAdd(load(ot), alpha, sum), ot);
    }
  }
}

/// The part that `keys` has of a block of `size` keys. Blocks begin at multiples of their size, so
/// that what is summed together does not depend on the item.
STROBE_SIMD Range forward_keys(int64_t block, int64_t size, Range keys) {
  if (kPairs) keys.begin -= keys.begin % 2;
  return intersect({block * size, (block + 1) * size}, keys);
}
/// The part that a tile has of such a block: whole pairs, as far as the block has them. The mask
/// hides what was added.
STROBE_SIMD Range tile_keys(const ForwardTile& tile, Range block) {
  Range keys = tile.keys;
  if (kPairs) keys = {keys.begin - keys.begin % 2, keys.end + keys.end % 2};
  return intersect(block, keys);
}

/// A block's rows of K, as the product with Q^T reads them.
STROBE_SIMD void load_keys(const RowView& k, const AttentionProblem& p, Range block, float* to) {
  const int64_t d = round_up(p.head_dim, kLanes);
  load_input_rows(k, block, p.head_dim, to, d);
  if constexpr (kPairs) pack_columns(to, d, block.size(), d, as_pairs(to));
}

/// What is hidden of the keys, which are a block's at a place of the tile's walk, from some of the
/// tile's queries. A block is cut to the keys that there are: all of them may be seen where the
/// block is not full.
STROBE_SIMD Hidden hidden_from(const Context& c, const Sequence& sequence, int64_t head,
                               const ForwardTile& tile, int64_t place, Range keys) {
  if (tile.walk.is_full(place)) return {Hides::kNothing, nullptr, 0, 0};
  const PairBits pair = pair_bits(c, sequence, head, tile.queries.begin, keys.begin);
  if (pair.bits) {
    const HeadMask mask = c.mask_of(sequence, head);
    return {Hides::kBits, mask.key_words(pair, tile.queries.begin, keys.begin), mask.block_q() / 32,
            tile.queries.begin % 32};
  }
  return {tile.full_keys.contains(keys) ? Hides::kNothing : Hides::kOutside, nullptr, 0, 0};
}

/// Writes the weights of one tile of queries and the keys `keys` to s.pt, and takes them into the
/// tile's maximum and sum. s.k holds K of `block`, of which `keys` is a part; ahead: fetched
/// meanwhile. Returns whether O has to be multiplied by s.alpha.
STROBE_SIMD bool weigh_keys(const Context& c, const ScoreOptions& options, const Sequence& sequence,
                            int64_t head, const ForwardTile& tile, Range block, Range keys,
                            const Hidden& hidden, RowsAhead& ahead, const ForwardScratch& s) {
  const int64_t dim = c.problem.head_dim, first = keys.begin - block.begin;
  if constexpr (kPairs) {
    const int64_t d = row_pairs(dim);
    gemm<Old::kDrop>(Gemm<Pair>{as_pairs(s.k) + first * d, d, 1, as_pairs(tile.qt), kForwardTileQ,
                                s.pt, kForwardTileQ},
                     keys.size(), tile.vectors, ceil_div(dim, 2), ahead);
  } else {
    const int64_t d = round_up(dim, kLanes);
    gemm<Old::kDrop>({s.k + first * d, d, 1, tile.qt, kForwardTileQ, s.pt, kForwardTileQ},
                     keys.size(), tile.vectors, dim, ahead);
  }
  const auto run = [&]<bool kLinear>() __attribute__((always_inline)) {
    return hidden.what == Hides::kNothing   ? softmax<kLinear, Hides::kNothing>
           : hidden.what == Hides::kOutside ? softmax<kLinear, Hides::kOutside>
                                            : softmax<kLinear, Hides::kBits>;
  };
  const auto softmax_of_tile =
      options.linear ? run.template operator()<true>() : run.template operator()<false>();
  if (c.bias.data) load_bias_tile(c, sequence, head, tile, keys, s);
  return softmax_of_tile(options, tile, sequence, keys, hidden, c.bias.data ? s.bias : nullptr,
                         s.pt, s.alpha);
}

/// O^T += V^T P^T of a step. place: in the tile's walk; rescale: whether alpha is not 1 everywhere;
/// bias: as for accumulate_seen_only; ahead: fetched meanwhile.
template <typename T>
STROBE_SIMD void accumulate(const ForwardTile& tile, Range keys, int64_t place, bool rescale,
                            bool v_nonfinite, const Hidden& hidden, const float* bias,
                            const Gemm<T>& product, int64_t dim_v, RowsAhead& ahead) {
  const int64_t depth = ceil_div(keys.size(), kValues<T>);
#if STROBE_BREAK_KERNEL_SCALE
  rescale = false;
#endif
  if (v_nonfinite && (hidden.what != Hides::kNothing || bias)) {
    accumulate_seen_only(tile, keys, hidden, bias, product, dim_v);
  } else if (place == tile.walk.begin) {
    gemm<Old::kDrop>(product, dim_v, tile.vectors, depth, ahead);
  } else if (rescale) {
    gemm<Old::kScale>(product, dim_v, tile.vectors, depth, ahead);
  } else {
    gemm<Old::kAdd>(product, dim_v, tile.vectors, depth, ahead);
  }
}

/// One tile of queries against the block of keys at a place of its walk: the step of the algorithm.
/// block: its keys whose rows are in s.k and s.v; ahead: fetched meanwhile.
STROBE_SIMD void forward_step(const ForwardContext& c, const ScoreOptions& options,
                              const Sequence& sequence, int64_t head, const ForwardTile& tile,
                              int64_t place, Range block, bool v_nonfinite, RowsAhead& ahead,
                              const ForwardScratch& s) {
  const AttentionProblem& p = c.problem;
  const Range keys = tile_keys(tile, block);
  const int64_t dv = round_up(p.head_dim_v, kLanes), first = keys.begin - block.begin;
  const Hidden hidden = hidden_from(c, sequence, head, tile, place, keys);
  const bool rescale = weigh_keys(c, options, sequence, head, tile, block, keys, hidden, ahead, s);
  const float* const bias = c.bias.data ? s.bias : nullptr;
  constexpr int64_t kRow = kForwardTileQ;
  if (kPairs && !tile.few_keys) {
    pack_rows(s.pt, kRow, keys.size(), tile.vectors, as_pairs(s.pt), kRow);
    const Pair* const v = s.v_pairs + first / 2 * dv;
    accumulate(tile, keys, place, rescale, v_nonfinite, hidden, bias,
               Gemm<Pair>{v, 1, dv, as_pairs(s.pt), kRow, tile.ot, kRow, s.alpha}, p.head_dim_v,
               ahead);
  } else {
    const float* const v = s.v + first * dv;
    accumulate(tile, keys, place, rescale, v_nonfinite, hidden, bias,
               Gemm<float>{v, 1, dv, s.pt, kRow, tile.ot, kRow, s.alpha}, p.head_dim_v, ahead);
  }
}

/// Some tiles of an item against all keys that they see. walk, keys: of all these tiles together. V
/// is multiplied by v_factor first.
static void forward_tiles_pass(const ForwardContext& c, const ScoreOptions& options,
                               const Sequence& sequence, const ForwardItem& item,
                               ForwardTile* tiles, int64_t count, const BlockWalk& walk, Range keys,
                               float v_factor, const ForwardScratch& s) {
  const AttentionProblem& p = c.problem;
  const int64_t dv = round_up(p.head_dim_v, kLanes);
  const RowView k = c.key_rows(c.k, sequence, c.head_kv(item.head));
  const RowView v = c.key_rows(c.v, sequence, c.head_kv(item.head));
  for (int64_t place = walk.begin; place < walk.end; place = walk.after(place)) {
    const Range block = forward_keys(walk.block(place), tiles[0].size, keys);
    load_keys(k, p, block, s.k);
    load_input_rows(v, block, p.head_dim_v, s.v, dv);
    if (v_factor != 1) scale_row(s.v, block.size() * dv, v_factor);
    if constexpr (kPairs) pack_rows(s.v, dv, block.size(), dv / kLanes, s.v_pairs, dv);
    const bool v_nonfinite = any_nonfinite(s.v, block.size(), dv, dv);
    // While the first tile is computed.
    RowsAhead ahead;
    if (const int64_t after = walk.after(place); after < walk.end) {
      const Range next = forward_keys(walk.block(after), tiles[0].size, keys);
      const int64_t vectors = tiles[0].vectors;
      ahead = {k,    p.head_dim,
               v,    p.head_dim_v,
               next, micro_kernels(block.size(), vectors) + micro_kernels(p.head_dim_v, vectors)};
    }
    for (int64_t t = 0; t < count; ++t) {
      const BlockWalk& own = tiles[t].walk;
      if (!own.visits(walk.block(place))) continue;
      if (p.batch_invariant) enter_chunk(p, options, tiles[t], walk.block(place));
      forward_step(c, options, sequence, item.head, tiles[t], own.rank(walk.block(place)), block,
                   v_nonfinite, ahead, s);
    }
  }
  for (int64_t t = 0; p.batch_invariant && t < count; ++t) end_chunks(p, options, tiles[t]);
}

/// Whether row r of the tile, whose weights have been summed, sees no key.
STROBE_SIMD bool sees_none(const Context& c, const Sequence& sequence, int64_t head,
                           const ForwardTile& tile, int64_t r) {
  const int64_t query = tile.queries.begin + r;
  return cpu::sees_none(c, sequence, head, tile.walk, query, tile.size, tile.sum[r]);
}

/// O's rows of the tile's queries from `first` on, kTransposeRows at most, to
/// [query][sums_row].
STROBE_SIMD void transpose_sums(const AttentionProblem& p, const ForwardTile& tile, int64_t first,
                                float* to) {
  const int64_t n = min64(tile.queries.size() - first, kTransposeRows);
  for (int64_t e = 0; e < p.head_dim_v; e += kTransposeRows)
    transpose_rows(tile.ot + e * kForwardTileQ + first, kForwardTileQ, n, 1, to + e, sums_row(p));
}

/// O = O^T / sum and lse = max + log(sum) of a tile's queries.
STROBE_SIMD void finish_tile(const ForwardContext& c, const Sequence& sequence,
                             const ForwardItem& item, const ForwardTile& tile, float* rows) {
  const AttentionProblem& p = c.problem;
  const int64_t row_v = sums_row(p), n = tile.queries.size();
  const ScoreOptions options = score_options(c, item.batch, item.head);
  const RowView out = c.query_rows(c.out, sequence, item.head);
  float* const lse =
      c.lse ? c.lse + c.lse_index(sequence, item.head) + tile.queries.begin : nullptr;
  for (int64_t r = 0; r < n; ++r) {
    if (r % kTransposeRows == 0) {
      transpose_sums(p, tile, r, rows);
      if (p.batch_invariant) drop_signs_of_zeros(rows, kTransposeRows * row_v);
    }
    const RowEnd end =
        row_end(c, options, item.head, tile.max[r], sees_none(c, sequence, item.head, tile, r));
    store_row(out, tile.queries.begin + r, p.head_dim_v, rows + r % kTransposeRows * row_v,
              end.factor(tile.sum[r]));
    if (lse) lse[r] = end.lse(tile.sum[r]);
  }
}

/// Before the division a row of O is the sum of up to seqlen_k rows of V. It may have overflowed
/// although the mean that it becomes is finite. This computes the tile again with a smaller V, and
/// replaces what is not finite in the output.
static void mend_overflow(const ForwardContext& c, const ScoreOptions& options,
                          const Sequence& sequence, const ForwardItem& item, ForwardTile& tile,
                          const ForwardScratch& s) {
  const AttentionProblem& p = c.problem;
  const int64_t row_v = sums_row(p), n = tile.queries.size();
  const RowView out = c.query_rows(c.out, sequence, item.head);
  float largest = 1;
  for (int64_t r = 0; r < n; ++r) {
    if (tile.sum[r] > largest && tile.sum[r] < kInfinity) largest = tile.sum[r];
    tile.sum[r] = 0;
  }
  // Where the maximum is not known beforehand, sums on the way may be as large as the keys are
  // many.
  if (p.batch_invariant) largest = static_cast<float>(tile.keys.size());
  float power = 2;  // sums of weights over this stay below 1/2, dropout's larger ones included
  while (power < 2 * largest * c.dropout.keep_scale) power *= 2;
  clear_sums(p, tile);
  forward_tiles_pass(c, options, sequence, item, &tile, 1, tile.walk, tile.keys, 1 / power, s);
  for (int64_t r = 0; r < n; ++r) {
    if (r % kTransposeRows == 0) transpose_sums(p, tile, r, s.rows);
    if (sees_none(c, sequence, item.head, tile, r)) continue;
    float* const row = s.rows + r % kTransposeRows * row_v;
    const RowEnd end = row_end(c, options, item.head, tile.max[r], false);
    scale_row(row, row_v, end.factor(tile.sum[r], power));
    mend_row(out, tile.queries.begin + r, p.head_dim_v, row, s.v);
  }
}

static void forward_block(const ForwardContext& c, const ForwardItem& item, std::byte* scratch) {
  Arena arena(scratch);
  const ForwardScratch s = carve_forward(arena, c);
  const Sequence sequence = c.sequence(item.batch, item.head);
  const ScoreOptions options = score_options(c, item.batch, item.head);

  const int64_t tiles = ceil_div(item.q_end - item.q_begin, kForwardTileQ);
  const Range queries{item.q_begin, item.q_end};
  const BlockWalk walk = keys_of(c, sequence, item.head, queries, forward_tile_k(c.problem));
  const Range keys = sequence.mask.kv_range(queries);
  if (walk.begin < walk.end) {
    // Short sequences are one block after the other, each somewhere else in memory.
    const Range block = forward_keys(walk.block(walk.begin), forward_tile_k(c.problem), keys);
    const int64_t head_kv = c.head_kv(item.head);
    prefetch_rows(c.key_rows(c.k, sequence, head_kv), block, c.problem.head_dim);
    prefetch_rows(c.key_rows(c.v, sequence, head_kv), block, c.problem.head_dim_v);
  }
  for (int64_t t = 0; t < tiles; ++t) {
    start_tile(c, sequence, item, item.q_begin + t * kForwardTileQ, s.rows, s.tiles[t]);
  }
  forward_tiles_pass(c, options, sequence, item, s.tiles, tiles, walk, keys, 1, s);
  for (int64_t t = 0; t < tiles; ++t) {
    ForwardTile& tile = s.tiles[t];
    finish_tile(c, sequence, item, tile, s.rows);
    if (any_nonfinite(tile.ot, c.problem.head_dim_v, tile.vectors * kLanes, kForwardTileQ))
      mend_overflow(c, options, sequence, item, tile, s);
  }
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_FORWARD_INL_H_
