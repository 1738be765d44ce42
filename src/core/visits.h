// Which blocks of keys a tile of queries visits, and which blocks of queries a tile of keys. All
// kernels and schedulers ask here; what has to be known before there are sequences, such as the
// most that a tile may visit, MaskRule says (mask.h).
#ifndef STROBE_CORE_VISITS_H_
#define STROBE_CORE_VISITS_H_

#include "core/mask.h"

namespace strobe {

/// Blocks are numbered: block n of size s holds the rows [n s, (n + 1) s) of a sequence, as far as
/// the sequence goes.
struct Visits {
  Range blocks;  // to be visited; those outside hold no pair that the mask allows
  Range full;    // of those, the ones whose every row is there and whose every pair is allowed

  STROBE_INLINE constexpr bool is_visited(int64_t block) const { return blocks.contains(block); }
  STROBE_INLINE constexpr bool is_full(int64_t block) const { return full.contains(block); }
};

/// The blocks that hold some row of `some`; full where they lie inside `all`. Int: what the rows'
/// numbers fit into.
template <typename Int>
STROBE_INLINE constexpr Visits visits_of(Range some, Range all, int64_t block_size) {
  if (some.empty()) return {};
  const auto size = static_cast<Int>(block_size);
  const auto below = [size](int64_t x) { return static_cast<Int>(x) / size; };
  Visits v{{below(some.begin), below(some.end + size - 1)}, {}};
  v.full = intersect(v.blocks, {below(all.begin + size - 1), below(all.end)});
  if (v.full.empty()) v.full = {v.blocks.begin, v.blocks.begin};
  return v;
}

/// Blocks of `size` keys that some of the queries see.
template <typename Int>
STROBE_INLINE constexpr Visits key_visits(const BasicMask<Int>& mask, Range queries, int64_t size) {
  if (queries.empty()) return {};
  // kv_range and full_range, both from two rows.
  const Range first = mask.row(static_cast<Int>(queries.begin));
  const Range last = mask.row(static_cast<Int>(queries.end - 1));
  return visits_of<Int>({first.begin, last.end}, {last.begin, first.end}, size);
}

/// Blocks of `size` queries that see some of the keys.
template <typename Int>
STROBE_INLINE constexpr Visits query_visits(const BasicMask<Int>& mask, Range keys, int64_t size) {
  return visits_of<Int>(mask.q_range(keys), mask.full_q_range(keys), size);
}

}  // namespace strobe

#endif  // STROBE_CORE_VISITS_H_
