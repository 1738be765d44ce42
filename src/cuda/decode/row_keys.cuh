// Which keys a row of a tile sees.
#ifndef STROBE_CUDA_DECODE_ROW_KEYS_CUH_
#define STROBE_CUDA_DECODE_ROW_KEYS_CUH_

#include <cstdint>

#include "cuda/common/walks.h"
#include "cuda/decode/pieces.cuh"

namespace strobe::cuda {

/// A row of a tile: a query of a head.
struct TileRow {
  int32_t query, head;

  __device__ __forceinline__ static TileRow of(const Division& d, const TileRows& tile, int row) {
    const auto packed = static_cast<uint32_t>(tile.first + row);
    const auto query = static_cast<int32_t>(d.group.divide(packed));
    return {query, tile.head +
                       static_cast<int32_t>(packed - d.group.value * static_cast<uint32_t>(query))};
  }
};

/// None, of a row that is not there.
struct RowKeys {
  int2 limits = {0, 0};  // keys that the row sees, of those in its head's blocks
  OwnBlocks own = {};

  template <typename Params>
  __device__ __forceinline__ static RowKeys of(const Params& p, const Piece& piece,
                                               const TileRow& row) {
    const Range keys = piece.mask.row(row.query - piece.first_query);
    return {make_int2(static_cast<int32_t>(keys.begin), static_cast<int32_t>(keys.end)),
            OwnBlocks::of(p, piece.tile.batch, row.head, row.query)};
  }
  /// Whether the row sees all of `count` keys from key0 on, which are of one block.
  __device__ __forceinline__ bool see_all(int32_t key0, int32_t count) const {
    return limits.x <= key0 && limits.y >= key0 + count && own.have(key0);
  }
  __device__ __forceinline__ bool see(int32_t key) const {
    return key >= limits.x && key < limits.y;
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_ROW_KEYS_CUH_
