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
// Where results must not depend on the batch, a span is cut into chunks by a rule on its own
// number of units alone, and a share holds the chunks that begin in it: every chunk is a piece.
#ifndef STROBE_CUDA_DECODE_SHARES_H_
#define STROBE_CUDA_DECODE_SHARES_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/sequence.h"
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
  int32_t chunk;  // units of a chunk: all, where spans are not cut

  /// Units of a span, at least 1.
  STROBE_INLINE constexpr int32_t units() const { return walk.end - walk.begin; }
  STROBE_INLINE constexpr int32_t all() const { return spans * units(); }
  STROBE_INLINE constexpr int32_t chunks() const { return (units() + chunk - 1) / chunk; }
  /// The unit at which the next chunk of a span begins: `unit` itself, where one does.
  STROBE_INLINE constexpr int32_t next_chunk(int32_t unit) const {
    const int32_t next = (unit + chunk - 1) / chunk * chunk;
    return next < units() ? next : units();
  }
};

/// What tells how sequences are cut: the same for all of a launch.
struct KeyCut {
  int32_t group;        // query heads of a key head
  int32_t tile_shift;   // a tile has 2^tile_shift rows
  int32_t unit_shift;   // a unit has 2^unit_shift keys
  int32_t most_chunks;  // of a span; 0: equal shares, no chunks

  STROBE_INLINE constexpr SequenceUnits of(const WalkLists& lists, const Mask& mask,
                                           int32_t heads) const {
    SequenceUnits s{};
    s.tiles = static_cast<int32_t>(ceil_shift(mask.seqlen_q * group, tile_shift));
    s.spans = s.tiles * heads;
    const auto walk = static_cast<WalkOf<int32_t>>(
        key_walk(lists, mask, {0, mask.seqlen_q}, PowerOfTwo{unit_shift}));
    s.walk = walk.blocks();
    if (walk.empty()) s.walk.end = walk.begin + 1;
    s.chunk = chunk(s.units());
    return s;
  }
  /// Units of a chunk of a span that has so many.
  STROBE_INLINE constexpr int32_t chunk(int32_t units) const {
    return most_chunks > 0 ? (units + most_chunks - 1) / most_chunks : units;
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
