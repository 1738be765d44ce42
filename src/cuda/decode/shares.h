// How a launch's keys are split among the thread blocks that read them: index maps alone, which the
// tests check on the CPU.
//
// The rows of a tile are queries times the query heads that share a key head. A span is all that
// reads the same keys with one tile: a (sequence, key head, tile). Its keys are cut into units.
// The spans of one head, sequence after sequence, unit after unit, make a line, and the thread
// blocks of a track take equal shares of it:
//
//   sequence         0           1           2
//   unit       |0 1 2 3 4 5|0 1|0 1 2 3 4 5 6 7 8|   the line of a head
//   block      |   0   |   1   |   2   |    3    |   of the head's track
//
// So lengths may be as ragged as they like: all thread blocks have the same to read. All tracks do
// the same at the same time, each with another head, so that rows in which heads lie side by side
// are read as a whole. Where there are more heads than thread blocks, a track has several.
//
// To end one span and begin another takes a thread block as long as some units do. So where all
// spans are alike, and there are more thread blocks than spans, each span may have the same number
// of thread blocks for itself, and a few are left without a share.
//
// What a share holds of a span is a piece. A thread block finishes a span that is all its own;
// other pieces go to the workspace, and the last thread block to leave one merges them, in order.
//
// With batch_invariant a span is cut into chunks, at multiples of kChunkKeys from the sequence's
// first key, so that neither the batch nor the sequence's other rows and keys decide what of a
// row's keys is added up together. Every chunk is a piece, and a row's pieces are taken together
// one after the other. A share holds the chunks that begin in it, or the spans that do: of these a
// thread block takes the chunks together as they come.
#ifndef STROBE_CUDA_DECODE_SHARES_H_
#define STROBE_CUDA_DECODE_SHARES_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/sequence.h"
#include "cuda/common/chunk_keys.h"
#include "cuda/common/static_order.cuh"
#include "cuda/common/walks.h"

namespace strobe::cuda {

/// How one sequence is cut in one track; its spans are alike. (They share a mask,
/// masks_differ_by_head, and a walk, which has what the walk of each of the track's query heads
/// has.)
struct SequenceUnits {
  int32_t tiles;
  int32_t spans;  // tiles * heads of the track
  // A span's walk through blocks of a unit's keys, from the first place on: those that some query
  // of some head sees. Where no key is seen, it is one place, for there still are rows to write.
  BlocksOf<int32_t> walk;

  /// Units of a span, at least 1.
  STROBE_INLINE constexpr int32_t units() const { return walk.end - walk.begin; }
  STROBE_INLINE constexpr int32_t all() const { return spans * units(); }
  // Where spans are cut into chunks, of 2^shift units:
  /// The number of a unit's chunk in its span.
  STROBE_INLINE constexpr int32_t chunk(int32_t unit, int32_t shift) const {
    return ((walk.begin + unit) >> shift) - (walk.begin >> shift);
  }
  STROBE_INLINE constexpr int32_t chunks(int32_t shift) const {
    return chunk(units() - 1, shift) + 1;
  }
  /// Where a unit's chunk ends.
  STROBE_INLINE constexpr int32_t chunk_end(int32_t unit, int32_t shift) const {
    const int32_t end = ((((walk.begin + unit) >> shift) + 1) << shift) - walk.begin;
    return end < units() ? end : units();
  }
};

/// What tells how sequences are cut: the same for all of a launch.
struct KeyCut {
  int32_t group;        // query heads of a key head
  int32_t tile_shift;   // a tile has 2^tile_shift rows
  int32_t unit_shift;   // a unit has 2^unit_shift keys
  int32_t most_chunks;  // of a span; 0: equal shares, no chunks
  int32_t chunk_shift;  // a chunk has 2^chunk_shift units
  int32_t whole_spans;  // where there are chunks: whether shares hold whole spans

