// The keys that a span goes through under a mask as data: those of the listed blocks alone, put
// together without the gaps between them.
//
//   keys of the sequence      |  0  |  1  |  2  |  3  |  4  |  5  |  6  |    blocks of the mask
//   a list                          |  1  |           |  4  |  5  |
//   its keys, without gaps          |0 - 127|128 - 255|256 - 383|
//   units of a span                 |  0  |  1  |  2  |  3  |  4  |  5  |    of 64 of these
//
// Without a mask, of problems with a bias alone, a span goes through the sequence's keys as they
// are.
//
// A unit is cut from the keys without gaps, so that a share is what it is without a mask: units to
// read, all alike, however the blocks lie. A team's keys of a unit lie in one block, since blocks
// are of 64 keys or more and a team has 64 or fewer.
//
// A tile of queries has one list: of 16, 32 or 64 rows, and queries times the group, none crosses a
// multiple of 64 queries.
#ifndef STROBE_CUDA_DECODE_LISTED_KEYS_H_
#define STROBE_CUDA_DECODE_LISTED_KEYS_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/packed_mask.h"

namespace strobe::cuda {

/// Entries of a list, one after the other. What they say need not be a mask's, since nobody has
/// checked its words on a device: what is read of them is cut, so that it leads nowhere outside.
struct ListedKeys {
  static constexpr int32_t kNoKey = int32_t{1} << 30;  // past the end of every sequence

  const int32_t* entries;  // null: there are no lists, and all keys are without gaps
  int32_t count;

  /// Those whose blocks have some of these keys, which are the ones that the rule leaves to some
  /// query of a tile.
  STROBE_INLINE static constexpr ListedKeys of(const BlockLists& lists, int64_t list, Range keys) {
    if (keys.empty()) return {lists.entries, 0};
    const int64_t begin = keys.begin / lists.other, end = ceil_div(keys.end, lists.other);
    // Most lists begin and end inside of the interval: nobody searches them.
    int64_t last = lists.count(list), first = 0;
    if (last > 0 && lists.entry(list, last - 1).block >= end) last = lists.find(list, end);
    if (last > 0 && begin > 0) first = min64(lists.find(list, begin), last);
    return {lists.words(list, first), static_cast<int32_t>(min64(last - first, end - begin))};
  }
  /// The entry that has number n of the keys without gaps; null: there is none, or there are no
  /// lists. width, log2_k: of SpanLists.
  STROBE_INLINE constexpr const int32_t* entry(int32_t n, int32_t width, int32_t log2_k) const {
    const int32_t at = n >> log2_k;
    return at < count ? entries + int64_t{at} * width : nullptr;
  }
  /// Number n of the keys without gaps, in the sequence. width, log2_k: of SpanLists.
  STROBE_INLINE constexpr int32_t key(int32_t n, int32_t width, int32_t log2_k) const {
    if (!entries) return n;
    const int32_t* const own = entry(n, width, log2_k);
    if (!own) return kNoKey;
    const int32_t most = kNoKey >> log2_k, block = *own;
    const int32_t there = block < 0 ? 0 : block < most ? block : most;
    return (there << log2_k) + (n & ((1 << log2_k) - 1));
  }
  STROBE_INLINE constexpr int32_t keys(int32_t log2_k) const { return count << log2_k; }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_LISTED_KEYS_H_
