// The mask: which keys a query sees, and bounds on their number. All kernels, schedulers and
// choices of a kernel, on the CPU and on CUDA, ask here; validate.cpp alone looks at the rule
// besides, to refuse what cannot be together. (The command line's reference.cpp knows the mask,
// too: it is there to check this file.)
//
// Every rule in Strobe lets a query see one interval of keys, and the ends of that interval never
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
  /// A window's end that hides nothing. Others are nearer than kFarthest.
  static constexpr int64_t kNoLimit = INT64_MAX, kFarthest = int64_t{1} << 40;

  // Keys from so far before a query's position to so far behind it. A negative limit ends the
  // window on the other side of the position.
  int64_t window_left = kNoLimit, window_right = kNoLimit;
  int64_t attention_chunk = 0;  // 0: none
  bool causal = false;          // window_right is 0 at most

  /// That of a problem, C's or the wrapper's: the options have the same names in both.
  template <typename Problem>
  STROBE_INLINE static constexpr MaskRule of(const Problem& p) {
    const auto limit = [&](int64_t x) {
      if (x >= kFarthest || (x < 0 && !p.window_signed)) return kNoLimit;
      return x > -kFarthest ? x : -kFarthest;
    };
    return {limit(p.window_left), limit(p.window_right), p.attention_chunk, p.causal != 0};
  }
  STROBE_INLINE constexpr bool is_limited_left() const { return window_left != kNoLimit; }
  STROBE_INLINE constexpr bool is_limited_right() const {
    return causal || window_right != kNoLimit;
  }
  /// The right limit, with causality.
  STROBE_INLINE constexpr int64_t right() const {
    return causal && window_right > 0 ? 0 : window_right;
  }
  /// Whether this hides no key from any query, whatever the lengths are.
  STROBE_INLINE constexpr bool hides_nothing() const {
#if STROBE_BREAK_KERNEL_MASK_MEMBER
    return false;
#endif
    return !is_limited_left() && !is_limited_right() && attention_chunk == 0;
  }
  /// Whether the queries of a sequence see the more keys the later they come: tiles then differ in
  /// their work, and the last ones have most of it. (Of causal queries with chunks that holds
  /// within a chunk.)
  STROBE_INLINE constexpr bool later_see_more() const {
    return causal || (is_limited_right() && !is_limited_left() && attention_chunk == 0);
  }
  /// The most keys that the queries of a run see together, of `length` keys; and the most queries
  /// that see some key of a run of keys, of `length` queries. run: rows of the run, at least 1. A
  /// bound for all offsets, and exact for a run of 1. (A prefix is for rules alone for which this
  /// is `length`.)
  STROBE_INLINE constexpr int64_t most_seen(int64_t run, int64_t length) const {
    int64_t most = length;
    if (is_limited_left() && is_limited_right()) {
      const int64_t window = run + window_left + right();
      most = window < most ? window : most;
    }
    if (0 < attention_chunk && attention_chunk < length) {
      const int64_t chunks = (run + attention_chunk - 2) / attention_chunk + 1;  // that a run meets
      if (chunks <= length / attention_chunk && chunks * attention_chunk < most) {
        most = chunks * attention_chunk;
      }
    }
    return most;
  }
  /// Keys that a query sees on average, to within a half, of as many keys as there are queries, as
  /// far as causality decides that; windows and chunks do not count.
  STROBE_INLINE constexpr int64_t keys_to_diagonal(int64_t keys) const {
    return causal ? (keys + 1) / 2 : keys;
  }
  /// Whether a query may see `keys` keys up to its own position, as far as there are so many.
  STROBE_INLINE constexpr bool reaches_back(int64_t keys) const {
    return window_left >= keys && right() >= 0 && (attention_chunk == 0 || attention_chunk >= keys);
  }
};

/// A rule in 32 bits, for Mask::tile: worked out once for all tiles. The largest number is no
/// limit. Limits are of either sign, and yet there is no sign for a kernel to extend: positions and
/// limits have 2^31 added to them, which differences do not show.
struct TileRule {
  static constexpr uint32_t kZero = uint32_t{1} << 31;

  uint32_t left, right;  // kZero plus MaskRule's left; kZero minus its right
  uint32_t chunk;        // below 2^31

  STROBE_INLINE static constexpr TileRule make(const MaskRule& rule) {
    const auto narrow = [](int64_t x) {
      return static_cast<uint32_t>(x > INT32_MAX ? INT32_MAX : x > -INT32_MAX ? x : -INT32_MAX);
    };
    return {kZero + narrow(rule.window_left), kZero - narrow(rule.right()),
            narrow(rule.attention_chunk)};
  }
};

