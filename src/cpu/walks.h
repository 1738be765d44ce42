// The walks of the CPU's kernels: which blocks a tile goes through, asked for by the sequence, the
// head and the tile's rows. Kernels go from place to place and ask the walk for the block
// (core/walk.h), so that walks of another type can stand here.
//
// Where the problem has a mask as data (core/packed_mask.h), a walk has those blocks of the rule's
// interval that the mask's lists have too. Tiles, and the blocks that a kernel goes through, may be
// parts of the mask's blocks or have several of them.
//
// With STROBE_RANDOM_WALKS, which tests build with, walks are lists that leave out random blocks.
#ifndef STROBE_CPU_WALKS_H_
#define STROBE_CPU_WALKS_H_

#include "core/sequence.h"
#include "core/walk.h"
#include "cpu/kernels.h"
#include "cpu/score.h"
#if STROBE_RANDOM_WALKS
#include "cpu/random_walks.h"
#endif

namespace strobe::cpu {

#if STROBE_RANDOM_WALKS

using BlockWalk = RandomWalk;

STROBE_INLINE BlockWalk keys_of(const Context&, const Sequence& s, int64_t head, Range queries,
                                int64_t size) {
  return random_key_walk(s, head, queries, size);
}
STROBE_INLINE BlockWalk queries_of(const Context&, const Sequence& s, int64_t head, Range keys,
                                   int64_t size) {
  return random_query_walk(s, head, keys, size);
}
STROBE_INLINE bool leaves_out(const Sequence& s, int64_t head, int64_t query, Range keys) {
  bool some = false;
  return strobe_random_blocks.hides_all(s.batch, head, {query, query + 1}, keys, some);
}
/// The first key that a query sees, or -1. walk: of a tile that has the query, in blocks of `size`
/// keys.
STROBE_INLINE int64_t first_seen_key(const Context&, const Sequence& s, int64_t,
                                     const BlockWalk& walk, int64_t query, int64_t size) {
  const Range seen = s.mask.row(query);
  if (!walk.meets(seen, size)) return -1;
  return max64(seen.begin, walk.block(walk.rank(seen.begin / size)) * size);
}

#else

/// The blocks of a rule's interval, or those of them that lists have: of one side of a mask as
/// data, the lists of the tile's rows. A place is the block's number, and those in between that no
/// list has are passed over (`after`).
struct BlockWalk {
  int64_t begin, end;  // places: the first one, and behind the last one
  IntervalWalk<int64_t> rule;
  BlockLists lists;          // none: all blocks of the interval
  Range tile;                // the lists of the tile
  int64_t size;              // rows of a block of the walk
  int64_t rows;              // in use on the other side: a list may have blocks behind them
  mutable int64_t near = 0;  // the entry that was found last, where there is one list

  STROBE_INLINE bool empty() const { return end <= begin; }
  STROBE_INLINE int64_t block(int64_t place) const { return place; }
  STROBE_INLINE int64_t rank(int64_t block) const { return block; }
  STROBE_INLINE bool visits(int64_t block) const {
    return begin <= block && block < end && (!lists.lists || first_from(block) == block);
  }
  /// The next place: `end` after the last one.
  STROBE_INLINE int64_t after(int64_t place) const {
    return lists.lists && place + 1 < end ? first_from(place + 1) : place + 1;
  }
  STROBE_INLINE bool is_full(int64_t place) const {
    return rule.is_full(place) && (!lists.lists || lists_are_full(place));
  }
  /// How many places come before this one.
  STROBE_INLINE int64_t places_before(int64_t place) const {
    if (!lists.lists) return place - begin;
    int64_t n = 0;
    for (int64_t at = begin; at < place; at = first_from(at + 1)) ++n;
    return n;
  }
  /// The part of the walk whose blocks lie in [first, last).
  STROBE_INLINE BlockWalk within(int64_t first, int64_t last) const {
    BlockWalk w = *this;
    w.rule = rule.within(first, last);
    w.find_ends();
    return w;
  }
  /// Whether a row of the tile that lies between two others sees a key where these do.
  STROBE_INLINE bool is_convex() const { return !lists.lists; }
  /// Whether some place is full, so that each row of the tile sees some of the other side's.
  STROBE_INLINE bool has_full() const {
    for (int64_t place = begin; place < end; place = after(place)) {
      if (is_full(place)) return true;
    }
    return false;
  }

