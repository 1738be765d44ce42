// Float8 on Hopper: V transposed in shared memory, and in which order its keys and columns lie
// there. Index maps only, which the tests check on the CPU.
//
// wgmma takes float8 operands that are K-major alone: O += P V wants V with the keys of a column
// side by side, which TMA, moving rows, cannot bring about. So a warpgroup transposes each block of
// V, 16 keys x 32 columns of a warp at a time: ldmatrix.trans turns pairs of bytes, two byte
// permutations part the even columns of a pair from the odd ones, stmatrix writes rows of 16 keys.
//
// Keys. A thread holds of each eight scores of a row two neighbours, and wgmma wants four
// neighbours of each 16 of P in one of its registers. The order of keys is free, as long as P and V
// have the same: so place 4t + {0, 1, 2, 3} of each 16 has the keys 2t, 2t + 1, 2t + 8, 2t + 9,
// those whose weights thread t of the row's four has. Nothing has to cross lanes.
//
// Columns. A register of ldmatrix.trans holds both columns of a pair, and byte permutations part
// the pairs of 16 columns into the even columns and the odd ones, eight each: a matrix of stmatrix,
// whose eight rows should lie in different banks. They do in any order within eight rows. It is
// chosen so that O's accumulators are those of columns in their order but for two registers of each
// four that have changed places.
#ifndef STROBE_CUDA_HOPPER_TRANSPOSED_VALUES_H_
#define STROBE_CUDA_HOPPER_TRANSPOSED_VALUES_H_

#include "core/macros.h"

namespace strobe::cuda::sm90 {

/// The key of a place of V's transposed rows, and of P's columns; both of a block.
STROBE_INLINE constexpr int key_at_place(int place) {
  return place / 16 * 16 + place / 2 % 2 * 8 + place / 4 % 4 * 2 + place % 2;
}
/// The row that has a column of V.
STROBE_INLINE constexpr int row_of_column(int column) {
  return column / 16 * 16 + column % 2 * 8 + column / 2 % 4 * 2 + column / 8 % 2;
}
/// Where a thread's accumulators of O have the value that would be the i-th if columns lay in their
/// order (ptx/wgmma.h): of a row the second of one eight and the first of the next change places.
STROBE_INLINE constexpr int accumulator_at(int i) {
  return i / 8 * 8 + i % 2 * 4 + i / 2 % 2 * 2 + i / 4 % 2;
}

/// A block of V, transposed: kWidth rows of 128 bytes, with the 128-byte swizzle. A row has kKeys
/// keys, one byte each.
template <int kKeys, int kWidth>
struct TransposedTile {
  static_assert(kKeys % 32 == 0 && kKeys <= 128 && kWidth % 32 == 0);
  static constexpr int kRowBytes = 128, kBytes = kWidth * kRowBytes;

  /// Bytes to the 16 places from 16 * unit on of a row.
  STROBE_INLINE static constexpr int offset(int row, int unit) {
    return row * kRowBytes + 16 * (unit ^ (row & 7));
  }
  /// Where a lane's row of stmatrix lies: of 16 keys, the unit-th, and the 32 columns from `column`
  /// on. Its four matrices are the even and the odd columns of the first 16, and of the last 16.
  STROBE_INLINE static constexpr int stored_offset(int lane, int column, int unit) {
    return offset(column + row_of_column(lane / 16 * 16 + lane % 8 * 2 + lane / 8 % 2), unit);
  }
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_TRANSPOSED_VALUES_H_
