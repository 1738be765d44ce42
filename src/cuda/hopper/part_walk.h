// Hopper forward: what a warpgroup adds to the walk of its queries. The walk of the tile is core's
// own.
#ifndef STROBE_CUDA_HOPPER_PART_WALK_H_
#define STROBE_CUDA_HOPPER_PART_WALK_H_

#include <cstdint>

#include "core/macros.h"
#include "cuda/common/walks.h"

namespace strobe::cuda::sm90 {

/// The walk of a warpgroup's queries through the keys, from the last place to the first. A full
/// block needs no mask and keeps the softmax's reference; the others take their maximum (Kind). A
/// block may be full and count as partial here: the mask then changes nothing.
struct alignas(16) PartWalk : WalkOf<int32_t> {};

/// That of a warpgroup whose queries have this walk: which blocks keep the reference, of those
/// that are full.
/// frees_q: where Q has one stage, the last block to be computed takes its maximum too. Such a
/// block never needs `redo`, which reads Q again. So Q is free as soon as S is there, and the next
/// tile's Q arrives while the softmax is computed.
/// rows_past_end: rows past a sequence's end hold the next sequence's queries, or anything. In a
/// block that keeps its reference they can send their warp to `redo`, which changes the bits of the
/// rows beside them. Where no bit may depend on them, no block of such a warpgroup keeps its
/// reference. (Kernels whose rows are invariant ask for neither: there `redo` leaves the bits of
/// other rows alone, and which of a row's blocks is the tile's last is no matter of the row.)
STROBE_INLINE constexpr PartWalk part_walk(const WalkOf<int32_t>& walk, bool frees_q,
                                           bool rows_past_end) {
  if (walk.empty()) return {};
  if (rows_past_end) return {walk.all_partial()};
  return {frees_q ? walk.partial_before(walk.begin + 1) : walk};
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_PART_WALK_H_