  /// tile_rows: of the tile.
  STROBE_INLINE static BlockWalk of(const IntervalWalk<int64_t>& rule, const BlockLists& lists,
                                    Range tile_rows, int64_t size, int64_t rows) {
    BlockWalk w{0, 0, rule, lists, {0, 0}, size, rows, 0};
    if (lists.lists) w.tile = {tile_rows.begin / lists.own, ceil_div(tile_rows.end, lists.own)};
    w.find_ends();
    return w;
  }

 private:
  /// BlockLists::find. Who goes from place to place finds an entry where the last one was, or next
  /// to it.
  STROBE_INLINE int64_t find(int64_t list, int64_t block) const {
    if (tile.size() != 1) return lists.find(list, block);
    const int64_t count = lists.count(list);
    for (int64_t n = near; n < near + 2 && n < count; ++n) {
      if (lists.entry(list, n).block < block) continue;
      if (n == 0 || lists.entry(list, n - 1).block < block) return near = n;
      break;
    }
    return near = lists.find(list, block);
  }
  /// Behind the last block of the lists that counts: the rule's interval and the rows end.
  STROBE_INLINE int64_t behind_last() const {
    return ceil_div(min64(rule.end * size, rows), lists.other);
  }
  STROBE_INLINE void find_ends() {
    begin = rule.begin;
    end = rule.end;
    if (!lists.lists || rule.empty()) return;
    begin = end;
    int64_t behind = rule.begin;
    for (int64_t list = tile.begin; list < tile.end; ++list) {
      const int64_t n = find(list, behind_last());
      if (n == 0) continue;
      const int64_t rows_end = (lists.entry(list, n - 1).block + 1) * lists.other;
      behind = max64(behind, min64(rule.end, ceil_div(rows_end, size)));
    }
    end = behind;
    if (rule.begin < end) begin = first_from(rule.begin);
  }
  /// The first block from this one on that some list has; `end` where there is none.
  STROBE_INLINE int64_t first_from(int64_t block) const {
    int64_t first = end;
    for (int64_t list = tile.begin; list < tile.end; ++list) {
      const int64_t n = find(list, block * size / lists.other);
      if (n == lists.count(list)) continue;
      const int64_t found = lists.entry(list, n).block;
      if (found < behind_last()) first = min64(first, max64(found * lists.other / size, block));
    }
    return first;
  }
  STROBE_INLINE bool lists_are_full(int64_t place) const {
    const int64_t first = place * size / lists.other,
                  last = ceil_div((place + 1) * size, lists.other);
    for (int64_t list = tile.begin; list < tile.end; ++list) {
      int64_t n = find(list, first);
      for (int64_t block = first; block < last; ++block, ++n) {
        if (n == lists.count(list)) return false;
        const BlockLists::Entry e = lists.entry(list, n);
        if (e.block != block || e.bits >= 0) return false;
      }
    }
    return true;
  }
};

/// The blocks of `size` keys that some of the queries of a head see.
STROBE_INLINE BlockWalk keys_of(const Context& c, const Sequence& s, int64_t head, Range queries,
                                int64_t size) {
  return BlockWalk::of(key_walk(s.mask, queries, size), c.mask_of(s, head).queries, queries, size,
                       s.mask.seqlen_k);
}
/// The blocks of `size` queries of a head that see some of the keys.
STROBE_INLINE BlockWalk queries_of(const Context& c, const Sequence& s, int64_t head, Range keys,
                                   int64_t size) {
  return BlockWalk::of(query_walk(s.mask, keys, size), c.mask_of(s, head).keys, keys, size,
                       s.mask.seqlen_q);
}
/// Whether the walk of a query leaves out a block of keys although the mask lets the query see some
/// of them. For kernels that take rows of several heads through one block; these take no mask as
/// data.
STROBE_INLINE bool leaves_out(const Sequence&, int64_t, int64_t, Range) { return false; }
/// The first key that a query sees, or -1. walk: of a tile that has the query, in blocks of `size`
/// keys.
STROBE_INLINE int64_t first_seen_key(const Context& c, const Sequence& s, int64_t head,
                                     const BlockWalk& walk, int64_t query, int64_t /*size*/) {
  const Range seen = s.mask.row(query);
  if (walk.is_convex()) return seen.empty() ? -1 : seen.begin;
  int64_t first = -1;
  c.mask_of(s, head).any_keys(
      query, seen, [&](int64_t key, uint32_t bits) __attribute__((always_inline)) {
        first = key + __builtin_ctz(bits);
        return true;
      });
  return first;
}

#endif

/// Whether rule, lengths, a mask as data and a bias let a query see a key.
STROBE_INLINE bool pair_is_seen(const Context& c, const Sequence& s, int64_t head, int64_t query,
                                int64_t key) {
  return s.mask.allows(query, key) && (!c.mask || c.mask_of(s, head).allows(query, key)) &&
         !c.bias.hides(s.batch, head, query, key);
}
/// Whether a bias hides all keys that a query would see. For rows whose weights sum to 0: those see
/// no key then, and are no NaN. walk: of the query's tile, in blocks of `size` keys.
STROBE_INLINE bool bias_hides_all(const Context& c, const Sequence& s, int64_t head,
                                  const BlockWalk& walk, int64_t query, int64_t size) {
  if (!c.bias.data) return false;
  const Range keys = s.mask.row(query);
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    if (pair_is_seen(c, s, head, query, key) && walk.visits(key / size)) return false;
  }
  return true;
}
/// Whether a query sees no key. walk: as for first_seen_key.
STROBE_INLINE bool sees_none(const Context& c, const Sequence& s, int64_t head,
                             const BlockWalk& walk, int64_t query, int64_t size) {
  return first_seen_key(c, s, head, walk, query, size) < 0;
}
/// The same for a query whose weights have been summed: a bias may hide what the mask shows.
STROBE_INLINE bool sees_none(const Context& c, const Sequence& s, int64_t head,
                             const BlockWalk& walk, int64_t query, int64_t size, float sum) {
  return sees_none(c, s, head, walk, query, size) ||
         (sum == 0 && bias_hides_all(c, s, head, walk, query, size));
}

