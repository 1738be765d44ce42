// The mask: which keys a query sees. The only file that knows; CPU, CUDA, forward and backward all
// ask here.
//
// Every mask in Strobe lets a query see one interval of keys, and the ends of that interval never
// move back from one query to the next. That is what makes the ranges below exact, and what a new
// mask has to keep to.
#ifndef STROBE_CORE_MASK_H_
#define STROBE_CORE_MASK_H_

#include <cstdint>

#include "core/macros.h"

namespace strobe {

/// Half-open interval [begin, end); empty where end <= begin.
struct Range {
  int64_t begin = 0, end = 0;

  STROBE_INLINE constexpr bool empty() const { return end <= begin; }
  STROBE_INLINE constexpr int64_t size() const { return empty() ? 0 : end - begin; }
  STROBE_INLINE constexpr bool contains(Range other) const {
    return other.empty() || (begin <= other.begin && other.end <= end);
  }
  STROBE_INLINE constexpr bool contains(int64_t i) const { return begin <= i && i < end; }
  friend constexpr bool operator==(const Range&, const Range&) = default;
};

STROBE_INLINE constexpr Range intersect(Range a, Range b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

/// Cuts `range` at the multiples of `size`: the piece that begins at `begin`, empty past the end.
STROBE_INLINE constexpr Range block_at(Range range, int64_t begin, int64_t size) {
  const int64_t end = (begin / size + 1) * size;
  return {begin, end < range.end ? end : range.end};
}

/// Causal and sliding-window masks of one sequence, aligned at the bottom right: query i stands at
/// key position i + seqlen_k - seqlen_q and sees `left` keys before that position and `right` keys
/// after it.
struct Mask {
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t left = 0, right = 0;  // never negative; large enough means no limit

  /// window_left, window_right: -1 for no limit.
  STROBE_INLINE static constexpr Mask make(int64_t seqlen_q, int64_t seqlen_k, bool causal,
                                           int64_t window_left, int64_t window_right) {
    // The distance between a query's position and any key is below this, so it stands for "no
    // limit" and the sums below cannot overflow.
    const int64_t no_limit = seqlen_q + seqlen_k;
    Mask m{seqlen_q, seqlen_k, no_limit, no_limit};
    if (window_left >= 0 && window_left < no_limit) m.left = window_left;
    if (window_right >= 0 && window_right < no_limit) m.right = window_right;
    if (causal) m.right = 0;
#if STROBE_BREAK_KERNEL_MASK
    if (causal) m.right = 1;
#endif
    return m;
  }

  /// Key position that query i stands at; may lie outside [0, seqlen_k).
  STROBE_INLINE constexpr int64_t position(int64_t i) const { return i + seqlen_k - seqlen_q; }

  /// Keys that query i sees.
  STROBE_INLINE constexpr Range row(int64_t i) const { return {first_key(i), end_key(i)}; }
  STROBE_INLINE constexpr bool allows(int64_t i, int64_t j) const { return row(i).contains(j); }

  /// Smallest interval that holds every key seen by some query of `q`. What lies outside is
  /// skipped.
  STROBE_INLINE constexpr Range kv_range(Range q) const {
    return q.empty() ? Range{0, 0} : Range{first_key(q.begin), end_key(q.end - 1)};
  }
  /// Keys that every query of `q` sees: tiles inside need no mask.
  STROBE_INLINE constexpr Range full_range(Range q) const {
    return q.empty() ? Range{0, seqlen_k} : Range{first_key(q.end - 1), end_key(q.begin)};
  }
  /// Smallest interval that holds every query that sees some key of `k`.
  STROBE_INLINE constexpr Range q_range(Range k) const {
    return k.empty() ? Range{0, 0} : Range{first_query(k.begin), end_query(k.end - 1)};
  }
  /// Queries that see every key of `k`.
  STROBE_INLINE constexpr Range full_q_range(Range k) const {
    return k.empty() ? Range{0, seqlen_q} : Range{first_query(k.end - 1), end_query(k.begin)};
  }

 private:
  STROBE_INLINE static constexpr int64_t clamp(int64_t x, int64_t high) {
    return x < 0 ? 0 : x > high ? high : x;
  }
  STROBE_INLINE constexpr int64_t first_key(int64_t i) const {
    return clamp(position(i) - left, seqlen_k);
  }
  STROBE_INLINE constexpr int64_t end_key(int64_t i) const {
    return clamp(position(i) + right + 1, seqlen_k);
  }
  STROBE_INLINE constexpr int64_t first_query(int64_t j) const {
    return clamp(j - (seqlen_k - seqlen_q) - right, seqlen_q);
  }
  STROBE_INLINE constexpr int64_t end_query(int64_t j) const {
    return clamp(j - (seqlen_k - seqlen_q) + left + 1, seqlen_q);
  }
};

}  // namespace strobe

#endif  // STROBE_CORE_MASK_H_
