// Where a share begins, and what comes after each of its pieces.
#ifndef STROBE_CUDA_DECODE_PLACE_CUH_
#define STROBE_CUDA_DECODE_PLACE_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/params.h"
#include "cuda/common/static_order.cuh"
#include "cuda/decode/listed_keys.h"
#include "cuda/decode/shares.h"

namespace strobe::cuda {

struct OpenSpan;

/// What a launch knows of its division, made on the host.
struct Division {
  KeyCut cut;
  int32_t heads_per_track, tracks;
  Divisor blocks;                // of a track
  Divisor of_span;               // blocks that a span has for itself; 0: shares begin anywhere
  int32_t most_tiles;            // of a sequence
  int32_t piece_rows;            // rows of a piece in the workspace
  Divisor group;                 // query heads of a key head
  uint64_t nonce;                // of this launch, of 48 bits, never 0
  unsigned long long* counters;  // [tracks][batch][spans]: pieces that have arrived
  float2* piece_sums;            // [slot][piece_rows]: a row's maximum and sum
  float* piece_o;                // [slot][piece_rows][width]
  OpenSpan* open_spans;          // as counters, for a kernel that merges; null: this one does

  STROBE_INLINE constexpr int32_t most_spans() const { return most_tiles * heads_per_track; }
  STROBE_INLINE constexpr int32_t slots_of_track(int32_t batch) const {
    const auto shares = static_cast<int32_t>(blocks.value);
    if (!cut.chunked()) return 2 * shares;
    return cut.whole_spans ? shares : batch * most_spans() * cut.most_chunks;
  }
};

/// A division whose spans are cut into chunks: its kernels are instances of their own, so that
/// nothing of this is in the others.
struct ChunkedDivision : Division {};
template <typename AnyDivision>
inline constexpr bool kChunked = std::is_same_v<AnyDivision, ChunkedDivision>;

#if defined(__CUDACC__)

/// What the walk of a track's spans of a sequence is made of: the lists of all query heads whose
/// keys it has. heads: key heads of the track.
__device__ __forceinline__ WalkLists lists_of_track(const Division& d, const CachedParams& p,
                                                    int32_t batch, int32_t track, int32_t heads) {
  const int32_t first = track * d.heads_per_track;
  return WalkLists::of_heads(p, batch, first * p.group, (first + heads) * p.group);
}

/// SequenceUnits of one span alone, under a mask as data: its own list says how many they are. Its
/// walk is that of the keys of listed blocks, put together without gaps; with a bias and no mask,
/// of all keys that its rows may see.
struct ListedUnits : SequenceUnits {
  ListedKeys listed;
};

/// What the line of a track is made of: sequences, whose spans are alike; under a mask as data
/// spans, each of which has units of its own.
template <typename Params>
struct Line {
  using Units = std::conditional_t<kMasked<Params>, ListedUnits, SequenceUnits>;

  __device__ __forceinline__ static int32_t parts(const Division& d, const Params& p) {
    return kMasked<Params> ? p.cache.batch * d.most_spans() : p.cache.batch;
  }
  __device__ __forceinline__ static int32_t batch_of(const Division& d, int32_t part) {
    return kMasked<Params> ? part / d.most_spans() : part;
  }
  /// The units of a part, whose sequence this is. heads: of the track.
  __device__ __forceinline__ static Units units(const Division& d, const Params& p,
                                                const CachedSequence& sequence, int32_t track,
                                                int32_t heads, int32_t part) {
    if constexpr (kMasked<Params>) {
      const auto batch = static_cast<int32_t>(sequence.batch);
      const int32_t span = part - batch * d.most_spans(), head = span / d.most_tiles;
      const auto rows = static_cast<int32_t>(sequence.mask.seqlen_q) * p.group;
      const int32_t first = (span - head * d.most_tiles) << d.cut.tile_shift;
      ListedUnits s{};
      if (head >= heads || first >= rows) return s;
      const int32_t last = min(first + (1 << d.cut.tile_shift), rows) - 1;
      const Range queries{d.group.divide(static_cast<uint32_t>(first)),
                          int64_t{d.group.divide(static_cast<uint32_t>(last))} + 1};
      const SpanLists& lists = p.span_lists;
      const Range seen = sequence.mask.kv_range(queries);
      int32_t begin = 0, keys = 0;
      if (p.mask) {
        s.listed = ListedKeys::of(lists.of(batch, track * d.heads_per_track + head, sequence.q_row),
                                  queries.begin / lists.numbers.block_q, seen);
        keys = s.listed.keys(lists.log2_k);
      } else if (!seen.empty()) {
        begin = static_cast<int32_t>(seen.begin), keys = static_cast<int32_t>(seen.end);
      }
      s.tiles = s.spans = 1;
      s.walk.begin = begin >> d.cut.unit_shift;
      s.walk.end = max(s.walk.begin + 1, (keys + (1 << d.cut.unit_shift) - 1) >> d.cut.unit_shift);
      return s;
    } else {
      return d.cut.of(lists_of_track(d, p, part, track, heads), sequence.mask, heads);
    }
  }
};

/// The parts of a line that a thread block looks at together, one for each thread, and where their
/// units lie in the line of a track. Threads look at them in parallel, since a launch with cold
/// caches executes most instructions once, and its time is that of the longest chain of them.
template <typename Params>
struct Look {
  CachedSequence sequence;
  typename Line<Params>::Units s;
  int32_t part, begin, end;  // of the line; empty where there is no such part

