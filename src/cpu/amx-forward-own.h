// The forward pass with batch_invariant: a row has the same bits as part of a prompt and decoded.
//
// A tile product gives an element the same bits whatever the other rows and columns of its tiles
// are, and a key that a row does not see adds 0 to its sums. So a row of amx-forward.h is its own
// but for three things, which here depend on the row alone:
//   - the reference: the largest score among those of 16 keys, from a multiple of 16 on, that begin
//     with the first one that the row sees;
//   - whether the row sees few keys, and goes to amx-forward-online.h for it. Where a tile has both
//     kinds each way writes its own;
//   - cuts: sums begin anew with each super-block, a chunk of keys, and what chunks give is added
//     along a tree over their numbers (key_tree.h), which decoding can share out. A row's reference
//     is that of all of its chunks, so that to merge is to add.
// Rows that amx-forward.h gives up, by their own sums, and rows with few keys go through their keys
// in order, in units of 128 keys from the first of the sequence.
//
// Decoding packs the queries of all heads that share a key head as rows of one tile.
#ifndef STROBE_CPU_AMX_FORWARD_OWN_H_
#define STROBE_CPU_AMX_FORWARD_OWN_H_

#include "cpu/amx-forward-item.h"
#include "cpu/decode.h"

namespace strobe::cpu::amx {

/// The queries of a tile whose rows may be several heads'.
STROBE_AMX void pack_own_queries(const Forward& f, int64_t t) {
  const int64_t n = f.d_blocks;
  const Range tile = f.tile(t);
  Bf16* const to = f.s.q + t * kForwardTileQ * n * kPair;
  for (int64_t r = 0; r < kForwardTileQ; ++r) {
    const int64_t row = min64(tile.begin + r, tile.end - 1), query = f.query(row);
    const Rows q(f.c.query_rows(f.c.q, f.sequence, f.head(row)), {query, query + 1},
                 f.c.problem.head_dim);
    for (int64_t d = 0; d < n; ++d) {
      _mm512_store_si512(to + (r / kTile * n + d) * kTileBf16 + r % kTile * kPair,
                         q.at(0, d * kPair));
    }
  }
}

/// Fills in the references of a tile's rows.
static void fill_own_references(const Forward& f, int64_t t) {
  const Range tile = f.tile(t);
  const Mask& mask = f.sequence.mask;
  const auto seen_by = [&](int64_t r) { return mask.row(f.query(tile.begin + r)); };
  alignas(64) float reference[kForwardTileQ] = {};
  for (int64_t r = 0, end = 0; r < tile.size(); r = end) {
    const Range seen = seen_by(r);
    end = r + 1;
    if (seen.empty()) continue;
    const int64_t first = seen.begin / kTile * kTile;
    // Rows that begin with the same 16 keys.
    while (end < tile.size() && seen_by(end).begin / kTile * kTile == first) ++end;
    const Range keys{first, min64(first + kTile, mask.seqlen_k)};
    pack_transposed(f.k_rows(keys), kTile, f.s.first_keys);
    score_first_keys(f, t, f.s.first_keys);
    for (int64_t half = 0; half < kForwardTileQ; half += kTile) {
      alignas(64) int32_t begins[kTile], ends[kTile];
      for (int64_t i = 0; i < kTile; ++i) {
        const Range own = seen_by(max64(r, min64(half + i, end - 1)));
        begins[i] = static_cast<int32_t>(own.begin - first);
        ends[i] = static_cast<int32_t>(max64(0, min64(own.end - first, kTile)));
      }
      alignas(64) float found[kTile];
      store(found, reference_of(f.s.s + half * kTile, _mm512_load_si512(begins),
                                _mm512_load_si512(ends), f.c.problem.scale));
      for (int64_t i = max64(r, half); i < min64(end, half + kTile); ++i) {
        reference[i] = found[i - half];
      }
    }
  }
  for (int64_t r = 0; r < kForwardTileQ; ++r) store(f.reference(t) + r * kTile, set(reference[r]));
}

STROBE_AMX bool has_many(const Forward& f, int64_t t) { return f.s.own[t].few != f.s.own[t].all; }

/// Before the keys: what rows are and where they begin.
static void begin_own_rows(const Forward& f, int64_t tiles) {
  for (int64_t t = 0; t < tiles; ++t) {
    OwnTile& own = f.s.own[t];
    own = {};
    const Range tile = f.tile(t);
    own.all = lanes(0, tile.size());
    for (int64_t r = 0; r < tile.size(); ++r) {
      const Range seen = f.sequence.mask.row(f.query(tile.begin + r));
      own.few |= static_cast<uint32_t>(!seen.empty() && seen.size() <= kFewKeys) << r;
    }
    if (f.heads > 1) pack_own_queries(f, t);
    if (has_many(f, t)) fill_own_references(f, t);
  }
}

/// Adds a node of the tree to the one before it.
STROBE_AMX void merge_own(const Forward& f, int64_t t, int64_t place) {
  float* const to = f.node(t, place);
  const float* const more = f.node(t, place + 1);
  for (int64_t i = 0; i < node_floats(f.c.problem); i += kTile) {
    store(to + i, _mm512_add_ps(load(to + i), load(more + i)));
  }
}

/// Some chunks of keys, for tiles of which each or none has rows with many keys: each tile's result
/// is at place 0 then.
static void add_chunks(const Forward& f, Range tiles, Range chunks) {
  if (!has_many(f, tiles.begin)) chunks = {0, 0};
  const Range keys = f.keys({f.tile(tiles.begin).begin, f.tile(tiles.end - 1).end});
  const int64_t size = super_block(f.c.problem);
  const auto merge = [&](int64_t t) { return [&f, t](int64_t place) { merge_own(f, t, place); }; };
  for (int64_t chunk = chunks.begin; chunk < chunks.end; ++chunk) {
    const Range block = intersect({chunk * size, (chunk + 1) * size}, {0, keys.end});
    if (intersect(block, keys).empty()) continue;
    clear_lane_sums(f, tiles);
    const bool nonfinite = pack_keys(f, block, tiles);
    run_pipeline(f, block, tiles, nonfinite);
    for (int64_t t = tiles.begin; t < tiles.end; ++t) {
      const BlockWalk walk =
          f.groups(f.tile(t)).within(block.begin / kGroup, ceil_div(block.end, kGroup));
      if (walk.begin >= walk.end) continue;
      float* const sums = f.sums(f.o_tile(t));
      for (int64_t half = 0; half < kForwardTileQ; half += kTile) {
        store(sums + half, sum_rows(f.s.sum + (t * kForwardTileQ + half) * kTile));
      }
      f.s.own[t].tree.add(0, chunk, merge(t));
    }
  }
  for (int64_t t = tiles.begin; t < tiles.end; ++t) {
    KeyTree& tree = f.s.own[t].tree;
    tree.end(merge(t));
    if (tree.top() == 0) {
      __builtin_memset(f.node(t, 0), 0, static_cast<size_t>(node_floats(f.c.problem)) * 4);
    }
    tree = {};
  }
}

/// Computes rows of a tile once more, or for the first time where they see few keys, with all of
/// their keys in order.
static void compute_in_order(const Forward& f, int64_t t, uint32_t rows, bool few) {
  if (rows == 0) return;
  f.s.few[t] = few;
  online_tiles(f, t, t + 1, 0);
  finish_online_tile(f, t, rows);
}

/// Writes a tile's rows, of whose many-keyed ones the results lie at place 0.
static void end_own_rows(const Forward& f, int64_t t) {
  const OwnTile& own = f.s.own[t];
  const uint32_t many = own.all & ~own.few;
  const uint32_t failed = many == 0 ? 0 : finish_tile(f, t, many);
  compute_in_order(f, t, failed, false);
  compute_in_order(f, t, own.few, true);
}

/// A row of O from a tile's node, [dim_v / 32][2 tiles][16 columns], and back.
STROBE_AMX float* row_in_node(const Forward& f, int64_t t, int64_t r) {
  return f.node(t, 0) + r / kTile * 2 * kTileFloat + r % kTile * kTile;
}
STROBE_AMX void take_row(const Forward& f, int64_t t, int64_t r, float* to) {
  const float* const row = row_in_node(f, t, r);
  for (int64_t b = 0; b < f.dv_blocks; ++b) {
    store(to + b * kPair, load(row + b * 4 * kTileFloat));
    store(to + b * kPair + kTile, load(row + b * 4 * kTileFloat + kTileFloat));
  }
}
STROBE_AMX void put_row(const Forward& f, int64_t t, int64_t r, const float* from) {
  float* const row = row_in_node(f, t, r);
  for (int64_t b = 0; b < f.dv_blocks; ++b) {
    store(row + b * 4 * kTileFloat, load(from + b * kPair));
    store(row + b * 4 * kTileFloat + kTileFloat, load(from + b * kPair + kTile));
  }
}

/// The same for all tiles of an item.
static void add_all_chunks(const Forward& f, int64_t tiles, Range chunks) {
  // Tiles next to each other share the packed K and V.
  for (Range run{0, 0}; run.begin < tiles; run.begin = run.end) {
    const bool many = has_many(f, run.begin);
    for (run.end = run.begin + 1; run.end < tiles && has_many(f, run.end) == many;) ++run.end;
    add_chunks(f, run, chunks);
  }
}

/// Prompts: an item's tiles, whose queries are packed.
static void own_block(const Forward& f, int64_t tiles) {
  begin_own_rows(f, tiles);
  add_all_chunks(f, tiles, {0, ceil_div(f.sequence.mask.seqlen_k, super_block(f.c.problem))});
  for (int64_t t = 0; t < tiles; ++t) end_own_rows(f, t);
}

// Decoding. A leaf of the tree is a chunk, and a node lies in a Partial row by row.

static int64_t own_leaf(const AttentionProblem& p) { return super_block(p) / kDecodeKeys; }

STROBE_AMX DecodeShape own_shape(const ForwardContext& c) {
  return decode_shape(c.problem, c.most_decoded, kPair, own_leaf(c.problem));
}

static size_t own_decode_scratch(const ForwardContext& c) {
  Arena arena;
  carve_forward(arena, c, own_shape(c).item_rows);
  return arena.used();
}

/// body(forward, tiles, n) for each key head of an item: n is its first row in a Partial.
template <typename Body>
STROBE_AMX void for_own_heads(const ForwardContext& c, const DecodeItem& item,
                              const ForwardScratch& s, const Body& body) {
  const Sequence sequence = c.sequence_of_all_heads(item.batch);
  const int64_t tiles = ceil_div(item.rows.size(), kForwardTileQ);
  for (int64_t h = item.heads.begin, n = 0; h < item.heads.end; ++h, n += item.rows.size()) {
    const Forward f{.c = c,
                    .sequence = sequence,
                    .item = {item.batch, h * c.group(), item.rows.begin, item.rows.end},
                    .s = s,
                    .heads = c.group()};
    if (f.heads == 1) pack_queries(f, tiles);
    begin_own_rows(f, tiles);
    body(f, tiles, n);
  }
}

static void own_decode_blocks(const ForwardContext& c, const DecodeItem& item,
                              const Partial* result, std::byte* scratch) {
  configure_tiles();
  Arena arena(scratch);
  const DecodeShape shape = own_shape(c);
  const ForwardScratch s = carve_forward(arena, c, shape.item_rows);
  const int64_t leaf = own_leaf(c.problem);
  const Range chunks{item.blocks.begin / leaf, ceil_div(item.blocks.end, leaf)};
  for_own_heads(c, item, s, [&](const Forward& f, int64_t tiles, int64_t n) {
    add_all_chunks(f, tiles, chunks);
    for (int64_t t = 0; t < tiles; ++t) {
      if (!result) {
        end_own_rows(f, t);
        continue;
      }
      for (int64_t r = 0; r < f.tile(t).size(); ++r) {
        const int64_t row = n + t * kForwardTileQ + r;
        take_row(f, t, r, result->out + row * shape.dim_v);
        result->sum[row] = f.sums(f.node(t, 0))[r];
      }
    }
  });
  tile_release();
}

static void own_decode_merge(const ForwardContext& c, const DecodeItem& item, const Partial& left,
                             const Partial& right) {
  const int64_t rows = item.row_count();
  const int64_t dim = round_up(c.problem.head_dim_v, kPair);
  for (int64_t i = 0; i < rows * dim; i += kTile) {
    store(left.out + i, _mm512_add_ps(load(left.out + i), load(right.out + i)));
  }
  for (int64_t n = 0; n < rows; ++n) left.sum[n] += right.sum[n];
}

static void own_decode_finish(const ForwardContext& c, const DecodeItem& item,
                              const Partial& result, std::byte* scratch) {
  configure_tiles();
  Arena arena(scratch);
  const DecodeShape shape = own_shape(c);
  const ForwardScratch s = carve_forward(arena, c, shape.item_rows);
  for_own_heads(c, item, s, [&](const Forward& f, int64_t tiles, int64_t n) {
    for (int64_t t = 0; t < tiles; ++t) {
      for (int64_t r = 0; r < f.tile(t).size(); ++r) {
        const int64_t row = n + t * kForwardTileQ + r;
        put_row(f, t, r, result.out + row * shape.dim_v);
        f.sums(f.node(t, 0))[r] = result.sum[row];
      }
      end_own_rows(f, t);
    }
  });
  tile_release();
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_FORWARD_OWN_H_