/// What a mask as data says of the pairs of a tile and a block which lie in one pair of the mask's
/// blocks each: all of them may be seen where there are no bits. query, key: the first ones.
STROBE_INLINE PairBits pair_bits(const Context& c, const Sequence& s, int64_t head, int64_t query,
                                 int64_t key) {
  const HeadMask mask = c.mask_of(s, head);
  return mask.there() ? mask.pair(query, key) : PairBits{true, nullptr, nullptr};
}

/// Rows of a block, at least, of the walks by which the following is found out.
inline constexpr int64_t kLeastWalkBlock = 32;

/// Whether a mask as data leaves few keys to one of the queries (score.h). walk: the queries'.
STROBE_INLINE bool data_leaves_few_keys(const Context& c, const Sequence& s, int64_t head,
                                        Range queries, const BlockWalk& walk) {
  // Full blocks of more keys than that, one after the other: most masks have some.
  int64_t full = 0;
  for (int64_t place = walk.begin; place < walk.end; place = walk.after(place)) {
    full += walk.is_full(place);
    if (full * kLeastWalkBlock > kFewKeys) return false;
  }
  const HeadMask mask = c.mask_of(s, head);
  for (int64_t query = queries.begin; query < queries.end; ++query) {
    int64_t seen = 0;
    const auto count = [&](int64_t, uint32_t bits) __attribute__((always_inline)) {
      seen += __builtin_popcount(bits);
      return seen > kFewKeys;
    };
    if (!mask.any_keys(query, s.mask.row(query), count) && seen > 0) return true;
  }
  return false;
}
/// Whether one of the queries sees few keys. walk: the queries'.
STROBE_INLINE bool sees_few_keys(const Context& c, const Sequence& s, int64_t head, Range queries,
                                 const BlockWalk& walk) {
  return c.mask ? data_leaves_few_keys(c, s, head, queries, walk) : sees_few_keys(s.mask, queries);
}
/// Whether few queries see the keys, or, with a mask as data, one of them.
STROBE_INLINE bool seen_by_few(const Context& c, const Sequence& s, int64_t head, Range keys) {
  if (s.mask.q_range(keys).size() <= kFewQueries) return true;
  if (!c.mask || queries_of(c, s, head, keys, kLeastWalkBlock).has_full()) return false;
  const HeadMask mask = c.mask_of(s, head);
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    int64_t seeing = 0;
    const auto count = [&](int64_t, uint32_t bits) __attribute__((always_inline)) {
      seeing += __builtin_popcount(bits);
      return seeing > kFewQueries;
    };
    if (!mask.any_queries(key, s.mask.q_range({key, key + 1}), count) && seeing > 0) return true;
  }
  return false;
}

}  // namespace strobe::cpu

#endif  // STROBE_CPU_WALKS_H_
