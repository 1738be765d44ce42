// The paper's own story, measured: standard attention, a FlashAttention-1 schedule, and
// FlashAttention-2's three changes to it (arXiv:2307.08691, section 3), added one at a time.
//
//     build/cuda/bin/paper_story --json story.json
//
//   standard   three plain steps, S and P in global memory: S = scale Q K^T, row softmax, O = P V
//   fa1        one thread block per (batch, head); warps split the keys of a block; the output is
//              normalised at every key block; row maximum and row sum are stored
//   unscaled   + 3.1: the accumulator is divided once, at the end; log-sum-exp alone is stored
//   sequence   + 3.2: a thread block per tile of queries too
//   fa2        + 3.3: warps split the queries, and have nothing to tell each other
//
// All four schedules are one kernel with three switches (kUnscaled, kSplitQueries, and for 3.2 the
// grid), so that a difference between two of them is the switch and nothing else. It is bench code:
// bf16, head_dim 64 or 128, seqlen_q == seqlen_k, mma.sync (compute capability 8.0 and newer).
// FlashAttention-1 as published also had keys in the outer loop, and O in global memory meanwhile;
// here queries are outer in every schedule, which is kind to it. The product kernels are
// src/cuda/mma_sync/forward_sm80.cuh and forward_sm90.cuh.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/common/softmax.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"

namespace {

namespace ptx = strobe::cuda::ptx;
using strobe::cuda::exp2_fast;
using strobe::cuda::infinity;
using strobe::cuda::kLog2e;
using strobe::cuda::quad_max;
using strobe::cuda::quad_sum;
using strobe::cuda::SharedTile;
using bf16 = __nv_bfloat16;

__host__ __device__ constexpr int tiles_of(int seqlen, int tile) {
  return (seqlen + tile - 1) / tile;
}

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;

struct Arguments {
  const bf16 *q, *k, *v;  // [batch, seqlen, heads, head_dim]
  bf16* out;              // [batch, seqlen, heads, head_dim]
  float* row_max;         // [batch, heads, seqlen], of scaled scores: fa1 alone
  float* row_sum;         // [batch, heads, seqlen], of exp(score - row_max): fa1 alone
  float* lse;             // [batch, heads, seqlen], natural logarithm: the others
  bf16* scores;           // [batch, heads, seqlen, scores_stride]: standard attention alone
  int64_t scores_stride;  // seqlen, rounded up to kStep: rows of whole 16-byte units
  int batch, seqlen, heads;
  float scale;

  __device__ int row_stride(int head_dim) const { return heads * head_dim; }
  /// Where row 0 of a (batch, head) begins in q, k, v and out.
  __device__ int64_t first(int batch_head, int head_dim) const {
    const int64_t b = batch_head / heads, h = batch_head % heads;
    return (b * seqlen * heads + h) * head_dim;
  }
};

/// The thread's lane, asked for anew, so that what follows from it is worked out where it is used.
/// Else the compiler keeps the end's addresses in registers through the loop over keys, which has
/// none to spare, and spills.
__device__ __forceinline__ int lane_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread % 32;
}

// --- Tiles: global to shared memory and back, shared memory to fragments ---

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
/// 16; ptx/ldmatrix.h says which registers are which operand.
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

// --- The kernel of the four schedules ---
//
//   shared memory   Q tile, at the end the output tile; K block; V block; and, where warps split
//                   the keys: exchange [warp][8][lane] x 4 float32, a warp's partial accumulators
//                   of 16 rows x 64 columns; before that the maxima [warp][row]; sums [warp][row]
//   registers       S of the warp's queries and keys; O, row maxima and row sums of the tile
//   copies          V of a block while S is computed, the next K while P V is
//
// A tile has its long side along what the warps split: 64 queries by 128 keys, or 128 queries by 64
// keys. Either way a warp has 32 of the split side, and two thread blocks fit a Hopper
// multiprocessor's shared memory and registers. What spills (ptxas -v: head_dim 128 alone) lies
// outside the loop over keys, but for four of fa2's row sums, which are there once a key block.
template <int kHeadDim_, bool kSplitQueries>
struct Shape {
  static constexpr int kHeadDim = kHeadDim_;
  static_assert(kHeadDim == 64 || kHeadDim == 128);
  static constexpr int kTileQ = kSplitQueries ? 128 : 64;
  static constexpr int kTileK = kSplitQueries ? 64 : 128;

  // What a warp has of them.
  static constexpr int kWarpQ = kSplitQueries ? kTileQ / kWarps : kTileQ;
  static constexpr int kWarpK = kSplitQueries ? kTileK : kTileK / kWarps;
  static constexpr int kRowBlocks = kWarpQ / 16;
  static constexpr int kKeyTiles = kWarpK / 8;
  // Where warps split the keys, 16 rows x kPart columns of O are exchanged at a time, and of each
  // such part a warp accumulates a quarter of the columns.
  static constexpr int kPart = 64;
  static constexpr int kPartTiles = kPart / 8 / kWarps;
  static constexpr int kColumnTiles = kSplitQueries ? kHeadDim / 8 : kHeadDim / kPart * kPartTiles;

  /// First column of the n-th 8 columns of O that a warp accumulates.
  __device__ static constexpr int column(int warp, int n) {
    if (kSplitQueries) return 8 * n;
    return n / kPartTiles * kPart + 8 * (warp * kPartTiles + n % kPartTiles);
  }
  static_assert(kWarpQ % 16 == 0 && kWarpK % 16 == 0);

  static constexpr int kKOffset = 2 * kTileQ * kHeadDim;
  static constexpr int kBlockBytes = 2 * kTileK * kHeadDim;
  static constexpr int kVOffset = kKOffset + kBlockBytes;
  static constexpr int kExchangeOffset = kVOffset + kBlockBytes;
  static constexpr int kExchangeBytes = kSplitQueries ? 0 : 4 * kWarps * 16 * kPart;
  static constexpr int kSumsOffset = kExchangeOffset + kExchangeBytes;
  static constexpr int kSumsBytes = kSplitQueries ? 0 : 4 * kWarps * 16;
  static constexpr int kBytes = kSumsOffset + kSumsBytes;
  static_assert(kSplitQueries || 4 * kWarps * kTileQ <= kExchangeBytes);
};

