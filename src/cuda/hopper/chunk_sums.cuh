// Hopper forward: what the chunks of keys give a row, put together (key_chunks.h); and the kernel
// that does so where thread blocks have shared the chunks of a tile.
#ifndef STROBE_CUDA_HOPPER_CHUNK_SUMS_CUH_
#define STROBE_CUDA_HOPPER_CHUNK_SUMS_CUH_

#include <cstdint>

#include "cuda/cache/cached_row.cuh"
#include "cuda/common/forward_pairwise.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/hopper/forward_sm90_layout.cuh"
#include "cuda/hopper/scheduler.cuh"

namespace strobe::cuda::sm90 {

/// Of a row and some of its keys, in units of log 2.
struct ChunkSums {
  float max, sum;

  /// Whether the row has seen no score above -inf: it adds nothing then, and what is beside it
  /// keeps its bits.
  __device__ __forceinline__ bool is_empty() const { return max == -infinity() && sum == 0.f; }
};

/// Puts the sums and O of later keys and of the chunk before them together. Who does it is no
/// matter of the row, so it is written in roundings, for the compiler to keep.
struct ChunkUnion {
  float later, earlier;  // factors of O
  bool only_later, only_earlier;

  /// sums: of the later keys, and then of both.
  __device__ __forceinline__ static ChunkUnion of(ChunkSums& sums, const ChunkSums& before) {
    const float most = fmaxf(sums.max, before.max), reference = reference_of(most);
    const ChunkUnion u{exp2_fast(sums.max - reference), exp2_fast(before.max - reference),
                       before.is_empty(), sums.is_empty()};
    const float sum = u.join(sums.sum, before.sum);
    sums = {u.only_later ? sums.max : u.only_earlier ? before.max : most, sum};
    return u;
  }
  __device__ __forceinline__ float join(float of_later, float of_earlier) const {
    const float both = __fmaf_rn(of_later, later, __fmul_rn(of_earlier, earlier));
    return only_later ? of_later : only_earlier ? of_earlier : both;
  }
};

/// What a row's sums come to. rounded: as KeyChunks has it. sees(): whether it sees a key.
template <typename T, typename Params, typename Sees>
__device__ __forceinline__ RowResult result_of(const Params& p, int32_t head, const ChunkSums& sums,
                                               bool rounded, const Sees& sees) {
  RowResult result{__fdividef(1.f, sums.sum), (sums.max + __log2f(sums.sum)) * kLn2};
  if (sums.sum == 0.f || p.sinks) result = finish_row(p, head, sees(), sums.max, sums.sum, 1.f);
  if (!rounded && is_coarse<T>(sums.max)) result.factor = infinity();  // so that O is suspect
  return result;
}

inline constexpr int kMergingWarps = 4;

/// Puts the pieces of rows together, a warp for each row of the tile with number blockIdx.x.
/// order: of whole tiles, one for each thread block.
template <typename Tr, typename Params>
__global__ void __launch_bounds__(32 * kMergingWarps)
    merge_chunks_kernel(const __grid_constant__ Params p, const __grid_constant__ TileOrder order) {
  using T = typename Tr::T;
  constexpr int kTileQ = Tr::kWarpgroups * kWarpgroupRows, kShare = Tr::kWidth / 32;
  const auto& sequences = sequences_of<false>(p);
  const int pack = pack_of(p);
  TilePlace place;
  TileScheduler<kTileQ, true, std::remove_cvref_t<decltype(sequences)>> scheduler(order, sequences,
                                                                                  pack);
  if (!scheduler.next(true, place)) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int row = static_cast<int>(kMergingWarps * blockIdx.y + threadIdx.x / 32);
  const auto sequence = sequences.sequence(static_cast<uint32_t>(place.batch), place.head << pack);
  const int query = place.begin + query_of(p, row);
  if (row >= p.chunks.piece_rows || query >= sequence.seqlen_q ||
      query_of(p, row) >= kTileQ >> pack) {
    return;
  }
  const int head = (place.head << pack) + head_of(p, row);

  ChunkSums sums{-infinity(), 0.f};
  float o[kShare] = {};
  for (int chunk = p.chunks.of_tile - 1; chunk >= 0; --chunk) {
    const int64_t piece =
        (int64_t{blockIdx.x} * p.chunks.of_tile + chunk) * p.chunks.piece_rows + row;
    const ChunkSums before{p.chunks.piece_sums[2 * piece], p.chunks.piece_sums[2 * piece + 1]};
    if (before.is_empty()) continue;
    const ChunkUnion u = ChunkUnion::of(sums, before);
#pragma unroll
    for (int i = 0; i < kShare; ++i)
      o[i] = u.join(o[i], p.chunks.piece_o[piece * Tr::kWidth + lane + 32 * i]);
  }
  RowResult result = result_of<T>(p, head, sums, p.chunks.rounded,
                                  [&] { return !sequence.mask.row(query).empty(); });
  if constexpr (kCached<Params>) {
    if (!sequence.in_range) result = {__int_as_float(0x7fffffff), __int_as_float(0x7fffffff)};
  }
  if (p.lse && lane == 0)
    p.lse[sequence.lse_row + int64_t{head} * p.lse_head_stride + query] = result.lse;
  const OutRow<T> out = out_row<T>(p, sequence, head, query);
  bool is_finite = true;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int column = lane + 32 * i;
    if (column >= p.head_dim_v) continue;
    out.put(column, o[i] * result.factor);
    is_finite &= fabsf(out[column]) < infinity();
  }
  if (result.factor != result.factor || __all_sync(0xffffffffu, is_finite)) return;
  __syncwarp();  // lanes write the row again that others have written
  if constexpr (kCached<Params>) {
    pairwise_cached_row<T>(static_cast<const CachedParams&>(p), place.batch, head, query);
  } else {
    pairwise_row<T, false, false, false>(p, place.batch, head, query);
  }
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_CHUNK_SUMS_CUH_
