// Which blocks of keys a tile of queries goes through under a mask as data: those of the rule's
// interval that a list of the tile's queries has, and what the lists say of them.
//
// Tiles are of 64 or 128 queries and blocks of up to 128 keys, those of the mask's lists of 64, 128
// or 256 each. So a tile has one list or two, and 64 queries and 64 keys always lie in one pair of
// the mask's blocks: a visit has up to four parts of that size, each of which is hidden, full, or
// has bits.
//
// One thread (or, on Hopper, one warp: hopper/forward_sm90_mask.cuh) goes through the lists, ahead
// of the others, and leaves what it finds in shared memory, where the others find the next block to
// load and the parts of the one that they compute.
#ifndef STROBE_CUDA_COMMON_MASK_VISITS_CUH_
#define STROBE_CUDA_COMMON_MASK_VISITS_CUH_

#include <cstdint>

#include "core/packed_mask.h"

namespace strobe::cuda {

/// A block that is visited.
struct MaskVisit {
  // Of a part, beside the places of bits.
  static constexpr int32_t kHidden = -2, kFull = -1;

  int32_t block;        // the end of the rule's interval: there is none any more
  int32_t parts[2][2];  // [list of the tile][64 keys of the block]
};

/// The lists of a tile's queries, for a walk through those blocks of theirs that lie in the rule's
/// interval. What they say need not be a mask's, since nobody has checked their words on a device:
/// what is read of them is cut, so that it leads nowhere outside.
template <int kTileQ>
struct MaskLists {
  static constexpr int kLists = kTileQ > 64 ? 2 : 1;
  static_assert(kTileQ <= 128);

  struct List {
    const int32_t* entries;
    int32_t count;
    int32_t lacks_room;  // for what its queries see: their rows are NaN
  };
  List lists[kLists];
  int32_t begin, end;  // blocks of the rule's interval
  int32_t row;         // the tile's first in the first list's block
  int32_t own_log2;    // rows of a block of the lists
  int32_t other_log2;  // keys of a block in the entries
  int32_t last_bits;   // place of the last bits that there is room for

  /// For a tile whose first query is `first`, of a sequence that has `queries` of them. begin, end:
  /// the rule's interval. By one thread.
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
      list = {of.entries, 0, 0};
      if (there >= first + kTileQ || there >= queries) continue;
      list.entries = of.words(first_list + n, 0);
      list.count = static_cast<int32_t>(of.count(first_list + n));
      list.lacks_room = of.over_capacity(first_list + n);
    }
  }

  /// Leaves out the entries that begin past the interval's end, as a walk from the end has them
  /// first. key_end: of the interval.
  __device__ void cut(int32_t key_end) {
    const int32_t past = key_end > 0 ? ((key_end - 1) >> other_log2) + 1 : 0;
#pragma unroll 1
    for (List& list : lists) {
      // Most lists end inside of the interval.
      const bool ends_inside = list.count == 0 || block_of(list, list.count - 1) < past;
      if (!ends_inside) list.count = find(list, past);
    }
  }

  /// Which of the tile's lists has a row of it.
  __device__ __forceinline__ int list_of(int32_t tile_row) const {
    return kLists == 2 ? (row + tile_row) >> own_log2 : 0;
  }
  /// An entry's block, cut to those that keys may lie in, so that no product leaves 32 bits.
  __device__ __forceinline__ int32_t block_of(const List& list, int32_t n) const {
    const int32_t block = list.entries[MaskLayout::kEntry * int64_t{n}];
    return min(max(block, 0), (1 << 30) >> other_log2);
  }
  /// What an entry says of its block, as MaskVisit's parts have it.
  __device__ __forceinline__ int32_t bits_of(const List& list, int32_t n) const {
    const int32_t bits = list.entries[MaskLayout::kEntry * int64_t{n} + 1];
    return bits < 0 ? MaskVisit::kFull : min(bits, last_bits);
  }
  /// The first entry of a list whose block is not before `block`.
  __device__ __forceinline__ static int32_t find(const List& list, int32_t block) {
    return static_cast<int32_t>(
        BlockLists::find(list.entries, MaskLayout::kEntry, list.count, block));
  }

 private:
  __device__ static int32_t log2_of(int64_t power) {
    return __ffs(static_cast<int32_t>(power)) - 1;
  }
};

/// A tile's visits in ascending order, in shared memory: one thread goes through the lists. Those
/// of the turns n, n + 1 and n + 2 are there at a time: of turn n the parts are read, of n + 1 the
/// block, and n + 2 is being written. A barrier lies between any two turns.
template <int kTileQ, int kTileK>
struct MaskVisits {
  static constexpr int kKept = 3, kBeforeFirst = kKept - 1, kParts = kTileK > 64 ? 2 : 1;
  using Lists = MaskLists<kTileQ>;
  static_assert(kTileK <= 128);

  Lists lists;
  int32_t next[Lists::kLists];  // entries: those before count no more
  MaskVisit visits[kKept];

  STROBE_INLINE static constexpr int after(int slot) { return slot + 1 == kKept ? 0 : slot + 1; }

  /// As MaskLists::start: the tile's first two visits are there afterwards. By one thread.
  __device__ void start(const HeadMask& mask, int32_t first, int32_t queries, int32_t begin,
                        int32_t end) {
    lists.start(mask, first, queries, begin, end);
    restart();
  }
  /// From the first visit on once more.
  __device__ void restart() {
#pragma unroll 1
    for (int n = 0; n < Lists::kLists; ++n) {
      const int32_t first = (lists.begin * kTileK) >> lists.other_log2;
      next[n] = first == 0 ? 0 : lists.find(lists.lists[n], first);
    }
    find(0, lists.begin);
    find_after(0);
    visits[kBeforeFirst].block =
        lists.begin - 1;  // what a turn finds that only has the first one copied
  }
  /// Writes the visit that comes after that of a slot, into the slot after it.
  __device__ void find_after(int slot) { find(after(slot), visits[slot].block + 1); }

  /// What the lists say of the pairs of a row of the tile and a key of the block that is visited.
  __device__ __forceinline__ int32_t part(int slot, int32_t row, int32_t key) const {
    return visits[slot].parts[lists.list_of(row)][kParts == 2 ? key / 64 % 2 : 0];
  }

 private:
  /// Writes the visit that comes next from block `from` on.
  __device__ void find(int slot, int32_t from) {
    const int32_t log2 = lists.other_log2;
    int32_t block = lists.end;
#pragma unroll
    for (int n = 0; n < Lists::kLists; ++n) {
      for (; next[n] < lists.lists[n].count; ++next[n]) {
        const int32_t key = lists.block_of(lists.lists[n], next[n]) << log2;
        if ((key + (1 << log2) - 1) / kTileK < from) continue;
        block = min(block, max(from, key / kTileK));
        break;
      }
    }
    MaskVisit& visit = visits[slot];
    visit.block = block;
#pragma unroll
    for (int n = 0; n < Lists::kLists; ++n) {
      const typename Lists::List& list = lists.lists[n];
      int32_t at = next[n];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int32_t wanted = (block * kTileK + 64 * part) >> log2;
        while (at < list.count && lists.block_of(list, at) < wanted) ++at;
        const bool found = at < list.count && lists.block_of(list, at) == wanted;
        visit.parts[n][part] = found ? lists.bits_of(list, at) : MaskVisit::kHidden;
      }
    }
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_MASK_VISITS_CUH_