/// One tile of queries of one head against all keys that it sees. All threads have to be done with
/// shared memory.
template <int kHeadDim, bool kCausal, bool kUnscaled, bool kSplitQueries>
__device__ __forceinline__ void attend(const Arguments& p, char* shared, int batch_head, int tile) {
  using S = Shape<kHeadDim, kSplitQueries>;
  constexpr int kRowBlocks = S::kRowBlocks, kKeyTiles = S::kKeyTiles;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int g = lane / 4, t = lane % 4;  // row and column pair of an accumulator (ptx/mma.h)
  const int warp_row = kSplitQueries ? warp * S::kWarpQ : 0;
  const int warp_key = kSplitQueries ? 0 : warp * S::kWarpK;
  auto* const exchange = reinterpret_cast<float4*>(shared + S::kExchangeOffset);
  auto* const maxima = reinterpret_cast<float*>(shared + S::kExchangeOffset);
  auto* const sums = reinterpret_cast<float*>(shared + S::kSumsOffset);

  const int64_t stride = p.row_stride(kHeadDim), first = p.first(batch_head, kHeadDim);
  const int begin = tile * S::kTileQ;
  const int end_key = kCausal ? min(begin + S::kTileQ, p.seqlen) : p.seqlen;
  const float scale_log2 = p.scale * kLog2e;

  const uint32_t base = ptx::shared_address(shared);
  const auto copy_block = [&](int offset, const bf16* tensor, int key) {
    copy_in<S::kTileK, kHeadDim>(base + static_cast<uint32_t>(offset),
                                 tensor + first + key * stride, stride, p.seqlen - key);
    ptx::cp_async_commit();
  };

  float out[kRowBlocks][S::kColumnTiles][4] = {};
  // Of rows 16r + 8h + g. In units of unscaled scores; -inf before the first block, of which every
  // row sees key 0.
  float row_max[kRowBlocks][2];
  // Unscaled: of the lane's own columns, as nobody asks for the sum before the end.
  float row_sum[kRowBlocks][2] = {};
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) row_max[r][0] = row_max[r][1] = -infinity();

  copy_in<S::kTileQ, kHeadDim>(base, p.q + first + begin * stride, stride, p.seqlen - begin);
  copy_block(S::kKOffset, p.k, 0);
#pragma unroll 1
  for (int key = 0; key < end_key; key += S::kTileK) {
    ptx::cp_async_wait<0>();
    __syncthreads();  // Q and K are there for all; all are done with V and the exchange
    copy_block(S::kVOffset, p.v, key);

    // --- S = Q K^T, masked; the block's row maxima ---
    float s[kRowBlocks][kKeyTiles][4] = {};
    {
      const Fragments<S::kTileQ, kHeadDim> q(base, warp_row);
      const Fragments<S::kTileK, kHeadDim> k(base + S::kKOffset, warp_key);
      multiply_qk<kHeadDim>(s, q, k);
    }
    const int last_key = key + S::kTileK - 1;
    if (last_key >= p.seqlen || (kCausal && last_key > begin + warp_row)) {
      const int self = lane_again();
      const int first_row = begin + warp_row + self / 4;
      const int first_key = key + warp_key + 2 * (self % 4);
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = first_row + 16 * r + 8 * (i / 2);
          const int end = kCausal ? min(row + 1, p.seqlen) : p.seqlen;
#pragma unroll
          for (int n = 0; n < kKeyTiles; ++n) {
            if (8 * n + i % 2 >= end - first_key) s[r][n][i] = -infinity();
          }
        }
      }
    }
    float block_max[kRowBlocks][2];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m = fmaxf(s[r][0][2 * h], s[r][0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < kKeyTiles; ++n) {
          m = fmaxf(m, fmaxf(s[r][n][2 * h], s[r][n][2 * h + 1]));
        }
        block_max[r][h] = quad_max(m);
        if constexpr (!kSplitQueries) {
          if (t == 0) maxima[warp * S::kTileQ + 16 * r + 8 * h + g] = block_max[r][h];
        }
      }
    }

    ptx::cp_async_wait<0>();
    __syncthreads();  // V and all warps' maxima are there; all are done with K
    if (key + S::kTileK < end_key) copy_block(S::kKOffset, p.k, key + S::kTileK);

    // --- P = exp(S - max), row sums; by how much the old O shrinks ---
    float old_factor[kRowBlocks][2] = {};
    float block_sum[kRowBlocks][2];  // fa1: of the warp's keys
    // fa1: O stays normalised, so both its old value and what is added are scaled. Returns the
    // latter's factor.
    const auto normalise = [&](int r, int h, float sum) {
      const float old_sum = row_sum[r][h] * old_factor[r][h];
      row_sum[r][h] = old_sum + sum;
      const float new_factor = __fdividef(1.f, row_sum[r][h]);
      old_factor[r][h] = old_sum * new_factor;
      return new_factor;
    };
    // The A operand of keys 16k to 16k + 15: the accumulators of S are it (tile.cuh).
    uint32_t weights[kRowBlocks][kKeyTiles / 2][4];
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m = fmaxf(row_max[r][h], block_max[r][h]);
        if constexpr (!kSplitQueries) {
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            m = fmaxf(m, maxima[w * S::kTileQ + 16 * r + 8 * h + g]);
          }
        }
        old_factor[r][h] = exp2_fast((row_max[r][h] - m) * scale_log2);
        row_max[r][h] = m;
        const float reference = m * scale_log2;
        float sum = 0.f;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 2 * h; i < 2 * h + 2; ++i) {
            s[r][n][i] = exp2_fast(fmaf(s[r][n][i], scale_log2, -reference));
            sum += s[r][n][i];
          }
        }
        float new_factor = 1.f;
        if constexpr (kUnscaled) {
          row_sum[r][h] = row_sum[r][h] * old_factor[r][h] + sum;
        } else {
          block_sum[r][h] = quad_sum(sum);
          if constexpr (kSplitQueries) new_factor = normalise(r, h, block_sum[r][h]);
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          weights[r][n / 2][n % 2 * 2 + h] =
              ptx::pack<bf16>(s[r][n][2 * h] * new_factor, s[r][n][2 * h + 1] * new_factor);
        }
      }
    }

    // --- O += P V ---
    const Fragments<S::kTileK, kHeadDim> v(base + S::kVOffset, warp_key);
    if constexpr (kSplitQueries) {
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) out[r][n][i] *= old_factor[r][i / 2];
        }
      }
