// Step 1: standard attention, as a framework computes it (arXiv:2205.14135, algorithm 0).
//
// Two matrix products and a softmax between them, three kernels one after the other:
//
//   S = scale Q K^T        P = softmax of the rows of S        O = P V
//
// The products use tensor cores and tiles in shared memory and are as fast as those of the later
// steps. But S and P have seqlen x seqlen values for every head: each is written to global memory
// and read back, and that is what takes the time (and the memory: step 1 cannot be run where it
// does not fit). The softmax needs whole rows of S, so that no kernel can begin before the one
// ahead of it is done. The mask is applied by the softmax, and both products compute what it hides.
//
// Stores S, and then P in its place, in bf16: `scores`.
#ifndef STROBE_EXAMPLES_PAPER_1_STANDARD_CUH_
#define STROBE_EXAMPLES_PAPER_1_STANDARD_CUH_

#include <algorithm>

#include "common.h"
#include "cuda/common/softmax.cuh"
#include "tiles.cuh"

namespace strobe::paper {

inline constexpr int kPlainTile = 128;  // queries; of S also keys
inline constexpr int kPlainRowBlocks = kPlainTile / kWarps / 16;
inline constexpr int kStep = 64;  // keys of P V at a time

/// Rows of S begin at whole steps, so that every copy of a step is one of 16-byte units.
constexpr int64_t stride_of_scores(int seqlen) { return int64_t{tiles_of(seqlen, kStep)} * kStep; }

/// What a lane holds of a tile of results into a tile in shared memory, from warp_row on.
template <int kWidth>
__device__ __forceinline__ void put_results(char* tile, int warp_row,
                                            const float (&values)[kPlainRowBlocks][kWidth / 8][4],
                                            float factor) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int r = 0; r < kPlainRowBlocks; ++r) {
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        put_pair<kPlainTile, kWidth>(tile, warp_row + 16 * r + 8 * h + lane / 4,
                                     8 * n + 2 * (lane % 4), values[r][n][2 * h] * factor,
                                     values[r][n][2 * h + 1] * factor);
      }
    }
  }
}

/// S = scale Q K^T, a tile of S to a thread block. Grid: (tiles of queries * tiles of keys, batch *
/// heads).
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2) scores_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kTileBytes = 2 * kPlainTile * kHeadDim;
  const int tiles = tiles_of(p.seqlen, kPlainTile), tile = static_cast<int>(blockIdx.x);
  const int query = tile / tiles * kPlainTile, key = tile % tiles * kPlainTile;
  const int batch_head = static_cast<int>(blockIdx.y);
  const int64_t stride = p.row_stride(kHeadDim), first = p.first(batch_head, kHeadDim);
  const uint32_t base = ptx::shared_address(shared);
  copy_in<kPlainTile, kHeadDim>(base, p.q + first + query * stride, stride, p.seqlen - query);
  copy_in<kPlainTile, kHeadDim>(base + kTileBytes, p.k + first + key * stride, stride,
                                p.seqlen - key);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();

  float s[kPlainRowBlocks][kPlainTile / 8][4] = {};
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * kPlainRowBlocks;
  const Fragments<kPlainTile, kHeadDim> q(base, warp_row), k(base + kTileBytes);
  multiply_qk<kHeadDim>(s, q, k);
  __syncthreads();  // all are done with Q and K, whose place the tile of S takes
  put_results<kPlainTile>(shared, warp_row, s, p.scale);
  __syncthreads();
  bf16* const to = p.scores + (int64_t{batch_head} * p.seqlen + query) * p.scores_stride + key;
  copy_out<kPlainTile, kPlainTile>(to, p.scores_stride, p.seqlen - query, p.scores_stride - key,
                                   shared);
}

inline constexpr int kSoftmaxChunks = 8;  // of 8 values, in a thread's registers
inline constexpr int kSoftmaxThreads = 256;
/// The longest row that softmax_kernel takes.
inline constexpr int kMostKeys = 8 * kSoftmaxChunks * kSoftmaxThreads;

/// Over all threads of the block, up to kSoftmaxThreads. of_warps: a value for each warp.
template <typename Op>
__device__ __forceinline__ float block_reduce(float x, float* of_warps, const Op& op) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = op(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_warps[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) x = op(x, of_warps[w]);
  return x;
}
inline constexpr int kSoftmaxBytes = 2 * 4 * (kSoftmaxThreads / 32);  // of two such reductions

/// Rows of S become rows of P: softmax over the keys that the row sees, zeros elsewhere. A row to a
/// thread block, which reads it once and holds it in registers. Grid: (seqlen, batch * heads),
/// whole warps.
template <bool kCausal>
__global__ void __launch_bounds__(kSoftmaxThreads)
    softmax_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  auto* const max_of_warps = reinterpret_cast<float*>(shared);
  float* const sum_of_warps = max_of_warps + kSoftmaxThreads / 32;
  const int row = static_cast<int>(blockIdx.x);
  const int end = kCausal ? row + 1 : p.seqlen;
  bf16* const scores =
      p.scores + (int64_t{blockIdx.y} * p.seqlen + row) * p.scores_stride + 8 * threadIdx.x;
  const auto column = [&](int chunk) {
    return 8 * static_cast<int>(chunk * blockDim.x + threadIdx.x);
  };
  const auto at = [&](int chunk) {
    return reinterpret_cast<uint4*>(scores + 8 * static_cast<int64_t>(chunk) * blockDim.x);
  };

  uint4 values[kSoftmaxChunks] = {};
  const auto score = [&](int chunk, int i) {
    return static_cast<float>(reinterpret_cast<const bf16*>(&values[chunk])[i]);
  };
  float max = -cuda::infinity();
