// Where a share begins, and what comes after each of its pieces.
#ifndef STROBE_CUDA_DECODE_PLACE_CUH_
#define STROBE_CUDA_DECODE_PLACE_CUH_

#include <cstdint>

#include "cuda/common/params.h"
#include "cuda/common/static_order.cuh"
#include "cuda/decode/shares.h"

namespace strobe::cuda {

/// What a launch knows of its division, made on the host.
struct Division {
  KeyCut cut;
  int32_t heads_per_track, tracks, blocks;  // blocks of a track
  int32_t most_tiles;                       // of a sequence
  int32_t piece_rows;                       // rows of a piece in the workspace
  Divisor group;                            // query heads of a key head
  bool alike;                    // nothing but its place tells one sequence from another: then
  SequenceUnits units;           // this is each of them, in a track of heads_per_track
  uint64_t nonce;                // of this launch, of 48 bits, never 0
  unsigned long long* counters;  // [tracks][batch][spans]: pieces that have arrived
  float2* piece_sums;            // [slot][piece_rows]: a row's maximum and sum
  float* piece_o;                // [slot][piece_rows][width]

  STROBE_INLINE constexpr int32_t most_spans() const { return most_tiles * heads_per_track; }
  STROBE_INLINE constexpr int32_t slots_of_track(int32_t batch) const {
    return cut.most_chunks > 0 ? batch * most_spans() * cut.most_chunks : 2 * blocks;
  }
};

#if defined(__CUDACC__)

/// A unit of a track's line. By a whole warp, all lanes alike.
struct Place {
  SequenceUnits s;
  int32_t batch, span, unit;  // of the sequence; of the span

  /// Heads of a track.
  __device__ __forceinline__ static int32_t heads(const Division& d, const DecodeParams& p,
                                                  int32_t track) {
    return min(d.heads_per_track, p.heads_kv - track * d.heads_per_track);
  }

  /// Goes to unit `u` of the line. Returns the units of the line up to the end of the sequence that
  /// it is in: of all sequences, where the line is not so long. Has one look at each sequence,
  /// which costs a launch with cold caches less than a shorter way there in more instructions.
  template <typename Params>
  __device__ __forceinline__ int32_t find(const Division& d, const Params& p, int32_t heads,
                                          int32_t u) {
    const int32_t batch_size = p.cache.batch;
    if (d.alike) {
      s = d.units;
      s.spans = s.tiles * heads;  // the last track may have fewer
      const int32_t all = s.all();
      batch = u / max(all, 1);
      if (batch >= batch_size) return batch_size * all;
      stand_at(u - batch * all);
      return (batch + 1) * all;
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    int32_t begin = 0;
#pragma unroll 1
    for (int32_t first = 0; first < batch_size; first += 32) {
      const int32_t b = first + lane;
      SequenceUnits own{};
      if (b < batch_size) own = d.cut.of(p.cached(b).mask, heads);
      int32_t end = own.all();
#pragma unroll 1
      for (int step = 1; step < 32; step *= 2) {  // inclusive scan over the lanes
        const int32_t before = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end += before;
      }
      const uint32_t past = __ballot_sync(0xffffffffu, u < begin + end);
      if (past) {
        const int source = __ffs(static_cast<int>(past)) - 1;
        batch = first + source;
        s = {__shfl_sync(0xffffffffu, own.tiles, source),
             __shfl_sync(0xffffffffu, own.spans, source),
             __shfl_sync(0xffffffffu, own.first, source),
             __shfl_sync(0xffffffffu, own.units, source),
             __shfl_sync(0xffffffffu, own.chunk, source)};
        begin += __shfl_sync(0xffffffffu, end, source);
        stand_at(u - (begin - s.all()));
        return begin;
      }
      begin += __shfl_sync(0xffffffffu, end, 31);
    }
    return begin;
  }

  /// To the first unit of the next span, which is there.
  template <typename Params>
  __device__ __forceinline__ void next_span(const Division& d, const Params& p, int32_t heads) {
    unit = 0;
    if (++span < s.spans) return;
    span = 0;
    do {  // sequences without queries have no spans
      if (++batch >= p.cache.batch) return;
      if (!d.alike) s = d.cut.of(p.cached(batch).mask, heads);
    } while (s.spans == 0);
  }

 private:
  __device__ __forceinline__ void stand_at(int32_t u) {
    span = u / s.units;
    unit = u - span * s.units;
  }
};

#endif  // __CUDACC__

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_PLACE_CUH_
