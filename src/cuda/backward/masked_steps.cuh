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

/// Goes through the steps of an item. By one thread, which has few registers, so that all of this
/// lies in shared memory; and each step has to be there before the products of the one before it
/// are done. So what an entry says is worked out once, however many tiles it has.
template <int kTileQ, int kTileK>
struct alignas(16) MaskedSteps {
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
    for (Cursor& cursor : cursors) cursor.at.first = cursor.at.last = kNoTile;
  }
  /// Writes the next step; false: there is none any more.
  __device__ __forceinline__ bool next(const CommonParams& p, Record& to) {
#pragma unroll 1
    for (;;) {
      const int32_t before = limit;
      int32_t tile = begin - 1;
#pragma unroll 1
      for (int n = 0; n < kLists; ++n) {
        Cursor& cursor = cursors[n];
#pragma unroll 1
        while (cursor.at.first >= before) advance(p, cursor);
        tile = max(tile, min(cursor.at.last, before - 1));
      }
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
  static constexpr int32_t kNoTile = -1, kUnread = INT32_MAX;
  /// What an entry of a list says, or two whose blocks share a tile.
  struct alignas(16) Entry {
    int32_t first, last;    // its tiles; kNoTile: the list has ended. first: kUnread: not yet begun
    int32_t parts[kParts];  // of each of its tiles, as in MaskedStepRecord::bits
    int32_t rank;           // as in the list
  };
  struct Cursor {
    Entry at;             // has tiles before the limit, unless the list has ended
    const int32_t* next;  // the entry to be read after it
    int32_t left;         // entries up to `next`; 0: there is none
  };

  Cursor cursors[kLists];
  int64_t list, head_step;
  int32_t lists, key_tile;
  int32_t begin, end;  // tiles of the rule's interval
  int32_t limit;       // those of the head that are still to come lie before it
  int32_t head, head_end;

  // The first and the last tile of an entry, whose block may be any number.
  __device__ __forceinline__ static int32_t block_of(int32_t word) {
    return min(max(word, -1), INT32_MAX / 256 - 1);
  }
  __device__ __forceinline__ static int32_t first_tile(const CommonParams& p, int32_t block) {
    return block * static_cast<int32_t>(p.mask_layout.block_q) >> kLog2;
  }
  __device__ __forceinline__ static int32_t last_tile(const CommonParams& p, int32_t block) {
    return ((block + 1) * static_cast<int32_t>(p.mask_layout.block_q) - 1) >> kLog2;
  }
  /// The place of an entry's bits.
  __device__ __forceinline__ static int32_t place_of(const CommonParams& p, int32_t word) {
    return word < 0 ? Record::kFull : min(word, static_cast<int32_t>(p.mask_layout.partial) - 1);
  }

  /// Reads a list's next entry. Of entries that do not ascend, steps are left out.
  __device__ __forceinline__ static void advance(const CommonParams& p, Cursor& cursor) {
    const int32_t left = cursor.left;
    if (left == 0) {
      cursor.at.first = cursor.at.last = kNoTile;
      return;
    }
    static_assert(MaskLayout::kKeyEntry == 4);
    const auto* const entry = reinterpret_cast<const int4*>(cursor.next);
    const int4 words = *entry;  // block, place of bits, rank
    const int32_t block = block_of(words.x), place = place_of(p, words.y);
    int taken = 1;
    cursor.at.first = first_tile(p, block);
    cursor.at.last = last_tile(p, block);
    cursor.at.rank = words.z;
    if constexpr (kParts == 1) {
      cursor.at.parts[0] = place;
    } else {
      const bool shares_tile = static_cast<int32_t>(p.mask_layout.block_q) < kTileQ;
      const bool is_second = shares_tile && block % 2 != 0;
      int32_t first_part = is_second ? Record::kHidden : place;
      if (is_second && left > 1) {
        const int4 before = *(entry - 1);
        if (block_of(before.x) == block - 1) {
          first_part = place_of(p, before.y);
          taken = 2;
        }
      }
      cursor.at.parts[0] = first_part;
      cursor.at.parts[1] = shares_tile && !is_second ? Record::kHidden : place;
    }
    cursor.next = reinterpret_cast<const int32_t*>(entry - taken);
    cursor.left = left - taken;
  }
  /// Goes to the lists of the head.
  __device__ __forceinline__ void enter(const CommonParams& p) {
    const MaskLayout& l = p.mask_layout;
    const auto capacity = static_cast<int32_t>(min64(l.capacity, INT32_MAX));
    const int32_t* of_list = p.mask + l.key_lists + 2 * (list + head * head_step);
    limit = end;
#pragma unroll 1
    for (int n = 0; n < lists; ++n, of_list += 2) {
      const int32_t first = min(max(of_list[0], 0), capacity);
      int32_t count = min(max(of_list[1], 0), capacity - first);
      const int32_t* const entries =
          p.mask + l.key_entries + int64_t{first} * MaskLayout::kKeyEntry;
      const auto begins_inside = [&](int32_t i) {
        return first_tile(p, block_of(entries[int64_t{i} * MaskLayout::kKeyEntry])) < end;
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
      cursors[n].at.first = kUnread;
      cursors[n].next = entries + (int64_t{count} - 1) * MaskLayout::kKeyEntry;
      cursors[n].left = count;
    }
  }
  __device__ __forceinline__ void put(const CommonParams& p, int32_t tile, Record& to) const {
    to.step = {head, tile};
    // The blocks that the tile's list has, in tiles of keys: what of them the rule hides lies
    // before all others, or behind.
    const auto block_k = static_cast<int32_t>(p.mask_layout.block_k);
    const int32_t tiles = block_k / kTileK;
    to.rank = tiles > 0 ? cursors[0].at.rank * tiles + (key_tile & (tiles - 1)) : 0;
#pragma unroll
    for (int n = 0; n < kLists; ++n) {
      // Blocks of more keys have the list, and the bits, of both halves of the tile's keys.
      const Entry at = cursors[block_k < kTileK ? n : 0].at;
#pragma unroll
      for (int i = 0; i < kParts; ++i)
        to.bits[n][i] = at.last >= tile ? at.parts[i] : Record::kHidden;
    }
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_MASKED_STEPS_CUH_
