// Hopper forward: masks as data. What a tile visits then follows from lists, and nobody knows at a
// tile's begin how many blocks that will be.
//
// The scheduler leaves the tile's lists in shared memory (MaskLists), cut to the rule's end. The
// warp that loads K and V goes through them (ListWindow), and leaves with each block of K what
// either warpgroup does with it (PartVisit): k.full and k.empty of the block hold for that too. So
// consumers read no lists, and do as many turns as one warp has found, whatever the lists say. A
// tile that visits nothing has one turn in which nothing is loaded.
//
// All warpgroups wait for each block, and those that skip it give it back themselves: they have to
// read that they do. (Of V, which they never look at, the thread that loads gives it back for
// them.) Q is free after the tile's last visit, whoever computes it.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_MASK_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_MASK_CUH_

#include <cstdint>

#include "cuda/common/mask_visits.cuh"
#include "cuda/common/params.h"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/ptx/thread_again.h"

namespace strobe::cuda::sm90 {

/// What a warpgroup does with a block that its tile visits.
struct VisitKind {
  static constexpr int32_t kComputed = 1;  // some pair may be seen
  static constexpr int32_t kMasked = 2;    // some pair may be hidden,
  static constexpr int32_t kLimited = 4;   // by the rule or the lengths
  static constexpr int32_t kLast = 8;      // of the tile
  // All of the tile's next visit is seen, and that is not the last. Without it, this is not known.
  static constexpr int32_t kNextIsFull = 16;

  int32_t block;
  int32_t flags;

  __device__ __forceinline__ bool is(int32_t flag) const { return (flags & flag) != 0; }
  __device__ __forceinline__ static bool is_full(int32_t flags) {
    return (flags & (kComputed | kMasked)) == kComputed;
  }
};
/// With what the mask says of its pairs: 64 queries and 64 keys lie in one pair of its blocks.
struct alignas(16) PartVisit : VisitKind {
  int32_t parts[2];  // as MaskVisit's
};

/// In shared memory, beside what a kernel without masks has there.
template <int kWarpgroups, int kStages, int kTileSlots>
struct MaskShared {
  struct TileLists : MaskLists<64 * kWarpgroups> {
    // Whether a warpgroup computed nothing, and has written what its rows get itself. Valid once it
    // has arrived at o.full.
    int32_t has_nothing[kWarpgroups];
  };
  TileLists tiles[kTileSlots];
  PartVisit visits[kStages][kWarpgroups];  // of the block that is in the stage of K
};
struct NoMaskShared {};

/// Goes through the lists of a tile from the last block to the first, by a whole warp: 32 blocks at
/// a time, of which each lane looks at one. (A thread by itself would take as long for a visit as
/// the tensor cores do.)
template <int kTileQ, int kTileK>
class ListWindow {
 public:
  using Lists = MaskLists<kTileQ>;
  static constexpr int kLists = Lists::kLists, kParts = kTileK / 64;

  // What the lists say of the lane's block: [list][64 keys of the block].
  int32_t parts[kLists][kParts] = {};

  __device__ __forceinline__ explicit ListWindow(const Lists& lists)
      : lists_(lists), bound_(lists.end) {
#pragma unroll
    for (int n = 0; n < kLists; ++n) next_[n] = lists.lists[n].count - 1;
    load();
  }

  /// The lane's block.
  __device__ __forceinline__ int32_t block() const { return block_of(lane()); }
  __device__ __forceinline__ int32_t block_of(int of_lane) const { return top_ - of_lane; }

  /// Goes on to the next blocks of which some is wanted. wanted(): whether the lane's is. Returns
  /// the lanes whose blocks are; 0 where no block is left.
  template <typename Wanted>
  __device__ __forceinline__ uint32_t advance(const Wanted& wanted) {
    uint32_t visited = 0;
    while (visited == 0 && !is_done()) {
      look();
      visited = __ballot_sync(kAll, wanted());
    }
    return visited;
  }
  /// Whether no entry is left, which is not known of entries that are no list.
  __device__ __forceinline__ bool is_done() const { return last_block() < lists_.begin; }

 private:
  static constexpr uint32_t kAll = 0xffffffffu;
  __device__ __forceinline__ static int lane() {
    return static_cast<int>(ptx::thread_again() % 32);
  }

