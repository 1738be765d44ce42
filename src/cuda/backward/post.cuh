// The end of the backward pass: float32 sums to gradients as the caller wants them.
#ifndef STROBE_CUDA_BACKWARD_POST_CUH_
#define STROBE_CUDA_BACKWARD_POST_CUH_

#include <cstdint>

#include "cuda/backward/gradients.cuh"
#include "cuda/backward/math.cuh"
#include "cuda/backward/pairwise.cuh"
#include "cuda/backward/pre.cuh"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/next_kernel.h"

namespace strobe::cuda {

inline constexpr int kPostThreads = 256;

/// Key rows whose dK or dV is not finite, where a weight of 0 may be why: those of the index-th of
/// the main kernel's items and every `stride`-th from there on, which are tile_k keys each, a warp
/// of this block those of one warp of the main kernel.
template <typename T, int kWidth, int kTileK, bool kMask>
__device__ __forceinline__ void pairwise_keys(const BackwardParams& p,
                                              const BackwardScratch& scratch,
                                              const BackwardOrder& order, int64_t index,
                                              int64_t stride) {
  constexpr int kWarps = kPostThreads / 32, kRows = kTileK / kWarps;
  if (*scratch.any_nonfinite == 0) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (; index < order.items; index += stride) {
    const BackwardItem item = backward_item(order, p.heads_kv, index);
    const int32_t first = item.block * kTileK + warp * kRows;
    const auto seqlen = static_cast<int32_t>(p.sequence_rows(item.batch).seqlen_k);
    if (item.block * kTileK >= seqlen || scratch.nonfinite[index * kWarps + warp] == 0) continue;
    for (int32_t key = first; key < min(first + kRows, seqlen); ++key)
      pairwise_key<T, kMask>(p, order, item, scratch.dk, kWidth, key);
  }
}

/// dQ = scale * sum. One thread block per query tile; a warp takes four neighbouring 16 x 8 blocks
/// of the sum, as an accumulator each, at a time. kKeepsSums: of p (a kernel of its own, since it
/// takes more registers).
template <typename T, int kTileQ, int kWidth, typename StageTraits, bool kKeepsSums>
__global__ void __launch_bounds__(kPostThreads)
    backward_post_kernel(const __grid_constant__ BackwardParams p,
                         const __grid_constant__ BackwardScratch scratch, int64_t items) {
  if constexpr (!StageTraits::kMarksNonfinite) {
    ptx::let_next_kernel_begin();
    ptx::wait_for_kernel_before();
  }
  const int64_t index = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  if (index >= items) return;
  const QueryTile tile = query_tile(p, index, scratch.tiles, kTileQ);
  const Sequence sequence = p.sequence(tile.batch, tile.head);
  const auto seqlen = static_cast<int32_t>(sequence.mask.seqlen_q);
  if (tile.begin >= seqlen) return;
  const float* const sum = scratch.dq + tile.scratch * (kTileQ * kWidth);
  // A tile that sees no key was visited by no key block, and its sum need not hold anything. (There
  // is no block of keys past the problem's bound.)
  const bool visited =
      visits_before(WalkLists::of(p, tile.batch, tile.head), sequence.mask,
                    {tile.begin, min64(tile.begin + kTileQ, seqlen)}, p.seqlen_k, scratch.tile_k);

  constexpr int kChunks = kWidth / 8, kItems = kTileQ / 16 * (kChunks / 4);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  /// take(row, column, x): of accumulators whose first value is there.
  const auto for_each_sum = [&](const auto& take) {
#pragma unroll(kKeepsSums ? 1 : kItems)
    for (int i = 0; i < kItems; i += kPostThreads / 32) {
      const int item = i + static_cast<int>(threadIdx.x) / 32;
      if (kItems % (kPostThreads / 32) != 0 && item >= kItems) break;
      const int chunk = 4 * (item % (kChunks / 4)), block = item / (kChunks / 4);
      if (8 * chunk >= p.head_dim || tile.begin + 16 * block >= seqlen) continue;
      float x[1][4][4] = {};
      // Where a mask has no room for what these queries see, their rows are NaN.
      const bool is_lost = StageTraits::kMask &&
                           p.head_mask(sequence, tile.head).lacks_room(tile.begin + 16 * block);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        if (visited && 8 * (chunk + d) < p.head_dim) {
          sum_load(sum + (block * kChunks + chunk + d) * 128 + sum_offset(lane), x[0][d]);
        }
        if (StageTraits::kMask && is_lost) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[0][d][i] = __int_as_float(0x7fffffff);
        }
      }
      take(tile.begin + 16 * block + lane / 4, 8 * chunk, x);
    }
  };
  const auto write = [&](int row, int column, const float(&x)[1][4][4]) {
    if constexpr (kKeepsSums) {
      const GradientRows<T> dq =
          gradient_rows<T>(p, p.dq, tile.batch, sequence.q_row, tile.head, seqlen, p.head_dim);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (row + 8 * h < seqlen) {
            dq.put(row + 8 * h, column + 8 * d + 2 * (lane % 4),
                   {x[0][d][2 * h] * p.scale, x[0][d][2 * h + 1] * p.scale});
          }
        }
      }
    } else {
      const RowsView dq =
          rows_view(p.dq, tile.batch, sequence.q_row, tile.head, seqlen, p.head_dim);
      store_accumulators<T>(dq, row, column, x, p.scale, lane);
    }
  };
  if constexpr (StageTraits::kMarksNonfinite) {
    for_each_sum(write);
  } else {
    bool finite = true;
    const bool writes_at_once = !kKeepsSums || !p.accumulates;
    for_each_sum([&](int row, int column, const float(&x)[1][4][4]) {
      if (writes_at_once) write(row, column, x);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          finite &= fabsf(x[0][d][j]) < infinity() || row + j / 2 * 8 >= seqlen;
      }
    });
    const bool any = __syncthreads_or(!finite) != 0;
    if (threadIdx.x == 0) {
      scratch.dq_nonfinite[index] = any;
      if (any) *scratch.any_nonfinite = 1;
    }
    // What is added cannot be taken back: where it is not finite the next kernel adds it.
    if (!writes_at_once && !any) for_each_sum(write);
  }
}

