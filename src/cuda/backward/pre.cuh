// The kernel before the main kernel of the backward pass: it computes lse and delta (or takes the
// caller's delta) in the form in which the main kernel reads them, and sets the sum of dQ to zero,
// or those rows of dQ itself that no other kernel writes.
#ifndef STROBE_CUDA_BACKWARD_PRE_CUH_
#define STROBE_CUDA_BACKWARD_PRE_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/sink.h"
#include "cuda/backward/scratch.cuh"
#include "cuda/common/bias.cuh"
#include "cuda/common/hidden_pairs.cuh"
#include "cuda/common/load.cuh"
#include "cuda/common/params.h"
#include "cuda/common/rows_past_end.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/walks.h"

namespace strobe::cuda {

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
/// The same where the first of each pair is float32, at `x`, as far as there are columns. aligned:
/// of x, to 16 bytes; then there are eight columns or none.
template <typename T>
__device__ __forceinline__ float dot_eight(const float* x, int columns, bool aligned,
                                           const uint4& y) {
  float u[8] = {};
  if (aligned) {
    if (columns > 0) {
      const auto* const from = reinterpret_cast<const float4*>(x);
      const float4 low = __ldcs(from), high = __ldcs(from + 1);
      u[0] = low.x, u[1] = low.y, u[2] = low.z, u[3] = low.w;
      u[4] = high.x, u[5] = high.y, u[6] = high.z, u[7] = high.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < columns) u[i] = x[i];
    }
  }
  const uint32_t b[4] = {y.x, y.y, y.z, y.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack<T>(b[i]);
    sum = fmaf(u[2 * i], v.x, fmaf(u[2 * i + 1], v.y, sum));
  }
  return sum;
}

/// Whether a bias hides all keys that the mask shows to a query, one after the other: for where it
/// is rare.
inline __device__ __noinline__ bool bias_hides_all(const Bias& bias, int32_t batch, int32_t head,
                                                   const RowWalk& keys, int32_t query) {
  const BiasPlane plane = BiasPlane::of(bias, batch, head);
  for (int64_t place = keys.begin; place < keys.end; ++place) {
    if (!plane.hides(query, static_cast<int32_t>(keys.block(place)))) return false;
  }
  return true;
}

/// Whether a query that the rule shows some key sees none. not_finite: of the sum of products of dO
/// and O, which tells whether a bias may be why. (A query that a mask has no room for sees what
/// nobody knows, which is not none.)
inline __device__ __noinline__ bool pairs_hide_all(const CommonParams& p, int32_t batch,
                                                   int32_t head, int32_t query, bool not_finite) {
  const Sequence sequence = p.sequence(batch, head);
  const HiddenPairs hidden = HiddenPairs::of(p, sequence, head);
  if (hidden.mask.lacks_room(query)) return false;
  const Range seen = sequence.mask.kv_range({query, query + 1});
  if (!hidden.mask.sees_some(query, seen)) return true;
  if (!p.bias.data || !not_finite) return false;
  for (int64_t key = seen.begin; key < seen.end; ++key) {
    if (!hidden.hides(query, static_cast<int32_t>(key))) return false;
  }
  return true;
}

/// The rank of the first key tile that adds to dQ of a tile of queries, as MaskedStepRecord has it:
/// by its place among the blocks that the mask lists.
inline __device__ __noinline__ uint32_t first_listed_rank(const CommonParams& p, int32_t batch,
                                                          int32_t head, int32_t begin,
                                                          int32_t tile_q, int32_t tile_k) {
  const Sequence sequence = p.sequence(batch, head);
  const Range queries{begin, min64(begin + tile_q, sequence.mask.seqlen_q)};
  const int64_t key_tile = key_walk(sequence.mask, queries, int64_t{tile_k}).begin;
  const BlockLists lists = p.head_mask(sequence, head).queries;
  const int64_t list = begin / lists.own, tiles = lists.other / tile_k, block = key_tile / tiles;
  const int64_t n = lists.find(list, block);
  const bool is_there = n < lists.count(list) && lists.entry(list, n).block == block;
  return static_cast<uint32_t>(n * tiles + (is_there ? key_tile % tiles : 0));
}

inline constexpr int kPreThreads = 256;