/// The mask of one sequence. Query i stands at key position i + offset, and the window lets it see
/// the keys from i + first to i + last, of its own chunk of `chunk` positions alone where there are
/// chunks; and the first `prefix` keys. Int: int64_t, which has room for everything, or int32_t,
/// which is what `tile` makes.
template <typename Int>
struct BasicMask {
  Int seqlen_q = 0, seqlen_k = 0;
  Int first = 0, last = 0;  // far enough away mean no limit
  Int offset = 0;           // key position of query 0; may be negative
  Int chunk = 0;            // 0: none
  Int prefix = 0;           // with no limit to the left and no chunks alone
#if STROBE_BREAK_KERNEL_MASK_MEMBER
  // What a new kind of mask would add: as many keys at the begin that no query sees.
  Int hidden = 1;
#endif

  /// offset: seqlen_k - seqlen_q aligns the last query with the last key (the bottom right).
  STROBE_INLINE static constexpr BasicMask make(const MaskRule& rule, Int seqlen_q, Int seqlen_k,
                                                Int offset, Int prefix) {
    // Positions, and distances between them and keys, are below this: it stands for "no limit", and
    // the sums below cannot overflow.
    const Int no_limit = seqlen_q + seqlen_k + (offset < 0 ? -offset : offset) + 1;
    const Int left = smaller(rule.window_left, no_limit);
    Int right = smaller(rule.right(), no_limit);
#if STROBE_BREAK_KERNEL_MASK
    if (rule.causal) right = 1;
#endif
    // Chunks longer than that hold the same positions: all from 0 on, or all before.
    const Int chunk = smaller(rule.attention_chunk, no_limit);
    return {seqlen_q, seqlen_k, offset - left, offset + right, offset, chunk, prefix};
  }
  /// Aligned at the bottom right, without a prefix.
  STROBE_INLINE static constexpr BasicMask make(const MaskRule& rule, Int seqlen_q, Int seqlen_k) {
    return make(rule, seqlen_q, seqlen_k, seqlen_k - seqlen_q, 0);
  }

  /// The same mask for the `rows` queries from `begin` on, as far as there are so many, which are
  /// its queries 0, 1, ...: in 32 bits, for kernels that have to be short of instructions and
  /// registers. rows: at most kTileRows. Lengths are at most kLongest, and |offset| at most 2^30.
  static constexpr Int kTileRows = 1024, kLongest = (Int{1} << 30) - kTileRows;
  STROBE_INLINE constexpr BasicMask<int32_t> tile(Int begin, Int rows) const {
    return tile(begin, rows, near(begin + first), near(begin + last),
                static_cast<int32_t>(smaller(chunk, INT32_MAX)));  // no position is further from 0
  }

  /// The same from the rule that the mask was made from, where registers do not suffice for 64
  /// bits.
  STROBE_INLINE constexpr BasicMask<int32_t> tile(Int begin, Int rows, const TileRule& rule) const {
    const int64_t position = static_cast<uint32_t>(begin + offset) + TileRule::kZero;
    return tile(begin, rows, near(position - rule.left), near(position - rule.right),
                static_cast<int32_t>(rule.chunk));
  }

  /// The same mask. kNoChunksNorPrefix: the caller promises that there are neither, and what looks
  /// for them is not compiled.
  template <bool kNoChunksNorPrefix>
  STROBE_INLINE constexpr BasicMask assuming() const {
    BasicMask m = *this;
    if (kNoChunksNorPrefix) m.chunk = m.prefix = 0;
    return m;
  }

  /// Key position that query i stands at; may lie outside [0, seqlen_k).
  STROBE_INLINE constexpr Int position(Int i) const { return i + offset; }

  /// Keys that query i sees.
  STROBE_INLINE constexpr Range row(Int i) const {
    const Int begin = own_chunk(i);
    return {first_key(i, begin), end_key(i, begin)};
  }
  STROBE_INLINE constexpr bool allows(Int i, Int j) const { return row(i).contains(j); }

  /// Smallest interval that holds every key seen by some query of `q`. What lies outside is
  /// skipped.
  STROBE_INLINE constexpr Range kv_range(Range q) const {
    return q.empty() ? Range{0, 0} : Range{first_key(of(q.begin)), end_key(of(q.end - 1))};
  }
  /// Keys that every query of `q` sees: tiles inside need no mask.
  STROBE_INLINE constexpr Range full_range(Range q) const {
    return q.empty() ? Range{0, seqlen_k} : Range{first_key(of(q.end - 1)), end_key(of(q.begin))};
  }
  /// Smallest interval that holds every query that sees some key of `k`.
  STROBE_INLINE constexpr Range q_range(Range k) const {
    return k.empty() ? Range{0, 0} : Range{first_query(of(k.begin)), end_query(of(k.end - 1))};
  }
  /// Queries that see every key of `k`.
  STROBE_INLINE constexpr Range full_q_range(Range k) const {
    return k.empty() ? Range{0, seqlen_q}
                     : Range{first_query(of(k.end - 1)), end_query(of(k.begin))};
  }

