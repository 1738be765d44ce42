// The pieces of a thread block's share, one after the other.
#ifndef STROBE_CUDA_DECODE_PIECES_CUH_
#define STROBE_CUDA_DECODE_PIECES_CUH_

#include <cstdint>

#include "cuda/cache/cache_update.cuh"
#include "cuda/decode/place.cuh"

namespace strobe::cuda {

/// The rows of a tile. head: the first query head of the key head's; first: of the packed rows.
struct TileRows {
  int32_t batch, head, first, count;
};

/// What a share holds of a span, with all that copies, products and merging need to know of it: one
/// thread finds it out, for a launch reads each instruction that it executes from memory first.
struct Piece {
  TileRows tile;
  const char* q;      // of query 0 of the sequence, and of the first query head of the key head's
  char* out;          // the same
  int64_t lse;        // the same, in elements
  const char *k, *v;  // the head's elements in row 0 of entry 0 of the cache, or of page 0
  KeyRows rows;       // where the keys are
  BasicMask<int32_t> mask;  // of the tile's queries, the first of which is `first_query`
  int32_t first_query;
  int32_t rotary_start;  // of the sequence
  int32_t in_range;      // whether the sequence's numbers are; else its rows are NaN
  int32_t key, units;    // the first unit's first key; units of this piece
  int32_t begin, end;    // keys that some row of the tile sees
  int32_t counter;       // of the span
  int32_t slot;          // of this piece in the workspace
  SpanPieces pieces;     // of the span, with slots of the workspace
  int32_t more;          // whether the share goes on
  NewKeys fresh;         // where there are any
};

/// Pieces that are known ahead of the one that is computed: the copies may be so far ahead.
inline constexpr int kPiecesKnown = 4;
/// Pieces in shared memory, in turn: while one is computed, the next that becomes known is written,
/// and slow warps still look at the one before.
inline constexpr int kPiecesKept = kPiecesKnown + 2;

#if defined(__CUDACC__)

/// Walks through a share. By a whole warp until it has begun; then by one thread.
class ShareWalk {
 public:
  /// False where the thread block has no share.
  template <typename Params>
  __device__ bool begin(const Division& d, const Params& p) {
    track_ = static_cast<int32_t>(blockIdx.x) % d.tracks;
    block_ = static_cast<int32_t>(blockIdx.x) / d.tracks;
    heads_ = Place::heads(d, p, track_);
    const bool chunked = d.cut.most_chunks > 0;
    int32_t begin = 0;
    // To the end of the line, of the share where there are chunks, and to its begin.
    constexpr int kEndOfLine = 0, kEndOfShare = 1, kBegin = 2;
#pragma unroll 1
    for (int step = kEndOfLine; step <= kBegin; ++step) {
      if (step == kEndOfShare && (!chunked || block_ + 1 >= shares_.blocks)) continue;
      const int32_t unit = step == kEndOfLine ? INT32_MAX : step == kEndOfShare ? end_ : begin;
      const int32_t found = place_.find(d, p, heads_, unit);
      // With chunks a share goes from the first that begins in it to the end of the last one.
      const int32_t skip =
          chunked && step != kEndOfLine ? place_.s.next_chunk(place_.unit) - place_.unit : 0;
      if (step == kEndOfLine) {
        shares_ = Shares::make(found, d.blocks);
        if (block_ >= shares_.blocks) return false;
        begin = shares_.begin(block_);
        end_ = shares_.begin(block_ + 1);
      } else if (step == kEndOfShare) {
        end_ += skip;
      } else {
        begin += skip;
        place_.unit += skip;
      }
    }
    left_ = end_ - begin;
    return left_ > 0;
  }

  /// Whether there is another piece.
  __device__ bool more() const { return left_ > 0; }
  /// Writes the next piece; there is one.
  template <typename Params>
  __device__ __forceinline__ void next(const Division& d, const Params& p, Piece& x) {
    const bool chunked = d.cut.most_chunks > 0;
    if (place_.unit == place_.s.units) place_.next_span(d, p, heads_);
    const SequenceUnits& s = place_.s;
    const int32_t rest = chunked ? min(s.units - place_.unit, s.chunk) : s.units - place_.unit;
    x.units = min(rest, left_);
    const int32_t head = s.spans == s.tiles ? 0 : place_.span / s.tiles;
    const int32_t tile = place_.span - head * s.tiles;
    const int32_t head_kv = track_ * d.heads_per_track + head;
    const CachedSequence sequence = p.cached(place_.batch);
    const auto rows = static_cast<int32_t>(sequence.mask.seqlen_q) * p.group;
    const int32_t first = tile * (1 << d.cut.tile_shift),
                  count = min(rows - first, 1 << d.cut.tile_shift);
    x.tile = {place_.batch, head_kv * p.group, first, count};
    x.q = static_cast<const char*>(p.q.data) +
          2 * p.q.element(sequence.batch, sequence.q_row, x.tile.head);
    x.out = static_cast<char*>(p.out.data) +
            (p.float_out ? 4 : 2) * p.out.element(sequence.batch, sequence.q_row, x.tile.head);
    x.lse = sequence.lse_row + x.tile.head * p.lse_head_stride;
    x.rotary_start = static_cast<int32_t>(sequence.rotary_start);
    x.in_range = sequence.in_range;
    const auto query_of = [&](int32_t row) {
      return static_cast<int32_t>(d.group.divide(static_cast<uint32_t>(row)));
    };
    x.first_query = query_of(first);
    const int32_t queries = query_of(first + count - 1) + 1 - x.first_query;
    x.mask = sequence.mask.tile(x.first_query, queries);
    const Range keys = x.mask.kv_range({0, queries});
    x.begin = static_cast<int32_t>(keys.begin);
    x.end = static_cast<int32_t>(keys.end);
    x.key = (s.first + place_.unit) << d.cut.unit_shift;
    x.rows = sequence.keys;
    x.k = static_cast<const char*>(p.k.data) + 2 * p.k.element(0, 0, head_kv);
    x.v = static_cast<const char*>(p.v.data) + 2 * p.v.element(0, 0, head_kv);
    x.counter = (track_ * p.cache.batch + place_.batch) * d.most_spans() + place_.span;
    const int32_t slots = track_ * d.slots_of_track(p.cache.batch);
    if (chunked) {
      const int32_t first_slot =
          slots + (place_.batch * d.most_spans() + place_.span) * d.cut.most_chunks;
      x.pieces = {first_slot, first_slot + 1, 1, s.chunks()};
      x.slot = first_slot + place_.unit / s.chunk;
    } else if (x.units == s.units) {
      x.pieces = {0, 0, 0, 1};
    } else {
      x.pieces = SpanPieces::of_shares(shares_, end_ - left_ - place_.unit, s.units);
      x.pieces.first_slot += slots;
      x.pieces.second_slot += slots;
      x.slot = slots + 2 * block_ + (first_ ? 0 : 1);
    }
    left_ -= x.units;
    x.more = left_ > 0;
    first_ = false;
    place_.unit += x.units;
  }

 private:
  Place place_{};
  Shares shares_{};
  int32_t track_ = 0, block_ = 0, heads_ = 0, end_ = 0, left_ = 0;
  bool first_ = true;
};

#endif  // __CUDACC__

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_PIECES_CUH_
