// What the backward pass needs beside its inputs, and the kernel that makes it: lse and delta in
// the form in which the main kernel reads them. (The sum for dQ needs no zeros: the first key block
// to come by a query tile stores.)
//
// Scratch rows are padded: every sequence begins at a multiple of the query tile, so that a tile is
// one piece of memory, aligned, whatever the lengths.
#ifndef STROBE_CUDA_BACKWARD_PRE_CUH_
#define STROBE_CUDA_BACKWARD_PRE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/load.cuh"
#include "cuda/params.h"
#include "cuda/scheduler.cuh"
#include "cuda/softmax.cuh"

namespace strobe::cuda {

/// Weights are at most 1 and travel between warps as fp16, times 2^12: from 2^-26 on (a row that
/// looks evenly at 64 million keys) they keep all bits of an fp16.
inline constexpr float kWeightShift = 12.f;
inline constexpr float kWeightScale = 4096.f;

/// The sizes that decide the scratch: of a problem, or of a launch's params.
struct BackwardSizes {
  int64_t batch, heads, heads_kv, seqlen_q, seqlen_k;
  bool varlen;
  int64_t total_q, total_k;  // varlen: of all sequences; total_k only decides sizes
  bool batch_invariant;
  int64_t dq_bytes;  // of dQ, where it is one piece of memory; else 0
};

/// Bytes of a tensor of 16-bit values that is one piece of memory, rows or heads first; else 0.
STROBE_INLINE constexpr int64_t packed_bytes(int64_t batch, int64_t rows, int64_t heads,
                                             int64_t dim, int64_t batch_stride, int64_t row_stride,
                                             int64_t head_stride) {
  const auto at = [](int64_t length, int64_t stride, int64_t packed) {
    return length <= 1 || stride == packed;
  };
  const bool rows_first = at(rows, row_stride, heads * dim) && at(heads, head_stride, dim);
  const bool heads_first = at(heads, head_stride, rows * dim) && at(rows, row_stride, dim);
  const bool packed = (rows_first || heads_first) && at(batch, batch_stride, rows * heads * dim);
  return packed ? 2 * batch * rows * heads * dim : 0;
}

STROBE_INLINE constexpr BackwardSizes sizes_of(const AttentionProblem& p) {
  return {p.batch,
          p.heads,
          p.heads_kv,
          p.seqlen_q,
          p.seqlen_k,
          p.varlen != 0,
          p.total_q,
          rows_k(p),
          p.batch_invariant != 0,
          packed_bytes(p.varlen ? 1 : p.batch, p.varlen ? p.total_q : p.seqlen_q, p.heads,
                       p.head_dim, p.dq.batch, p.dq.seqlen, p.dq.head)};
}
STROBE_INLINE constexpr BackwardSizes sizes_of(const BackwardParams& p) {
  return {p.batch,
          p.heads,
          p.heads_kv,
          p.seqlen_q,
          p.seqlen_k,
          p.cu_q != nullptr,
          p.total_q,
          p.cu_k ? p.total_k : p.batch * p.total_k,
          p.batch_invariant != 0,
          packed_bytes(p.cu_q ? 1 : p.batch, p.total_q, p.heads, p.head_dim, p.dq.batch_stride,
                       p.dq.row_stride, p.dq.head_stride)};
}

/// Query tiles of one head in the scratch, all sequences together.
STROBE_INLINE constexpr int64_t scratch_tiles(const BackwardSizes& s, int64_t tile) {
  return s.varlen ? ceil_div(s.total_q, tile) + s.batch : s.batch * ceil_div(s.seqlen_q, tile);
}
/// The first of sequence b: there is room for all its tiles before that of sequence b + 1.
STROBE_INLINE constexpr uint32_t scratch_begin(const CommonParams& p, int32_t tile, int32_t b) {
  return static_cast<uint32_t>(p.cu_q ? p.cu_q[b] / tile + b
                                      : b * ((p.seqlen_q + tile - 1) / tile));
}

/// Thread blocks that keep a large GPU busy. A constant, not the device's, so that the order of
/// summation, hence every bit of the result, is the same on every GPU.
inline constexpr int64_t kWantedBlocks = 128;

/// Into how many parts the query heads of a key head are cut: 1 where there are key blocks enough.
/// The parts' dK and dV are summed in a fixed order afterwards; so that a sequence's bits do not
/// depend on the batch, batch_invariant counts its own blocks alone, and none where lengths vary.
STROBE_INLINE constexpr int64_t group_parts(const BackwardSizes& s, int64_t tile_k) {
  const int64_t group = s.heads / s.heads_kv;
  if (s.batch_invariant && s.varlen) return 1;
  const int64_t blocks =
      (s.batch_invariant ? 1 : s.batch) * s.heads_kv * max64(1, ceil_div(s.seqlen_k, tile_k));
  const int64_t parts = min64(group, ceil_div(kWantedBlocks, blocks));
  return ceil_div(group, ceil_div(group, parts));
}

struct BackwardScratch {
  float* lse;           // [heads, tiles, tile_q]: lse * log2(e) - kWeightShift
  float* delta;         // [heads, tiles, tile_q]: (rowsum(dout * out) - dlse) / kWeightScale
  float* dq;            // [heads, tiles, tile_q / 16, width / 8, 128]: blocks of 16 x 8 in the
                        // order of sum_offset
  uint32_t* nonfinite;  // [heads, tiles]: q or dout may hold an inf or a NaN there
  uint32_t* turn;       // [heads, tiles, warps]: key blocks that have added to dq; unless
                        // deterministic, whether the first one has stored there
  uint32_t* ticket;     // the next work item
  float *dk, *dv;       // [rows_k, heads_kv, parts, width]: where there are several parts
  uint32_t tiles;       // of a head (all heads' are fewer than 2^32: a tile takes 16 KB)
};

/// dq: dQ itself, or null while the arena counts. The post kernel writes it, last: until then lse
/// and delta live there, where there is room.
inline BackwardScratch carve_backward(Arena& arena, const BackwardSizes& s, int64_t width,
                                      int64_t tile_q, int64_t tile_k, int64_t turns, void* dq) {
  BackwardScratch c{};
  c.tiles = static_cast<uint32_t>(scratch_tiles(s, tile_q));
  const int64_t all = s.heads * c.tiles;
  constexpr uintptr_t kAlignment = kWorkspaceAlignment;
  if (s.dq_bytes >= 2 * all * tile_q * int64_t{sizeof(float)} + int64_t{kAlignment}) {
    const uintptr_t at = (reinterpret_cast<uintptr_t>(dq) + kAlignment - 1) & ~(kAlignment - 1);
    c.lse = dq ? reinterpret_cast<float*>(at) : nullptr;
    c.delta = dq ? c.lse + all * tile_q : nullptr;
  } else {
    c.lse = arena.take<float>(all * tile_q);
    c.delta = arena.take<float>(all * tile_q);
  }
  c.dq = arena.take<float>(all * tile_q * width);
  c.nonfinite = arena.take<uint32_t>(all);
  c.turn = arena.take<uint32_t>(all * turns);
  c.ticket = arena.take<uint32_t>(1);
  const int64_t parts = group_parts(s, tile_k);
  if (parts > 1) {
    // Both in one piece, last, so that total_k decides nothing but the size.
    c.dk = arena.take<float>(2 * s.total_k * s.heads_kv * parts * width);
    c.dv = c.dk ? c.dk + width : nullptr;
  }
  return c;
}

/// A tile of queries of one head.
struct QueryTile {
  int32_t batch, head, begin;
};

STROBE_INLINE constexpr QueryTile query_tile(const CommonParams& p, int64_t index, int64_t items,
                                             int32_t tiles, int32_t tile_q) {
  int32_t batch_head, tile;
  if (items <= INT32_MAX) {  // 32-bit division takes a fifth of the time
    batch_head = static_cast<int32_t>(index) / tiles;
    tile = static_cast<int32_t>(index) % tiles;
  } else {
    batch_head = static_cast<int32_t>(index / tiles);
    tile = static_cast<int32_t>(index % tiles);
  }
  return {batch_head / p.heads, batch_head % p.heads, tile * tile_q};
}

/// Eight values from `p`, zeros from column `columns` on; one by one.
template <typename T>
__device__ __noinline__ uint4 load_slowly(const T* p, int columns) {
  uint32_t word[4] = {};
  for (int i = 0; i < 8; ++i) {
    if (i < columns) {
      word[i / 2] |= uint32_t{reinterpret_cast<const uint16_t*>(p)[i]} << (i % 2 * 16);
    }
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t bits) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
  } else {
    __half2 x;
    memcpy(&x, &bits, sizeof x);
    return __half22float2(x);
  }
}
/// The sum of products of eight pairs.
template <typename T>
__device__ __forceinline__ float dot_eight(const uint4& x, const uint4& y) {
  const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = unpack<T>(a[i]), v = unpack<T>(b[i]);
    sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
  }
  return sum;
}

