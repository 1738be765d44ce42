// Where things lie: tiles in shared memory and mma fragments in registers. Constexpr index maps
// only, so that the tests check them on the CPU.
#ifndef STROBE_CUDA_COMMON_TILE_CUH_
#define STROBE_CUDA_COMMON_TILE_CUH_

#include <cstdint>

#include "core/macros.h"

namespace strobe::cuda {

/// A tile of kRows x kWidth values in shared memory, kValueBytes each, cut into panels whose rows
/// are of 128 bytes (64 where the tile's are no multiple of 128). A panel is [kRows][kPanel], its
/// 16-byte chunks permuted within each row so that the eight rows an ldmatrix phase reads, and the
/// rows a cp.async of a warp writes, lie in different banks. With 128 bytes that is the layout of
/// TMA's 128-byte swizzle (and with 64 of its 64-byte swizzle), when the tile begins at a multiple
/// of 1024 bytes.
template <int kRows, int kWidth, int kValueBytes = 2>
struct SharedTile {
  static_assert(kRows % 16 == 0 && kWidth * kValueBytes % 64 == 0);
  static constexpr int kRowBytes = kWidth * kValueBytes % 128 == 0 ? 128 : 64;  // of a panel
  static constexpr int kPanel = kRowBytes / kValueBytes;                        // columns
  static constexpr int kPanels = kWidth / kPanel;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static constexpr int kChunks = kRowBytes / 16;   // 16-byte chunks of a panel's row
  static constexpr int kChunk = 16 / kValueBytes;  // columns of a chunk

  /// Bytes from the panel's row to its chunk: the permutation.
  STROBE_INLINE static constexpr int swizzle(int row, int chunk) {
    return 16 * (kRowBytes == 128 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3));
  }
  /// Bytes from the tile's begin to the chunk that holds `column`, a multiple of kChunk.
  STROBE_INLINE static constexpr int offset(int row, int column) {
    return column / kPanel * kPanelBytes + row * kRowBytes + swizzle(row, column % kPanel / kChunk);
  }

  /// The lane's part of an ldmatrix address for a block of 16 rows and 32 bytes, the k-th of its
  /// rows' panel, which are 16 columns of 16-bit values and 32 of 8-bit ones: which row of the
  /// block and which half of its columns the lane points at (ptx/ldmatrix.h). Add
  /// block_offset for the block's place. The permutation only looks at the row's low bits, which
  /// the block's place does not change, and flips them into the chunk: so k flips bits too, and one
  /// register serves a whole tile, as (tile + fragment_offset(lane, 0)) ^ (32 * k), tiles beginning
  /// at multiples of 128 bytes.
  STROBE_INLINE static constexpr int fragment_offset(int lane,
                                                     int k) {  // A; B with k = row (trans)
    return lane % 16 * kRowBytes + (swizzle(lane % 16, lane / 16) ^ 32 * k);
  }
  STROBE_INLINE static constexpr int fragment_offset_b(int lane, int k) {  // B with n = row
    return (lane % 8 + lane / 16 * 8) * kRowBytes + (swizzle(lane % 8, lane / 8 % 2) ^ 32 * k);
  }
  /// row and column: of the block, multiples of 16 and of 2 kChunk.
  STROBE_INLINE static constexpr int block_offset(int row, int column) {
    return column / kPanel * kPanelBytes + row * kRowBytes;
  }
  STROBE_INLINE static constexpr int block_k(int column) { return column % kPanel / (2 * kChunk); }
};

/// Row and column within a 16 x 8 mma accumulator of a lane's i-th value, i = 0 to 3.
STROBE_INLINE constexpr int accumulator_row(int lane, int i) { return lane / 4 + 8 * (i / 2); }
STROBE_INLINE constexpr int accumulator_column(int lane, int i) { return 2 * (lane % 4) + i % 2; }

// Accumulators of columns 16k to 16k + 7 (c0) and 16k + 8 to 16k + 15 (c1) of one row block hold
// what the A fragment of k-step k needs, in this order: a[0] = pack(c0[0], c0[1]), a[1] =
// pack(c0[2], c0[3]), a[2] = pack(c1[0], c1[1]), a[3] = pack(c1[2], c1[3]).

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_TILE_CUH_
