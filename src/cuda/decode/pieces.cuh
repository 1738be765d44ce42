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

/// The scales of a head's keys and values, as a sequence reads them: of row 0 of entry 0, or of
/// page 0.
struct HeadScales {
  const char *k, *v;
};

/// What a share holds of a span, with all that copies, products and merging need to know of it, so
/// that it is found out once: a launch reads each instruction that it executes from memory first.
struct Piece {
  TileRows tile;
  const char* q;      // of query 0 of the sequence, and of the first query head of the key head's
  char* out;          // the same
  int64_t lse_row;    // of query 0 of the sequence and head 0, in elements
  const char *k, *v;  // the head's elements in row 0 of entry 0 of the cache, or of page 0
  KeyRows rows;       // where the keys are
  BasicMask<int32_t> mask;  // of the tile's queries, the first of which is `first_query`
  int32_t first_query;
  int32_t q_row;           // the sequence's first row in q and out
  int32_t rotary_start;    // of the sequence
  int32_t in_range;        // whether the sequence's numbers are; else its rows are NaN
  BlocksOf<int32_t> walk;  // the span's, as far as this piece goes: a unit is a block
  int32_t begin, end;      // keys that some row of the tile sees
  int32_t counter;         // of the span
  int32_t slot;            // of this piece in the workspace
  int32_t number;          // of this piece in the span, where that is cut into chunks
  SpanPieces pieces;       // of the span, with slots of the workspace
  int32_t more;            // whether the share goes on
  union {
    NewKeys fresh;      // where there are any
    HeadScales scales;  // of a quantised cache
    ListedKeys listed;  // of the span, under a mask as data
  };

  /// Whether some row of the tile may see some key of the piece. unit: keys of a unit.
  STROBE_INLINE constexpr bool sees_keys(int32_t unit) const {
    return walk.block(walk.begin) * unit < end && begin < (walk.block(walk.end - 1) + 1) * unit;
  }
};

/// A span of several pieces that are left for the kernel after this one to merge: any of its
/// pieces; the launch's nonce, by which that kernel knows it from what lay in the workspace before;
/// and how many thread blocks of that kernel have looked at it. All have when the launch ends, so
/// that the same launch in a graph, which has the same nonce and maybe other lengths, finds none of
/// the replay before.
struct alignas(16) OpenSpan {
  Piece piece;
  uint64_t nonce;
  uint32_t looks;
};

/// The most pieces that are known ahead of the one that is computed: copies may run so far ahead.
inline constexpr int kPiecesKnown = 4;
/// The number of pieces, from the first, that are known when piece n is computed. Two at first, for
/// each takes a thread some microseconds, and two more during each piece until they are enough.
STROBE_INLINE constexpr int32_t pieces_known(int32_t n) {
  return n + 2 < kPiecesKnown ? 2 * n + 2 : n + kPiecesKnown;
}
/// Pieces in shared memory, in turn: while one is computed, the next that becomes known is written,
/// and slow warps still look at the one before.
inline constexpr int kPiecesKept = kPiecesKnown + 2;

#if defined(__CUDACC__)

