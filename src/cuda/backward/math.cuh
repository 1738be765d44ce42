// The products of the backward pass, and how its results leave registers.
#ifndef STROBE_CUDA_BACKWARD_MATH_CUH_
#define STROBE_CUDA_BACKWARD_MATH_CUH_

#include <cstdint>

#include "cuda/common/load.cuh"
#include "cuda/common/quad.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/stmatrix.h"

namespace strobe::cuda {

/// This lane's ldmatrix address of the 16 x 16 block at (row, column) of a tile. base: the tile,
/// plus whole rows or panels, plus the lane's fragment_offset or fragment_offset_b for k = 0.
template <typename Tile>
__device__ __forceinline__ uint32_t block_address(uint32_t base, int row, int column) {
  return (base ^ static_cast<uint32_t>(32 * Tile::block_k(column))) +
         static_cast<uint32_t>(Tile::block_offset(row, column));
}

/// acc += A B over kSlices slices of 16 of the inner dimension, one warp. load_a(slice, a): A's 16
/// x 16 fragments; load_b(slice, pair, b): B's of columns 16 pair to 16 pair + 15, (b[0], b[1]) the
/// first eight. Loads of B run kAhead column pairs ahead of the products (an ldmatrix takes about
/// 30 cycles, the four products of a pair 24), A's one slice. near_end() is called when the last
/// products are under way and fragments' registers become free: for loads of what comes next.
template <typename T, int kSlices, int kAhead, int kM, int kN, typename LoadA, typename LoadB,
          typename NearEnd>
__device__ __forceinline__ void multiply(float (&acc)[kM][kN][4], const LoadA& load_a,
                                         const LoadB& load_b, const NearEnd& near_end) {
  static_assert(kN % 2 == 0);
  constexpr int kPairs = kN / 2, kItems = kSlices * kPairs;
  uint32_t a[2][kM][4], b[kAhead + 1][4];
  load_a(0, a[0]);
#pragma unroll
  for (int i = 0; i < kAhead && i < kItems; ++i) load_b(i / kPairs, i % kPairs, b[i]);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int slice = i / kPairs, pair = i % kPairs, next = i + kAhead;
    if (next < kItems) load_b(next / kPairs, next % kPairs, b[next % (kAhead + 1)]);
    if (pair == 0 && slice + 1 < kSlices) load_a(slice + 1, a[(slice + 1) % 2]);
    if (i == (kItems > 4 ? kItems - 4 : 0)) near_end();
    const uint32_t(&now)[4] = b[i % (kAhead + 1)];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ptx::mma<T>(acc[m][2 * pair], a[slice % 2][m], now[0], now[1]);
      ptx::mma<T>(acc[m][2 * pair + 1], a[slice % 2][m], now[2], now[3]);
    }
  }
}

/// The same for a block where an operand may hold an infinity or a NaN and some pairs are masked:
/// only pairs with sees(2 m + h, k) are multiplied, so that no row gets 0 * NaN of a pair that is
/// masked. Row h of block m is 16 m + 8 h + lane / 4. value_b(k, n): row k of B, columns 8 n + 2
/// (lane % 4) + {0, 1}. kUnroll: A's fragments are registers. Slow, rare.
template <typename T, int kSlices, bool kUnroll, int kM, int kN, typename LoadA, typename ValueB,
          typename Sees>
__device__ __forceinline__ void multiply_seen(float (&acc)[kM][kN][4], int lane,
                                              const LoadA& load_a, const ValueB& value_b,
                                              const Sees& sees) {
  const auto value = [](uint32_t bits) {
    const auto half = static_cast<uint16_t>(bits);
    T x;
    memcpy(&x, &half, sizeof x);
    return static_cast<float>(x);
  };
#pragma unroll(kUnroll ? kSlices : 1)
  for (int slice = 0; slice < kSlices; ++slice) {
    uint32_t a[kM][4];
    load_a(slice, a);
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
      const int source = (lane & ~3) | i % 8 / 2;  // the lane that holds columns i, i ^ 1 of A
      float weight[kM][2];
      bool seen[kM][2];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t pair = __shfl_sync(0xffffffffu, i & 8 ? a[m][2 + h] : a[m][h], source);
          weight[m][h] = value(i & 1 ? pair >> 16 : pair);
          seen[m][h] = sees(2 * m + h, 16 * slice + i);
        }
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const uint32_t pair = value_b(16 * slice + i, n);
        const float low = value(pair), high = value(pair >> 16);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            if (seen[m][h]) {
              acc[m][n][2 * h] = fmaf(weight[m][h], low, acc[m][n][2 * h]);
              acc[m][n][2 * h + 1] = fmaf(weight[m][h], high, acc[m][n][2 * h + 1]);
            }
          }
        }
      }
    }
  }
}

/// Writes rows of 16 x 8 accumulators as T, times scale; block m is 16 rows on, accumulator n 8
/// columns. After transposes within each quad a lane has eight columns of two rows, so a row is
/// written 64 bytes at a time. row: this lane's upper row of block 0; rows past view.rows and
/// columns past view.dim stay.
template <typename T, int kM, int kN>
__device__ __forceinline__ void store_accumulators(const RowsView& view, int32_t row, int column,
                                                   const float (&x)[kM][kN][4], float scale,
                                                   int lane) {
  static_assert(kN % 4 == 0);
  const bool aligned = view.aligned();  // then eight columns are there, or none of them
  column += 8 * (lane % 4);
  char* to = view.row(row) + 2 * column;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    uint32_t w[2][kN / 4][4];  // upper row, lower row
#pragma unroll
    for (int n = 0; n < kN; n += 4) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          w[h][n / 4][d] = ptx::pack<T>(x[m][n + d][2 * h] * scale, x[m][n + d][2 * h + 1] * scale);
        }
        quad_transpose(w[h][n / 4], lane);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 16 * m + 8 * h < view.rows) {
        if (aligned) {
#pragma unroll
          for (int n = 0; n < kN / 4; ++n) {
            if (column + 32 * n >= view.dim) break;
            *reinterpret_cast<uint4*>(to + 64 * n) =
                make_uint4(w[h][n][0], w[h][n][1], w[h][n][2], w[h][n][3]);
          }
        } else {
#pragma unroll
          for (int n = 0; n < kN / 4; ++n) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              if (column + 32 * n + i < view.dim) {
                reinterpret_cast<uint16_t*>(to + 64 * n)[i] =
                    static_cast<uint16_t>(w[h][n][i / 2] >> (i % 2 * 16));
              }
            }
          }
        }
      }
      to += 8 * view.stride_bytes;
    }
  }
}

