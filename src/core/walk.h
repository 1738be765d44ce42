// Walks: which blocks a tile goes through, which of those need no mask, and in which order several
// tiles come to one block. All kernels and schedulers ask here; what has to be known before there
// are sequences, such as the most that a tile may visit, MaskRule says (mask.h).
//
// A walk is a row of places, which are consecutive numbers: begin, begin + 1, ..., end - 1. A
// kernel goes from place to place, up or down, and asks for each which block is there (`block`) and
// whether it is full (`is_full`): then every row exists and the mask allows every pair. A place is
// no block number by itself. Where the mask is an interval of keys, the blocks are an interval too,
// place and block are the same number, and asking costs nothing. Where the blocks come from a
// list, the places are the list's entries.
//
// In the backward pass several tiles of keys add to the dQ of one tile of queries, and where the
// order of these additions has to be the same in each launch, it is that of their ranks: the
// places of the tiles of keys in the walk of the tile of queries.
#ifndef STROBE_CORE_WALK_H_
#define STROBE_CORE_WALK_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/mask.h"

namespace strobe {

/// The blocks of an interval, without a word on which are full: what a warp needs that only loads
/// them. Blocks are numbered: block n of size s holds the rows [n s, (n + 1) s) of a sequence, as
/// far as the sequence goes. Int: what their numbers fit into.
template <typename Int>
struct BlockInterval {
  Int begin, end;  // places; those blocks that are outside hold no pair of the mask

  STROBE_INLINE constexpr bool empty() const { return end <= begin; }
  STROBE_INLINE constexpr Int count() const { return empty() ? 0 : end - begin; }
  /// The block at a place of the walk.
  STROBE_INLINE constexpr Int block(Int place) const { return place; }
  /// Whether the walk has this place.
  STROBE_INLINE constexpr bool has(Int place) const { return begin <= place && place < end; }
  STROBE_INLINE constexpr bool visits(Int block) const { return has(block); }
  /// The place of a block that is visited; of the first one it is `begin`.
  STROBE_INLINE constexpr Int rank(Int block) const { return block; }
  /// The part that has the places [first, last) of the whole.
  STROBE_INLINE constexpr BlockInterval places(Int first, Int last) const { return {first, last}; }
};

/// A block's size that is a power of two, where only its logarithm is known: no division is
/// compiled.
struct PowerOfTwo {
  int32_t log2;
};

/// The blocks of an interval, and which of them are full. (Not derived from BlockInterval, so that
/// records which hold a walk have the standard layout, whose offsets kernels may ask for.)
template <typename Int>
struct IntervalWalk {
  Int begin, end;            // places, as BlockInterval's
  Int full_begin, full_end;  // of the full ones; where there are none, both are `begin`

  STROBE_INLINE constexpr BlockInterval<Int> blocks() const { return {begin, end}; }
  STROBE_INLINE constexpr bool empty() const { return blocks().empty(); }
  STROBE_INLINE constexpr Int count() const { return blocks().count(); }
  STROBE_INLINE constexpr Int block(Int place) const { return blocks().block(place); }
  STROBE_INLINE constexpr bool has(Int place) const { return blocks().has(place); }
  STROBE_INLINE constexpr bool visits(Int block) const { return blocks().visits(block); }
  STROBE_INLINE constexpr Int rank(Int block) const { return blocks().rank(block); }
  STROBE_INLINE constexpr bool is_full(Int place) const {
    return full_begin <= place && place < full_end;
  }
  STROBE_INLINE constexpr bool all_full() const { return full_begin <= begin && end <= full_end; }
  /// The part of the walk whose blocks lie in [first, last).
  STROBE_INLINE constexpr IntervalWalk within(Int first, Int last) const {
    IntervalWalk w = *this;
    if (w.begin < first) w.begin = first;
    if (w.end > last) w.end = last;
    return w;
  }
  /// Whether some of these rows lie in blocks of the walk, which has blocks of `size` rows. rows: a
  /// part of those that the mask leaves to some row of the walk's tile.
  STROBE_INLINE constexpr bool meets(Range rows, int64_t) const { return !rows.empty(); }
  /// Whether a row of a tile that lies between two others meets the walk where these do.
  static constexpr bool kConvex = true;
  /// The first place of the run of full ones that a full place is in: down to there no place is
  /// partial.
  STROBE_INLINE constexpr Int full_run_begin(Int /*place*/) const { return full_begin; }
  /// The same walk, of which nothing is full.
  STROBE_INLINE constexpr IntervalWalk all_partial() const {
    return make(begin, end, begin, begin);
  }
  /// The same walk, of which the full ones before this place count as partial.
  STROBE_INLINE constexpr IntervalWalk partial_before(Int place) const {
    const Int from = full_begin < place ? place : full_begin;
    return make(begin, end, from, full_end < from ? from : full_end);
  }
  /// The same walk in rows: a block's place, and its number, become that of its first row.
  STROBE_INLINE constexpr IntervalWalk in_rows(Int size) const {
    return make(begin * size, end * size, full_begin * size, full_end * size);
  }