#pragma unroll
      for (int k_step = 0; k_step < kKeyTiles / 2; ++k_step) {
#pragma unroll
        for (int column = 0; column < kHeadDim; column += 16) {
          uint32_t b[4];
          v.b_columns(b, 16 * k_step, column);
#pragma unroll
          for (int r = 0; r < kRowBlocks; ++r) {
            ptx::mma<bf16>(out[r][column / 8], weights[r][k_step], b[0], b[1]);
            ptx::mma<bf16>(out[r][column / 8 + 1], weights[r][k_step], b[2], b[3]);
          }
        }
      }
    } else {
      // Each warp's product is over its own keys alone: written out, and summed by columns.
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
        float new_factor[2] = {1.f, 1.f};
#pragma unroll
        for (int begin_column = 0; begin_column < kHeadDim; begin_column += S::kPart) {
          float part[S::kPart / 8][4] = {};
#pragma unroll
          for (int k_step = 0; k_step < kKeyTiles / 2; ++k_step) {
#pragma unroll
            for (int n = 0; n < S::kPart / 8; n += 2) {
              uint32_t b[4];
              v.b_columns(b, 16 * k_step, begin_column + 8 * n);
              ptx::mma<bf16>(part[n], weights[r][k_step], b[0], b[1]);
              ptx::mma<bf16>(part[n + 1], weights[r][k_step], b[2], b[3]);
            }
          }
          __syncthreads();  // all have read the maxima, or the part before
#pragma unroll
          for (int n = 0; n < S::kPart / 8; ++n) {
            exchange[(warp * S::kPart / 8 + n) * 32 + lane] =
                make_float4(part[n][0], part[n][1], part[n][2], part[n][3]);
          }
          if constexpr (!kUnscaled) {
            if (begin_column == 0 && t == 0) {
              sums[warp * 16 + g] = block_sum[r][0];
              sums[warp * 16 + 8 + g] = block_sum[r][1];
            }
          }
          __syncthreads();  // all warps' products are there
          if constexpr (!kUnscaled) {
            if (begin_column == 0) {
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                float sum = 0.f;
#pragma unroll
                for (int w = 0; w < kWarps; ++w) sum += sums[w * 16 + 8 * h + g];
                new_factor[h] = normalise(r, h, sum);
              }
            }
          }
#pragma unroll
          for (int n = 0; n < S::kPartTiles; ++n) {
            float sum[4] = {};
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
              const float4 one =
                  exchange[(w * S::kPart / 8 + warp * S::kPartTiles + n) * 32 + lane];
              sum[0] += one.x, sum[1] += one.y, sum[2] += one.z, sum[3] += one.w;
            }
            float(&o)[4] = out[r][begin_column / S::kPart * S::kPartTiles + n];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              o[i] = o[i] * old_factor[r][i / 2] + sum[i] * new_factor[i / 2];
            }
          }
        }
      }
    }
  }

  // --- The end: sums of all columns, O / sum, statistics ---
  const int end_lane = lane_again(), end_g = end_lane / 4, end_t = end_lane % 4;
  if constexpr (kUnscaled) {
#pragma unroll
    for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) row_sum[r][h] = quad_sum(row_sum[r][h]);
    }
    if constexpr (!kSplitQueries) {
      __syncthreads();  // all have read the exchange
#pragma unroll
      for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (end_t == 0) maxima[warp * S::kTileQ + 16 * r + 8 * h + end_g] = row_sum[r][h];
        }
      }
      __syncthreads();
    }
  }
#pragma unroll
  for (int r = 0; r < kRowBlocks; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float factor = 1.f;
      if constexpr (kUnscaled) {
        if constexpr (!kSplitQueries) {
          row_sum[r][h] = 0.f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) {
            row_sum[r][h] += maxima[w * S::kTileQ + 16 * r + 8 * h + end_g];
          }
        }
        factor = __fdividef(1.f, row_sum[r][h]);
      }
      // The Q tile's place: since the last __syncthreads of the loop nobody reads Q.
      const int tile_row = warp_row + 16 * r + 8 * h + end_g;
#pragma unroll
      for (int n = 0; n < S::kColumnTiles; ++n) {
        put_pair<S::kTileQ, kHeadDim>(shared, tile_row, S::column(warp, n) + 2 * end_t,
                                      out[r][n][2 * h] * factor, out[r][n][2 * h + 1] * factor);
      }
      // Where warps split the keys, all of them hold every row's statistics.
      if (end_t == 0 && (kSplitQueries || warp == 0) && begin + tile_row < p.seqlen) {
        const int64_t row = int64_t{batch_head} * p.seqlen + begin + tile_row;
        if constexpr (kUnscaled) {
          p.lse[row] = row_max[r][h] * p.scale + logf(row_sum[r][h]);
        } else {
          p.row_max[row] = row_max[r][h] * p.scale;
          p.row_sum[row] = row_sum[r][h];
        }
      }
    }
  }
  __syncthreads();
  copy_out<S::kTileQ, kHeadDim>(p.out + first + begin * stride, stride, p.seqlen - begin, kHeadDim,
                                shared);
}

