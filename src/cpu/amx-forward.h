// The forward pass with AMX, bf16 (arXiv:2307.08691, algorithm 1, with the differences below).
//
// An item's queries are cut into tiles of 32, and its keys into super-blocks of 1024 (or 512),
// which are packed once for all tiles. A super-block is cut into units of up to 128 keys = 4 groups
// of 32:
//
//     S [32 queries][32 keys] = Q K^T - reference      16 tile products at head_dim 128, a group
//     P [32][32] = exp2(scale * S)                     vectors; keys lie along the lanes
//     O [32][dim_v] += P V                             a unit at a time, 32 columns of O at once
//
// There is no running maximum. The softmax does not need the largest score, but only one that is
// near enough to keep exp2 in float32's range, which is bf16's too: `reference` is the largest
// score of the first keys that the query sees. It enters as the tile product's initial value, which
// costs next to nothing, and the loop needs neither a maximum nor a rescaling. A row whose scores
// rise more than about 40 above the reference (weights of e^40) has too large a sum at the end, and
// amx-forward-online.h computes it again.
//
// Tiles whose queries see few keys (kFewKeys) go to amx-forward-online.h at once.
//
// Pipeline. Tile products run asynchronously, with vector instructions beside them. Three streams
// move through the units of a super-block, each ahead of the next:
//
//     scores: S of the next group or two  ->  weights: rows of P of this one  ->  O of the last
//     unit
//
// Rows of weights are issued a few at a time between the tile instructions of the other two. The
// memory that is written over and over (S, P, the sums, a tile of O) is small enough for L1; K, V
// and Q are loaded past L1 (tile_stream).
#ifndef STROBE_CPU_AMX_FORWARD_H_
#define STROBE_CPU_AMX_FORWARD_H_

#include "cpu/amx-product.h"
#include "cpu/amx-score.h"
#include "cpu/key_tree.h"
#include "cpu/walks.h"

namespace strobe::cpu::amx {

constexpr int64_t kForwardTileQ = 32;
constexpr int64_t kGroup = 32;  // keys
constexpr int64_t kUnitGroups = 4;
constexpr int64_t kUnit = kGroup * kUnitGroups;

/// Keys of a super-block: up to 512 KB of K and V.
STROBE_AMX int64_t super_block(const AttentionProblem& p) {
  return p.head_dim + p.head_dim_v > 256 ? 512 : 1024;
}

/// Whether rows have bits that depend on themselves alone (amx-forward-own.h).
STROBE_AMX bool own_rows(const AttentionProblem& p) {
  return p.batch_invariant && p.direction == STROBE_FORWARD;
}
/// A tile of such rows.
struct OwnTile {
  KeyTree tree;       // of chunks: the one at hand lies at its top
  uint32_t few, all;  // rows that see few keys; that there are
};

struct ForwardScratch {
  Bf16* q;              // rows, of all tiles of the item
  Bf16 *k, *v;          // columns and pairs of a super-block
  uint32_t* nonfinite;  // of V's groups
  float* reference;     // [block_q][16]: minus the score taken off, in all lanes
  float* sum;           // [block_q][16]: of weights, lane by lane
  float* o;          // [tile][node][dim_v / 32] blocks of 2 x 2 tiles [rows 0-15, 16-31][columns]
  float* s;          // [group][32 queries][32 keys]
  float* spare;      // a tile that is written and never read
  Bf16* p;           // [2 units][group] 2 tiles [rows 0-15, 16-31]
  uint8_t* few;      // [tile]: whether its weights are split (kFewKeys)
  OwnTile* own;      // [tile], of own rows; else null, and a tile has one node
  Bf16* first_keys;  // of own rows: columns of 16 keys
};

/// What several chunks of keys give a tile lies one behind the other: O, and of own rows the sums
/// of weights.
STROBE_AMX int64_t node_floats(const AttentionProblem& p) {
  return kForwardTileQ * (padded_dim(p.head_dim_v) + (own_rows(p) ? 1 : 0));
}
STROBE_AMX int64_t tree_nodes(const AttentionProblem& p) {
  return own_rows(p) ? 1 + KeyTree::levels(ceil_div(p.seqlen_k, super_block(p))) : 1;
}

/// rows: of an item, at most.
STROBE_AMX ForwardScratch carve_forward(Arena& arena, const ForwardContext& c, int64_t rows) {
  const AttentionProblem& p = c.problem;
  const int64_t queries = round_up(rows, kForwardTileQ), tiles = queries / kForwardTileQ;
  const int64_t keys = min64(super_block(p), round_up(max64(p.seqlen_k, 1), kUnit));
  const int64_t d = padded_dim(p.head_dim), dv = padded_dim(p.head_dim_v);
  ForwardScratch s;
  s.q = arena.take<Bf16>(queries * d);
  s.k = arena.take<Bf16>(keys * d);
  s.v = arena.take<Bf16>(keys * dv);
  s.nonfinite = arena.take<uint32_t>(keys / kGroup);
  s.reference = arena.take<float>(queries * kTile);
  s.sum = arena.take<float>(queries * kTile);
  s.o = arena.take<float>(tiles * tree_nodes(p) * node_floats(p));
  s.s = arena.take<float>(kUnitGroups * kForwardTileQ * kGroup);
  s.spare = arena.take<float>(kTileFloat);
  s.p = arena.take<Bf16>(2 * kForwardTileQ * kUnit);
  s.few = arena.take<uint8_t>(tiles);
  s.own = arena.take<OwnTile>(own_rows(p) ? tiles : 0);
  if (!own_rows(p)) s.own = nullptr;
  s.first_keys = arena.take<Bf16>(own_rows(p) ? kTile * d : 0);
  return s;
}

/// What the item's functions share.
struct Forward {
  const ForwardContext& c;
  const Sequence sequence;
  const ForwardItem item;
  const ForwardScratch s;
  const int64_t d_blocks = padded_dim(c.problem.head_dim) / kPair;  // of 32
  const int64_t dv_blocks = padded_dim(c.problem.head_dim_v) / kPair;
  // The rows of so many heads from the item's on, which share a key head, are one behind the other:
  // row r is query r / heads of head r % heads of these. The item counts rows.
  const int64_t heads = 1;

