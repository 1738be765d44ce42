// The mask in 32 bits, for the rows of a tile.
#ifndef STROBE_CUDA_COMMON_TILE_MASK_H_
#define STROBE_CUDA_COMMON_TILE_MASK_H_

#include <cstdint>

#include "core/mask.h"

namespace strobe::cuda {

/// What a sequence may have, so that positions, also those of a tile's rows past its end, can be
/// added up in 32 bits.
inline constexpr int64_t kLongestSequence = Mask::kLongest;

/// Mask::tile's result: a quarter of the instructions, where a thread needs a row's keys between
/// two products. It is the mask's own code in another type: a test holds the two against each other
/// (tile_mask_test.cpp).
using TileMask = BasicMask<int32_t>;

/// The bits before the n-th, which may be none or all.
STROBE_INLINE constexpr uint32_t bits_below(int32_t n) {
  return n <= 0 ? 0 : n >= 32 ? ~uint32_t{0} : (uint32_t{1} << n) - 1;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_TILE_MASK_H_