/// Grid: (tiles of queries or 1, batch * heads): with 1, a thread block does all tiles of its head.
template <int kHeadDim, bool kCausal, bool kUnscaled, bool kSplitQueries>
__global__ void __launch_bounds__(kThreads, 2)
    attention_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  const int tiles = tiles_of(p.seqlen, Shape<kHeadDim, kSplitQueries>::kTileQ);
#pragma unroll 1
  for (int i = static_cast<int>(blockIdx.x); i < tiles; i += static_cast<int>(gridDim.x)) {
    // The longest first, so that the short ones fill the end.
    attend<kHeadDim, kCausal, kUnscaled, kSplitQueries>(p, shared, static_cast<int>(blockIdx.y),
                                                        kCausal ? tiles - 1 - i : i);
    __syncthreads();  // all are done with shared memory
  }
}

// --- Standard attention ---
//
// As a framework would do it: two matrix products and a softmax, 16-bit S and P in global memory (P
// takes S's place), every score computed whatever the mask.

constexpr int kStep = 64;  // keys of P V at a time
constexpr int kPlainTile = 128;
constexpr int kPlainRowBlocks = kPlainTile / kWarps / 16;

/// S = scale Q K^T. Grid: (tiles of keys, tiles of queries, batch * heads).
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2) scores_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kTileBytes = 2 * kPlainTile * kHeadDim;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int key = static_cast<int>(blockIdx.x) * kPlainTile;
  const int query = static_cast<int>(blockIdx.y) * kPlainTile;
  const int batch_head = static_cast<int>(blockIdx.z);
  const int64_t stride = p.row_stride(kHeadDim), first = p.first(batch_head, kHeadDim);
  const uint32_t base = ptx::shared_address(shared);
  copy_in<kPlainTile, kHeadDim>(base, p.q + first + query * stride, stride, p.seqlen - query);
  copy_in<kPlainTile, kHeadDim>(base + kTileBytes, p.k + first + key * stride, stride,
                                p.seqlen - key);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();

  float s[kPlainRowBlocks][kPlainTile / 8][4] = {};
  const int warp_row = warp * 16 * kPlainRowBlocks;
  const Fragments<kPlainTile, kHeadDim> q(base, warp_row), k(base + kTileBytes);
  multiply_qk<kHeadDim>(s, q, k);
  __syncthreads();  // all are done with Q and K, whose place the tile of S takes
#pragma unroll
  for (int r = 0; r < kPlainRowBlocks; ++r) {
#pragma unroll
    for (int n = 0; n < kPlainTile / 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        put_pair<kPlainTile, kPlainTile>(shared, warp_row + 16 * r + 8 * h + lane / 4,
                                         8 * n + 2 * (lane % 4), s[r][n][2 * h] * p.scale,
                                         s[r][n][2 * h + 1] * p.scale);
      }
    }
  }
  __syncthreads();
  bf16* const to = p.scores + (int64_t{batch_head} * p.seqlen + query) * p.scores_stride + key;
  copy_out<kPlainTile, kPlainTile>(to, p.scores_stride, p.seqlen - query, p.scores_stride - key,
                                   shared);
}

constexpr int kSoftmaxChunks = 8;  // of 8 values, in a thread's registers
constexpr int kSoftmaxThreads = 256;

/// Over all threads of the block, up to kSoftmaxThreads.
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

/// Rows of S become rows of P: softmax over the keys that the row sees, zeros elsewhere. Grid:
/// (seqlen, batch * heads), whole warps, the row in kSoftmaxChunks chunks of a thread.
template <bool kCausal>
__global__ void __launch_bounds__(kSoftmaxThreads)
    softmax_kernel(const __grid_constant__ Arguments p) {
  __shared__ float max_of_warps[kSoftmaxThreads / 32];
  __shared__ float sum_of_warps[kSoftmaxThreads / 32];
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

  uint4 values[kSoftmaxChunks];
  float max = -infinity();
#pragma unroll
  for (int c = 0; c < kSoftmaxChunks; ++c) {
    if (column(c) < end) values[c] = *at(c);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (column(c) + i < end) {
        max = fmaxf(max, __bfloat162float(reinterpret_cast<const bf16*>(&values[c])[i]));
      }
    }
  }
  max = block_reduce(max, max_of_warps, [](float a, float b) { return fmaxf(a, b); });
  const auto weight = [&](int c, int i) {
    const float score = __bfloat162float(reinterpret_cast<const bf16*>(&values[c])[i]);
    return column(c) + i < end ? exp2_fast((score - max) * kLog2e) : 0.f;
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

/// O = P V. Grid: (tiles of queries, batch * heads).
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 2) values_kernel(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  constexpr int kPBytes = 2 * kPlainTile * kStep, kStageBytes = kPBytes + 2 * kStep * kHeadDim;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
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
  const int warp_row = warp * 16 * kPlainRowBlocks;
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
#pragma unroll
      for (int column = 0; column < kHeadDim; column += 16) {
        uint32_t b[4];
        v.b_columns(b, k, column);
#pragma unroll
        for (int r = 0; r < kPlainRowBlocks; ++r) {
          ptx::mma<bf16>(out[r][column / 8], a[r], b[0], b[1]);
          ptx::mma<bf16>(out[r][column / 8 + 1], a[r], b[2], b[3]);
        }
      }
    }
    stage = next;
  }
  __syncthreads();  // all are done with both stages
#pragma unroll
  for (int r = 0; r < kPlainRowBlocks; ++r) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        put_pair<kPlainTile, kHeadDim>(shared, warp_row + 16 * r + 8 * h + lane / 4,
                                       8 * n + 2 * (lane % 4), out[r][n][2 * h],
                                       out[r][n][2 * h + 1]);
      }
    }
  }
  __syncthreads();
  copy_out<kPlainTile, kHeadDim>(p.out + first + query * stride, stride, p.seqlen - query, kHeadDim,
                                 shared);
}

