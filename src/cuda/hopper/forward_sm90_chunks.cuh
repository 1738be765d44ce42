// Hopper forward: chunks of keys (key_chunks.h), where the bits of a row may depend on the row
// alone. A tile goes through its chunks from the last to the first. What it has of those behind it
// is parked in memory while a chunk is under way, and appended to that when it is done; or thread
// blocks have a chunk of a tile each, and a second kernel appends them in the same order.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_CHUNKS_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_CHUNKS_CUH_

#include <cstdint>

#include "cuda/hopper/chunk_sums.cuh"
#include "cuda/hopper/forward_sm90_consumer.cuh"
#include "cuda/hopper/key_chunks.h"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/thread_again.h"

namespace strobe::cuda::sm90 {

/// Whether a chunk of keys (key_chunks.h) begins at this place, seen from its end, and is not the
/// walk's first.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ bool Consumer<Tr, kGeneral, kAllRowsUsed, Params>::begins_chunk(
    const PartWalk& walk, int place) {
  constexpr int kBlocks = chunk_blocks(kTileK);
  return walk.has(place) && walk.has(place + 1) &&
         walk.block(place) / kBlocks != walk.block(place + 1) / kBlocks;
}

/// Whether a chunk begins here, and the one that the tile comes from is parked. Where sequences
/// turn out longer than the launch was told there is no room for that, and all is one chunk.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ bool Consumer<Tr, kGeneral, kAllRowsUsed, Params>::parks_at(
    const PartWalk& walk, int place) const {
  return p_.chunks.parked && begins_chunk(walk, place);
}

/// Down to which place, from this full one on, blocks are full and of one chunk. Known before
/// the steps, between which there is no time to look for a chunk's end.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ int Consumer<Tr, kGeneral, kAllRowsUsed, Params>::run_begin(
    const PartWalk& walk, int place) {
  int end = walk.full_run_begin(place);
  if constexpr (Tr::kChunked && kWalksAreLists) {
    const int run = end;
    for (end = place; end != run && !begins_chunk(walk, end - 1);) --end;
  } else if constexpr (Tr::kChunked) {
    constexpr int kBlocks = chunk_blocks(kTileK);
    end = max(end, place / kBlocks * kBlocks);  // a place is its block
  }
  return end;
}

/// Begins the next chunk of a tile's keys. The one before is retired as a tile is: its last O +=
/// P V is done in this one's first step, and then finish_chunk has it.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::begin_chunk() {
  retire_chunk();
  begin_sums();
  first_ = true;
}

/// Parks the sums of a chunk whose scores have all been seen.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::retire_chunk() {
  slots_.finish();
  const float sum[2] = {quad_sum(sum_[0]), quad_sum(sum_[1])};
  parked()[Parked<kWidth>::at(Parked<kWidth>::kOwnSums)] =
      make_float4(max_[0], sum[0], max_[1], sum[1]);
}

/// What this thread parks, by Parked::at.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ float4* Consumer<Tr, kGeneral, kAllRowsUsed, Params>::parked() const {
  const auto warpgroup = static_cast<int32_t>(blockIdx.x) * Tr::kWarpgroups + warpgroup_;
  const int thread = ptx::thread_again() % kWarpgroupThreads;
  return reinterpret_cast<float4*>(p_.chunks.parked + Parked<kWidth>::begin(warpgroup)) + thread;
}

