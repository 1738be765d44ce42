// The mask in 32 bits, for the rows of a tile.
#ifndef STROBE_CUDA_COMMON_TILE_MASK_H_
#define STROBE_CUDA_COMMON_TILE_MASK_H_

#include <cstdint>

#include "core/mask.h"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// What a sequence may have, so that positions, also those of a tile's rows past its end, can be
/// added up in 32 bits.
inline constexpr int64_t kLongestSequence = (int64_t{1} << 30) - 1024;

/// The mask's part that all sequences of a launch share; worked out on the host. 2^30 is more than
/// any length, and stands for no limit.
struct TileWindow {
  int32_t left, right;

  STROBE_INLINE static constexpr TileWindow make(const CommonParams& p) {
    constexpr int64_t kHalf = int64_t{1} << 29;  // Mask's limit is the sum of the lengths
    const Mask m = Mask::make(p.rule, kHalf, kHalf);
    return {static_cast<int32_t>(m.left), static_cast<int32_t>(m.right)};
  }
};

/// Mask::row, for the rows of a tile: a quarter of the instructions, where a thread needs it
/// between two products. A test holds it against the original (tile_mask_test.cpp).
struct TileMask {
  int32_t position, left, right, seqlen_k;  // position: of the tile's row 0 among the keys

  /// first: the tile's row 0, as a query of the sequence.
  STROBE_INLINE static constexpr TileMask make(const TileWindow& window, int32_t seqlen_q,
                                               int32_t seqlen_k, int32_t first) {
    return {first + seqlen_k - seqlen_q, window.left, window.right, seqlen_k};
  }
  /// Keys [begin, end) that the tile's row sees.
  STROBE_INLINE constexpr int32_t begin(int32_t row) const { return clamp(position + row - left); }
  STROBE_INLINE constexpr int32_t end(int32_t row) const {
    return clamp(position + row + right + 1);
  }

 private:
  STROBE_INLINE constexpr int32_t clamp(int32_t x) const {
    return x < 0 ? 0 : x > seqlen_k ? seqlen_k : x;
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_TILE_MASK_H_