/// The same as float32, to sums of parts: rows `stride` values apart, those below `rows` of them.
/// to: of this lane's first value.
template <int kM, int kN>
__device__ __forceinline__ void store_part_sums(float* to, int64_t stride, int64_t rows,
                                                const float (&x)[kM][kN][4], float scale) {
#pragma unroll
  for (int r = 0; r < 2 * kM; ++r) {
    if (8 * r >= rows) break;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const float* const y = &x[r / 2][n][r % 2 * 2];
      *reinterpret_cast<float2*>(to + 8 * r * stride + 8 * n) =
          make_float2(y[0] * scale, y[1] * scale);
    }
  }
}

/// Whose dK and dV a work item has: keys of a sequence, for a part of the query heads of a group.
struct KeysOfPart {
  int32_t batch, head_kv, part;
  uint32_t parts;  // of a group
  int64_t k_row;   // of the sequence
  int32_t seqlen;
};
/// Writes rows of dK or dV, times scale: to the caller's tensor, or, where parts_sum is not null
/// (BackwardScratch::dk), as float32 to the part's sums. key, column: of this lane's first value.
template <typename T, int kWidth, int kM, int kN>
__device__ __forceinline__ void store_keys(const BackwardParams& p, const KeysOfPart& of,
                                           int32_t key, int column, int lane,
                                           const float (&x)[kM][kN][4], float scale,
                                           const Tensor& tensor, int32_t dim, float* parts_sum) {
  if (parts_sum) {
    const int64_t first = (p.cu_k ? of.k_row : int64_t{of.batch} * p.seqlen_k) + key;
    const int64_t stride = int64_t{p.heads_kv} * of.parts * 2 * kWidth;
    store_part_sums(parts_sum + first * stride +
                        (int64_t{of.head_kv} * of.parts + of.part) * 2 * kWidth + column +
                        2 * (lane % 4),
                    stride, of.seqlen - key, x, scale);
  } else {
    store_accumulators<T>(rows_view(tensor, of.batch, of.k_row, of.head_kv, of.seqlen, dim), key,
                          column, x, scale, lane);
  }
}

/// Four 8 x 8 blocks of packed pairs to shared memory, the transport of ldmatrix backwards;
/// address: the lane's, as ldmatrix would take it for the 16 x 16 block (tile.cuh's
/// fragment_offset).
template <typename Tile>
__device__ __forceinline__ void store_block(uint32_t tile, int row, int column, int lane,
                                            [[maybe_unused]] uint32_t lane_base,
                                            const uint32_t (&r)[4]) {
#if __CUDA_ARCH__ >= 900
  ptx::stmatrix(block_address<Tile>(lane_base, row, column), r);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ptx::store_shared(tile + static_cast<uint32_t>(
                                 Tile::offset(row + 8 * (i % 2) + lane / 4, column + 8 * (i / 2)) +
                                 4 * (lane % 4)),
                      r[i]);
  }
#endif
}

// The sum of dQ in global memory: blocks of 16 x 8, 128 values each, in an order in which a warp's
// mma accumulator is added with the fewest transactions. From 9.0 on, where a lane can add four
// values at once: a lane's four values side by side. Before: value i of all lanes side by side.
// (With four separate additions to the first layout each instruction would touch all sixteen
// sectors of the block for an eighth of each, and these additions are then what the whole backward
// pass waits for: docs/log/2026-11.md.) A launch's kernels come from one image, so they all agree.
#if __CUDA_ARCH__ >= 900
inline constexpr bool kAddFour = true;
#else
inline constexpr bool kAddFour = false;
#endif

/// Where the lane's value 0 of a block is.
__device__ __forceinline__ int sum_offset(int lane) { return kAddFour ? 4 * lane : lane; }
/// Where the sum of a tile of kWidth columns has one value.
template <int kWidth>
__device__ __forceinline__ int sum_at(int row, int column) {
  const int lane = row % 8 * 4 + column % 8 / 2, value = row % 16 / 8 * 2 + column % 2;
  return (row / 16 * (kWidth / 8) + column / 8) * 128 + sum_offset(lane) +
         (kAddFour ? value : 32 * value);
}
/// p: see sum_offset. No thread waits until it is done.
__device__ __forceinline__ void sum_store(float* p, const float (&x)[4]) {
  if constexpr (kAddFour) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) p[32 * i] = x[i];
  }
}
__device__ __forceinline__ void sum_add(float* p, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  ptx::add_four(p, x);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::add(p + 32 * i, x[i]);
#endif
}
__device__ __forceinline__ void sum_load(const float* p, float (&x)[4]) {
  if constexpr (kAddFour) {
    const float4 y = __ldcs(reinterpret_cast<const float4*>(p));
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __ldcs(p + 32 * i);
  }
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_MATH_CUH_
