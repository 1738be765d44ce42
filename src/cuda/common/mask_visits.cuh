// Which blocks of keys a tile of queries goes through under a mask as data: those of the rule's
// interval that a list of the tile's queries has, and what the lists say of them.
//
// Tiles are of 64 or 128 queries and blocks of up to 128 keys, those of the mask's lists of 64, 128
// or 256 each. So a tile has one list or two, and 64 queries and 64 keys always lie in one pair of
// the mask's blocks: a visit has up to four parts of that size, each of which is hidden, full, or
// has bits.
//
// One thread goes through the lists, a block or more ahead of the others, and leaves what it finds
// in shared memory, where the others find the next block to load and the parts of the one that they
// compute.
#ifndef STROBE_CUDA_COMMON_MASK_VISITS_CUH_
#define STROBE_CUDA_COMMON_MASK_VISITS_CUH_

#include <cstdint>

#include "core/packed_mask.h"

namespace strobe::cuda {

/// A block that is visited.
struct MaskVisit {
  // Of a part, beside the places of bits.
  static constexpr int32_t kHidden = -2, kFull = -1;

  int32_t block;        // past the interval's end (before its begin): there is none any more
  int32_t parts[2][2];  // [list of the tile][64 keys of the block]
};

/// A walk through the lists of a tile's queries, as far as the rule's interval of blocks goes.
/// kDescends: from the last block to the first. By one thread.
///
/// What the lists say need not be a mask's: nobody has checked their words on a device. Blocks of
/// visits ascend (or descend) all the same, and lie in the interval, so that a walk ends.
template <int kTileQ, int kTileK, bool kDescends>
struct MaskWalk {
  static constexpr int kLists = kTileQ > 64 ? 2 : 1, kParts = kTileK > 64 ? 2 : 1;
  static_assert(kTileQ <= 128 && kTileK <= 128);

  struct List {
    const int32_t* entries;
    int32_t count;
    int32_t next;        // the entries before it (behind it, where the walk descends) count no more
    int32_t lacks_room;  // for what its queries see: their rows are NaN
  };
  List lists[kLists];
  int32_t begin, end;  // blocks of the rule's interval
  int32_t row;         // the tile's first in the first list's block
  int32_t own_log2;    // rows of a block of the lists
  int32_t other_log2;  // keys of a block in the entries
  int32_t last_bits;   // place of the last bits that there is room for

  /// For a tile whose first query is `first`, of a sequence that has `queries` of them. begin, end:
  /// the rule's interval.
  __device__ void start(const HeadMask& mask, int32_t first, int32_t queries, int32_t begin_,
                        int32_t end_) {
    const BlockLists& of = mask.queries;
    begin = begin_;
    end = end_;
    own_log2 = log2_of(of.own);
    other_log2 = log2_of(of.other);
    row = first & ((1 << own_log2) - 1);
    last_bits = static_cast<int32_t>(mask.partial) - 1;
    const int32_t first_list = first >> own_log2;
#pragma unroll 1
    for (int n = 0; n < kLists; ++n) {
      List& list = lists[n];
      const int32_t there = (first_list + n) << own_log2;
      list = {of.entries, 0, 0, 0};
      if (there >= first + kTileQ || there >= queries) continue;
      list.entries = of.words(first_list + n, 0);
      list.count = static_cast<int32_t>(of.count(first_list + n));
      list.lacks_room = of.over_capacity(first_list + n);
    }
    restart();
  }
  /// From the first visit on once more.
  __device__ void restart() {
#pragma unroll 1
    for (List& list : lists) {
      const auto before = [&](int32_t block) {
        return static_cast<int32_t>(
            BlockLists::find(list.entries, MaskLayout::kEntry, list.count, block));
      };
      if constexpr (kDescends) {
        // Most lists end inside of the interval.
        const int32_t past = ((end * kTileK - 1) >> other_log2) + 1;
        const bool ends_inside = list.count == 0 || block_of(list, list.count - 1) < past;
        list.next = (ends_inside ? list.count : before(past)) - 1;
      } else {
        list.next = begin == 0 ? 0 : before((begin * kTileK) >> other_log2);
      }
    }
  }

