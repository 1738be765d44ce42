// In which order tiles are handed out: by the number of their visits, longest first, so that the
// short ones fill what is left at a launch's end. A tile that takes long and is handed out last
// leaves all others idle.
//
// Most launches need no such order. Where tiles visit equally many blocks, plain order is best for
// L2; where MaskRule::later_see_more, the last tile of each head first is the order by visits. What
// is left is sequences that differ, whose lengths lie in a device's memory: each thread that looks
// at one of them counts what goes before it.
#ifndef STROBE_CORE_VISIT_ORDER_H_
#define STROBE_CORE_VISIT_ORDER_H_

#include <cstdint>

#include "core/macros.h"

namespace strobe {

/// The place of a sequence, all tiles of which are handed out one after the other, among the kMost
/// that a warp looks at together: one word, since the warp has few registers.
struct VisitKey {
  static constexpr uint32_t kMost = 32;

  uint32_t key;

  /// visits: of its longest tile, below 2^27. number: in plain order, below kMost.
  STROBE_INLINE static constexpr VisitKey make(uint32_t visits, uint32_t number) {
    return {visits * kMost + (kMost - 1 - number)};
  }
  /// Whether this goes before another one. Those with as many visits stay in plain order.
  STROBE_INLINE constexpr bool goes_before(VisitKey other) const { return key > other.key; }
};

}  // namespace strobe

#endif  // STROBE_CORE_VISIT_ORDER_H_