/// Appends what is parked of the tile of this walk to O of the chunk that was retired, whose
/// products are all done; last: the last place of the chunk. is_complete: it is the tile's last
/// chunk, of which done_factor_ and lse become what retire makes of them elsewhere. Else O is
/// parked.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::finish_chunk(
    const PartWalk& walk, int last, bool is_complete) {
  using Place = Parked<kWidth>;
  constexpr int kBlocks = chunk_blocks(kTileK);
  // What ptxas has to write to O in a branch gets registers beside those of O, and at width 256
  // there are none: there what two chunks come to goes to memory alone, and is O when all is there.
  constexpr bool kJoinsInMemory = kWidth > 192;
  const Tile<Tr::kWarpgroups>& tile = shared_.tiles[slots_.done()];
  // Of a few queries most warps have no row.
  if (warpgroup_ * kWarpgroupRows + 16 * warp() >= tile.rows) return;
  float4* const quads = parked();
  const float4 own = quads[Place::at(Place::kOwnSums)];
  ChunkSums sums[2] = {{own.x, own.y}, {own.z, own.w}};
  const bool is_first = walk.block(last) / kBlocks == walk.block(walk.end - 1) / kBlocks;
  if (!is_first) {
    const float4 later = quads[Place::at(Place::kSums)];
    sums[0] = {later.x, later.y};
    sums[1] = {later.z, later.w};
    const ChunkUnion both[2] = {ChunkUnion::of(sums[0], {own.x, own.y}),
                                ChunkUnion::of(sums[1], {own.z, own.w})};
    if constexpr (kJoinsInMemory) {
      constexpr int kTogether = 8;
#pragma unroll
      for (int i = 0; i < Place::kQuads; i += kTogether) {
        float4 o[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) o[j] = ptx::load_in_turn(quads + Place::at(i + j));
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          const float* const here = o_ + 4 * (i + j);
          o[j] = make_float4(both[0].join(o[j].x, here[0]), both[0].join(o[j].y, here[1]),
                             both[1].join(o[j].z, here[2]), both[1].join(o[j].w, here[3]));
          ptx::store_in_turn(quads + Place::at(i + j), o[j]);
        }
      }
      if (is_complete) {
#pragma unroll
        for (int i = 0; i < Place::kQuads; ++i) {
          const float4 o = ptx::load_in_turn(quads + Place::at(i));
          o_[4 * i] = o.x, o_[4 * i + 1] = o.y, o_[4 * i + 2] = o.z, o_[4 * i + 3] = o.w;
        }
      }
    } else {
      // As many at a time as S has registers, which is not there now: no load is moved to before a
      // __syncwarp.
      constexpr int kTogether = kTileK / 8;
#pragma unroll
      for (int i = 0; i < Place::kQuads; ++i) {
        if (i > 0 && i % kTogether == 0) __syncwarp();
        const float4 o = quads[Place::at(i)];
        o_[4 * i] = both[0].join(o.x, o_[4 * i]);
        o_[4 * i + 1] = both[0].join(o.y, o_[4 * i + 1]);
        o_[4 * i + 2] = both[1].join(o.z, o_[4 * i + 2]);
        o_[4 * i + 3] = both[1].join(o.w, o_[4 * i + 3]);
      }
    }
  }
  if (!is_complete) {
    if (!kJoinsInMemory || is_first) {
#pragma unroll
      for (int i = 0; i < Place::kQuads; ++i)
        quads[Place::at(i)] = make_float4(o_[4 * i], o_[4 * i + 1], o_[4 * i + 2], o_[4 * i + 3]);
    }
    quads[Place::at(Place::kSums)] =
        make_float4(sums[0].max, sums[0].sum, sums[1].max, sums[1].sum);
    return;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowResult result =
        result_of<T>(p_, tile.head + head_of(p_, row(r)), sums[r], kGeneral,
                     [&] { return walk.meets(mask_of(tile).row(query(r)), kTileK); });
    done_factor_[r] = result.factor;
    if (p_.lse && row(r) < tile.rows && lane() % 4 == 0) p_.lse[lse_row(tile, r)] = result.lse;
  }
}

/// Leaves O and sums of the tile's chunk to merge_chunks_kernel.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::store_piece(
    const Tile<Tr::kWarpgroups>& tile) {
  const float4 own = parked()[Parked<kWidth>::at(Parked<kWidth>::kOwnSums)];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row(r) >= tile.rows) continue;
    const int64_t piece = int64_t{tile.number} * p_.chunks.piece_rows + row(r);
    const int column = 2 * (lane() % 4);
    if (column == 0) {
      *reinterpret_cast<float2*>(p_.chunks.piece_sums + 2 * piece) =
          r == 0 ? make_float2(own.x, own.y) : make_float2(own.z, own.w);
    }
    float* const to = p_.chunks.piece_o + piece * kWidth + column;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
      *reinterpret_cast<float2*>(to + 8 * n) =
          make_float2(o_[4 * n + 2 * r], o_[4 * n + 2 * r + 1]);
  }
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_CHUNKS_CUH_