  /// Which of the tile's lists has a row of it.
  __device__ __forceinline__ int list_of(int32_t tile_row) const {
    return kLists == 2 ? (row + tile_row) >> own_log2 : 0;
  }
  /// How many visits may be left, where the lists are sorted and have the same blocks.
  __device__ int32_t visits_left() const {
    static_assert(kDescends);
    int32_t entries = 0;
#pragma unroll
    for (const List& list : lists) entries = max(entries, list.next + 1);
    return ((min(entries, 1 << 16) << other_log2) + kTileK - 1) / kTileK;
  }

  /// Writes the visit of block `from`, or of the next one behind it (before it, where the walk
  /// descends).
  __device__ void find(int32_t from, MaskVisit& visit) {
    int32_t block = kDescends ? begin - 1 : end;
#pragma unroll
    for (List& list : lists) {
      for (; is_there(list, list.next); list.next += kStep) {
        const int32_t key = block_of(list, list.next) << other_log2;
        const int32_t first = key / kTileK, last = (key + (1 << other_log2) - 1) / kTileK;
        if (kDescends ? first > from : last < from) continue;
        block = kDescends ? max(block, min(from, last)) : min(block, max(from, first));
        break;
      }
    }
    visit.block = block;
#pragma unroll
    for (int n = 0; n < kLists; ++n) {
      const List& list = lists[n];
      int32_t at = list.next;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const int part = kDescends ? kParts - 1 - i : i;
        const int32_t wanted = (block * kTileK + 64 * part) >> other_log2;
        const auto is_before = [&](int32_t b) { return kDescends ? b > wanted : b < wanted; };
        while (is_there(list, at) && is_before(block_of(list, at))) at += kStep;
        int32_t found = MaskVisit::kHidden;
        if (is_there(list, at) && block_of(list, at) == wanted) {
          const int32_t bits = list.entries[MaskLayout::kEntry * int64_t{at} + 1];
          found = bits < 0 ? MaskVisit::kFull : min(bits, last_bits);
        }
        visit.parts[n][part] = found;
      }
    }
  }

 private:
  static constexpr int32_t kStep = kDescends ? -1 : 1;

  __device__ static int32_t log2_of(int64_t power) {
    return __ffs(static_cast<int32_t>(power)) - 1;
  }
  __device__ __forceinline__ static bool is_there(const List& list, int32_t n) {
    return kDescends ? n >= 0 : n < list.count;
  }
  /// An entry's block, cut to those that keys may lie in, so that no product below leaves 32 bits.
  __device__ __forceinline__ int32_t block_of(const List& list, int32_t n) const {
    const int32_t block = list.entries[MaskLayout::kEntry * int64_t{n}];
    return min(max(block, 0), (1 << 30) >> other_log2);
  }
};

/// A tile's visits in ascending order, in shared memory. Those of the turns n, n + 1 and n + 2 are
/// there at a time: of turn n the parts are read, of n + 1 the block, and n + 2 is being written. A
/// barrier lies between any two turns.
template <int kTileQ, int kTileK>
struct MaskVisits {
  static constexpr int kKept = 3, kBeforeFirst = kKept - 1;
  using Walk = MaskWalk<kTileQ, kTileK, false>;

  Walk walk;
  MaskVisit visits[kKept];

  STROBE_INLINE static constexpr int after(int slot) { return slot + 1 == kKept ? 0 : slot + 1; }

  /// As MaskWalk::start: the tile's first two visits are there afterwards. By one thread.
  __device__ void start(const HeadMask& mask, int32_t first, int32_t queries, int32_t begin,
                        int32_t end) {
    walk.start(mask, first, queries, begin, end);
    find_first();
  }
  /// From the first visit on once more.
  __device__ void restart() {
    walk.restart();
    find_first();
  }
  /// Writes the visit that comes after that of a slot, into the slot after it.
  __device__ void find_after(int slot) { walk.find(visits[slot].block + 1, visits[after(slot)]); }

  /// What the lists say of the pairs of a row of the tile and a key of the block that is visited.
  __device__ __forceinline__ int32_t part(int slot, int32_t row, int32_t key) const {
    return visits[slot].parts[walk.list_of(row)][Walk::kParts == 2 ? key / 64 % 2 : 0];
  }

 private:
  __device__ void find_first() {
    walk.find(walk.begin, visits[0]);
    find_after(0);
    visits[kBeforeFirst].block = walk.begin - 1;  // what a turn finds that only has the first one
                                                  // copied
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_MASK_VISITS_CUH_
