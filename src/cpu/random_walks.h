// Walks that leave out random blocks: lists, made of a mask's interval and of core/random_blocks.h.
// For tests alone: see walks.h.
#ifndef STROBE_CPU_RANDOM_WALKS_H_
#define STROBE_CPU_RANDOM_WALKS_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/random_blocks.h"
#include "core/sequence.h"
#include "core/walk.h"

namespace strobe {
/// The seed of the lists of the launches that follow. 0: intervals.
extern "C" uint64_t strobe_random_walks_seed;
}  // namespace strobe

namespace strobe::cpu {

/// A row of blocks in ascending order. Its places are the numbers of the list's entries.
struct ListWalk {
  static constexpr int64_t kMost = 512;  // entries; longer ones are no test's

  int64_t begin = 0, end = 0;
  int32_t blocks[kMost];
  bool full[kMost];

  STROBE_INLINE bool empty() const { return end <= begin; }
  STROBE_INLINE int64_t count() const { return empty() ? 0 : end - begin; }
  STROBE_INLINE int64_t block(int64_t place) const { return blocks[place]; }
  STROBE_INLINE int64_t after(int64_t place) const { return place + 1; }
  STROBE_INLINE int64_t places_before(int64_t place) const { return place - begin; }
  STROBE_INLINE bool is_full(int64_t place) const { return full[place]; }
  /// The first place whose block does not come before `block`.
  STROBE_INLINE int64_t rank(int64_t block) const {
    int64_t low = begin, high = end;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (blocks[middle] < block) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  STROBE_INLINE bool visits(int64_t block) const {
    const int64_t place = rank(block);
    return place < end && blocks[place] == block;
  }
  STROBE_INLINE ListWalk within(int64_t first, int64_t last) const {
    ListWalk w = *this;
    w.begin = rank(first);
    w.end = rank(last);
    return w;
  }
  STROBE_INLINE bool is_convex() const { return false; }
  STROBE_INLINE bool has_full() const {
    for (int64_t place = begin; place < end; ++place) {
      if (full[place]) return true;
    }
    return false;
  }
  STROBE_INLINE bool meets(Range rows, int64_t size) const {
    if (rows.empty()) return false;
    const int64_t place = rank(rows.begin / size);
    return place < end && blocks[place] * size < rows.end;
  }

  /// The interval's blocks that `hidden` does not hide.
  template <typename Hidden>
  STROBE_INLINE static ListWalk of(const IntervalWalk<int64_t>& interval, const Hidden& hidden) {
    ListWalk w;
    // Not from place 0 on, so that a kernel that takes a place for a block, or the first place for
    // 0, is found out.
    w.begin = w.end = 3;
    for (int64_t block = interval.begin; block < interval.end; ++block) {
      bool some = false;
      if (hidden(block, some)) continue;
      if (w.end == kMost) __builtin_trap();
      w.blocks[w.end] = static_cast<int32_t>(block);
      w.full[w.end++] = !some && interval.is_full(block);
    }
    return w;
  }
};

/// Whether no query sees any of the keys. some: becomes true where one does not see one.
STROBE_INLINE bool hides_all(const Sequence& s, int64_t head, Range queries, Range keys,
                             bool& some) {
  bool all = true;
  for (int64_t q = queries.begin / kRandomBlockQ; q * kRandomBlockQ < queries.end; ++q) {
    for (int64_t k = keys.begin / kRandomBlockK; k * kRandomBlockK < keys.end; ++k) {
      const bool hidden = hides_random_block(strobe_random_walks_seed, s.batch, head, q, k);
      all &= hidden;
      some |= hidden;
    }
  }
  return all;
}
STROBE_INLINE bool hides_all(const Sequence& s, int64_t head, Range queries, Range keys) {
  bool some = false;
  return hides_all(s, head, queries, keys, some);
}

STROBE_INLINE ListWalk random_key_walk(const Sequence& s, int64_t head, Range queries,
                                       int64_t size) {
  return ListWalk::of(key_walk(s.mask, queries, size), [&](int64_t block, bool& some) {
    const Range keys{block * size, min64((block + 1) * size, s.mask.seqlen_k)};
    return hides_all(s, head, queries, keys, some);
  });
}
STROBE_INLINE ListWalk random_query_walk(const Sequence& s, int64_t head, Range keys,
                                         int64_t size) {
  return ListWalk::of(query_walk(s.mask, keys, size), [&](int64_t block, bool& some) {
    const Range queries{block * size, min64((block + 1) * size, s.mask.seqlen_q)};
    return hides_all(s, head, queries, keys, some);
  });
}

}  // namespace strobe::cpu

#endif  // STROBE_CPU_RANDOM_WALKS_H_