#pragma unroll
  for (int c = 0; c < kSoftmaxChunks; ++c) {
    if (column(c) < end) values[c] = *at(c);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (column(c) + i < end) max = fmaxf(max, score(c, i));
    }
  }
  max = block_reduce(max, max_of_warps, [](float a, float b) { return fmaxf(a, b); });
  const auto weight = [&](int c, int i) {
    return column(c) + i < end ? cuda::exp2_fast((score(c, i) - max) * cuda::kLog2e) : 0.f;
  };
  float sum = 0.f;
#pragma unroll
  for (int c = 0; c < kSoftmaxChunks; ++c) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += weight(c, i);
  }
  sum = block_reduce(sum, sum_of_warps, [](float a, float b) { return a + b; });
  const float factor = __fdividef(1.f, sum);
#pragma unroll
  for (int c = 0; c < kSoftmaxChunks; ++c) {
    if (column(c) >= p.scores_stride) continue;
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      packed[i] = ptx::pack<bf16>(weight(c, 2 * i) * factor, weight(c, 2 * i + 1) * factor);
    }
    *at(c) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
}

/// O = P V, a tile of O to a thread block. Grid: (tiles of queries, batch * heads).
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2) values_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kPBytes = 2 * kPlainTile * kStep, kStageBytes = kPBytes + 2 * kStep * kHeadDim;
  const int query = static_cast<int>(blockIdx.x) * kPlainTile;
  const int batch_head = static_cast<int>(blockIdx.y);
  const int64_t stride = p.row_stride(kHeadDim), first = p.first(batch_head, kHeadDim);
  const uint32_t base = ptx::shared_address(shared);
  const bf16* const weights = p.scores + (int64_t{batch_head} * p.seqlen + query) * p.scores_stride;
  const auto copy_step = [&](uint32_t stage, int key) {
    copy_in<kPlainTile, kStep>(stage, weights + key, p.scores_stride, p.seqlen - query);
    copy_in<kStep, kHeadDim>(stage + kPBytes, p.v + first + key * stride, stride, p.seqlen - key);
    ptx::cp_async_commit();
  };

  float out[kPlainRowBlocks][kHeadDim / 8][4] = {};
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * kPlainRowBlocks;
  uint32_t stage = base;
  copy_step(stage, 0);
#pragma unroll 1
  for (int key = 0; key < p.seqlen; key += kStep) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // this step is there for all; all are done with the other stage
    const uint32_t next = 2 * base + kStageBytes - stage;
    if (key + kStep < p.seqlen) copy_step(next, key + kStep);
    const Fragments<kPlainTile, kStep> a_tile(stage, warp_row);
    const Fragments<kStep, kHeadDim> v(stage + kPBytes);
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      uint32_t a[kPlainRowBlocks][4];
#pragma unroll
      for (int r = 0; r < kPlainRowBlocks; ++r) a_tile.a(a[r], 16 * r, k);
      multiply_pv(out, a, v, k, 0);
    }
    stage = next;
  }
  __syncthreads();  // all are done with both stages
  put_results<kHeadDim>(shared, warp_row, out, 1.f);
  __syncthreads();
  copy_out<kPlainTile, kHeadDim>(p.out + first + query * stride, stride, p.seqlen - query, kHeadDim,
                                 shared);
}

template <int kHeadDim, bool kCausal, typename Launch>
void run_standard(const Arguments& p, const Launch& launch) {
  const auto heads = static_cast<unsigned>(p.batch * p.heads);
  const auto rows = static_cast<unsigned>(p.seqlen);
  const auto tiles = static_cast<unsigned>(tiles_of(p.seqlen, kPlainTile));
  const auto chunks = static_cast<int>(p.scores_stride / 8);
  constexpr int kScoresBytes = 2 * std::max(2 * kPlainTile * kHeadDim, kPlainTile * kPlainTile);
  constexpr int kStageBytes = 2 * (kPlainTile * kStep + kStep * kHeadDim);
  static_assert(2 * kStageBytes >= 2 * kPlainTile * kHeadDim);
  launch(scores_kernel<kHeadDim>, dim3(tiles * tiles, heads), kThreads, kScoresBytes, p);
  launch(softmax_kernel<kCausal>, dim3(rows, heads),
         std::min((chunks + 31) / 32 * 32, kSoftmaxThreads), kSoftmaxBytes, p);
  launch(values_kernel<kHeadDim>, dim3(tiles, heads), kThreads, 2 * kStageBytes, p);
}

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_1_STANDARD_CUH_
