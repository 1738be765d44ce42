// The steps of a work item of the backward pass under a mask as data: which tiles of queries it
// goes through, and what the mask says of each.
//
// Blocks of the mask are of 64, 128 or 256 queries and keys, tiles of 32, 64 or 128 each. So an
// item's keys have one list of each query head, or, of 128 keys where blocks have 64, two; and a
// tile of queries lies in one of a list's blocks, or, of 128 queries where blocks have 64, has two
// of them. A step's pairs have up to four parts, each of which is hidden, full, or has bits.
//
// A head's steps are the tiles of the rule's interval that a list has, descending. One thread looks
// for them (MaskedSteps), and leaves what it finds in shared memory: nobody else reads a list, so
// that all agree on the steps whatever the words of the mask are.
#ifndef STROBE_CUDA_BACKWARD_MASKED_STEPS_CUH_
#define STROBE_CUDA_BACKWARD_MASKED_STEPS_CUH_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/packed_mask.h"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// A step of an item under a mask as data: a tile of queries of one query head.
struct MaskedStep {
  int32_t head, tile;
};

/// What there is to know of a step.
template <int kTileQ, int kTileK>
struct alignas(16) MaskedStepRecord {
  static_assert(kTileQ == 32 || kTileQ == 64 || kTileQ == 128);
  static_assert(kTileK == 32 || kTileK == 64 || kTileK == 128);
  static constexpr int kLists = kTileK == 128 ? 2 : 1, kParts = kTileQ == 128 ? 2 : 1;
  static constexpr int32_t kFull = -1, kHidden = -2;  // beside the places of bits

  MaskedStep step;
  /// Of the item's keys among those that add to dQ of the tile; where blocks of the mask are no
  /// smaller than tiles.
  int32_t rank;
  int32_t bits[kLists][kParts];  // of up to 64 keys and 64 queries
};

/// Goes through the steps of an item. By one thread, that has few registers.
template <int kTileQ, int kTileK>
struct MaskedSteps {
  using Record = MaskedStepRecord<kTileQ, kTileK>;
  static constexpr int kLists = Record::kLists, kParts = Record::kParts;

  /// Keys of an item, and where their lists are.
  struct Keys {
    int64_t list;       // number of head 0's first list of them
    int64_t head_step;  // to that of the next head
    int32_t begin;      // the first key, in the sequence
    int32_t seqlen_k;

    STROBE_INLINE static constexpr Keys of(const MaskLayout& l, const SequenceRows& rows,
                                           int32_t begin) {
      return {l.first_k(rows.batch, 0, rows.k_row) + begin / l.block_k, l.head_step_k(), begin,
              static_cast<int32_t>(rows.seqlen_k)};
    }
  };

  /// begin, end: tiles of the rule's interval.
  __device__ __forceinline__ void start(const CommonParams& p, const Keys& keys, int32_t begin_,
                                        int32_t end_, int32_t head_begin, int32_t head_end_) {
    const auto block_k = static_cast<int32_t>(p.mask_layout.block_k);
    list = keys.list;
    head_step = keys.head_step;
    // (Behind the sequence's last key the next list is another sequence's.)
    lists = kLists == 2 && block_k < kTileK && keys.begin + block_k < keys.seqlen_k ? 2 : 1;
    key_tile = keys.begin / kTileK;
    begin = begin_;
    end = end_;
    limit = begin_;
    head = begin_ < end_ ? head_begin - 1 : head_end_;
    head_end = head_end_;
    for (int n = 0; n < kLists; ++n) cursors[n].left = 0;
  }
  /// Writes the next step; false: there is none any more.
  __device__ __forceinline__ bool next(const CommonParams& p, Record& to) {
#pragma unroll 1
    for (;;) {
      int32_t tile = begin - 1;
#pragma unroll 1
      for (int n = 0; n < kLists; ++n) tile = max(tile, last_before_limit(p, cursors[n]));
      if (tile >= begin) {
        put(p, tile, to);
        limit = tile;
        return true;
      }
      if (head + 1 >= head_end) return false;
      ++head;
      enter(p);
    }
  }

 private:
  static constexpr int kLog2 = kTileQ == 32 ? 5 : kTileQ == 64 ? 6 : 7;
  /// A list's last entry that may have a step to come.
  struct Cursor {
    const int32_t* entry;
    int32_t left;  // entries up to this one; 0: there is none
  };

  Cursor cursors[kLists];
  int64_t list, head_step;
  int32_t lists, key_tile;
  int32_t begin, end;  // tiles of the rule's interval
  int32_t limit;       // those of the head that are still to come lie before it
  int32_t head, head_end;