// --- Random data ---

/// Standard normal: Box and Muller's transform of splitmix64's bits.
__global__ void fill_normal(bf16* to, int64_t count, uint64_t seed) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= count) return;
  uint64_t x = (seed << 40) + static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  x ^= x >> 31;
  constexpr float kUnit = 1.f / 4294967296.f;
  const float radius = (static_cast<float>(x >> 32) + 0.5f) * kUnit;
  const float angle = static_cast<float>(x & 0xffffffff) * kUnit;
  to[i] = __float2bfloat16(sqrtf(-2.f * logf(radius)) * cospif(2.f * angle));
}

// --- Host ---

enum Variant { kStandard, kFa1, kUnscaledToo, kSequenceToo, kFa2, kVariants };
constexpr const char* kKeys[kVariants] = {"standard", "fa1", "unscaled", "sequence", "fa2"};
constexpr const char* kNames[kVariants] = {
    "standard attention: S and P in global memory",
    "FlashAttention-1: normalised at each key block, parallel over batch and heads, split keys",
    "+ 3.1 unscaled accumulator, log-sum-exp alone",
    "+ 3.2 parallel over the sequence",
    "+ 3.3 warps split the queries: FlashAttention-2",
};
constexpr int64_t kMaxScoresBytes = 8'000'000'000;
constexpr int kTokens = 16384, kHidden = 2048;

void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "paper_story: %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

