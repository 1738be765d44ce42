// Hopper forward: the chunks of keys of rows whose bits depend on themselves alone
// (Traits::kChunked), which end at multiples of one number of blocks from a sequence's first key.
//
// A row's O, reference and sum begin anew with each chunk, and what the chunks give is appended to
// one another from the last to the first (chunk_sums.cuh). So a few queries of a long sequence may
// have a thread block for each chunk (a *piece* of the tile), and a tile of a prompt, which goes
// through all chunks, gives a row the same bits: it keeps what it has so far in the workspace
// (*parked*), where each thread of a consumer warpgroup has its own place, and fetches it at the
// next chunk's end.
#ifndef STROBE_CUDA_HOPPER_KEY_CHUNKS_H_
#define STROBE_CUDA_HOPPER_KEY_CHUNKS_H_

#include <cstdint>

#include "core/macros.h"
#include "cuda/common/chunk_keys.h"

namespace strobe::cuda::sm90 {

/// Thread blocks of a launch that parks, at most: Hopper has no more multiprocessors.
inline constexpr int32_t kMostParked = 144;

/// What a thread parks: its share of O, and of its two rows reference and sum, twice: of all chunks
/// so far, and of the one that ends. Each four floats of all threads of a warpgroup lie together.
template <int kWidth>
struct Parked {
  static constexpr int kThreads = 128, kQuads = kWidth / 8, kSums = kQuads, kOwnSums = kQuads + 1;
  static constexpr int64_t kFloats = int64_t{4} * (kQuads + 2) * kThreads;  // of a warpgroup

  /// Where those of a warpgroup begin, in floats; and in quads from the first of a thread its
  /// others. warpgroup: of all thread blocks.
  STROBE_INLINE static constexpr int64_t begin(int32_t warpgroup) { return warpgroup * kFloats; }
  STROBE_INLINE static constexpr int32_t at(int32_t quad) { return quad * kThreads; }
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_KEY_CHUNKS_H_