  STROBE_INLINE constexpr SequenceUnits of(const WalkLists& lists, const Mask& mask,
                                           int32_t heads) const {
    SequenceUnits s{};
    s.tiles = static_cast<int32_t>(ceil_shift(mask.seqlen_q * group, tile_shift));
    s.spans = s.tiles * heads;
    const auto walk = static_cast<WalkOf<int32_t>>(
        key_walk(lists, mask, {0, mask.seqlen_q}, PowerOfTwo{unit_shift}));
    s.walk = walk.blocks();
    if (walk.empty()) s.walk.end = walk.begin + 1;
    return s;
  }
  STROBE_INLINE constexpr bool chunked() const { return most_chunks > 0; }
  /// Where there are chunks: the unit of a span at which what a share has from `unit` on may begin,
  /// `unit` itself among them.
  STROBE_INLINE constexpr int32_t share_begin(const SequenceUnits& s, int32_t unit) const {
    if (unit == 0) return 0;
    if (whole_spans) return s.units();
    return s.chunk(unit, chunk_shift) > s.chunk(unit - 1, chunk_shift)
               ? unit
               : s.chunk_end(unit, chunk_shift);
  }

 private:
  STROBE_INLINE static constexpr int64_t ceil_shift(int64_t x, int32_t shift) {
    return (x + (int64_t{1} << shift) - 1) >> shift;
  }
};

/// Equal shares, to within one unit, of each of some equal stretches of the line: of the whole
/// line, or of its spans. None of them is empty.
struct Shares {
  int32_t blocks;         // of the line
  int32_t least, larger;  // of a stretch: units of the smaller shares; how many have one more
  int32_t units;          // of a stretch
  Divisor of_stretch;     // blocks

  /// At most `blocks` shares of the whole line.
  STROBE_INLINE static constexpr Shares make(int32_t total, const Divisor& blocks) {
    const auto most = static_cast<int32_t>(blocks.value);
    if (total <= most) return {total, 1, 0, total, blocks};
    const auto least = static_cast<int32_t>(blocks.divide(static_cast<uint32_t>(total)));
    return {most, least, total - least * most, total, blocks};
  }
  /// `of_span` shares of each of `spans` equal spans, which have no fewer units.
  STROBE_INLINE static constexpr Shares of_spans(int32_t total, int32_t spans,
                                                 const Divisor& of_span) {
    Shares shares = make(total / spans, of_span);
    shares.blocks *= spans;
    return shares;
  }
  STROBE_INLINE constexpr int32_t begin(int32_t block) const {
    const auto stretch = static_cast<int32_t>(of_stretch.divide(static_cast<uint32_t>(block)));
    const int32_t own = block - stretch * static_cast<int32_t>(of_stretch.value);
    return stretch * units + own * least + (own < larger ? own : larger);
  }
  /// The thread block whose share holds the unit.
  STROBE_INLINE constexpr int32_t holder(int32_t unit) const {
    // Of a whole line there is one stretch: it is not asked to divide.
    const int32_t stretch = unit < units ? 0 : unit / units, own = unit - stretch * units;
    const int32_t of_larger = larger * (least + 1);
    return stretch * static_cast<int32_t>(of_stretch.value) +
           (own < of_larger ? own / (least + 1) : larger + (own - of_larger) / least);
  }
};

/// The pieces of a span in equal shares, and where they lie. A thread block leaves two at most: one
/// of the span that its share begins in, one of the span that it ends in.
struct SpanPieces {
  int32_t first_slot, second_slot, step;  // the others follow the second, `step` apart
  int32_t count;

  /// begin: the span's first unit in the line.
  STROBE_INLINE static constexpr SpanPieces of_shares(const Shares& shares, int32_t begin,
                                                      int32_t units) {
    const int32_t first = shares.holder(begin), last = shares.holder(begin + units - 1);
    const bool enters = shares.begin(first) < begin;  // hence it is this thread block's last piece
    return {2 * first + (enters ? 1 : 0), 2 * first + 2, 2, last - first + 1};
  }
  STROBE_INLINE constexpr int32_t slot(int32_t piece) const {
    return piece == 0 ? first_slot : second_slot + step * (piece - 1);
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_SHARES_H_
