// Which of the items that visit a query tile is the first to add to its dQ.
#ifndef STROBE_CUDA_MMA_SYNC_ADDITION_ORDER_H_
#define STROBE_CUDA_MMA_SYNC_ADDITION_ORDER_H_

#include <cstdint>

#include "core/walk.h"

namespace strobe::cuda::sm80 {

/// From this tile of `tile_q` queries on no query sees a key before key_begin: the item whose keys
/// begin there is the first that visits these tiles. The items that visit a tile are neighbours, so
/// each of the others follows on the one before it.
STROBE_INLINE constexpr int32_t first_tile_started(const Mask& mask, int64_t key_begin,
                                                   int64_t tile_q) {
  return static_cast<int32_t>(query_walk(mask, {0, key_begin}, tile_q).end);
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_ADDITION_ORDER_H_
