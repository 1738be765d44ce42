// In what boxes TMA fetches a block of keys that lie in a cache.
#ifndef STROBE_CUDA_COMMON_KEY_BOXES_H_
#define STROBE_CUDA_COMMON_KEY_BOXES_H_

#include <cstdint>

#include "core/cache.h"
#include "core/macros.h"

namespace strobe::cuda {

/// The boxes of a block of keys.
struct KeyBoxes {
  int32_t rows;  // of a box

  /// The largest that divide a block of tile_k keys, and a page: 0 rows where TMA cannot write such
  /// boxes, since they are not made of the groups of eight rows that the swizzle works on. A tile
  /// of 128 rows has 16 of eight, so each has a lane. page_size: 0 without pages.
  STROBE_INLINE static constexpr KeyBoxes make(int32_t tile_k, int64_t page_size) {
    int64_t a = page_size, b = tile_k;
    while (a != 0) {
      const int64_t rest = b % a;
      b = a;
      a = rest;
    }
    return {b % 8 == 0 ? static_cast<int32_t>(b) : 0};
  }
  /// Where box `i` of the block that begins with this key lies: all its rows follow this one.
  STROBE_INLINE constexpr KeyRows::Place place(const KeyRows& keys, int64_t block_key,
                                               int32_t i) const {
    return keys.place(block_key + int64_t{i} * rows);
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_KEY_BOXES_H_
