// Which blocks of keys a tile of queries goes through under a mask as data: those of the rule's
// interval that a list of the tile's queries has, and what the lists say of them.
//
// Tiles are of 64 or 128 queries and blocks of up to 128 keys, those of the mask's lists of 64, 128
// or 256 each. So a tile has one list or two, and a block lies in one of the mask's blocks or has
// two of them: a visit has up to four parts, each of which is hidden, full, or has bits.
//
// One thread goes through the lists, a block ahead of the others, and leaves what it finds in
// shared memory, where the others find the next block to load and the parts of the one that they
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

  int32_t block;        // the end of the rule's interval: there is none any more
  int32_t parts[2][2];  // [list of the tile][block of keys of the mask]
};

/// A tile's visits, in shared memory. Those of the turns n, n + 1 and n + 2 are there at a time: of
/// turn n the parts are read, of n + 1 the block, and n + 2 is being written. A barrier lies
/// between any two turns.
template <int kTileQ, int kTileK>
struct MaskVisits {
  static constexpr int kKept = 3, kBeforeFirst = kKept - 1, kLists = kTileQ > 64 ? 2 : 1,
                       kParts = kTileK > 64 ? 2 : 1;

  BlockLists lists;
  int64_t first_list;
  int32_t last_bits;   // place of the last bits that there is room for
  int32_t next[2];     // entries: those before count no more
  int32_t counts[2];   // of the tile's lists
  int32_t begin, end;  // blocks of the rule's interval
  MaskVisit visits[kKept];

  STROBE_INLINE static constexpr int after(int slot) { return slot + 1 == kKept ? 0 : slot + 1; }

  /// For a tile whose first query is `first`, of a sequence that has `queries` of them: its first
  /// two visits are there afterwards. By one thread. begin, end: the rule's interval.
  __device__ void start(const HeadMask& mask, int32_t first, int32_t queries, int32_t begin_,
                        int32_t end_) {
    lists = mask.queries;
    last_bits = static_cast<int32_t>(mask.partial) - 1;
    begin = begin_;
    end = end_;
    first_list = first / lists.own;
    for (int n = 0; n < kLists; ++n) {
      const int64_t row = (first_list + n) * lists.own;
      const bool there = row < first + kTileQ && row < queries;
      counts[n] = there ? static_cast<int32_t>(lists.count(first_list + n)) : 0;
    }
    restart();
  }
  /// From the first visit on once more.
  __device__ void restart() {
    for (int n = 0; n < kLists; ++n) {
      const bool some = counts[n] > 0 && begin < end;
      next[n] = some ? static_cast<int32_t>(
                           lists.find(first_list + n, int64_t{begin} * kTileK / lists.other))
                     : 0;
    }
    find(0, begin);
    find_after(0);
    visits[kBeforeFirst].block = begin - 1;  // what a turn finds that only has the first one copied
  }
  /// Writes the visit that comes after that of a slot, into the slot after it.
  __device__ void find_after(int slot) { find(after(slot), visits[slot].block + 1); }

  /// What the lists say of the pairs of a row of the tile and a key of the block that is visited.
  __device__ __forceinline__ int32_t part(int slot, int32_t first, int32_t row, int32_t key) const {
    const MaskVisit& visit = visits[slot];
    const auto own = static_cast<int32_t>(lists.own), other = static_cast<int32_t>(lists.other);
    const int list = kLists == 2 && first % own + row >= own ? 1 : 0;
    const int block = kParts == 2 && key - visit.block * kTileK >= other ? 1 : 0;
    return visit.parts[list][block];
  }

 private:
  /// Writes the visit that comes next from block `from` on.
  __device__ void find(int slot, int32_t from) {
    const int64_t size = lists.other;
    int64_t block = end;
    for (int n = 0; n < kLists; ++n) {
      for (; next[n] < counts[n]; ++next[n]) {
        const int64_t there = entry(n, next[n]).block;
        if ((there + 1) * size <= int64_t{from} * kTileK) continue;
        block = min64(block, max64(from, there * size / kTileK));
        break;
      }
    }
    MaskVisit& visit = visits[slot];
    visit.block = static_cast<int32_t>(block);
    for (int n = 0; n < kLists; ++n) {
      int32_t at = next[n];
      for (int part = 0; part < kParts; ++part) {
        const int64_t wanted = block * kTileK / size + part;
        while (at < counts[n] && entry(n, at).block < wanted) ++at;
        int32_t found = MaskVisit::kHidden;
        if (at < counts[n]) {
          const BlockLists::Entry e = entry(n, at);
          if (e.block == wanted)
            found = e.bits < 0 ? MaskVisit::kFull : min(static_cast<int32_t>(e.bits), last_bits);
        }
        visit.parts[n][part] = found;
      }
    }
  }
  __device__ BlockLists::Entry entry(int list, int32_t n) const {
    return lists.entry(first_list + list, n);
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_MASK_VISITS_CUH_