/// Walks through a share. By the whole thread block until it has begun; then by one thread.
template <typename Params>
class ShareWalk {
 public:
  /// To the begin of the share. True for one thread, which is at it and knows what `look` says of
  /// its sequence; for none where the thread block has no share. words: shared, one for each warp;
  /// word: another, which is used up to the last barrier in here.
  template <int kThreads, typename AnyDivision>
  __device__ __forceinline__ bool begin(const AnyDivision& d, const Params& p, Look<Params>& look,
                                        int32_t* words, int32_t* word) {
    track_ = static_cast<int32_t>(blockIdx.x);
    block_ = static_cast<int32_t>(blockIdx.y);
    heads_ = Place<Params>::heads(d, p, track_);
    const int32_t parts = Line<Params>::parts(d, p);
    // Asked while the launch runs, which knows it: where it is a constant, ptxas makes one loop of
    // two, and spills in kernels that append.
    const bool chunked = kChunked<AnyDivision> || d.cut.chunked();
    // To the end of the line; then to the end of the share, where there are chunks, and to its
    // begin. Of a line that has a thread for each part, all are in sight after the first.
    constexpr int kEndOfLine = 0, kEndOfShare = 1, kBegin = 2;
    int32_t begin = 0;
#pragma unroll 1
    for (int step = kEndOfLine;; ++step) {
      if (step == kEndOfShare && (!chunked || block_ + 1 >= shares_.blocks)) continue;
      const int32_t unit = step == kEndOfLine ? INT32_MAX : step == kEndOfShare ? end_ : begin;
      if (step == kEndOfLine || parts > kThreads) {
        int32_t found = 0;
#pragma unroll 1
        for (int32_t first = 0; first < parts && found <= unit; first += kThreads) {
          if (step != kEndOfLine || first > 0) __syncthreads();
          found = look.template at<kThreads>(d, p, track_, heads_, first, found, words);
        }
        if (step == kEndOfLine) {
          const int32_t spans = p.cache.batch * d.most_tiles * heads_;
          const auto own = static_cast<int32_t>(d.of_span.value);
          shares_ = own > 0 && found >= own * spans ? Shares::of_spans(found, spans, d.of_span)
                                                    : Shares::make(found, d.blocks);
          if (block_ >= shares_.blocks) return false;
          begin = shares_.begin(block_);
          end_ = shares_.begin(block_ + 1);
          continue;
        }
      }
      // With chunks a share goes from the first that begins in it to the end of the last one; or
      // from the first span to the end of the last one.
      int32_t skip = 0;
      const bool holds = look.holds(unit);
      if (holds) {
        place_ = Place<Params>::of(look, unit);
        if (chunked) skip = d.cut.share_begin(place_.s, place_.unit) - place_.unit;
      }
      if (step == kBegin) {
        place_.unit += skip;
        left_ = end_ - begin - skip;
        return holds;
      }
      if (holds) *word = skip;
      __syncthreads();
      end_ += *word;
      __syncthreads();
    }
  }

