// What steps 2 to 5 share: one thread block, one tile of queries, block after block of keys.
//
// It is the loop of algorithm 1 of FlashAttention-2 (arXiv:2307.08691, section 3.1): S of a block,
// the new row maxima, P, the row sums, O += P V. Each step says three things of it, and a step is
// the step before it but for one of them:
//
//   Split     what each of the four warps does of a block           steps 2, 5 (section 3.3)
//   Scaling   what is kept of the softmax, and when O is divided    steps 2, 3 (section 3.1)
//   thread_blocks(tiles)   how many thread blocks work at a head    steps 2, 4 (section 3.2)
//
// So a difference in speed between two steps is that one thing and nothing else.
//
// In the order of the loop, the loop asks
//
//   Split::tell_max, max_of_warps   for a row's maximum over the keys of all warps
//   Scaling::after_block            for the new row sum l, and for what O_old is multiplied by
//   Split::add_values               to do O = O_old * factor + P V
//   Split::add_sums                 for a row's sum over the keys of all warps, at the end
//   Scaling::at_end, store          for what O is multiplied by at the end; to store the statistics
//
//   shared memory   Q tile, at the end the output tile; K block; V block; what Split wants
//   registers       S of the warp's queries and keys; O, row maxima and row sums of the tile
//   copies          V of a block while S is computed, the next K while P V is
//
// A tile has its long side along what the warps split: 64 queries by 128 keys, or 128 queries by 64
// keys. Either way a warp has 32 of the split side, and two thread blocks fit a Hopper
// multiprocessor's shared memory and registers. What spills (nvcc 13.0 for 9.0, at head_dim 128
// alone) lies outside the loop over keys but for 7 loads at most, of its 1000 to 1800 instructions.
#ifndef STROBE_EXAMPLES_PAPER_SCHEDULE_CUH_
#define STROBE_EXAMPLES_PAPER_SCHEDULE_CUH_

#include <cstdint>

#include "common.h"
#include "cuda/common/softmax.cuh"
#include "cuda/ptx/thread_again.h"
#include "tiles.cuh"

namespace strobe::paper {

/// The tile of a thread block, and what a warp has of its queries and keys.
template <int kHeadDim_, int kTileQ_, int kTileK_, int kWarpQ, int kWarpK>
struct Shape {
  static constexpr int kHeadDim = kHeadDim_, kTileQ = kTileQ_, kTileK = kTileK_;
  static constexpr int kRowBlocks = kWarpQ / 16, kKeyTiles = kWarpK / 8;
  static_assert(kHeadDim == 64 || kHeadDim == 128);
  static_assert(kWarpQ % 16 == 0 && kWarpK % 16 == 0);

  // Shared memory: Q at 0.
  static constexpr int kKOffset = 2 * kTileQ * kHeadDim;
  static constexpr int kBlockBytes = 2 * kTileK * kHeadDim;
  static constexpr int kVOffset = kKOffset + kBlockBytes;
  static constexpr int kSplitOffset = kVOffset + kBlockBytes;
};

/// A value for each of a lane's rows: [r][h] for row 16r + 8h + lane / 4 of the warp's.
template <typename Split>
using OfRows = float[Split::kRowBlocks][2];

/// What a lane holds of its rows from block to block.
template <typename Split>
struct Rows {
  float out[Split::kRowBlocks][Split::kColumnTiles][4] = {};  // O
  OfRows<Split> max;       // m, in units of unscaled scores; -inf before the first block
  OfRows<Split> sum = {};  // l
};

/// What a block of keys does to them.
template <typename Split>
struct Block {
  // P, rounded, as the A operand of keys 16k to 16k + 15: the accumulators of S lie as that operand
  // wants them (cuda/common/tile.cuh), so P never leaves the registers.
  uint32_t weights[Split::kKeyTiles / 2][Split::kRowBlocks][4];
  OfRows<Split> sum;         // the block's own, where Scaling wants one
  OfRows<Split> old_factor;  // exp(m_old - m_new); then what O is multiplied by, which Scaling says
};

/// -inf for what row and key of the tile do not see each other.
template <bool kCausal, typename Split>
__device__ __forceinline__ void mask(float (&s)[Split::kRowBlocks][Split::kKeyTiles][4], int seqlen,
                                     int warp_row, int warp_key) {
  const int lane = ptx::thread_again() % 32;
  const int first_row = warp_row + lane / 4, first_key = warp_key + 2 * (lane % 4);
#pragma unroll
  for (int r = 0; r < Split::kRowBlocks; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first_row + 16 * r + 8 * (i / 2);
      const int end = kCausal ? min(row + 1, seqlen) : seqlen;
#pragma unroll
      for (int n = 0; n < Split::kKeyTiles; ++n) {
        if (8 * n + i % 2 >= end - first_key) s[r][n][i] = -cuda::infinity();
      }
    }
  }
}

/// One tile of queries of one head against all keys that it sees. All threads have to be done with
/// shared memory.
template <typename Split, typename Scaling, bool kCausal>
__device__ __forceinline__ void attend(const Arguments& p, char* shared, int batch_head, int tile) {
  constexpr int kHeadDim = Split::kHeadDim, kTileQ = Split::kTileQ, kTileK = Split::kTileK;
  constexpr int kRowBlocks = Split::kRowBlocks, kKeyTiles = Split::kKeyTiles;
  const Split split(shared);
  const int64_t stride = p.row_stride(kHeadDim), first = p.first(batch_head, kHeadDim);
  const int begin = tile * kTileQ;
  const int end_key = kCausal ? min(begin + kTileQ, p.seqlen) : p.seqlen;
  const float scale_log2 = p.scale * cuda::kLog2e;

  const uint32_t base = ptx::shared_address(shared);
  const auto copy_block = [&](int offset, const bf16* tensor, int key) {
    copy_in<kTileK, kHeadDim>(base + static_cast<uint32_t>(offset), tensor + first + key * stride,
                              stride, p.seqlen - key);
    ptx::cp_async_commit();
  };

  Rows<Split> rows;
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) rows.max[r][0] = rows.max[r][1] = -cuda::infinity();

  copy_in<kTileQ, kHeadDim>(base, p.q + first + begin * stride, stride, p.seqlen - begin);
  copy_block(Split::kKOffset, p.k, 0);