 private:
  /// Ends of the window that are further away from all keys than a tile has rows, mean the same
  /// wherever they are.
  STROBE_INLINE static constexpr int32_t near(int64_t x) {
    constexpr int64_t kFar = int64_t{1} << 30;
    return static_cast<int32_t>(x < -kFar ? -kFar : x < kFar ? x : kFar);
  }
  /// What both ways to a tile's mask share. All members by name: one that is added to them and left
  /// out here does not compile.
  STROBE_INLINE constexpr BasicMask<int32_t> tile(Int begin, Int rows, int32_t tile_first,
                                                  int32_t tile_last, int32_t tile_chunk) const {
#if STROBE_BREAK_KERNEL_MASK_MEMBER
    const auto& [q, k, first_, last_, offset_, chunk_, prefix_, hidden_] = *this;
#else
    const auto& [q, k, first_, last_, offset_, chunk_, prefix_] = *this;
#endif
    return {
      static_cast<int32_t>(smaller(rows, q - begin)), static_cast<int32_t>(k), tile_first,
          tile_last, static_cast<int32_t>(begin + offset_), tile_chunk,
          static_cast<int32_t>(prefix_),
#if STROBE_BREAK_KERNEL_MASK_MEMBER
          static_cast<int32_t>(hidden_)
#endif
    };
  }

  // No sum below leaves 32 bits where `tile` has made the mask: tests hold that against 64.
  STROBE_INLINE static constexpr Int of(int64_t x) { return static_cast<Int>(x); }
  STROBE_INLINE static constexpr Int clamp(Int x, Int high) {
    return x < 0 ? 0 : x > high ? high : x;
  }
  STROBE_INLINE static constexpr Int larger(Int a, Int b) { return a > b ? a : b; }
  STROBE_INLINE static constexpr Int smaller(Int a, Int b) { return a < b ? a : b; }
  /// x + chunk, or `high` where that is less.
  STROBE_INLINE constexpr Int chunk_after(Int x, Int high) const {
    return x >= high - chunk ? high : x + chunk;
  }
  /// The first position of the chunk that holds `position`, which may be negative.
  STROBE_INLINE constexpr Int chunk_begin(Int position) const {
    const Int rest = position % chunk;
    return position - (rest < 0 ? rest + chunk : rest);
  }
  /// Where query i's chunk begins; 0 where there are no chunks.
  STROBE_INLINE constexpr Int own_chunk(Int i) const {
    return chunk > 0 ? chunk_begin(position(i)) : 0;
  }
  STROBE_INLINE constexpr Int first_key(Int i) const { return first_key(i, own_chunk(i)); }
  STROBE_INLINE constexpr Int end_key(Int i) const { return end_key(i, own_chunk(i)); }
  STROBE_INLINE constexpr Int first_key(Int i, Int own_chunk) const {
    Int key = larger(i + first, own_chunk);
#if STROBE_BREAK_KERNEL_MASK_MEMBER
    key = larger(key, hidden);
#endif
    return clamp(key, seqlen_k);
  }
  STROBE_INLINE constexpr Int end_key(Int i, Int own_chunk) const {
    Int key = i + last + 1;
    if (chunk > 0) key = smaller(key, chunk_after(own_chunk, seqlen_k));
    return clamp(larger(key, prefix), seqlen_k);
  }
  // The inverses: the first query whose end_key is past key j, and the first whose first_key is.
  STROBE_INLINE constexpr Int first_query(Int j) const {
    if (j < prefix) return 0;
    Int query = j - last;
    if (chunk > 0) query = larger(query, chunk_begin(j) - offset);
    return clamp(query, seqlen_q);
  }
  STROBE_INLINE constexpr Int end_query(Int j) const {
#if STROBE_BREAK_KERNEL_MASK_MEMBER
    if (j < hidden) return 0;
#endif
    Int query = j - first + 1;
    if (chunk > 0) query = smaller(query, chunk_after(chunk_begin(j) - offset, seqlen_q));
    return clamp(query, seqlen_q);
  }
};

using Mask = BasicMask<int64_t>;

}  // namespace strobe

#endif  // STROBE_CORE_MASK_H_
