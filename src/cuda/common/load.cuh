// Rows of 16-bit values from global memory into a swizzled shared tile; pieces of rows back to it.
#ifndef STROBE_CUDA_COMMON_LOAD_CUH_
#define STROBE_CUDA_COMMON_LOAD_CUH_

#include <cstdint>

#include "cuda/common/params.h"
#include "cuda/common/tile.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda {

/// Rows of one (batch, head) in global memory: [rows, dim] with a row stride in values.
struct RowsView {
  char* data;
  int64_t stride_bytes;
  int32_t rows;  // those past it read as zeros and are not written
  int32_t dim;   // columns past it likewise
  /// Where row j begins. A head's rows lie where Tensor::element says and apart as `row` and `from`
  /// say. Two copies, for which registers and instructions count, walk by strides of their own:
  /// decode/key_copies.cuh (the cache's rows) and mma_sync/backward_copies.cuh.
  __device__ __forceinline__ char* row(int64_t j) const { return data + j * stride_bytes; }
  /// Rows j, j + step, ..., one after the other.
  struct Walk {
    char* row;
    int64_t step_bytes;
    __device__ __forceinline__ void next() { row += step_bytes; }
  };
  __device__ __forceinline__ Walk from(int64_t j, int step) const {
    return {row(j), step * stride_bytes};
  }
  /// Every row is made of whole 16-byte units.
  __device__ __forceinline__ bool aligned() const {
    return ((reinterpret_cast<uint64_t>(data) | static_cast<uint64_t>(stride_bytes)) & 15) == 0 &&
           dim % 8 == 0;
  }
};

/// bytes: of an element.
__device__ __forceinline__ RowsView rows_view(const Tensor& t, int32_t batch, int64_t row,
                                              int32_t head, int64_t rows, int32_t dim,
                                              int bytes = 2) {
  return {static_cast<char*>(t.data) + bytes * t.element(batch, row, head), bytes * t.row_stride,
          static_cast<int32_t>(rows), dim};
}

/// Copies rows [row, row + kRows) of `from` into the tile at the shared address `to`. 16-byte
/// cp.async, to be committed and waited for by the caller; where the rows are not aligned to that,
/// plain loads and stores of single values, which a barrier makes visible.
template <int kRows, int kWidth, int kThreads>
__device__ __forceinline__ void load_tile(uint32_t to, const RowsView& from, int32_t row,
                                          bool aligned, int thread) {
  using Tile = SharedTile<kRows, kWidth>;
  constexpr int kRowsAtOnce = kThreads / Tile::kChunks;
  static_assert(kRowsAtOnce % 8 == 0, "the swizzle looks at the row's low three bits");
  const int chunk = thread % Tile::kChunks, first = thread / Tile::kChunks;
  to += static_cast<uint32_t>(Tile::offset(first, Tile::kChunk * chunk));
  RowsView::Walk source = from.from(row + first, kRowsAtOnce);
  source.row += 16 * chunk;
  const int left = from.dim - Tile::kChunk * chunk;  // columns from this chunk on
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      if (kRows % kRowsAtOnce != 0 && i + first >= kRows) break;
      const bool there = row + first + i < from.rows;
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        ptx::cp_async_16_if(
            to + static_cast<uint32_t>(panel * Tile::kPanelBytes + i * Tile::kRowBytes),
            source.row + panel * Tile::kRowBytes, there && left > panel * Tile::kPanel);
      }
      source.next();
    }
  } else {
#pragma unroll 1
    for (int i = 0; i + first < kRows; i += kRowsAtOnce) {
      const bool there = row + first + i < from.rows;
#pragma unroll 1
      for (int panel = 0; panel < Tile::kPanels; ++panel) {
        uint32_t word[4] = {};
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          if (there && c < left - panel * Tile::kPanel) {
            const auto* p = reinterpret_cast<const uint16_t*>(source.row + panel * Tile::kRowBytes);
            word[c / 2] |= static_cast<uint32_t>(p[c]) << (c % 2 * 16);
          }
        }
        ptx::store_shared_words(
            to + static_cast<uint32_t>(panel * Tile::kPanelBytes + i * Tile::kRowBytes), word);
      }
      source.next();
    }
  }
}

/// The same for rows that begin at 16-byte units, of any number of columns.
template <int kRows, int kWidth, int kThreads>
__device__ __forceinline__ void load_units(uint32_t to, const RowsView& from, int32_t row,
                                           int thread) {
  using Tile = SharedTile<kRows, kWidth>;
  constexpr int kRowsAtOnce = kThreads / Tile::kChunks;
  static_assert(kRowsAtOnce % 8 == 0 && kRows % kRowsAtOnce == 0 && Tile::kPanels == 1);
  const int chunk = thread % Tile::kChunks, first = thread / Tile::kChunks;
  to += static_cast<uint32_t>(Tile::offset(first, Tile::kChunk * chunk));
  RowsView::Walk source = from.from(row + first, kRowsAtOnce);
  source.row += 16 * chunk;
  const int bytes = min(max(2 * (from.dim - Tile::kChunk * chunk), 0), 16);
#pragma unroll
  for (int i = 0; i < kRows; i += kRowsAtOnce) {
    const bool there = row + first + i < from.rows;
    ptx::cp_async_16_of(to + static_cast<uint32_t>(i * Tile::kRowBytes), source.row,
                        there ? static_cast<uint32_t>(bytes) : 0);
    source.next();
  }
}

/// Writes eight 16-bit values to `row` from `column` on, as far as there are columns. aligned: of
/// the row, which is then made of whole 16-byte units.
__device__ __forceinline__ void store_words(char* row, int column, int32_t dim, bool aligned,
                                            const uint32_t (&w)[4]) {
  if (aligned) {
    if (column < dim)
      *reinterpret_cast<uint4*>(row + 2 * column) = make_uint4(w[0], w[1], w[2], w[3]);
    return;
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    if (column + c < dim)
      reinterpret_cast<uint16_t*>(row)[column + c] =
          static_cast<uint16_t>(w[c / 2] >> (c % 2 * 16));
  }
}

/// Writes two float32 values to `row` from `column` on, an even one, as far as there are columns.
/// aligned: as above.
__device__ __forceinline__ void store_floats(char* row, int column, int32_t dim, bool aligned,
                                             float x, float y) {
  auto* const to = reinterpret_cast<float*>(row) + column;
  if (aligned) {
    if (column < dim) *reinterpret_cast<float2*>(to) = make_float2(x, y);
    return;
  }
  if (column < dim) to[0] = x;
  if (column + 1 < dim) to[1] = y;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_LOAD_CUH_