/// What the kernels around a main kernel (pre before it, post after it) have to know of it: which
/// form it wants its inputs in, and what it leaves to them. These are the traits of mma.sync's.
struct MmaSyncStageTraits {
  /// Weights are held times kScale = 2^kShift.
  static constexpr float kShift = kWeightShift, kScale = kWeightScale;
  /// pre stores lse and delta in quad_order.
  static constexpr bool kQuadOrder = false;
  /// pre marks the query tiles that may hold an infinity or a NaN, and the main kernel looks at the
  /// marks. Without, dK, dV and dQ that are not finite are marked afterwards, and
  /// backward_pairwise_kernel computes their rows again.
  static constexpr bool kMarksNonfinite = true;
  /// pre calls prepare_keys(p, scratch, i) for each key block i.
  static constexpr bool kPreparesKeys = false;
  /// The main kernel writes dQ itself where scratch.dq is null.
  static constexpr bool kMayStoreDq = false;
  /// The main kernel goes through the lists of a mask as data.
  static constexpr bool kMask = false;
};
struct MaskedStageTraits : MmaSyncStageTraits {
  static constexpr bool kMask = true;
};

/// Thread blocks of a multiprocessor, which bound the registers.
template <typename StageTraits>
inline constexpr int kPreBlocks = StageTraits::kMask             ? 2
                                  : StageTraits::kMarksNonfinite ? 3
                                                                 : 4;

/// Up to where a sink above the keys' scores is still told from lse (core/sink.h).
template <typename StageTraits>
__device__ __forceinline__ float most_sink_above(const BackwardParams& p) {
  return StageTraits::kShift != 0.f && p.dlse ? kMostSinkAboveHalf : kMostSinkAbove;
}
/// What rows of a head add to the gradient of its sink, in place of their sums of products of dO
/// and O (or the caller's delta). By one thread, from a row on in steps. Out of line: its registers
/// would take thread blocks from the launches that want none of it.
template <typename StageTraits>
__device__ __noinline__ void put_sink_rows(const BackwardParams& p, int32_t batch, int32_t head,
                                           int32_t begin, int32_t step, int32_t end) {
  const Sequence sequence = p.sequence(batch, head);
  const float sink = sink_of(p.sinks, head);
  const int64_t lse_at = sequence.lse_row + head * p.lse_head_stride;
#pragma unroll 1
  for (int32_t query = begin; query < end; query += step) {
    const float sum = p.sink_rows[lse_at + query];
    const auto with = SinkOfRow::of<NaturalMath>(sink, p.lse[lse_at + query], p.sinks_in_lse,
                                                 most_sink_above<StageTraits>(p));
    // Where no key is seen out is 0 whatever dout holds, and all weight is the sink's. (Of a row
    // whose keys a bias hides only 0 times what is not finite tells.) Where lse says that it is
    // not, the row has keys elsewhere, in another launch's part.
    const RowWalk keys = single_keys(WalkLists::of(p, batch, head), sequence.mask, query);
    bool empty = keys.empty();
    if constexpr (StageTraits::kMask) {
      empty = empty || pairs_hide_all(p, batch, head, query, isnan(sum));
    } else {
      empty =
          empty || (p.bias.data && isnan(sum) && bias_hides_all(p.bias, batch, head, keys, query));
    }
    empty = empty && !(with.weight < 1.f);
    const float weight = empty ? 1.f : with.weight, of_out = empty && !p.delta ? 0.f : sum;
    const float dlse = p.dlse && p.sinks_in_lse ? p.dlse[lse_at + query] : 0.f;
    p.sink_rows[lse_at + query] = sink == -infinity() ? 0.f : weight * (dlse - of_out);
  }
}

/// Sets rows of a tile of dQ to zero, from `begin` on as far as the tile and the sequence go.
template <int kTileQ, int kWidth>
__device__ __forceinline__ void clear_dq(const RowsView& dq, int32_t begin) {
  constexpr int kChunks = kWidth / 8;
  constexpr uint32_t kZeros[4] = {};
  const bool aligned = dq.aligned();
  const int chunks = min(kTileQ, dq.rows - begin) * kChunks;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += kPreThreads)
    store_words(dq.row(begin + i / kChunks), i % kChunks * 8, dq.dim, aligned, kZeros);
}