template <typename T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(int64_t count) : bytes_(static_cast<size_t>(count) * sizeof(T)) {
    if (bytes_ > 0 && cudaMalloc(&data_, bytes_) != cudaSuccess) {
      data_ = nullptr;
      cudaGetLastError();  // the caller asks for data(), and later launches are not to blame
    }
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  /// Ends the program where there was no memory.
  T* need() const {
    must(data_ != nullptr ? cudaSuccess : cudaErrorMemoryAllocation, "cudaMalloc");
    return data();
  }
  void fill(int byte) { must(cudaMemset(need(), byte, bytes_), "cudaMemset"); }
  std::vector<T> to_host() const {
    std::vector<T> values(bytes_ / sizeof(T));
    must(cudaMemcpy(values.data(), need(), bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

int64_t scores_stride(int seqlen) { return int64_t{tiles_of(seqlen, kStep)} * kStep; }

/// Launches `kernel` with as much shared memory as it needs.
template <typename Kernel>
void launch(Kernel kernel, dim3 grid, int threads, int bytes, const Arguments& p) {
  if (bytes > 48 << 10) {
    must(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
         "cudaFuncSetAttribute");
  }
  kernel<<<grid, threads, bytes>>>(p);
}

template <int kHeadDim, bool kCausal>
void launch_standard(const Arguments& p) {
  const auto heads = static_cast<unsigned>(p.batch * p.heads);
  const auto rows = static_cast<unsigned>(p.seqlen);
  const auto tiles = static_cast<unsigned>(tiles_of(p.seqlen, kPlainTile));
  const auto chunks = static_cast<int>(p.scores_stride / 8);
  constexpr int kScoresBytes = 2 * std::max(2 * kPlainTile * kHeadDim, kPlainTile * kPlainTile);
  constexpr int kStageBytes = 2 * (kPlainTile * kStep + kStep * kHeadDim);
  static_assert(2 * kStageBytes >= 2 * kPlainTile * kHeadDim);
  launch(scores_kernel<kHeadDim>, dim3(tiles, tiles, heads), kThreads, kScoresBytes, p);
  launch(softmax_kernel<kCausal>, dim3(rows, heads),
         std::min((chunks + 31) / 32 * 32, kSoftmaxThreads), 0, p);
  launch(values_kernel<kHeadDim>, dim3(tiles, heads), kThreads, 2 * kStageBytes, p);
}

template <int kHeadDim, bool kCausal, bool kUnscaled, bool kParallelSequence, bool kSplitQueries>
void launch_schedule(const Arguments& p) {
  using S = Shape<kHeadDim, kSplitQueries>;
  const auto tiles = static_cast<unsigned>(kParallelSequence ? tiles_of(p.seqlen, S::kTileQ) : 1);
  launch(attention_kernel<kHeadDim, kCausal, kUnscaled, kSplitQueries>,
         dim3(tiles, static_cast<unsigned>(p.batch * p.heads)), kThreads, S::kBytes, p);
}

template <int kHeadDim, bool kCausal>
void launch_variant(Variant variant, const Arguments& p) {
  switch (variant) {
    case kStandard:
      return launch_standard<kHeadDim, kCausal>(p);
    case kFa1:
      return launch_schedule<kHeadDim, kCausal, false, false, false>(p);
    case kUnscaledToo:
      return launch_schedule<kHeadDim, kCausal, true, false, false>(p);
    case kSequenceToo:
      return launch_schedule<kHeadDim, kCausal, true, true, false>(p);
    default:
      return launch_schedule<kHeadDim, kCausal, true, true, true>(p);
  }
}

void run(Variant variant, int head_dim, bool causal, const Arguments& p) {
  if (head_dim == 64) {
    causal ? launch_variant<64, true>(variant, p) : launch_variant<64, false>(variant, p);
  } else {
    causal ? launch_variant<128, true>(variant, p) : launch_variant<128, false>(variant, p);
  }
  must(cudaGetLastError(), kKeys[variant]);
}

void fill(DeviceBuffer<bf16>& buffer, int64_t count, uint64_t seed) {
  const dim3 grid(static_cast<unsigned>((count + 255) / 256));
  fill_normal<<<grid, 256>>>(buffer.need(), count, seed);
  must(cudaGetLastError(), "fill_normal");
}

// --- Check: float64, on the host ---

struct Case {
  int head_dim, seqlen;
  bool causal;
  int batch = 2, heads = 2;

  int64_t rows() const { return int64_t{batch} * seqlen * heads; }
  int64_t elements() const { return rows() * head_dim; }
};

double rounded(double x) {
  return static_cast<double>(__bfloat162float(__float2bfloat16(static_cast<float>(x))));
}

/// Naive attention, and the largest error that its bf16 roundings alone make.
struct Reference {
  std::vector<double> out, lse;
  double flash_error = 0, standard_error = 0;
};

Reference reference_of(const Case& c, const std::vector<bf16>& q, const std::vector<bf16>& k,
                       const std::vector<bf16>& v) {
  Reference result;
  result.out.resize(static_cast<size_t>(c.elements()));
  result.lse.resize(static_cast<size_t>(c.rows()));
  const double scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  const auto n = static_cast<size_t>(c.seqlen), d = static_cast<size_t>(c.head_dim);
  const auto heads = static_cast<size_t>(c.heads);
  const auto number = [](bf16 x) { return static_cast<double>(__bfloat162float(x)); };
  std::vector<double> score(n);
  for (size_t b = 0; b < static_cast<size_t>(c.batch); ++b) {
    for (size_t h = 0; h < heads; ++h) {
      const auto at = [&](size_t row) { return ((b * n + row) * heads + h) * d; };
      for (size_t i = 0; i < n; ++i) {
        const size_t keys = c.causal ? i + 1 : n;
        double max = -std::numeric_limits<double>::infinity(), bf16_max = max;
        for (size_t j = 0; j < keys; ++j) {
          double dot = 0;
          for (size_t x = 0; x < d; ++x) dot += number(q[at(i) + x]) * number(k[at(j) + x]);
          score[j] = scale * dot;
          max = std::max(max, score[j]);
          bf16_max = std::max(bf16_max, rounded(score[j]));
        }
        double sum = 0, bf16_sum = 0;
        for (size_t j = 0; j < keys; ++j) {
          sum += std::exp(score[j] - max);
          bf16_sum += std::exp(rounded(score[j]) - bf16_max);
        }
        result.lse[(b * heads + h) * n + i] = max + std::log(sum);
        for (size_t x = 0; x < d; ++x) {
          double exact = 0, flash = 0, standard = 0;
          for (size_t j = 0; j < keys; ++j) {
            const double value = number(v[at(j) + x]), weight = std::exp(score[j] - max);
            exact += weight * value;
            flash += rounded(weight) * value;
            standard += rounded(std::exp(rounded(score[j]) - bf16_max) / bf16_sum) * value;
          }
          exact /= sum;
          result.out[at(i) + x] = exact;
          result.flash_error = std::max(result.flash_error, std::abs(rounded(flash / sum) - exact));
          result.standard_error =
              std::max(result.standard_error, std::abs(rounded(standard) - exact));
        }
      }
    }
  }
  return result;
}

/// Largest difference; inf where there is a NaN.
template <typename T>
double difference(const std::vector<T>& got, const std::vector<double>& want) {
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = std::abs(static_cast<double>(static_cast<float>(got[i])) - want[i]);
    worst = d <= worst ? worst : std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
  }
  return worst;
}

/// Whether what lies behind the first `count` values still has all bits set, as fill(0xff) left it.
template <typename T>
bool untouched(const std::vector<T>& values, int64_t count) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(values.data());
  return std::all_of(bytes + static_cast<size_t>(count) * sizeof(T),
                     bytes + values.size() * sizeof(T), [](unsigned char x) { return x == 0xff; });
}

/// Every variant against float64. Tolerance of the output: twice the error that rounding to bf16
/// makes in the same formula done in float64 (weights and output; for standard attention scores
/// too). Of log-sum-exp: 1e-4, some hundred float32 roundings of values near 8.
bool check(const Case& c) {
  constexpr int64_t kGuard = 128 * 128 * 4;  // values behind the outputs: more than a tile
  constexpr double kLseTolerance = 1e-4;
  DeviceBuffer<bf16> q(c.elements()), k(c.elements()), v(c.elements());
  DeviceBuffer<bf16> out(c.elements() + kGuard);
  DeviceBuffer<float> row_max(c.rows() + kGuard), row_sum(c.rows() + kGuard);
  DeviceBuffer<float> lse(c.rows() + kGuard);
  const int64_t score_count = c.rows() * scores_stride(c.seqlen);
  DeviceBuffer<bf16> scores(score_count + kGuard);
  fill(q, c.elements(), 1), fill(k, c.elements(), 2), fill(v, c.elements(), 3);
  const Reference want = reference_of(c, q.to_host(), k.to_host(), v.to_host());
  const auto scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_dim)));
  const Arguments p{q.data(),   k.data(),       v.data(),
                    out.data(), row_max.data(), row_sum.data(),
                    lse.data(), scores.need(),  scores_stride(c.seqlen),
                    c.batch,    c.seqlen,       c.heads,
                    scale};
  bool good = true;
  std::printf("%3d %-6s seqlen %4d  ", c.head_dim, c.causal ? "causal" : "full", c.seqlen);
  for (int i = 0; i < kVariants; ++i) {
    const auto variant = static_cast<Variant>(i);
    out.fill(0xff), row_max.fill(0xff), row_sum.fill(0xff), lse.fill(0xff), scores.fill(0xff);
    run(variant, c.head_dim, c.causal, p);
    must(cudaDeviceSynchronize(), kKeys[variant]);
    const std::vector<bf16> got = out.to_host();
    const double error = difference(got, want.out);
    const double rounding = variant == kStandard ? want.standard_error : want.flash_error;
    bool fine = error <= 2 * rounding + 1e-6 && untouched(got, c.elements()) &&
                untouched(scores.to_host(), variant == kStandard ? score_count : 0);
    double lse_error = 0;
    if (variant != kStandard) {
      std::vector<float> got_lse = lse.to_host();
      fine = fine && untouched(got_lse, variant == kFa1 ? 0 : c.rows());
      const std::vector<float> m = row_max.to_host(), l = row_sum.to_host();
      fine = fine && untouched(m, variant == kFa1 ? c.rows() : 0) &&
             untouched(l, variant == kFa1 ? c.rows() : 0);
      for (size_t row = 0; variant == kFa1 && row < want.lse.size(); ++row) {
        got_lse[row] = m[row] + std::log(l[row]);
      }
      lse_error = difference(got_lse, want.lse);
      fine = fine && lse_error <= kLseTolerance;
    }
    std::printf("  %s %.1e of %.1e%s", kKeys[variant], error, 2 * rounding, fine ? "" : " FAILED");
    if (!fine) std::printf(" (lse %.1e)", lse_error);
    good = good && fine;
  }
  std::printf("\n");
  return good;
}