  /// Lane i takes the i-th entry of those that are left of each list, if there is one.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int n = 0; n < kLists; ++n) {
      const int32_t at = next_[n] - lane();
      block_[n] = -1;
      bits_[n] = MaskVisit::kHidden;
      if (at < 0) continue;
      block_[n] = lists_.block_of(lists_.lists[n], at);
      bits_[n] = lists_.bits_of(lists_.lists[n], at);
    }
  }
  /// The last block that an entry is left for, below those that have been looked at.
  __device__ __forceinline__ int32_t last_block() const {
    int32_t last = -1;
#pragma unroll
    for (int n = 0; n < kLists; ++n) {
      const int32_t first = __shfl_sync(kAll, block_[n], 0);
      if (first >= 0) last = max(last, (((first + 1) << lists_.other_log2) - 1) / kTileK);
    }
    return min(last, bound_ - 1);
  }
  /// Of the blocks from the last one on, as far as 32 entries and 32 lanes go.
  __device__ __forceinline__ void look() {
    const int32_t log2 = lists_.other_log2;
    top_ = last_block();
    // The mask's block of the last key; 32 of these are looked at.
    const int32_t last = ((top_ + 1) * kTileK - 1) >> log2;
    const int32_t lowest = ((max(last - 31, 0) << log2) + kTileK - 1) / kTileK;
    const int32_t low = max(max(lists_.begin, top_ - 31), lowest);
#pragma unroll
    for (int n = 0; n < kLists; ++n) {
      const auto before_last = static_cast<uint32_t>(last - block_[n]);
      const bool is_near = block_[n] >= 0 && before_last < 32;
      const uint32_t listed = __reduce_or_sync(kAll, is_near ? 1u << before_last : 0);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const auto wanted =
            static_cast<uint32_t>(last - ((block() * kTileK + 64 * part) >> log2)) % 32;
        // Entries that come before it are those of the lanes before.
        const int from = __popc(listed & ((1u << wanted) - 1)) % 32;
        const int32_t bits = __shfl_sync(kAll, bits_[n], from);
        const bool is_listed = block() >= low && (listed >> wanted & 1) != 0;
        parts[n][part] = is_listed ? bits : MaskVisit::kHidden;
      }
      // An entry whose first key comes before these blocks is looked at once more.
      const bool is_done = block_[n] >= 0 && block_[n] << log2 >= low * kTileK;
      next_[n] -= __popc(__ballot_sync(kAll, is_done));
    }
    bound_ = low;
    load();
  }

  const Lists& lists_;
  int32_t next_[kLists];                  // entries that are left are this one and those before
  int32_t block_[kLists], bits_[kLists];  // the lane's entries
  int32_t top_ = 0;                       // block of lane 0
  int32_t bound_;                         // blocks from here on have been looked at
};

/// The bits of a thread's two rows, [row][64 keys]: as words lie in a packed mask.
template <int kTileK>
struct MaskBits {
  static constexpr int kParts = kTileK / 64;
  static_assert(kTileK % 64 == 0 && kParts <= 2);

  uint2 words[2][kParts];

  /// Of a row, by the number of the query.
  __device__ __forceinline__ void load(const CommonParams& p, const PartVisit& visit, int r,
                                       int32_t query) {
    const MaskLayout& l = p.mask_layout;
    const auto own = static_cast<int32_t>(l.block_q), other = static_cast<int32_t>(l.block_k);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int32_t place = visit.parts[part];
      const uint32_t all = place == MaskVisit::kFull ? ~0u : 0u;
      words[r][part] = make_uint2(all, all);
      if (place < 0) continue;
      const int32_t key = visit.block * kTileK + 64 * part;
      const int64_t at = l.bits + place * l.words_of_bits() + (query & (own - 1)) * (other / 32) +
                         (key & (other - 1)) / 32;
      words[r][part] = *reinterpret_cast<const uint2*>(p.mask + at);
    }
  }
  /// Those of the columns 2t, 2t + 1, 2t + 8, 2t + 9, ... of a row, which lane t of a quad holds.
  __device__ __forceinline__ uint32_t of_lane(int r, int t) const {
    uint32_t seen = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      seen |= (of_lane(words[r][part].x, t) | of_lane(words[r][part].y, t) << 8) << 16 * part;
    }
    return seen;
  }

 private:
  /// Two of each eight bits, put together: the product has them in its highest byte, and no carry.
  __device__ __forceinline__ static uint32_t of_lane(uint32_t word, int t) {
    return (word >> 2 * t & 0x03030303u) * 0x01041040u >> 24;
  }
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_MASK_CUH_
