// Walks whose blocks come from a list: any blocks of a sequence, in ascending order, each full or
// not. They answer what the walks over intervals of core/walk.h answer, and may stand wherever
// these stand. Places are the numbers of the list's entries, the first of which is kFirstPlace: not
// 0, so that a kernel that takes a place for a block, or the first place for 0, is found out.
//
// The list is one of bits, one for each block of the sequence: short enough for shared memory, and
// a kernel needs no memory that somebody filled before it. That is for tests (STROBE_RANDOM_WALKS),
// whose sequences are short.
#ifndef STROBE_CORE_LIST_WALK_H_
#define STROBE_CORE_LIST_WALK_H_

#include <cstdint>

#include "core/macros.h"
#include "core/mask.h"
#include "core/walk.h"

namespace strobe {

inline constexpr int32_t kFirstPlace = 3;

/// A set of numbers below 64 * kWords.
template <int kWords>
struct BitSet {
  uint64_t words[kWords];

  STROBE_INLINE constexpr bool has(int64_t n) const {
    return 0 <= n && n < 64 * kWords && (words[n / 64] >> n % 64 & 1) != 0;
  }
  STROBE_INLINE constexpr void add(int64_t n) {
    if (n < 0 || n >= 64 * kWords) {  // longer lists are no test's
#if defined(__NVCC__) && defined(__CUDA_ARCH__)
      __trap();
#else
      __builtin_trap();
#endif
    }
    words[n / 64] |= uint64_t{1} << n % 64;
  }
  /// How many are below n.
  STROBE_INLINE constexpr int32_t below(int64_t n) const {
    int32_t count = 0;
    for (int i = 0; i < kWords; ++i) {
      const int64_t here = n - 64 * i;
      if (here <= 0) break;
      count += ones(here < 64 ? words[i] & ((uint64_t{1} << here) - 1) : words[i]);
    }
    return count;
  }
  /// The number that `count` are below, or 64 * kWords. (Without branches in a word: kernels ask
  /// while products are under way.)
  STROBE_INLINE constexpr int32_t after(int32_t count) const {
    int32_t first = 0;
    for (int i = 0; i + 1 < kWords && ones(words[i]) <= count; ++i) {
      count -= ones(words[i]);
      first += 64;
    }
    uint64_t rest = words[first / 64];
    for (int32_t half = 32; half > 0; half /= 2) {
      const int32_t low = ones(rest & ((uint64_t{1} << half) - 1));
      const bool is_higher = low <= count;
      count -= is_higher ? low : 0;
      first += is_higher ? half : 0;
      rest = is_higher ? rest >> half : rest;
    }
    return first + ((rest & 1) != 0 && count == 0 ? 0 : 1);
  }

 private:
  STROBE_INLINE static constexpr int32_t ones(uint64_t x) {
    // (The sums of neighbouring 2, 4 and 8 bits, and then of the bytes: the same for all
    // compilers.)
    x -= x >> 1 & 0x5555555555555555;
    x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333);
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F;
    return static_cast<int32_t>(x * 0x0101010101010101 >> 56);
  }
};

/// The blocks of a list, without a word on which are full: BlockInterval's fellow.
template <typename Int, int kWords>
struct BlockList {
  BitSet<kWords> visited;  // of the whole list
  Int begin, end;          // places of this part of it

  STROBE_INLINE constexpr bool empty() const { return end <= begin; }
  STROBE_INLINE constexpr Int count() const { return empty() ? 0 : end - begin; }
  STROBE_INLINE constexpr Int block(Int place) const {
    return static_cast<Int>(visited.after(static_cast<int32_t>(place) - kFirstPlace));
  }
  STROBE_INLINE constexpr bool has(Int place) const { return begin <= place && place < end; }
  /// The place of a block, or the first one whose block comes after it.
  STROBE_INLINE constexpr Int rank(Int block) const {
    return static_cast<Int>(kFirstPlace + visited.below(block));
  }
  STROBE_INLINE constexpr bool visits(Int block) const {
    return visited.has(block) && has(rank(block));
  }
  STROBE_INLINE constexpr BlockList places(Int first, Int last) const {
    return {visited, first, last};
  }
};

/// The blocks of a list, and which of them are full: IntervalWalk's fellow.
template <typename Int, int kWords>
struct ListWalk {
  BitSet<kWords> visited, full;  // of the whole list; full blocks are visited
  Int begin, end;                // places of this part of it
  static constexpr bool kConvex = false;

  STROBE_INLINE constexpr BlockList<Int, kWords> blocks() const { return {visited, begin, end}; }
  STROBE_INLINE constexpr bool empty() const { return blocks().empty(); }
  STROBE_INLINE constexpr Int count() const { return blocks().count(); }
  STROBE_INLINE constexpr Int block(Int place) const { return blocks().block(place); }
  STROBE_INLINE constexpr bool has(Int place) const { return blocks().has(place); }
  STROBE_INLINE constexpr bool visits(Int block) const { return blocks().visits(block); }
  STROBE_INLINE constexpr Int rank(Int block) const { return blocks().rank(block); }
  STROBE_INLINE constexpr bool is_full(Int place) const {
    return has(place) && full.has(block(place));
  }
  STROBE_INLINE constexpr bool all_full() const {
    for (Int place = begin; place < end; ++place) {
      if (!full.has(block(place))) return false;
    }
    return true;
  }
  STROBE_INLINE constexpr ListWalk within(Int first, Int last) const {
    ListWalk w = *this;
    if (w.begin < rank(first)) w.begin = rank(first);
    if (w.end > rank(last)) w.end = rank(last);
    return w;
  }
  STROBE_INLINE constexpr bool meets(Range rows, int64_t size) const {
    if (rows.empty()) return false;
    const ListWalk w =
        within(static_cast<Int>(rows.begin / size), static_cast<Int>((rows.end - 1) / size + 1));
    return !w.empty();
  }
  STROBE_INLINE constexpr Int full_run_begin(Int place) const {
    while (is_full(place - 1)) --place;
    return place;
  }
  STROBE_INLINE constexpr ListWalk all_partial() const { return {visited, {}, begin, end}; }
  STROBE_INLINE constexpr ListWalk partial_before(Int place) const {
    ListWalk w = all_partial();
    for (Int at = begin < place ? place : begin; at < end; ++at) {
      if (is_full(at)) w.full.add(block(at));
    }
    return w;
  }

  template <typename Other>
  STROBE_INLINE constexpr explicit operator ListWalk<Other, kWords>() const {
    return {visited, full, static_cast<Other>(begin), static_cast<Other>(end)};
  }

  /// Of no blocks yet.
  STROBE_INLINE static constexpr ListWalk none() { return {{}, {}, kFirstPlace, kFirstPlace}; }
  /// One more block, which comes after all others.
  STROBE_INLINE constexpr void add(int64_t block, bool is_full) {
    visited.add(block);
    if (is_full) full.add(block);
    ++end;
  }
  /// The blocks of an interval's walk that hidden(block, some) does not leave out. some: it sets
  /// that where it leaves out a part of a block.
  template <typename Walk, typename Hidden>
  STROBE_INLINE static constexpr ListWalk of(const Walk& interval, const Hidden& hidden) {
    ListWalk w = none();
    for (auto block = interval.begin; block < interval.end; ++block) {
      bool some = false;
      if (!hidden(static_cast<int64_t>(block), some))
        w.add(block, !some && interval.is_full(block));
    }
    return w;
  }
};

}  // namespace strobe

#endif  // STROBE_CORE_LIST_WALK_H_