// --- Times ---

struct Point {
  Case problem;
  double ms[kVariants] = {};  // 0: not run
  double tflops[kVariants] = {};
  std::string skipped;  // why standard attention was
};

double median(std::vector<float> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return static_cast<double>(*middle);
}

/// Medians of all variants, in turns, L2 overwritten before each.
Point measure(const Case& c, Arguments p, int rounds, DeviceBuffer<char>& flush) {
  Point point{c, {}, {}, {}};
  p.batch = c.batch, p.seqlen = c.seqlen, p.heads = c.heads;
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_dim)));
  p.scores_stride = scores_stride(c.seqlen);
  const int64_t score_count = c.rows() * p.scores_stride;
  const bool small = score_count * 2 <= kMaxScoresBytes;
  const DeviceBuffer<bf16> scores(small ? score_count : 0);
  p.scores = scores.data();
  char text[96];
  std::snprintf(text, sizeof text, "S would take %.1f GB, %s",
                static_cast<double>(score_count) * 2e-9,
                small ? "and the GPU has not so much left" : "more than 8");
  if (p.scores == nullptr) point.skipped = text;

  std::vector<Variant> variants;
  for (int i = p.scores == nullptr ? kFa1 : kStandard; i < kVariants; ++i) {
    variants.push_back(static_cast<Variant>(i));
  }
  for (const Variant variant : variants) run(variant, c.head_dim, c.causal, p);  // warm
  struct Timed {
    Variant variant;
    cudaEvent_t begin, end;
  };
  std::vector<Timed> timed;
  for (int round = 0; round < rounds; ++round) {
    for (const Variant variant : variants) {
      Timed one{variant, {}, {}};
      must(cudaEventCreate(&one.begin), "cudaEventCreate");
      must(cudaEventCreate(&one.end), "cudaEventCreate");
      flush.fill(round);
      must(cudaEventRecord(one.begin), "cudaEventRecord");
      run(variant, c.head_dim, c.causal, p);
      must(cudaEventRecord(one.end), "cudaEventRecord");
      timed.push_back(one);
    }
  }
  must(cudaDeviceSynchronize(), "timing");
  std::vector<float> times[kVariants];
  for (const Timed& one : timed) {
    float ms = 0;
    must(cudaEventElapsedTime(&ms, one.begin, one.end), "cudaEventElapsedTime");
    times[one.variant].push_back(ms);
    cudaEventDestroy(one.begin), cudaEventDestroy(one.end);
  }
  const double pairs = static_cast<double>(c.seqlen) * c.seqlen * (c.causal ? 0.5 : 1);
  const double flop = 4 * pairs * c.head_dim * c.heads * c.batch;
  for (const Variant variant : variants) {
    point.ms[variant] = median(times[variant]);
    point.tflops[variant] = flop / point.ms[variant] * 1e-9;
  }
  return point;
}

void print_head() {
  std::printf("\nTFLOP/s (4 seqlen^2 head_dim heads batch, halved when causal), medians\n");
  for (int i = 0; i < kVariants; ++i) std::printf("  %-9s %s\n", kKeys[i], kNames[i]);
  std::printf("head_dim mask   seqlen ");
  for (const char* key : kKeys) std::printf(" %9s", key);
  std::printf("\n");
}

void print(const Point& point) {
  const Case& c = point.problem;
  std::printf("%8d %-6s %6d ", c.head_dim, c.causal ? "causal" : "full", c.seqlen);
  for (int i = 0; i < kVariants; ++i) {
    if (point.ms[i] > 0) {
      std::printf(" %9.1f", point.tflops[i]);
    } else {
      std::printf(" %9s", "-");
    }
  }
  if (!point.skipped.empty()) std::printf("   standard: skipped, %s", point.skipped.c_str());
  std::printf("\n");
  std::fflush(stdout);
}

bool write_json(const std::string& path, const char* gpu, int rounds,
                const std::vector<Point>& points) {
  std::FILE* const file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return false;
  std::fprintf(file, "{\n \"gpu\": \"%s\",\n \"dtype\": \"bf16\",\n \"rounds\": %d,\n", gpu,
               rounds);
  std::fprintf(file, " \"variants\": {");
  for (int i = 0; i < kVariants; ++i) {
    std::fprintf(file, "%s\n  \"%s\": \"%s\"", i == 0 ? "" : ",", kKeys[i], kNames[i]);
  }
  std::fprintf(file, "\n },\n \"points\": [");
  for (size_t n = 0; n < points.size(); ++n) {
    const Case& c = points[n].problem;
    std::fprintf(file,
                 "%s\n  {\"head_dim\": %d, \"causal\": %s, \"seqlen\": %d, \"batch\": %d, "
                 "\"heads\": %d",
                 n == 0 ? "" : ",", c.head_dim, c.causal ? "true" : "false", c.seqlen, c.batch,
                 c.heads);
    const auto object = [&](const char* name, const double(&values)[kVariants]) {
      std::fprintf(file, ", \"%s\": {", name);
      const char* comma = "";
      for (int i = 0; i < kVariants; ++i) {
        if (points[n].ms[i] <= 0) continue;
        std::fprintf(file, "%s\"%s\": %.6g", comma, kKeys[i], values[i]);
        comma = ", ";
      }
      std::fprintf(file, "}");
    };
    object("ms", points[n].ms);
    object("tflops", points[n].tflops);
    if (!points[n].skipped.empty()) {
      std::fprintf(file, ", \"skipped\": {\"standard\": \"%s\"}", points[n].skipped.c_str());
    }
    std::fprintf(file, "}");
  }
  std::fprintf(file, "\n ]\n}\n");
  const bool written = std::ferror(file) == 0;
  return std::fclose(file) == 0 && written;
}

