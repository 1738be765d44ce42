// Hopper forward: masks as data. What a tile visits then follows from lists, and nobody knows at a
// tile's begin how many blocks that will be.
//
// The scheduler leaves the tile's lists in shared memory, where the walk through them begins. The
// thread that loads K and V goes through them (MaskWalk), and leaves with each block of K what
// either warpgroup does with it (PartVisit): k.full and k.empty of the block hold for that too. So
// consumers read no lists, and do as many turns as one thread has found, whatever the lists say. A
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

namespace strobe::cuda::sm90 {

/// What a warpgroup does with a block that its tile visits. Its 64 queries and 64 keys lie in one
/// pair of the mask's blocks.
struct alignas(16) PartVisit {
  static constexpr int32_t kComputed = 1;  // some pair may be seen
  static constexpr int32_t kMasked = 2;    // some pair may be hidden,
  static constexpr int32_t kLimited = 4;   // by the rule or the lengths
  static constexpr int32_t kLast = 8;      // of the tile

  int32_t block;
  int32_t flags;
  int32_t parts[2];  // as MaskVisit's

  __device__ __forceinline__ bool is(int32_t flag) const { return (flags & flag) != 0; }
  __device__ __forceinline__ bool is_full() const {
    return (flags & (kComputed | kMasked)) == kComputed;
  }
};

/// In shared memory, beside what a kernel without masks has there.
template <int kWarpgroups, int kTileK, int kStages, int kTileSlots>
struct MaskShared {
  struct TileLists {
    MaskWalk<64 * kWarpgroups, kTileK, true> walk;
    // Whether a warpgroup computed nothing, and has written what its rows get itself. Valid once it
    // has arrived at o.full.
    int32_t has_nothing[kWarpgroups];
  };
  TileLists tiles[kTileSlots];
  PartVisit visits[kStages][kWarpgroups];  // of the block that is in the stage of K
};
struct NoMaskShared {};

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