#pragma unroll 1
  for (int key = 0; key < end_key; key += kTileK) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // Q and K are there for all; all are done with V and with what Split has
    copy_block(Split::kVOffset, p.v, key);

    // --- S = Q K^T, masked; the block's row maxima ---
    float s[kRowBlocks][kKeyTiles][4] = {};
    {
      const Fragments<kTileQ, kHeadDim> q(base, split.first_row());
      const Fragments<kTileK, kHeadDim> k(base + Split::kKOffset, split.first_key());
      multiply_qk<kHeadDim>(s, q, k);
    }
    const int last_key = key + kTileK - 1;
    if (last_key >= p.seqlen || (kCausal && last_key > begin + split.first_row())) {
      mask<kCausal, Split>(s, p.seqlen, begin + split.first_row(), key + split.first_key());
    }
    OfRows<Split> block_max;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m = fmaxf(s[r][0][2 * h], s[r][0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < kKeyTiles; ++n) {
          m = fmaxf(m, fmaxf(s[r][n][2 * h], s[r][n][2 * h + 1]));
        }
        block_max[r][h] = cuda::quad_max(m);
        split.tell_max(r, h, block_max[r][h]);
      }
    }

    ptx::cp_async_wait<0>();
    __syncthreads();  // V is there, and what tell_max() told; all are done with K
    if (key + kTileK < end_key) copy_block(Split::kKOffset, p.k, key + kTileK);

    // --- P = exp(S - max), row sums; by how much the old O shrinks ---
    Block<Split> block;
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // Every row sees key 0, so that m is finite from the first block on.
        const float m = split.max_of_warps(r, h, fmaxf(rows.max[r][h], block_max[r][h]));
        block.old_factor[r][h] = cuda::exp2_fast((rows.max[r][h] - m) * scale_log2);
        rows.max[r][h] = m;
        const float reference = m * scale_log2;
        float sum = 0.f;  // of the lane's columns
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          float(&x)[4] = s[r][n];
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            x[i] = cuda::exp2_fast(fmaf(x[i], scale_log2, -reference));
            sum += x[i];
          }
        }
        if constexpr (Scaling::kNeedsBlockSums) {
          block.sum[r][h] = cuda::quad_sum(sum);
        } else {
          Scaling::after_block(rows.sum[r][h], block.old_factor[r][h], sum);
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          block.weights[n / 2][r][n % 2 * 2 + h] =
              ptx::pack<bf16>(s[r][n][2 * h], s[r][n][2 * h + 1]);
        }
      }
    }

    // --- O += P V ---
    const Fragments<kTileK, kHeadDim> v(base + Split::kVOffset, split.first_key());
    split.template add_values<Scaling>(rows, block, v);
  }

  // --- The end: the sums of all columns, O and the statistics to global memory ---
  const int lane = ptx::thread_again() % 32;
  if constexpr (!Scaling::kNeedsBlockSums) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) rows.sum[r][h] = cuda::quad_sum(rows.sum[r][h]);
    }
    split.add_sums(rows.sum, lane);
  }
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor = Scaling::at_end(rows.sum[r][h]);
      // The Q tile's place: since the last __syncthreads of the loop nobody reads Q.
      const int tile_row = split.first_row() + 16 * r + 8 * h + lane / 4;
#pragma unroll
      for (int n = 0; n < Split::kColumnTiles; ++n) {
        put_pair<kTileQ, kHeadDim>(shared, tile_row, split.column(n) + 2 * (lane % 4),
                                   rows.out[r][n][2 * h] * factor,
                                   rows.out[r][n][2 * h + 1] * factor);
      }
      if (lane % 4 == 0 && split.stores_statistics() && begin + tile_row < p.seqlen) {
        Scaling::store(p, int64_t{batch_head} * p.seqlen + begin + tile_row, rows.max[r][h],
                       rows.sum[r][h]);
      }
    }
  }
  __syncthreads();
  copy_out<kTileQ, kHeadDim>(p.out + first + begin * stride, stride, p.seqlen - begin, kHeadDim,
                             shared);
}

/// Grid: (thread blocks of a head, batch * heads). They do the head's tiles between them.
template <typename Split, typename Scaling, bool kCausal>
__global__ void __launch_bounds__(kThreads, 2)
    attention_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  const int tiles = tiles_of(p.seqlen, Split::kTileQ);
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x); i < tiles; i += static_cast<int>(gridDim.x)) {
    // The longest first, so that the short ones fill the end.
    attend<Split, Scaling, kCausal>(p, shared, static_cast<int>(blockIdx.y),
                                    kCausal ? tiles - 1 - i : i);
    __syncthreads();  // all are done with shared memory
  }
}

template <typename Step, int kHeadDim, bool kCausal, typename Launch>
void run_schedule(const Arguments& p, const Launch& launch) {
  using Split = typename Step::template Split<kHeadDim>;
  const int thread_blocks = Step::thread_blocks(tiles_of(p.seqlen, Split::kTileQ));
  launch(attention_kernel<Split, typename Step::Scaling, kCausal>,
         dim3(static_cast<unsigned>(thread_blocks), static_cast<unsigned>(p.batch * p.heads)),
         kThreads, Split::kBytes, p);
}

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_SCHEDULE_CUH_