  // A prompt's rows are of one head, and take no division.
  STROBE_INLINE int64_t query(int64_t row) const { return heads == 1 ? row : row / heads; }
  STROBE_INLINE int64_t head(int64_t row) const {
    return heads == 1 ? item.head : item.head + row % heads;
  }
  STROBE_INLINE Range queries(Range rows) const {
    return rows.empty() ? Range{0, 0} : Range{query(rows.begin), query(rows.end - 1) + 1};
  }
  STROBE_INLINE Range tile(int64_t t) const {
    const int64_t begin = item.q_begin + t * kForwardTileQ;
    return {begin, min64(begin + kForwardTileQ, item.q_end)};
  }
  /// The groups that a tile visits.
  STROBE_INLINE BlockWalk groups(Range rows) const {
    return keys_of(c, sequence, item.head, queries(rows), kGroup);
  }
  /// The keys that some of the rows see.
  STROBE_INLINE Range keys(Range rows) const { return sequence.mask.kv_range(queries(rows)); }
  /// Where a row's lse goes; null: nowhere.
  STROBE_INLINE float* lse(int64_t row) const {
    return c.lse ? c.lse + c.lse_index(sequence, head(row)) + query(row) : nullptr;
  }
  /// Whether the mask shows a row of a tile no key. walk: the tile's.
  STROBE_INLINE bool sees_none(const BlockWalk& walk, int64_t query) const {
    return cpu::sees_none(c, sequence, item.head, walk, query, kGroup);
  }
  /// Finds out whose weights are split, before anybody asks.
  STROBE_INLINE void find_few(int64_t tiles) const {
    for (int64_t t = 0; t < tiles; ++t) {
      s.few[t] = splits_weights(c, sequence, item.head, tile(t), groups(tile(t)));
    }
  }
  /// Whether the bias hides all keys of the row.
  STROBE_INLINE bool bias_hides_all(const BlockWalk& walk, int64_t query) const {
    return cpu::bias_hides_all(c, sequence, item.head, walk, query, kGroup);
  }
  /// Whether the tile's weights are split (kFewKeys).
  STROBE_INLINE bool few_keys(int64_t t) const { return s.few[t] != 0; }
  /// Whether a query of the item sees a key.
  STROBE_INLINE bool allows(int64_t query, int64_t key) const {
    return pair_is_seen(c, sequence, item.head, query, key);
  }
  /// The keys of a group that a query sees, one bit each. pair: pair_bits of the query's tile and
  /// the group.
  STROBE_INLINE uint32_t seen_keys(const PairBits& pair, int64_t query, int64_t key) const {
    const Range seen = sequence.mask.row(query);
    const uint32_t bits = lanes(seen.begin - key, seen.end - key);
    return pair.bits ? bits & *c.mask_of(sequence, item.head).words(pair, query, key) : bits;
  }
  STROBE_INLINE Rows q_rows(Range rows) const {
    return Rows(c.query_rows(c.q, sequence, item.head), rows, c.problem.head_dim);
  }
  STROBE_INLINE Rows k_rows(Range rows) const {
    return Rows(c.key_rows(c.k, sequence, c.head_kv(item.head)), rows, c.problem.head_dim);
  }
  STROBE_INLINE Rows v_rows(Range rows) const {
    return Rows(c.key_rows(c.v, sequence, c.head_kv(item.head)), rows, c.problem.head_dim_v);
  }
  STROBE_INLINE float* reference(int64_t t) const {
    return s.reference + t * kForwardTileQ * kTile;
  }
  STROBE_INLINE float* node(int64_t t, int64_t place) const {
    return s.o + (t * tree_nodes(c.problem) + place) * node_floats(c.problem);
  }
  /// The one at hand.
  STROBE_INLINE float* o_tile(int64_t t) const { return node(t, s.own ? s.own[t].tree.top() : 0); }
  /// A node's sums of weights, behind its O.
  STROBE_INLINE float* sums(float* node) const { return node + kForwardTileQ * dv_blocks * kPair; }
};

/// Up to 128 keys against one tile of queries.
struct Unit {
  int64_t tile, key, key_in_block;  // key: of the sequence; in_block: of the super-block
  int groups;
  bool first;       // of the tile: O has nothing in it yet
  uint32_t masked;  // groups that are not full
};

/// The units of tiles [tile, tile_end) in a super-block, tile by tile.
class Units {
 public:
  STROBE_INLINE Units(const Forward& f, Range block, int64_t tile, int64_t tile_end)
      : f_(f), block_(block), tile_(tile), tile_end_(tile_end) {
    start_tile();
  }
  /// False when there are no more.
  STROBE_INLINE bool next(Unit& unit) {
    while (place_ >= walk_.end) {
      if (++tile_ >= tile_end_) return false;
      start_tile();
    }
    // Groups that follow each other in memory too.
    const int64_t first = walk_.block(place_), key = first * kGroup;
    const bool is_first = place_ == first_place_;
    int64_t groups = 0;
    uint32_t masked = 0;
    do {
      masked |= static_cast<uint32_t>(!walk_.is_full(place_)) << groups++;
      place_ = walk_.after(place_);
      // Units of own rows end at fixed keys, whatever the other rows of the tile see.
      if (f_.s.own && (first + groups) % kUnitGroups == 0) break;
    } while (place_ < walk_.end && groups < kUnitGroups && walk_.block(place_) == first + groups);
    unit = {tile_, key, key - block_.begin, static_cast<int>(groups), is_first, masked};
    return true;
  }