  STROBE_INLINE friend constexpr bool operator==(const IntervalWalk& a, const IntervalWalk& b) {
    return a.begin == b.begin && a.end == b.end && a.full_begin == b.full_begin &&
           a.full_end == b.full_end;
  }
  template <typename Other>
  STROBE_INLINE constexpr explicit operator IntervalWalk<Other>() const {
    return IntervalWalk<Other>::make(static_cast<Other>(begin), static_cast<Other>(end),
                                     static_cast<Other>(full_begin), static_cast<Other>(full_end));
  }
  STROBE_INLINE static constexpr IntervalWalk make(Int begin, Int end, Int full_begin,
                                                   Int full_end) {
    return {begin, end, full_begin, full_end};
  }

  /// Blocks of one row each, all of which are full.
  STROBE_INLINE static constexpr IntervalWalk all_of(Range rows) {
    const auto begin = static_cast<Int>(rows.begin), end = static_cast<Int>(rows.end);
    return make(begin, end, begin, end);
  }

  /// The blocks that hold some row of `some`; full where they lie inside `all`. Size: int64_t, or
  /// PowerOfTwo.
  template <typename Size>
  STROBE_INLINE static constexpr IntervalWalk of(Range some, Range all, Size block_size) {
    if (some.empty()) return {};
    const Int most = rest_of(block_size);
    const auto below = [block_size](int64_t x) {
      return quotient(static_cast<Int>(x), block_size);
    };
    IntervalWalk w =
        make(below(some.begin), below(some.end + most), below(all.begin + most), below(all.end));
    if (w.full_begin < w.begin) w.full_begin = w.begin;
    if (w.full_end > w.end) w.full_end = w.end;
    if (w.full_end <= w.full_begin) w.full_begin = w.full_end = w.begin;
    return w;
  }

 private:
  STROBE_INLINE static constexpr Int quotient(Int x, int64_t size) {
    return static_cast<Int>(x / static_cast<Int>(size));
  }
  STROBE_INLINE static constexpr Int quotient(Int x, PowerOfTwo size) {
    return static_cast<Int>(x >> size.log2);
  }
  /// The size less 1.
  STROBE_INLINE static constexpr Int rest_of(int64_t size) { return static_cast<Int>(size - 1); }
  STROBE_INLINE static constexpr Int rest_of(PowerOfTwo size) {
    return static_cast<Int>((Int{1} << size.log2) - 1);
  }
};

/// Walk of a tile of queries: blocks of `size` keys that some of the queries see.
template <typename Int, typename Size>
STROBE_INLINE constexpr IntervalWalk<Int> key_walk(const BasicMask<Int>& mask, Range queries,
                                                   Size size) {
  if (queries.empty()) return {};
  // kv_range and full_range, both from two rows.
  const Range first = mask.row(static_cast<Int>(queries.begin));
  const Range last = mask.row(static_cast<Int>(queries.end - 1));
  return IntervalWalk<Int>::of({first.begin, last.end}, {last.begin, first.end}, size);
}

/// Walk of a tile of keys: blocks of `size` queries that see some of the keys.
template <typename Int, typename Size>
STROBE_INLINE constexpr IntervalWalk<Int> query_walk(const BasicMask<Int>& mask, Range keys,
                                                     Size size) {
  return IntervalWalk<Int>::of(mask.q_range(keys), mask.full_q_range(keys), size);
}

/// The most blocks of `size` that a tile of `run` rows visits, of a sequence that has `length` rows
/// on the other side: a bound that is known before there are sequences, and that a longer sequence
/// has no less of.
STROBE_INLINE constexpr int64_t most_visits(const MaskRule& rule, int64_t run, int64_t length,
                                            int64_t size) {
  const int64_t all = ceil_div(length, size);
  const int64_t most = ceil_div(rule.most_seen(run, length), size) + 1;  // may begin inside a block
  return most < all ? most : all;
}

/// Walk of one query through the single keys that it sees, and of one key through the queries that
/// see it: what computes a row again from its pairs goes through these.
template <typename Int>
STROBE_INLINE constexpr IntervalWalk<Int> single_keys(const BasicMask<Int>& mask, int64_t query) {
  return IntervalWalk<Int>::all_of(mask.row(static_cast<Int>(query)));
}
template <typename Int>
STROBE_INLINE constexpr IntervalWalk<Int> single_queries(const BasicMask<Int>& mask, int64_t key) {
  return IntervalWalk<Int>::all_of(mask.q_range({key, key + 1}));
}

}  // namespace strobe

#endif  // STROBE_CORE_WALK_H_
