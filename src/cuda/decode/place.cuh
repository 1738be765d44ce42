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
  UnitRule rule;
  int32_t heads_per_column, columns, blocks;  // blocks of a column
  int32_t most_tiles;                         // of a sequence
  int32_t piece_rows;                         // rows of a piece in the workspace
  Divisor group;                              // query heads of a key head
  bool alike;                    // nothing but its place tells one sequence from another: then
  SequenceUnits units;           // this is each of them, in a column of heads_per_column
  uint64_t nonce;                // of this launch, of 48 bits, never 0
  unsigned long long* counters;  // [columns][batch][spans]: pieces that have arrived
  float2* piece_sums;            // [slot][piece_rows]: a row's maximum and sum
  float* piece_o;                // [slot][piece_rows][width]

  STROBE_INLINE constexpr int32_t most_spans() const { return most_tiles * heads_per_column; }
  STROBE_INLINE constexpr int32_t slots_of_column(int32_t batch) const {
    return rule.most_chunks > 0 ? batch * most_spans() * rule.most_chunks : 2 * blocks;
  }
};

#if defined(__CUDACC__)

/// A unit of a column's line. By a whole warp, all lanes alike.
struct Place {
  SequenceUnits s;
  int32_t batch, span, unit;  // of the sequence; of the span

  /// Heads of a column.
  __device__ __forceinline__ static int32_t heads(const Division& d, const DecodeParams& p,
                                                  int32_t column) {
    return min(d.heads_per_column, p.heads_kv - column * d.heads_per_column);
  }
  __device__ __forceinline__ static SequenceUnits units(const Division& d, const DecodeParams& p,
                                                        int32_t heads, int32_t batch) {
    if (!d.alike) return d.rule.of(p.cache.sequence(batch).mask, heads);
    SequenceUnits s = d.units;
    s.spans = s.tiles * heads;  // the last column may have fewer
    return s;
  }

  /// Units of the line.
  __device__ static int32_t total(const Division& d, const DecodeParams& p, int32_t heads) {
    if (d.alike) return p.cache.batch * units(d, p, heads, 0).all();
    int32_t sum = 0;
    for (int32_t b = static_cast<int32_t>(threadIdx.x % 32); b < p.cache.batch; b += 32)
      sum += units(d, p, heads, b).all();
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
  }

  /// Goes to unit `u` of the line, which is there.
  __device__ void find(const Division& d, const DecodeParams& p, int32_t heads, int32_t u) {
    if (d.alike) {
      s = units(d, p, heads, 0);
      batch = u / s.all();
      stand_at(u - batch * s.all());
      return;
    }
    const int lane = static_cast<int>(threadIdx.x % 32);
    int32_t begin = 0;
    for (int32_t first = 0;; first += 32) {
      const int32_t b = first + lane;
      int32_t end = b < p.cache.batch ? units(d, p, heads, b).all() : 0;
      for (int step = 1; step < 32; step *= 2) {  // inclusive scan over the lanes
        const int32_t before = __shfl_up_sync(0xffffffffu, end, step);
        if (lane >= step) end += before;
      }
      const uint32_t past = __ballot_sync(0xffffffffu, u < begin + end);
      if (past || first + 32 >= p.cache.batch) {
        const int source = past ? __ffs(static_cast<int>(past)) - 1 : 0;
        batch = first + source;
        if (source > 0) begin += __shfl_sync(0xffffffffu, end, source - 1);
        s = units(d, p, heads, batch);
        stand_at(u - begin);
        return;
      }
      begin += __shfl_sync(0xffffffffu, end, 31);
    }
  }

  /// To the first unit of the next span, which is there.
  __device__ __forceinline__ void next_span(const Division& d, const DecodeParams& p,
                                            int32_t heads) {
    unit = 0;
    if (++span < s.spans) return;
    span = 0;
    do {  // sequences without queries have no spans
      if (++batch >= p.cache.batch) return;
      if (!d.alike) s = units(d, p, heads, batch);
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