 private:
  STROBE_INLINE void start_tile() {
    place_ = walk_.end = 0;
    if (tile_ >= tile_end_) return;
    const BlockWalk groups = f_.groups(f_.tile(tile_));
    first_place_ = groups.begin;
    // Super-blocks begin at multiples of 32 keys.
    walk_ = groups.within(block_.begin / kGroup, ceil_div(block_.end, kGroup));
    place_ = walk_.begin;
    if (f_.s.own) first_place_ = place_;  // of the chunk
  }

  const Forward& f_;
  const Range block_;
  int64_t tile_, tile_end_, place_ = 0, first_place_ = 0;
  BlockWalk walk_{};  // of the tile in the super-block
};

/// Adds weight * V for the rows of V that pack_pairs left out, pair by pair.
static void add_nonfinite(const Forward& f, const Unit& unit, const Bf16* p, float* o) {
  const Range tile = f.tile(unit.tile);
  for (int64_t group = 0; group < unit.groups; ++group) {
    const uint32_t nonfinite = f.s.nonfinite[unit.key_in_block / kGroup + group];
    for (int64_t j = 0; j < kGroup; ++j) {
      if (!(nonfinite >> j & 1)) continue;
      const int64_t key = unit.key + group * kGroup + j;
      const Rows v = f.v_rows({key, key + 1});
      for (int64_t r = 0; r < tile.size(); ++r) {
        if (!f.allows(f.query(tile.begin + r), key)) continue;
        add_row_to_tiles(v, p[(group * 32 + r) * kPair + j % 16 * 2 + j / 16],
                         o + r / kTile * 2 * kTileFloat + r % kTile * kTile);
      }
    }
  }
}

/// The three streams of a super-block. kRows: rows of weights issued with each tile product.
template <int kRows>
class ForwardPipeline {
 public:
  using Constants = WeightConstants;

