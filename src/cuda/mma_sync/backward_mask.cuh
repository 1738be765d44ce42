// The backward pass through mma.sync under a mask as data: which tiles of queries an item goes
// through, and which pairs of a tile the mask allows.
//
// Tiles are of 64 queries and 64 keys, and blocks of the mask of 64, 128 or 256 each: so an item's
// keys have one list of each query head, and a step's pairs lie in one pair of the mask's blocks,
// which is full or has bits. The item's walk stays the rule's interval of tiles; its steps are
// those of them that a list of the mask has, descending, which for a head are the list's entries
// from the last to the first, and of each the tiles of its block.
//
// One thread of the weights half goes through the lists, a step ahead of the copies, and leaves
// what a step is in shared memory, where all threads find it. Of steps n - 2 to n + 1 there is a
// record at a time, while step n is being copied: whoever copies has waited until no thread is at
// step n - 3 (q_empty, backward_barriers.cuh). The bits of a step are copied together with its
// queries.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_MASK_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_MASK_CUH_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/packed_mask.h"
#include "core/walk.h"
#include "cuda/common/params.h"

namespace strobe::cuda::sm80 {

/// A step of an item under a mask as data: a tile of queries of one query head.
struct MaskedStep {
  int32_t head, tile;
};

/// What there is to know of a step.
struct alignas(16) MaskedStepRecord {
  static constexpr int32_t kFull = -1;  // beside the places of bits

  MaskedStep step;
  int32_t bits;
  int32_t rank;  // of the item's keys among those that add to dQ of the tile
};

/// Goes through the steps of an item. By one thread.
struct MaskedSteps {
  const int32_t* entry;  // that has the step's tile, in the list of its head
  int32_t before;        // entries of the list before it
  int32_t begin, end;    // tiles of the rule's interval
  int32_t head_end;
  int32_t batch, key_tile;
  MaskedStepRecord now;  // head_end as its head: there is no step any more

  template <int kTileQ, int kTileK>
  __device__ __forceinline__ void start(const CommonParams& p, const Mask& mask, int32_t batch_,
                                        int32_t key_begin, int32_t head_begin, int32_t head_end_) {
    const Range keys{key_begin, min64(key_begin + kTileK, mask.seqlen_k)};
    const auto walk = static_cast<IntervalWalk<int32_t>>(query_walk(mask, keys, int64_t{kTileQ}));
    begin = walk.begin;
    end = walk.end;
    batch = batch_;
    key_tile = key_begin / kTileK;
    head_end = head_end_;
    enter<kTileQ, kTileK>(p, head_begin);
  }
  __device__ __forceinline__ bool done() const { return now.step.head >= head_end; }
  template <int kTileQ, int kTileK>
  __device__ __forceinline__ void advance(const CommonParams& p) {
    const auto tiles = static_cast<int32_t>(p.mask_layout.block_q) / kTileQ;
    if (now.step.tile % tiles != 0 && now.step.tile > begin) {
      --now.step.tile;
      return;
    }
    if (before > 0) {
      --before;
      entry -= MaskLayout::kKeyEntry;
      if (read<kTileQ, kTileK>(p)) return;
    }
    enter<kTileQ, kTileK>(p, now.step.head + 1);
  }

 private:
  /// Goes to the first step of this head, or of the next one that has some.
  template <int kTileQ, int kTileK>
  __device__ __forceinline__ void enter(const CommonParams& p, int32_t head) {
    const SequenceRows rows = p.sequence_rows(batch);
    for (; head < head_end && begin < end; ++head) {
      const BlockLists lists = p.head_mask(rows, head).keys;
      const int64_t list = int64_t{key_tile} * kTileK / lists.own;
      // The last entry that begins before the interval's end.
      const int64_t n = lists.find(list, ceil_div(int64_t{end} * kTileQ, lists.other)) - 1;
      if (n < 0) continue;
      entry = lists.words(list, n);
      before = static_cast<int32_t>(n);
      if (read<kTileQ, kTileK>(p)) {
        now.step.head = head;
        return;
      }
    }
    now.step.head = head_end;
  }
  /// The last tile of the entry that the interval has; false: it has none, nor has an entry before.
  template <int kTileQ, int kTileK>
  __device__ __forceinline__ bool read(const CommonParams& p) {
    const MaskLayout& l = p.mask_layout;
    const uint4 words = *reinterpret_cast<const uint4*>(entry);
    const auto block = static_cast<int32_t>(words.x), place = static_cast<int32_t>(words.y);
    const int64_t tiles = l.block_q / kTileQ;
    const int64_t last = min64((int64_t{block} + 1) * tiles, end) - 1;
    if (last < begin) return false;
    const auto of_block = static_cast<int32_t>(l.block_k) / kTileK;
    now.step.tile = static_cast<int32_t>(last);
    now.bits =
        place < 0 ? MaskedStepRecord::kFull : static_cast<int32_t>(min64(place, l.partial - 1));
    // The blocks that the tile's list has, in tiles of keys: what of them the rule hides lies
    // before all others, or behind.
    now.rank = static_cast<int32_t>(words.z) * of_block + key_tile % of_block;
    return true;
  }
};

/// Where the bits of the step that is computed lie in shared memory: of each key of the tile two
/// words, with the tile's 64 queries.
struct StepBits {
  uint32_t at;      // of key 0; 0: every pair is allowed
  uint32_t stride;  // of keys, in bytes

  /// A copy takes 16 bytes: two keys' of blocks of 64 queries, else a key's 128 queries.
  __device__ __forceinline__ static uint32_t stride_of(const CommonParams& p) {
    return p.mask_layout.block_q == 64 ? 8 : 16;
  }
};

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_MASK_CUH_
