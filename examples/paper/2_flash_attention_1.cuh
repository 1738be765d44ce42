// Step 2: the schedule of FlashAttention-1 (arXiv:2205.14135, algorithm 1), in the loop of
// schedule.cuh. S and P never leave the registers; step 0 is done a block of keys at a time.
//
// This file defines all three things that a step says: how warps split a block of keys, when O is
// divided by its row sums, how many thread blocks work at a head. FlashAttention-2 changes each of
// them once, and steps 3, 4 and 5 are these changes.
//
// FlashAttention-1 as published had keys in its outer loop too, and wrote O to global memory and
// read it back for every block of them. Queries are outer in every step here, which is kind to
// step 2.
//
// Stores row_max and row_sum.
#ifndef STROBE_EXAMPLES_PAPER_2_FLASH_ATTENTION_1_CUH_
#define STROBE_EXAMPLES_PAPER_2_FLASH_ATTENTION_1_CUH_

#include "schedule.cuh"

namespace strobe::paper {

/// O is a finished result after every block: the softmax over the keys so far, times V. The next
/// block takes the division back, adds, and divides again:
///
///   l_new = l_old exp(m_old - m_new) + l_block
///   O_new = (O_old l_old exp(m_old - m_new) + P V) / l_new
///
/// Both statistics are kept for the backward pass.
struct DividedAtEveryBlock {
  /// Every block asks for its row sums, over all of its keys.
  static constexpr bool kNeedsBlockSums = true;

  /// Of a row; old_factor is exp(m_old - m_new) before, and after it what O_old is multiplied by.
  /// Returns what P V is multiplied by.
  __device__ __forceinline__ static float after_block(float& sum, float& old_factor,
                                                      float block_sum) {
    const float old_sum = sum * old_factor;
    sum = old_sum + block_sum;
    const float new_factor = __fdividef(1.f, sum);
    old_factor = old_sum * new_factor;
    return new_factor;
  }
  /// What O is multiplied by after the last block.
  __device__ __forceinline__ static float at_end(float) { return 1.f; }
  __device__ __forceinline__ static void store(const Arguments& p, int64_t row, float max,
                                               float sum) {
    p.row_max[row] = max * p.scale;
    p.row_sum[row] = sum;
  }
};

/// "Split-K" (arXiv:2307.08691, section 3.3): every warp has all 64 queries and a quarter of the
/// block's 128 keys. So each holds a share of every row's maximum, of its sum, and of every value
/// of P V. All of that goes through shared memory, at every block, with barriers around it:
///
///   maxima     [warp][row]: told before P can be computed
///   exchange   [warp][8][lane] x 4 values: a warp's P V, of 16 rows x 64 columns at a time; a
///              quarter of their columns each warp sums up and adds to the O that it holds
///   sums       [warp][row]: of those 16 rows
template <int kHeadDim>
struct SplitKeys : Shape<kHeadDim, 64, 128, 64, 128 / kWarps> {
  using Base = Shape<kHeadDim, 64, 128, 64, 128 / kWarps>;
  static constexpr int kPart = 64;                       // columns that are exchanged at a time
  static constexpr int kPartTiles = kPart / 8 / kWarps;  // of which a warp sums up so many times 8
  static constexpr int kColumnTiles = kHeadDim / kPart * kPartTiles;
  static constexpr int kSumsOffset = Base::kSplitOffset + 4 * kWarps * 16 * kPart;
  static constexpr int kBytes = kSumsOffset + 4 * kWarps * 16;
  static_assert(4 * kWarps * Base::kTileQ <= kSumsOffset - Base::kSplitOffset);

  char* shared;
  int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  float4* exchange = reinterpret_cast<float4*>(shared + Base::kSplitOffset);
  float* maxima = reinterpret_cast<float*>(shared + Base::kSplitOffset);  // while no P V is there
  float* sums = reinterpret_cast<float*>(shared + kSumsOffset);

  __device__ __forceinline__ explicit SplitKeys(char* shared_) : shared(shared_) {}