/// One thread block per query tile. The kernel waits for memory, so that as many thread blocks
/// should share a multiprocessor as their registers let without spills.
///
/// It does not let the main kernel begin before it ends. The code of both is read for the first
/// time, and comes from memory more slowly together than one after the other: a short pass would
/// take up to a third longer.
template <typename T, int kTileQ, int kWidth, typename StageTraits>
__global__ void __launch_bounds__(kPreThreads, kPreBlocks<StageTraits>)
    backward_pre_kernel(const __grid_constant__ BackwardParams p,
                        const __grid_constant__ BackwardScratch scratch, int64_t items,
                        int32_t counters) {
  const int64_t index = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  if (index == 0 && threadIdx.x == 0) {
    *scratch.ticket = scratch.first_ticket;
    *scratch.any_nonfinite = 0;
  }
  if constexpr (StageTraits::kPreparesKeys) {
    if (index < scratch.key_blocks)
      StageTraits::prepare_keys(p, scratch, static_cast<uint32_t>(index));
  }
  constexpr int kWarps = kPreThreads / 32;
  const WarpOfLaunch own{index * kWarps + static_cast<int>(threadIdx.x / 32),
                         int64_t{gridDim.x} * gridDim.y * kWarps};
  if (p.cu_k) clear_past_end_of_keys(p, own);
  if (p.cu_q) clear_past_end_of_dq(p, own);
  if constexpr (StageTraits::kMask) {
    const int64_t first = int64_t{p.heads} * scratch.tiles * counters;
    const int64_t ends = ended_words(sizes_of(p), scratch.tile_k, counters);
    const int64_t threads = int64_t{gridDim.x} * gridDim.y * kPreThreads;
#pragma unroll 1
    for (int64_t i = index * kPreThreads + threadIdx.x; i < ends; i += threads)
      scratch.additions[first + i] = 0;
  }
  if (index >= items) return;
  const QueryTile tile = query_tile(p, index, scratch.tiles, kTileQ);
  const Sequence sequence = p.sequence(tile.batch, tile.head);
  const auto seqlen = static_cast<int32_t>(sequence.mask.seqlen_q);
  if (tile.begin >= seqlen) return;
  const int64_t at = tile.scratch;
  const int thread = threadIdx.x;
  const bool sums_dq = !StageTraits::kMayStoreDq || scratch.dq != nullptr;
  if (!sums_dq) {
    if (thread == 0) scratch.dq_nonfinite[at] = 0;
    // The main kernel writes the tiles of dQ that the sequence's only block of keys visits; the
    // others are cleared here. (There is no block of keys past the problem's bound.)
    const Range keys{0, min64(sequence.mask.seqlen_k, p.seqlen_k)};
    const auto lists = WalkLists::of(p, tile.batch, tile.head);
    if (!query_walk(lists, sequence.mask, keys, kTileQ).visits(tile.begin / kTileQ)) {
      clear_dq<kTileQ, kWidth>(
          rows_view(p.dq, tile.batch, sequence.q_row, tile.head, seqlen, p.head_dim), tile.begin);
      if (!p.dsinks) return;
    }
  }
  if (thread < counters) {
    // Where additions to dQ have an order, each key tile waits until the counter says its rank.
    uint32_t first = 0;
    if (StageTraits::kMask && p.deterministic) {
      first = first_listed_rank(p, tile.batch, tile.head, tile.begin, kTileQ, scratch.tile_k);
    } else if (p.deterministic) {
      const Range queries{tile.begin, min64(tile.begin + kTileQ, seqlen)};
      first = first_rank(p, scratch, tile.batch, tile.head,
                         key_walk(WalkLists::of(p, tile.batch, tile.head), sequence.mask, queries,
                                  scratch.tile_k));
    }
    scratch.additions[at * counters + thread] = first;
  }

  if (sums_dq && !scratch.items_zero && !scratch.stores_sum) {
    // As far as there are rows and columns, in the blocks of 16 x 8 that a sum is made of
    // (backward/math.cuh).
    auto* const sum = reinterpret_cast<float4*>(scratch.dq + at * (kTileQ * kWidth));
    const int values = min(kTileQ, (seqlen - tile.begin + 15) / 16 * 16) * (kWidth / 4);
#pragma unroll
    for (int i = 0; i < kTileQ * kWidth / 4; i += kPreThreads) {
      const int column = (i + thread) / 32 % (kWidth / 8) * 8;
      if (i + thread < values && column < p.head_dim)
        sum[i + thread] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }

  // kLanes lanes a row, eight columns a lane.
  constexpr int kLanes = kWidth <= 64 ? 8 : kWidth <= 128 ? 16 : 32;
  constexpr int kRows = kPreThreads / kLanes, kPasses = kTileQ / kRows;
  constexpr int kAtOnce = kPasses < 4 ? kPasses : 4;  // so many loads of each tensor under way
  const RowsView out = rows_view(p.out, tile.batch, sequence.q_row, tile.head, seqlen, p.head_dim_v,
                                 p.float_out ? 4 : 2);
  const RowsView dout =
      rows_view(p.dout, tile.batch, sequence.q_row, tile.head, seqlen, p.head_dim_v);
  const RowsView q = rows_view(p.q, tile.batch, sequence.q_row, tile.head, seqlen, p.head_dim);
  // Where delta is given nobody reads out. What is not finite in dO, an inf or a NaN times 0, shows
  // in the sum of products all the same.
  const bool given = p.delta != nullptr, reads_dout = !given || StageTraits::kMarksNonfinite;
  const bool aligned = (given || out.aligned()) && dout.aligned();
  const int lane = thread % kLanes, column = 8 * lane, first = thread / kLanes;
  const int64_t lse_at = sequence.lse_row + tile.head * p.lse_head_stride + tile.begin;
  const auto values = [&](const RowsView& view, int r) {
    return reinterpret_cast<const T*>(view.row(tile.begin + r)) + column;
  };
  const auto zeros = make_uint4(0, 0, 0, 0);
  const float sink = sink_of(p.sinks, tile.head);
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
        if (!given && !p.float_out) x[i] = __ldcs(reinterpret_cast<const uint4*>(values(out, r)));
        if (reads_dout) y[i] = __ldg(reinterpret_cast<const uint4*>(values(dout, r)));
      }
    }
    if (!aligned) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int r = begin + i * kRows;
        if (tile.begin + r < seqlen) {
          if (!given && !p.float_out) x[i] = load_slowly(values(out, r), p.head_dim_v - column);
          if (reads_dout) y[i] = load_slowly(values(dout, r), p.head_dim_v - column);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int r = begin + i * kRows;
      const bool there = tile.begin + r < seqlen;
      float products = 0.f;
      if (given || !p.float_out) {
        products = dot_eight<T>(x[i], y[i]);
      } else if (there) {
        products = dot_eight<T>(reinterpret_cast<const float*>(out.row(tile.begin + r)) + column,
                                p.head_dim_v - column, aligned, y[i]);
      }
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2) {
        products += __shfl_xor_sync(0xffffffffu, products, offset);
      }
      if (lane == 0) {
        const float dlse = there && p.dlse ? p.dlse[lse_at + r] : 0.f;
        const float sum = !given ? products : there ? p.delta[lse_at + r] : 0.f;
        SinkOfRow with{natural[i], 0.f, 1.f};
        if (p.sinks) {
          with = SinkOfRow::of<NaturalMath>(sink, natural[i], p.sinks_in_lse,
                                            most_sink_above<StageTraits>(p));
        }
        const float delta = sum - dlse * with.dlse_factor;
        if (p.dsinks && there) p.sink_rows[lse_at + r] = sum;
        const int64_t place = at * kTileQ + (StageTraits::kQuadOrder ? quad_order(r) : r);
        scratch.delta[place] = delta / StageTraits::kScale;
        // A row past the end gets no weight. (Of one that sees no key every score is masked.) Nor
        // does one whose keys a bias hides, which no mask tells the main kernel.
        const bool is_hidden = p.bias.data && with.lse == -infinity() && isfinite(delta);
        scratch.lse[place] =
            there && !is_hidden ? weight_reference(with.lse, StageTraits::kShift) : infinity();
        nonfinite |= there && (!isfinite(delta) || !isfinite(products) || isnan(with.lse) ||
                               with.lse == infinity());
      }
      // An inf or a NaN in a row of q shows in its lse, unless softcap hides it or the row sees
      // nothing; or it has next to nothing beside its sink, as where all its scores are -inf.
      const bool hidden = p.softcap > 0.f || natural[i] == -infinity() ||
                          (p.sinks_in_lse && natural[i] - sink < 1e-3f);
      if (StageTraits::kMarksNonfinite && there && hidden && column < p.head_dim) {
        const uint4 bits = load_slowly(values(q, r), p.head_dim - column);
        const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
        for (int c = 0; c < 4; ++c) {
          const float2 v = unpack<T>(word[c]);
          nonfinite |= !isfinite(v.x) || !isfinite(v.y);
        }
      }
    }
  }
  // A thread finds the sum of a row where it left it above.
  if (p.dsinks && lane == 0) {
    put_sink_rows<StageTraits>(p, tile.batch, tile.head, tile.begin + first, kRows,
                               min(tile.begin + kTileQ, seqlen));
  }
  if constexpr (StageTraits::kMarksNonfinite) {
    nonfinite = __syncthreads_or(nonfinite) != 0;
    if (thread == 0) scratch.nonfinite[at] = nonfinite;
  }
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_PRE_CUH_