  STROBE_INLINE ForwardPipeline(const Forward& f, Range block, Range tiles, bool any_nonfinite)
      : f_(f),
        units_(f, block, tiles.begin, tiles.end),
        products_(f.s.spare),
        constants_{FastExp2(f.c.problem.scale * kLog2e), {}},
        any_nonfinite_(any_nonfinite),
        // One product of P and V for a whole unit: two groups of rows go with it.
        ahead_(f.dv_blocks == 1 ? 2 : 1) {}

  STROBE_INLINE void run() {
    const Constants constants = constants_;  // in registers: nobody else knows where these stand
    for (int64_t n = 0; n < ahead_; ++n) score_group(constants);
    if (made_ == 0) return;
    flush();
    // No branch in here depends on data: a mispredicted branch would cost all that runs ahead.
    for (; weights_unit_ < made_; ++weights_unit_) {
      const Unit& u = unit(weights_unit_);
      const int64_t blocks = weights_unit_ > 0 ? f_.dv_blocks : 0;
      begin_weights(u);
      if (any_nonfinite_ && blocks > 0) add_nonfinites();
      // As many groups of scores as the unit has, and the output of the unit before, spread evenly.
      int64_t block = 0;
      for (int64_t g = 1; g <= u.groups; ++g) {
        score_group(constants);
        for (; (block + 1) * u.groups <= g * blocks; ++block) add_output(block, constants);
      }
      while (row_ < end_) weigh_alone(constants);
    }
    row_ = end_ = 0;
    if (any_nonfinite_) add_nonfinites();
    for (int64_t block = 0; block < f_.dv_blocks; ++block) add_output(block, constants);
    flush();
  }

  // Work for Products: rows of weights.

  STROBE_INLINE bool start() {
    if (row_ >= end_ || (first_group_ + row_ / kGroup) >= written_) return false;
    const int64_t group = row_ / kGroup;
    if (masked_ >> group & 1) [[unlikely]] {
      weigh_masked(group);
      row_ += kForwardTileQ;
      return false;
    }
    const int64_t r = row_ % kForwardTileQ;
    row_s_ = slot(first_group_ + group) + r * kGroup;
    row_sum_ = sum_ + r * kTile;
    row_p_ = weights_ + row_ * kPair;
    return true;
  }
  template <int kSlot>
  STROBE_INLINE void slot(const Constants& constants) {
    STROBE_UNROLL for (int r = kSlot * kRows; r < (kSlot + 1) * kRows; ++r) {
      const __m512 a = constants.exp2(load(row_s_ + r * kGroup));
      const __m512 b = constants.exp2(load(row_s_ + r * kGroup + kTile));
      float* const sum = row_sum_ + r * kTile;
      store(sum, _mm512_add_ps(load(sum), _mm512_add_ps(a, b)));
      _mm512_store_si512(row_p_ + r * kPair, constants.pairs(a, b));
    }
  }
  STROBE_INLINE void advance() { row_ += 4 * kRows; }
  STROBE_INLINE void written() { written_ = scored_; }

 private:
  static constexpr int kRing = 4;  // units at hand: scores may be three ahead of the output

  STROBE_INLINE Unit& unit(int64_t n) { return ring_[n % kRing]; }
  STROBE_INLINE float* slot(int64_t n) const {
    return f_.s.s + (ahead_ == 1 ? n % 2 : n % 3) * kForwardTileQ * kGroup;
  }
  STROBE_INLINE Bf16* weights(int64_t n) const { return f_.s.p + n % 2 * kForwardTileQ * kUnit; }

  STROBE_INLINE void begin_weights(const Unit& u) {
    first_group_ += end_ / kGroup;
    row_ = 0;
    end_ = u.groups * kForwardTileQ;
    weights_ = weights(weights_unit_);
    sum_ = f_.s.sum + u.tile * kForwardTileQ * kTile;
    masked_ = u.masked;
  }

  STROBE_INLINE void flush() {
    products_.flush();
    written_ = scored_;
  }
  /// A product stores the scores before it: the rows that stand there must be done.
  STROBE_INLINE void make_room(const Constants& constants) {
    while (written_ < scored_ && row_ < end_ &&
           first_group_ + row_ / kGroup < scored_ - 1 - ahead_) {
      weigh_alone(constants);
    }
  }

