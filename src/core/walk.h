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

#include "core/mask.h"

namespace strobe {

/// The blocks of an interval. Blocks are numbered: block n of size s holds the rows [n s, (n + 1)
/// s) of a sequence, as far as the sequence goes. Int: what their numbers fit into.
template <typename Int>
struct IntervalWalk {
  Int begin, end;            // places; those blocks that are outside hold no pair of the mask
  Int full_begin, full_end;  // of those, the full ones; where there are none, both are `begin`

  STROBE_INLINE constexpr bool empty() const { return end <= begin; }
  STROBE_INLINE constexpr Int count() const { return empty() ? 0 : end - begin; }
  /// The block at a place of the walk.
  STROBE_INLINE constexpr Int block(Int place) const { return place; }
  STROBE_INLINE constexpr bool is_full(Int place) const {
    return full_begin <= place && place < full_end;
  }
  STROBE_INLINE constexpr bool all_full() const { return full_begin <= begin && end <= full_end; }
  STROBE_INLINE constexpr bool visits(Int block) const { return begin <= block && block < end; }
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
  /// The place of a block that is visited; of the first one it is `begin`.
  STROBE_INLINE constexpr Int rank(Int block) const { return block; }
  /// The same walk, of which nothing is full.
  STROBE_INLINE constexpr IntervalWalk all_partial() const { return {begin, end, begin, begin}; }

  STROBE_INLINE friend constexpr bool operator==(const IntervalWalk& a, const IntervalWalk& b) {
    return a.begin == b.begin && a.end == b.end && a.full_begin == b.full_begin &&
           a.full_end == b.full_end;
  }
  template <typename Other>
  STROBE_INLINE constexpr explicit operator IntervalWalk<Other>() const {
    return {static_cast<Other>(begin), static_cast<Other>(end), static_cast<Other>(full_begin),
            static_cast<Other>(full_end)};
  }

  /// The blocks that hold some row of `some`; full where they lie inside `all`.
  STROBE_INLINE static constexpr IntervalWalk of(Range some, Range all, int64_t block_size) {
    if (some.empty()) return {};
    const auto size = static_cast<Int>(block_size);
    const auto below = [size](int64_t x) { return static_cast<Int>(static_cast<Int>(x) / size); };
    IntervalWalk w{below(some.begin), below(some.end + size - 1), below(all.begin + size - 1),
                   below(all.end)};
    if (w.full_begin < w.begin) w.full_begin = w.begin;
    if (w.full_end > w.end) w.full_end = w.end;
    if (w.full_end <= w.full_begin) w.full_begin = w.full_end = w.begin;
    return w;
  }
};

/// Walk of a tile of queries: blocks of `size` keys that some of the queries see.
template <typename Int>
STROBE_INLINE constexpr IntervalWalk<Int> key_walk(const BasicMask<Int>& mask, Range queries,
                                                   int64_t size) {
  if (queries.empty()) return {};
  // kv_range and full_range, both from two rows.
  const Range first = mask.row(static_cast<Int>(queries.begin));
  const Range last = mask.row(static_cast<Int>(queries.end - 1));
  return IntervalWalk<Int>::of({first.begin, last.end}, {last.begin, first.end}, size);
}

/// Walk of a tile of keys: blocks of `size` queries that see some of the keys.
template <typename Int>
STROBE_INLINE constexpr IntervalWalk<Int> query_walk(const BasicMask<Int>& mask, Range keys,
                                                     int64_t size) {
  return IntervalWalk<Int>::of(mask.q_range(keys), mask.full_q_range(keys), size);
}

}  // namespace strobe

#endif  // STROBE_CORE_WALK_H_