/// Computes rows of dQ, dK and dV that are not finite again, pair by pair, after a main kernel
/// without kMarksNonfinite. A kernel of its own, since it takes twice the registers of the one
/// before it. Any number of thread blocks; items: query tiles. (With a mask ptxas would aim at more
/// of them on a multiprocessor, and spill, as in pre.cuh.)
template <typename T, int kTileQ, int kWidth, int kTileK, bool kMask>
__global__ void __launch_bounds__(kPostThreads, kMask ? 1 : 0)
    backward_pairwise_kernel(const __grid_constant__ BackwardParams p,
                             const __grid_constant__ BackwardScratch scratch,
                             const __grid_constant__ BackwardOrder order, int64_t items) {
  ptx::wait_for_kernel_before();
  if (*scratch.any_nonfinite == 0) return;
  pairwise_keys<T, kWidth, kTileK, kMask>(p, scratch, order, blockIdx.x, gridDim.x);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t index = blockIdx.x; index < items; index += gridDim.x) {
    const QueryTile tile = query_tile(p, index, scratch.tiles, kTileQ);
    const Sequence sequence = p.sequence(tile.batch, tile.head);
    const auto seqlen = static_cast<int32_t>(sequence.mask.seqlen_q);
    if (tile.begin >= seqlen || scratch.dq_nonfinite[index] == 0) continue;
    const RowsView dq = rows_view(p.dq, tile.batch, sequence.q_row, tile.head, seqlen, p.head_dim);
    const GradientRows<T> gradients =
        gradient_rows<T>(p, p.dq, tile.batch, sequence.q_row, tile.head, seqlen, p.head_dim);
    const float* const sum = scratch.dq + tile.scratch * (kTileQ * kWidth);
    for (int row = tile.begin + warp; row < min(tile.begin + kTileQ, seqlen);
         row += kPostThreads / 32) {
      // From the sum, where dQ does not show it: it may be no sum of these pairs alone.
      const auto value = [&](int d) {
        return p.keeps_sums() ? sum[sum_at<kWidth>(row - tile.begin, d)]
                              : static_cast<float>(reinterpret_cast<const T*>(dq.row(row))[d]);
      };
      // (Rows that a mask has no room for are not finite, whatever the sum is.)
      bool finite = !(kMask && lacks_room(p, tile.batch, tile.head, row));
      for (int d = lane; d < p.head_dim; d += 32) finite &= fabsf(value(d)) < infinity();
      if (!__all_sync(0xffffffffu, finite)) {
        pairwise_query<T, kMask>(p, tile.batch, tile.head, row);
      } else if (p.accumulates) {
        for (int d = lane; d < p.head_dim; d += 32) gradients.put(row, d, {value(d) * p.scale});
      }
    }
  }
}

