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
  STROBE_INLINE friend constexpr bool operator==(const Range& a, const Range& b) {
    return a.begin == b.begin && a.end == b.end;
  }
};

STROBE_INLINE constexpr Range intersect(Range a, Range b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

/// Cuts `range` at the multiples of `size`: the piece that begins at `begin`, empty past the end.
STROBE_INLINE constexpr Range block_at(Range range, int64_t begin, int64_t size) {
  const int64_t end = (begin / size + 1) * size;
  return {begin, end < range.end ? end : range.end};
}

/// What a problem says of the mask, for all its sequences.
struct MaskRule {
  int64_t window_left = -1, window_right = -1;  // -1: no limit
  int64_t attention_chunk = 0;                  // 0: none
  bool causal = false;

  /// Whether this hides no key from any query, whatever the lengths are.
  STROBE_INLINE constexpr bool hides_nothing() const {
    return !causal && window_left < 0 && window_right < 0 && attention_chunk == 0;
  }
};

/// The mask of one sequence. Query i stands at key position i + offset and sees the keys from
/// `left` before that position to `right` after it, of its own chunk of `chunk` positions alone
/// where there are chunks; and the first `prefix` keys.
struct Mask {
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t left = 0, right = 0;  // never negative; large enough means no limit
  int64_t offset = 0;           // key position of query 0; may be negative
  int64_t chunk = 0;            // 0: none
  int64_t prefix = 0;           // with no limit to the left and no chunks alone

  /// offset: seqlen_k - seqlen_q aligns the last query with the last key (the bottom right).
  STROBE_INLINE static constexpr Mask make(const MaskRule& rule, int64_t seqlen_q, int64_t seqlen_k,
                                           int64_t offset, int64_t prefix) {
    // Positions, and distances between them and keys, are below this: it stands for "no limit", and
    // the sums below cannot overflow.
    const int64_t no_limit = seqlen_q + seqlen_k + (offset < 0 ? -offset : offset) + 1;
    // Chunks longer than that hold the same positions: all from 0 on, or all before.
    const int64_t chunk = smaller(rule.attention_chunk, no_limit);
    Mask m{seqlen_q, seqlen_k, no_limit, no_limit, offset, chunk, prefix};
    if (rule.window_left >= 0 && rule.window_left < no_limit) m.left = rule.window_left;
    if (rule.window_right >= 0 && rule.window_right < no_limit) m.right = rule.window_right;
    if (rule.causal) m.right = 0;
#if STROBE_BREAK_KERNEL_MASK
    if (rule.causal) m.right = 1;
#endif
    return m;
  }
  /// Aligned at the bottom right, without a prefix.
  STROBE_INLINE static constexpr Mask make(const MaskRule& rule, int64_t seqlen_q,
                                           int64_t seqlen_k) {
    return make(rule, seqlen_q, seqlen_k, seqlen_k - seqlen_q, 0);
  }

  /// Key position that query i stands at; may lie outside [0, seqlen_k).
  STROBE_INLINE constexpr int64_t position(int64_t i) const { return i + offset; }

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
  STROBE_INLINE static constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
  STROBE_INLINE static constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
  /// The first position of the chunk that holds `position`, which may be negative.
  STROBE_INLINE constexpr int64_t chunk_begin(int64_t position) const {
    const int64_t rest = position % chunk;
    return position - (rest < 0 ? rest + chunk : rest);
  }
  STROBE_INLINE constexpr int64_t first_key(int64_t i) const {
    int64_t key = position(i) - left;
    if (chunk > 0) key = larger(key, chunk_begin(position(i)));
    return clamp(key, seqlen_k);
  }
  STROBE_INLINE constexpr int64_t end_key(int64_t i) const {
    int64_t key = position(i) + right + 1;
    if (chunk > 0) key = smaller(key, chunk_begin(position(i)) + chunk);
    return clamp(larger(key, prefix), seqlen_k);
  }
  // The inverses: the first query whose end_key is past key j, and the first whose first_key is.
  STROBE_INLINE constexpr int64_t first_query(int64_t j) const {
    if (j < prefix) return 0;
    int64_t query = j - offset - right;
    if (chunk > 0) query = larger(query, chunk_begin(j) - offset);
    return clamp(query, seqlen_q);
  }
  STROBE_INLINE constexpr int64_t end_query(int64_t j) const {
    int64_t query = j - offset + left + 1;
    if (chunk > 0) query = smaller(query, chunk_begin(j) + chunk - offset);
    return clamp(query, seqlen_q);
  }
};

}  // namespace strobe

#endif  // STROBE_CORE_MASK_H_