  // The first and the last tile of an entry, whose block may be any number.
  __device__ __forceinline__ static int32_t block_of(const int32_t* entry) {
    return min(max(entry[0], -1), INT32_MAX / 256 - 1);
  }
  __device__ __forceinline__ static int32_t first_tile(const CommonParams& p, int32_t block) {
    return block * static_cast<int32_t>(p.mask_layout.block_q) >> kLog2;
  }
  __device__ __forceinline__ static int32_t last_tile(const CommonParams& p, int32_t block) {
    return ((block + 1) * static_cast<int32_t>(p.mask_layout.block_q) - 1) >> kLog2;
  }

  /// The last of its tiles before the limit. What else it has before is not looked for: entries
  /// that do not ascend have steps that are left out.
  __device__ __forceinline__ int32_t last_before_limit(const CommonParams& p,
                                                       Cursor& cursor) const {
    const int32_t* entry = cursor.entry;
    int32_t left = cursor.left, tile = -1;
#pragma unroll 1
    for (; left > 0; --left, entry -= MaskLayout::kKeyEntry) {
      const int32_t block = block_of(entry);
      if (first_tile(p, block) < limit) {
        tile = min(last_tile(p, block), limit - 1);
        break;
      }
    }
    cursor.entry = entry;
    cursor.left = left;
    return tile;
  }
  /// Goes to the lists of the head.
  __device__ __forceinline__ void enter(const CommonParams& p) {
    const MaskLayout& l = p.mask_layout;
    const auto capacity = static_cast<int32_t>(min64(l.capacity, INT32_MAX));
    const int32_t* of_list = p.mask + l.key_lists + 2 * (list + head * head_step);
    limit = end;
#pragma unroll 1
    for (int n = 0; n < kLists; ++n, of_list += 2) {
      cursors[n].left = 0;
      if (n >= lists) continue;
      const int32_t first = min(max(of_list[0], 0), capacity);
      int32_t count = min(max(of_list[1], 0), capacity - first);
      const int32_t* const entries =
          p.mask + l.key_entries + int64_t{first} * MaskLayout::kKeyEntry;
      const auto begins_inside = [&](int32_t i) {
        return first_tile(p, block_of(entries + int64_t{i} * MaskLayout::kKeyEntry)) < end;
      };
      // Mostly all of them do.
      if (count > 0 && !begins_inside(count - 1)) {
        int32_t low = 0;
#pragma unroll 1
        while (low < count) {
          const int32_t middle = low + (count - low) / 2;
          if (begins_inside(middle)) {
            low = middle + 1;
          } else {
            count = middle;
          }
        }
      }
      cursors[n].left = count;
      cursors[n].entry = entries + (int64_t{count} - 1) * MaskLayout::kKeyEntry;
    }
  }
  /// The place of an entry's bits.
  __device__ __forceinline__ static int32_t place_of(const CommonParams& p, const int32_t* entry) {
    const int32_t place = entry[1];
    return place < 0 ? Record::kFull : min(place, static_cast<int32_t>(p.mask_layout.partial) - 1);
  }
  __device__ __forceinline__ void put(const CommonParams& p, int32_t tile, Record& to) const {
    const auto block_q = static_cast<int32_t>(p.mask_layout.block_q);
    to.step = {head, tile};
#pragma unroll 1
    for (int n = 0; n < kLists; ++n) {
      // Blocks of more keys have the list, and the bits, of both halves of the tile's keys.
      const int own = lists == 2 ? n : 0;
      const Cursor& cursor = cursors[own];
      const bool is_there = (lists == 2 || n == 0 || shares_list(p)) && cursor.left > 0 &&
                            last_tile(p, block_of(cursor.entry)) >= tile;
      int32_t part[kParts];
#pragma unroll
      for (int i = 0; i < kParts; ++i) part[i] = Record::kHidden;
      if (is_there) {
        const int32_t* const entry = cursor.entry;
        const int32_t place = place_of(p, entry);
        if (n == 0) {
          // The blocks that the tile's list has, in tiles of keys: what of them the rule hides lies
          // before all others, or behind.
          const int32_t tiles = static_cast<int32_t>(p.mask_layout.block_k) / kTileK;
          to.rank = tiles > 0 ? entry[2] * tiles + (key_tile & (tiles - 1)) : 0;
        }
        if (kParts == 1 || block_q >= kTileQ) {
#pragma unroll
          for (int i = 0; i < kParts; ++i) part[i] = place;
        } else {
          const int32_t block = block_of(entry);
          const bool second = block % 2 != 0;
          part[0] = second ? Record::kHidden : place;
          part[kParts - 1] = second ? place : Record::kHidden;
          const int32_t* const before = entry - MaskLayout::kKeyEntry;
          if (second && cursor.left > 1 && block_of(before) == block - 1)
            part[0] = place_of(p, before);
        }
      }
#pragma unroll
      for (int i = 0; i < kParts; ++i) to.bits[n][i] = part[i];
    }
  }
  /// Whether the second half of the tile's keys has the first one's list.
  __device__ __forceinline__ static bool shares_list(const CommonParams& p) {
    return p.mask_layout.block_k >= kTileK;
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_MASKED_STEPS_CUH_