  /// Whether there is another piece.
  __device__ bool more() const { return left_ > 0; }
  /// Whether the next piece is of the span that the walk is in.
  __device__ bool in_span() const { return place_.unit < place_.s.units(); }
  /// To the span of the next piece, which there is. Returns its sequence.
  __device__ __forceinline__ CachedSequence enter(const Division& d, const Params& p) {
    return place_.enter_span(d, p, track_, heads_);
  }
  /// Writes the next piece, but for what `complete` does; there is one, of the span that the walk
  /// is in, whose sequence this is.
  template <typename AnyDivision>
  __device__ __forceinline__ void next(const AnyDivision& d, const Params& p,
                                       const CachedSequence& sequence, Piece& x) {
    const typename Line<Params>::Units& s = place_.s;
    const int32_t end =
        kChunked<AnyDivision> ? s.chunk_end(place_.unit, d.cut.chunk_shift) : s.units();
    const int32_t units = min(end - place_.unit, left_), from = s.walk.begin + place_.unit;
#if STROBE_RANDOM_WALKS
    x.walk = s.walk.places(from, from + units);
#else
    x.walk = {from, from + units};  // `places` says the same, and ptxas makes other code of it
#endif
    const int32_t batch = Line<Params>::batch_of(d, place_.part);
    int32_t head = 0, tile = 0;
    if constexpr (kMasked<Params>) {
      const int32_t span = place_.part - batch * d.most_spans();
      head = span / d.most_tiles;
      tile = span - head * d.most_tiles;
    } else {
      head = s.spans == s.tiles ? 0 : place_.span / s.tiles;
      tile = place_.span - head * s.tiles;
    }
    const int32_t head_kv = track_ * d.heads_per_track + head;
    const auto rows = static_cast<int32_t>(sequence.mask.seqlen_q) * p.group;
    const int32_t first = tile * (1 << d.cut.tile_shift),
                  count = min(rows - first, 1 << d.cut.tile_shift);
    x.tile = {batch, head_kv * p.group, first, count};
    x.q = static_cast<const char*>(p.q.data) +
          2 * p.q.element(sequence.batch, sequence.q_row, x.tile.head);
    x.q_row = static_cast<int32_t>(sequence.q_row);
    x.lse_row = sequence.lse_row;
    x.rotary_start = static_cast<int32_t>(sequence.rotary_start);
    x.in_range = sequence.in_range;
    const auto query_of = [&](int32_t row) {
      return static_cast<int32_t>(d.group.divide(static_cast<uint32_t>(row)));
    };
    x.first_query = query_of(first);
    const int32_t queries = query_of(first + count - 1) + 1 - x.first_query;
    x.mask = sequence.mask.tile(x.first_query, queries);
    const IntervalWalk<int32_t> keys = key_walk(x.mask, {0, queries}, 1);
    x.begin = keys.begin;
    x.end = keys.end;
    x.rows = sequence.keys;
    constexpr int kBytes = kQuantised<Params> ? 1 : 2;  // of what strides count
    x.k = static_cast<const char*>(p.k.data) + kBytes * p.k.element(0, 0, head_kv);
    x.v = static_cast<const char*>(p.v.data) + kBytes * p.v.element(0, 0, head_kv);
    if constexpr (kUpdates<Params>) x.fresh = new_keys_of(p, sequence, head_kv);
    if constexpr (kMasked<Params>) x.listed = s.listed;
    if constexpr (kQuantised<Params>) {
      const RowScales &k = p.quantised.k_scale, &v = p.quantised.v_scale;
      const int32_t b = x.tile.batch;
      x.scales = {k.at(b, 0, 0, head_kv), v.at(b, 0, 0, head_kv)};
    }
    left_ -= units;
    x.more = left_ > 0;
    ++pieces_;
    place_.unit += units;
  }
  /// Completes the piece that next() wrote last, with what is needed only once the piece has been
  /// computed.
  template <typename AnyDivision>
  __device__ __forceinline__ void complete(const AnyDivision& d, const Params& p, Piece& x) const {
    x.out = static_cast<char*>(p.out.data) +
            2 * p.out_words() * p.out.element(x.tile.batch, x.q_row, x.tile.head);
    const int32_t batch_size = p.cache.batch;
    const SequenceUnits& s = place_.s;
    const int32_t units = x.walk.end - x.walk.begin, unit = place_.unit - units;
    const int32_t span = kMasked<Params> ? place_.part : place_.part * d.most_spans() + place_.span;
    x.counter = track_ * batch_size * d.most_spans() + span;
    const int32_t slots = track_ * d.slots_of_track(batch_size);
    if constexpr (kChunked<AnyDivision>) {
      const int32_t shift = d.cut.chunk_shift;
      const int32_t first_slot = slots + (d.cut.whole_spans ? block_ : span * d.cut.most_chunks);
      x.pieces = {first_slot, first_slot + 1, 1, s.chunks(shift)};
      x.number = s.chunk(unit, shift);
      x.slot = first_slot + (d.cut.whole_spans ? 0 : x.number);
    } else if (units == s.units()) {
      x.pieces = {0, 0, 0, 1};
    } else {
      x.pieces = SpanPieces::of_shares(shares_, end_ - left_ - units - unit, s.units());
      x.pieces.first_slot += slots;
      x.pieces.second_slot += slots;
      x.slot = slots + 2 * block_ + (pieces_ == 1 ? 0 : 1);
    }
  }

 private:
  Place<Params> place_{};
  Shares shares_{};
  int32_t track_ = 0, block_ = 0, heads_ = 0, end_ = 0, left_ = 0;
  int32_t pieces_ = 0;  // that are written
};

#endif  // __CUDACC__

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_PIECES_CUH_