  // The warp's first query of the tile and first key of the block, and the first of the n-th 8
  // columns of O that it holds.
  __device__ __forceinline__ int first_row() const { return 0; }
  __device__ __forceinline__ int first_key() const { return warp * (Base::kTileK / kWarps); }
  __device__ __forceinline__ int column(int n) const {
    return n / kPartTiles * kPart + 8 * (warp * kPartTiles + n % kPartTiles);
  }
  // All warps hold every row's statistics.
  __device__ __forceinline__ bool stores_statistics() const { return warp == 0; }

  /// In maxima.
  __device__ __forceinline__ static int place(int warp, int r, int h, int lane) {
    return warp * Base::kTileQ + 16 * r + 8 * h + lane / 4;
  }
  __device__ __forceinline__ void tell_max(int r, int h, float max) const {
    if (lane % 4 == 0) maxima[place(warp, r, h, lane)] = max;
  }
  __device__ __forceinline__ float max_of_warps(int r, int h, float max) const {
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      max = fmaxf(max, maxima[place(w, r, h, lane)]);
    }
    return max;
  }

  /// O = O * old_factor + P V * new_factor.
  template <typename Scaling, typename V>
  __device__ __forceinline__ void add_values(Rows<SplitKeys>& rows, Block<SplitKeys>& block,
                                             const V& v) const {
#pragma unroll
    for (int r = 0; r < Base::kRowBlocks; ++r) {
      float new_factor[2] = {1.f, 1.f};
#pragma unroll
      for (int begin = 0; begin < kHeadDim; begin += kPart) {
        float part[1][kPart / 8][4] = {};  // over the warp's own keys alone
#pragma unroll
        for (int k = 0; k < Base::kKeyTiles / 2; ++k) {
          multiply_pv(part, &block.weights[k][r], v, 16 * k, begin);
        }
        __syncthreads();  // all have read the maxima, or the part before
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n) {
          const float(&x)[4] = part[0][n];
          exchange[(warp * kPart / 8 + n) * 32 + lane] = make_float4(x[0], x[1], x[2], x[3]);
        }
        if constexpr (Scaling::kNeedsBlockSums) {
          if (begin == 0 && lane % 4 == 0) {
            sums[warp * 16 + lane / 4] = block.sum[r][0];
            sums[warp * 16 + 8 + lane / 4] = block.sum[r][1];
          }
        }
        __syncthreads();  // all warps' products are there, and their sums
        if constexpr (Scaling::kNeedsBlockSums) {
#pragma unroll
          for (int h = 0; begin == 0 && h < 2; ++h) {
            float sum = 0.f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) sum += sums[w * 16 + 8 * h + lane / 4];
            new_factor[h] = Scaling::after_block(rows.sum[r][h], block.old_factor[r][h], sum);
          }
        }
#pragma unroll
        for (int n = 0; n < kPartTiles; ++n) {
          float sum[4] = {};
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            const float4 one = exchange[(w * kPart / 8 + warp * kPartTiles + n) * 32 + lane];
            sum[0] += one.x, sum[1] += one.y, sum[2] += one.z, sum[3] += one.w;
          }
          float(&o)[4] = rows.out[r][begin / kPart * kPartTiles + n];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            o[i] = o[i] * block.old_factor[r][i / 2] + sum[i] * new_factor[i / 2];
          }
        }
      }
    }
  }

  /// Where no block asked for them: the row sums over all warps' keys, at the end.
  __device__ __forceinline__ void add_sums(OfRows<SplitKeys>& sum, int end_lane) const {
    __syncthreads();  // all have read the exchange
#pragma unroll
    for (int r = 0; r < Base::kRowBlocks; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (end_lane % 4 == 0) {
          maxima[place(warp, r, h, end_lane)] = sum[r][h];
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < Base::kRowBlocks; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[r][h] = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          sum[r][h] += maxima[place(w, r, h, end_lane)];
        }
      }
    }
  }
};

struct FlashAttention1 {
  template <int kHeadDim>
  using Split = SplitKeys<kHeadDim>;
  using Scaling = DividedAtEveryBlock;
  /// One thread block does a head, tile of queries after tile of queries (arXiv:2307.08691, section
  /// 3.2: parallel over batch and heads alone).
  static constexpr int thread_blocks(int /*tiles*/) { return 1; }
};

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_2_FLASH_ATTENTION_1_CUH_