  /// The next group's scores, if there is one left.
  STROBE_INLINE void score_group(const Constants& constants) {
    if (s_group_ == s_groups_) {
      if (!units_.next(unit(made_))) return;
      s_groups_ = unit(made_).groups;
      s_group_ = 0;
      ++made_;
    }
    const Unit& u = unit(made_ - 1);
    const int64_t n = f_.d_blocks;
    const Bf16* const k = f_.s.k + (u.key_in_block + s_group_ * kGroup) * n * kPair;
    const Product p = {{f_.s.q + u.tile * kForwardTileQ * n * kPair, kTileBf16, n * kTileBf16},
                       {k, kTileBf16, n * kTileBf16},
                       {f_.reference(u.tile), 0, kTileFloat},
                       {slot(scored_), kTile, kTile * kGroup, kGroup * 4},
                       n};
    make_room(constants);
    products_.multiply<true>(p, *this, constants);
    ++scored_;
    ++s_group_;
  }

  /// 32 columns of O, for the unit before.
  STROBE_INLINE void add_output(int64_t block, const Constants& constants) {
    const Unit& u = unit(weights_unit_ - 1);
    const int64_t n = f_.dv_blocks;
    float* const o = f_.o_tile(u.tile) + block * 4 * kTileFloat;
    const Bf16* const v = f_.s.v + (u.key_in_block * n + block * kGroup) * kPair;
    const Product p = {{weights(weights_unit_ - 1), 2 * kTileBf16, kTileBf16},
                       {v, n * kGroup * kPair, kTileBf16},
                       {u.first && !any_nonfinite_ ? nullptr : o, kTileFloat, 2 * kTileFloat},
                       {o, kTileFloat, 2 * kTileFloat},
                       u.groups};
    make_room(constants);
    products_.multiply<false>(p, *this, constants);
  }
  __attribute__((noinline)) void add_nonfinites() {
    const Unit& u = unit(weights_unit_ - 1);
    float* const o = f_.o_tile(u.tile);
    flush();
    if (u.first) {
      for (int64_t i = 0; i < f_.dv_blocks * 4 * kTileFloat; ++i) o[i] = 0;
    }
    add_nonfinite(f_, u, weights(weights_unit_ - 1), o);
  }

  /// Rows that no product was left to go with.
  STROBE_INLINE void weigh_alone(const Constants& constants) {
    if (first_group_ + row_ / kGroup >= written_) flush();
    if (!start()) return;
    slot<0>(constants);
    slot<1>(constants);
    slot<2>(constants);
    slot<3>(constants);
    advance();
  }

  /// The rows of a group of which the mask hides some keys.
  __attribute__((noinline)) void weigh_masked(int64_t group) {
    const Unit& u = unit(weights_unit_);
    const Range tile = f_.tile(u.tile);
    const int64_t key = u.key + group * kGroup;
    const float* s = slot(first_group_ + group);
    Bf16* p = weights_ + group * 2 * kTileBf16;
    const PairBits pair = pair_bits(f_.c, f_.sequence, f_.item.head, f_.query(tile.begin), key);
    const Constants constants = constants_;
    for (int64_t r = 0; r < kForwardTileQ; ++r, s += kGroup, p += kPair) {
      // Rows past the last are not used; they are treated as the last.
      const int64_t query = f_.query(min64(tile.begin + r, tile.end - 1));
      const uint32_t bits = f_.seen_keys(pair, query, key);
      const __m512 a = constants.exp2.masked(load(s), static_cast<__mmask16>(bits));
      const __m512 b = constants.exp2.masked(load(s + kTile), static_cast<__mmask16>(bits >> 16));
      float* const sum = sum_ + r * kTile;
      store(sum, _mm512_add_ps(load(sum), _mm512_add_ps(a, b)));
      _mm512_store_si512(p, constants.pairs(a, b));
    }
  }

  const Forward& f_;
  Units units_;
  Products products_;
  const Constants constants_;
  const bool any_nonfinite_;
  const int64_t ahead_;  // groups of scores that are there when a unit begins
  Unit ring_[kRing];
  int64_t made_ = 0, weights_unit_ = 0;  // units: begun by the scores; at hand by the weights
  int64_t s_group_ = 0, s_groups_ = 0;   // scores: groups of the last unit made
  int64_t scored_ = 0, written_ = 0;     // groups whose scores are computed; are in memory
  int64_t first_group_ = 0;              // weights: the unit's first
  int64_t row_ = 0, end_ = 0;            // weights: rows of the unit, group by group
  uint32_t masked_ = 0;                  // groups of the unit
  float* sum_ = nullptr;
  Bf16* weights_ = nullptr;
  const float* row_s_ = nullptr;
  float* row_sum_ = nullptr;
  Bf16* row_p_ = nullptr;
};

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_FORWARD_H_
