// Tiles on their way: from global to shared memory and back, and from shared memory to the
// registers that the tensor cores multiply. Nothing here is about attention.
//
// mma.sync m16n8k16 multiplies 16 x 16 by 16 x 8 values in bf16 and adds to 16 x 8 in float32. The
// 32 lanes of a warp hold such an accumulator between them: with lane = 4 g + t, a lane's four
// values are columns 2t and 2t + 1 of rows g and g + 8 (cuda/ptx/mma.h). Hence the arrays
// [row block][column tile][4] of all steps: 16 rows, 8 columns, and the lane's four values of them.
#ifndef STROBE_EXAMPLES_PAPER_TILES_CUH_
#define STROBE_EXAMPLES_PAPER_TILES_CUH_

#include <cuda_bf16.h>

#include <cstdint>

#include "common.h"
#include "cuda/common/tile.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::paper {

namespace ptx = cuda::ptx;
using cuda::SharedTile;

/// Begins the copy of a tile; rows from `rows` on, which the tensor does not have, become zeros.
template <int kRows, int kWidth>
__device__ __forceinline__ void copy_in(uint32_t to, const bf16* from, int64_t stride, int rows) {
  using Tile = SharedTile<kRows, kWidth>;
  constexpr int kChunks = kWidth / 8, kRowsAtOnce = kThreads / kChunks;
  static_assert(kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread / kChunks, column = thread % kChunks * 8;
  // Rows a multiple of 8 apart are permuted alike: one address, and steps from it.
  to += static_cast<uint32_t>(Tile::offset(row, column));
  from += row * stride + column;
#pragma unroll 1
  for (int i = 0; i < kRows; i += kRowsAtOnce) {
    ptx::cp_async_16_if(to + static_cast<uint32_t>(i * Tile::kRowBytes), from, row + i < rows);
    from += kRowsAtOnce * stride;
  }
}

/// Stores the tile's first rows and columns (a multiple of 8).
template <int kRows, int kWidth>
__device__ __forceinline__ void copy_out(bf16* to, int64_t stride, int rows, int64_t columns,
                                         const char* from) {
  constexpr int kChunks = kWidth / 8;
  for (int chunk = static_cast<int>(threadIdx.x); chunk < kRows * kChunks; chunk += kThreads) {
    const int row = chunk / kChunks, column = chunk % kChunks * 8;
    if (row >= rows || column >= columns) continue;
    *reinterpret_cast<uint4*>(to + row * stride + column) =
        *reinterpret_cast<const uint4*>(from + SharedTile<kRows, kWidth>::offset(row, column));
  }
}

/// Two neighbouring values of an accumulator into a tile; column is even.
template <int kRows, int kWidth>
__device__ __forceinline__ void put_pair(char* tile, int row, int column, float low, float high) {
  *reinterpret_cast<uint32_t*>(tile + SharedTile<kRows, kWidth>::offset(row, column / 8 * 8) +
                               column % 8 * 2) = ptx::pack<bf16>(low, high);
}

/// A tile as a lane reads fragments from it. row and column, of a 16 x 16 block, are multiples of
/// 16; cuda/ptx/ldmatrix.h says which registers are which operand.
template <int kRows, int kWidth>
struct Fragments {
  using Tile = SharedTile<kRows, kWidth>;
  uint32_t plain;    // the lane's address in block (0, 0): A; B with k = row
  uint32_t b_plain;  // the same for B with n = row

  /// first_row: a multiple of 16, from which on the rows below count.
  __device__ __forceinline__ explicit Fragments(uint32_t tile, int first_row = 0) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    tile += static_cast<uint32_t>(Tile::block_offset(first_row, 0));
    plain = tile + static_cast<uint32_t>(Tile::fragment_offset(lane, 0));
    b_plain = tile + static_cast<uint32_t>(Tile::fragment_offset_b(lane, 0));
  }

  __device__ __forceinline__ static uint32_t at(uint32_t lane_address, int row, int column) {
    return (lane_address ^ static_cast<uint32_t>(32 * Tile::block_k(column))) +
           static_cast<uint32_t>(Tile::block_offset(row, column));
  }
  /// The A operand [row][column].
  __device__ __forceinline__ void a(uint32_t (&r)[4], int row, int column) const {
    ptx::ldmatrix(r, at(plain, row, column));
  }
  /// B with n = row, k = column: K of S = Q K^T. (r[0], r[1]) for rows 0-7, (r[2], r[3]) for 8-15.
  __device__ __forceinline__ void b_rows(uint32_t (&r)[4], int row, int column) const {
    ptx::ldmatrix(r, at(b_plain, row, column));
  }
  /// B with k = row, n = column: V of O = P V. (r[0], r[1]) for columns 0-7, (r[2], r[3]) for 8-15.
  __device__ __forceinline__ void b_columns(uint32_t (&r)[4], int row, int column) const {
    ptx::ldmatrix_trans(r, at(plain, row, column));
  }
};

/// s += Q K^T of the first kRowBlocks x 16 queries and kKeyTiles x 8 keys.
template <int kHeadDim, int kRowBlocks, int kKeyTiles, typename QFragments, typename KFragments>
__device__ __forceinline__ void multiply_qk(float (&s)[kRowBlocks][kKeyTiles][4],
                                            const QFragments& q, const KFragments& k) {
#pragma unroll
  for (int column = 0; column < kHeadDim; column += 16) {
    uint32_t a[kRowBlocks][4];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) q.a(a[r], 16 * r, column);
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      uint32_t b[4];
      k.b_rows(b, 8 * n, column);
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        ptx::mma<bf16>(s[r][n], a[r], b[0], b[1]);
        ptx::mma<bf16>(s[r][n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

/// out += P V of kRowBlocks x 16 queries, the 16 keys from `key` on, and the kColumnTiles x 8
/// columns from first_column on. p: the A operand of each row block.
template <int kRowBlocks, int kColumnTiles, typename VFragments>
__device__ __forceinline__ void multiply_pv(float (&out)[kRowBlocks][kColumnTiles][4],
                                            const uint32_t (*p)[4], const VFragments& v, int key,
                                            int first_column) {
#pragma unroll
  for (int n = 0; n < kColumnTiles; n += 2) {
    uint32_t b[4];
    v.b_columns(b, key, first_column + 8 * n);
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
      ptx::mma<bf16>(out[r][n], p[r], b[0], b[1]);
      ptx::mma<bf16>(out[r][n + 1], p[r], b[2], b[3]);
    }
  }
}

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_TILES_CUH_