/// Writes eight columns of a row, those below `columns`.
template <typename T>
__device__ __forceinline__ void store_eight(T* p, int columns, bool aligned, const float (&x)[8]) {
  if (aligned && columns >= 8) {
    *reinterpret_cast<uint4*>(p) = make_uint4(ptx::pack<T>(x[0], x[1]), ptx::pack<T>(x[2], x[3]),
                                              ptx::pack<T>(x[4], x[5]), ptx::pack<T>(x[6], x[7]));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < columns) p[i] = static_cast<T>(x[i]);
    }
  }
}

/// dK and dV as the sums of the parts that the group's query heads were cut into, in order. A
/// thread takes eight columns of a row.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kPostThreads)
    backward_parts_kernel(const __grid_constant__ BackwardParams p,
                          const __grid_constant__ BackwardScratch scratch, int32_t parts,
                          int64_t items) {
  constexpr int kChunks = kWidth / 8;
  const int64_t index = (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kPostThreads + threadIdx.x;
  if (index >= items) return;
  const int chunk = static_cast<int>(index % kChunks);
  const int64_t rest = index / kChunks;
  const auto head = static_cast<int32_t>(rest % p.heads_kv);
  const int64_t row_of_batch = rest / p.heads_kv;
  const auto b = static_cast<int32_t>(row_of_batch / p.seqlen_k);
  const auto row = static_cast<int32_t>(row_of_batch % p.seqlen_k);
  const SequenceRows sequence = p.sequence_rows(b);
  if (row >= sequence.seqlen_k) return;
  const int64_t first = p.cu_k ? sequence.k_row : int64_t{b} * p.seqlen_k;

  const auto sum_of = [&](const float* from, const Tensor& tensor, int32_t dim) {
    const int columns = dim - 8 * chunk;
    if (columns <= 0) return;
    float x[8] = {};
    from += ((first + row) * p.heads_kv + head) * parts * 2 * kWidth + 8 * chunk;
    for (int part = 0; part < parts; ++part, from += 2 * kWidth) {
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        const float4 y = *reinterpret_cast<const float4*>(from + i);
        x[i] += y.x, x[i + 1] += y.y, x[i + 2] += y.z, x[i + 3] += y.w;
      }
    }
    if (p.keeps_sums()) {
      gradient_rows<T>(p, tensor, b, sequence.k_row, head, sequence.seqlen_k, dim)
          .put(row, 8 * chunk, x);
      return;
    }
    const RowsView to = rows_view(tensor, b, sequence.k_row, head, sequence.seqlen_k, dim);
    store_eight(reinterpret_cast<T*>(to.row(row)) + 8 * chunk, columns, to.aligned(), x);
  };
  sum_of(scratch.dk, p.dk, p.head_dim);
  sum_of(scratch.dv, p.dv, p.head_dim_v);
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_POST_CUH_