inline constexpr int kPreThreads = 256;

/// One thread block per query tile.
template <typename T, int kTileQ, int kWidth>
__global__ void __launch_bounds__(kPreThreads)
    backward_pre_kernel(const __grid_constant__ BackwardParams p,
                        const __grid_constant__ BackwardScratch scratch, int32_t tiles,
                        int64_t items, int32_t turns) {
  const int64_t index = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  if (index == 0 && threadIdx.x == 0) *scratch.ticket = 0;
  if (index >= items) return;
  const QueryTile tile = query_tile(p, index, items, tiles, kTileQ);
  const Sequence sequence = p.sequence(tile.batch);
  const auto seqlen = static_cast<int32_t>(sequence.mask.seqlen_q);
  if (tile.begin >= seqlen) return;
  const int64_t at = int64_t{tile.head} * scratch.tiles + scratch_begin(p, kTileQ, tile.batch) +
                     tile.begin / kTileQ;
  const int thread = threadIdx.x;
  if (thread < turns) scratch.turn[at * turns + thread] = 0;

  // kLanes lanes a row, eight columns a lane.
  constexpr int kLanes = kWidth <= 64 ? 8 : kWidth <= 128 ? 16 : 32;
  constexpr int kRows = kPreThreads / kLanes, kPasses = kTileQ / kRows;
  constexpr int kAtOnce = kPasses < 4 ? kPasses : 4;  // so many loads of each tensor under way
  const RowsView out =
      rows_view(p.out, tile.batch, sequence.q_row, tile.head, seqlen, p.head_dim_v);
  const RowsView dout =
      rows_view(p.dout, tile.batch, sequence.q_row, tile.head, seqlen, p.head_dim_v);
  const RowsView q = rows_view(p.q, tile.batch, sequence.q_row, tile.head, seqlen, p.head_dim);
  const bool aligned = out.aligned() && dout.aligned();
  const int lane = thread % kLanes, column = 8 * lane, first = thread / kLanes;
  const int64_t lse_at = sequence.lse_row + tile.head * p.lse_head_stride + tile.begin;
  const auto values = [&](const RowsView& view, int r) {
    return reinterpret_cast<const T*>(view.data + (tile.begin + r) * view.stride_bytes) + column;
  };
  const auto zeros = make_uint4(0, 0, 0, 0);
  bool nonfinite = false;
#pragma unroll 1
  for (int begin = first; begin < kTileQ; begin += kAtOnce * kRows) {
    uint4 x[kAtOnce], y[kAtOnce];
    float natural[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int r = begin + i * kRows;
      const bool there = tile.begin + r < seqlen;
      x[i] = y[i] = zeros;
      natural[i] = there ? p.lse[lse_at + r] : 0.f;
      if (aligned && there && column < p.head_dim_v) {
        x[i] = __ldcs(reinterpret_cast<const uint4*>(values(out, r)));
        y[i] = __ldg(reinterpret_cast<const uint4*>(values(dout, r)));
      }
    }
    if (!aligned) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int r = begin + i * kRows;
        if (tile.begin + r < seqlen) {
          x[i] = load_slowly(values(out, r), p.head_dim_v - column);
          y[i] = load_slowly(values(dout, r), p.head_dim_v - column);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int r = begin + i * kRows;
      const bool there = tile.begin + r < seqlen;
      float sum = dot_eight<T>(x[i], y[i]);
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
      if (lane == 0) {
        const float delta = there && p.dlse ? sum - p.dlse[lse_at + r] : sum;
        scratch.delta[at * kTileQ + r] = delta / kWeightScale;
        // A row past the end gets no weight. (One that sees no key has -inf here, and every score
        // of it is masked.)
        scratch.lse[at * kTileQ + r] = there ? natural[i] * kLog2e - kWeightShift : infinity();
        nonfinite |= there && (!isfinite(delta) || isnan(natural[i]) || natural[i] == infinity());
      }
      // An inf or a NaN in a row of q shows in its lse, unless softcap hides it or the row sees
      // nothing.
      if (there && (p.softcap > 0.f || natural[i] == -infinity()) && column < p.head_dim) {
        const uint4 bits = load_slowly(values(q, r), p.head_dim - column);
        const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
        for (int c = 0; c < 4; ++c) {
          const float2 v = unpack<T>(word[c]);
          nonfinite |= !isfinite(v.x) || !isfinite(v.y);
        }
      }
    }
  }
  nonfinite = __syncthreads_or(nonfinite) != 0;
  if (thread == 0) scratch.nonfinite[at] = nonfinite;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_PRE_CUH_