// --- The command line ---

constexpr const char* kHelp =
    "Standard attention, FlashAttention-1's schedule and FlashAttention-2's changes, one at a "
    "time.\n"
    "usage: paper_story [options]\n"
    "  --rounds N        times each variant is timed at a point (9)\n"
    "  --seconds X       begin no further point after so long\n"
    "  --head-dim D      64 or 128 (both)\n"
    "  --json FILE       write the result there too\n"
    "  --check-only      check against float64, time nothing\n"
    "  --help            this text\n";

struct Options {
  int rounds = 9;
  double seconds = std::numeric_limits<double>::infinity();
  std::vector<int> head_dims{64, 128};
  std::string json;
  bool check_only = false;
};

[[noreturn]] void refuse(const std::string& got, const char* wanted) {
  std::fprintf(stderr, "paper_story: got %s, expected %s\n", got.c_str(), wanted);
  std::exit(2);
}

/// All of `text` as a number in [low, high].
template <typename T>
T parse(std::string_view flag, std::string_view text, T low, T high, const char* wanted) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || stop != end || !(value >= low && value <= high)) {
    refuse(std::string(flag) + " '" + std::string(text) + "'", wanted);
  }
  return value;
}

Options parse_options(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    const auto value = [&](const char* wanted) -> std::string_view {
      if (i + 1 == argc) refuse(std::string(flag) + " without a value", wanted);
      return argv[++i];
    };
    if (flag == "--help") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    } else if (flag == "--rounds") {
      constexpr const char* kWanted = "a whole number from 1 to 10000";
      options.rounds = parse(flag, value(kWanted), 1, 10000, kWanted);
    } else if (flag == "--seconds") {
      constexpr const char* kWanted = "a number of seconds from 0";
      options.seconds = parse(flag, value(kWanted), 0.0, 1e9, kWanted);
    } else if (flag == "--head-dim") {
      constexpr const char* kWanted = "64 or 128";
      const int head_dim = parse(flag, value(kWanted), 64, 128, kWanted);
      if (head_dim != 64 && head_dim != 128)
        refuse("--head-dim " + std::to_string(head_dim), kWanted);
      options.head_dims = {head_dim};
    } else if (flag == "--json") {
      options.json = value("the name of a file");
    } else if (flag == "--check-only") {
      options.check_only = true;
    } else {
      refuse("'" + std::string(flag) + "'",
             "--rounds, --seconds, --head-dim, --json, --check-only or --help");
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse_options(argc, argv);
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("paper_story: skipped (no GPU)\n");
    return 0;
  }
  cudaDeviceProp gpu;
  must(cudaGetDeviceProperties(&gpu, 0), "cudaGetDeviceProperties");
  constexpr int kNeeded = Shape<128, false>::kBytes;
  static_assert(kNeeded >= Shape<64, false>::kBytes && kNeeded >= Shape<128, true>::kBytes);
  if (gpu.major < 8 || gpu.sharedMemPerBlockOptin < static_cast<size_t>(kNeeded)) {
    std::printf(
        "paper_story: skipped (%s: compute capability %d.%d with %zu bytes of shared memory per "
        "block, expected 8.0 with %d)\n",
        gpu.name, gpu.major, gpu.minor, gpu.sharedMemPerBlockOptin, kNeeded);
    return 0;
  }
  std::printf("%s\n\nlargest error against float64, of what is allowed:\n", gpu.name);
  bool good = true;
  for (const int head_dim : options.head_dims) {
    for (const bool causal : {false, true}) {
      for (const int seqlen : {1, 64, 200, 333, 512}) {
        good = check({head_dim, seqlen, causal}) && good;
      }
    }
  }
  if (!good) {
    std::printf("FAILED\n");
    return 1;
  }
  if (options.check_only) return 0;

  constexpr int64_t kElements = int64_t{kTokens} * kHidden;
  DeviceBuffer<bf16> q(kElements), k(kElements), v(kElements), out(kElements);
  constexpr int64_t kMaxRows = kElements / 64;
  DeviceBuffer<float> row_max(kMaxRows), row_sum(kMaxRows), lse(kMaxRows);
  DeviceBuffer<char> flush(256 << 20);  // several times the L2
  fill(q, kElements, 1), fill(k, kElements, 2), fill(v, kElements, 3);
  Arguments p{};
  p.q = q.need(), p.k = k.need(), p.v = v.need(), p.out = out.need();
  p.row_max = row_max.need(), p.row_sum = row_sum.need(), p.lse = lse.need();
  std::vector<Point> points;
  bool out_of_time = false;
  print_head();
  for (const int head_dim : options.head_dims) {
    for (const bool causal : {false, true}) {
      for (int seqlen = 512; seqlen <= kTokens; seqlen *= 2) {
        if (seconds() > options.seconds) {
          out_of_time = true;
          continue;
        }
        const Case problem{head_dim, seqlen, causal, kTokens / seqlen, kHidden / head_dim};
        points.push_back(measure(problem, p, options.rounds, flush));
        print(points.back());
      }
    }
  }
  if (out_of_time) std::printf("out of time after %zu points\n", points.size());
  if (!options.json.empty()) {
    if (!write_json(options.json, gpu.name, options.rounds, points)) {
      std::fprintf(stderr, "paper_story: got --json '%s', expected a file that can be written\n",
                   options.json.c_str());
      return 1;
    }
    std::printf("written to %s\n", options.json.c_str());
  }
  return 0;
}