  /// The parts from `first` on, whose units begin at `before`, by the whole thread block.
  /// heads: of the track. totals: shared, a word for each warp; a barrier has to lie between two
  /// looks. Returns where the units of them all end.
  template <int kThreads>
  __device__ __forceinline__ int32_t at(const Division& d, const Params& p, int32_t track,
                                        int32_t heads, int32_t first, int32_t before,
                                        int32_t* totals) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    part = first + static_cast<int32_t>(threadIdx.x);
    int32_t all = 0;
    if (part < Line<Params>::parts(d, p)) {
      sequence = p.cached_of_all_heads(Line<Params>::batch_of(d, part));
      s = Line<Params>::units(d, p, sequence, track, heads, part);
      all = s.all();
    }
    end = all;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {  // inclusive scan over the lanes
      const int32_t other = __shfl_up_sync(0xffffffffu, end, step);
      if (lane >= step) end += other;
    }
    if (lane == 31) totals[warp] = end;
    __syncthreads();
    int32_t after = before;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w == warp) end += after;
      after += totals[w];
    }
    begin = end - all;
    return after;
  }

  /// Whether a unit of the line is of this thread's part.
  __device__ __forceinline__ bool holds(int32_t unit) const { return begin <= unit && unit < end; }
};

/// A unit of a track's line.
template <typename Params>
struct Place {
  typename Line<Params>::Units s;
  int32_t part, span, unit;  // of the line; of the part; of the span

  /// Heads of a track.
  __device__ __forceinline__ static int32_t heads(const Division& d, const CachedParams& p,
                                                  int32_t track) {
    return min(d.heads_per_track, p.heads_kv - track * d.heads_per_track);
  }

  /// The unit `u` of the line, which is of the part looked at.
  __device__ __forceinline__ static Place of(const Look<Params>& look, int32_t u) {
    const int32_t own = u - look.begin, span = own / look.s.units();
    return {look.s, look.part, span, own - span * look.s.units()};
  }

  /// To the first unit of the next span, which is there, if this span has no further unit. Returns
  /// the sequence. It is looked at only once, since the thread that walks keeps a team of warps
  /// waiting.
  __device__ __forceinline__ CachedSequence enter_span(const Division& d, const Params& p,
                                                       int32_t track, int32_t heads) {
    using OfLine = Line<Params>;
    bool other = false;
    if (unit == s.units()) {
      unit = 0;
      other = ++span == s.spans;
    }
    if (other) span = 0, ++part;
    CachedSequence sequence = p.cached_of_all_heads(OfLine::batch_of(d, part));
    if (!other) return sequence;
    s = OfLine::units(d, p, sequence, track, heads, part);
    // Sequences without queries have no spans.
    while (s.spans == 0 && part + 1 < OfLine::parts(d, p)) {
      sequence = p.cached_of_all_heads(OfLine::batch_of(d, ++part));
      s = OfLine::units(d, p, sequence, track, heads, part);
    }
    return sequence;
  }
};

#endif  // __CUDACC__

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_PLACE_CUH_
