// Where the keys of a sequence are when they lie in a cache, how many they are, and where new ones
// go. One definition for CPU and CUDA; launches without a cache have core/sequence.h alone.
#ifndef STROBE_CORE_CACHE_H_
#define STROBE_CORE_CACHE_H_

#include <cstdint>

#include "core/macros.h"
#include "core/sequence.h"

namespace strobe {

/// Division of row numbers by a page's size, without a division where it is used.
struct Divider {
  uint32_t divisor = 1, factor = uint32_t{1} << 31;
  int32_t shift = 31;

  /// divisor: 1 to 2^31 - 1. The factor is 2^shift / divisor, rounded up, for the smallest shift
  /// from 31 on with 2^(shift - 31) >= divisor: the largest that fits 32 bits. Rounding makes
  /// x * factor / 2^shift too large by less than x / 2^shift < 1 / divisor for an x below 2^31, and
  /// that moves no quotient.
  STROBE_INLINE static constexpr Divider make(uint32_t divisor) {
    Divider d{divisor, 0, 31};
    while ((uint64_t{1} << (d.shift - 31)) < divisor) ++d.shift;
    d.factor = static_cast<uint32_t>(((uint64_t{1} << d.shift) + divisor - 1) / divisor);
    return d;
  }
  /// x / divisor, for 0 <= x < 2^31.
  STROBE_INLINE constexpr int32_t quotient(int32_t x) const {
    return static_cast<int32_t>((static_cast<uint64_t>(x) * factor) >> shift);
  }
};

/// Where the keys of one sequence lie in the cache: its row n, counted from the begin of its entry
/// or of its first page. Key j is the row first + j.
struct KeyRows {
  int64_t entry;         // of the cache; not with pages
  const int32_t* pages;  // the sequence's row of the block table; null: no pages
  Divider page_size;
  int32_t pool;   // pages of the pool
  int64_t first;  // rows before key 0

  /// A row's place: the entry or page, and the row within it.
  struct Place {
    int64_t entry, row;
    /// Whether there is such an entry. What is not there is neither read nor written.
    bool there;

    /// Elements from the begin of the tensor. Strides in elements.
    STROBE_INLINE constexpr int64_t offset(int64_t entry_stride, int64_t row_stride) const {
      return entry * entry_stride + row * row_stride;
    }
  };
  STROBE_INLINE constexpr Place place(int64_t key) const {
    const int64_t row = first + key;
    if (!pages) return {entry, row, true};
    const int32_t column = page_size.quotient(static_cast<int32_t>(row));
    const int32_t page = read_once(pages + column);
    return {page, row - int64_t{column} * page_size.divisor, has(page)};
  }
  /// Whether there is an entry, or page, of this number: the table may hold anything.
  STROBE_INLINE constexpr bool has(int64_t number) const {
    return !pages || (0 <= number && number < pool);
  }
  /// The end of the run of keys from `key` on that lie one row stride apart: `end` at most.
  STROBE_INLINE constexpr int64_t run_end(int64_t key, int64_t end) const {
    if (!pages) return end;
    const int64_t row = first + key, size = page_size.divisor;
    const int64_t next = (int64_t{page_size.quotient(static_cast<int32_t>(row))} + 1) * size;
    return next - first < end ? next - first : end;
  }
};

/// A sequence whose keys lie in a cache. seqlen_k counts the appended keys, and rows_k is the same
/// number: no row of a cache is filled because it is not in use. `k_row` is not used.
struct CachedRows : SequenceRows {
  KeyRows keys;
  int64_t new_entry, new_row;  // of k_new: entry, and row of its first new key
  int64_t new_begin;           // the new keys are [new_begin, seqlen_k)
  int64_t rotary_start;        // position of the first query and of the first new key
  /// False where the sequence's numbers are out of range. Nothing is then read or written for it
  /// but its queries' out and lse, which become NaN, and it has no keys.
  bool in_range;
};
using CachedSequence = WithMask<CachedRows>;

/// What tells the sequences of a launch with a cache apart. `used_k` of the base are lengths before
/// the append, cu_k is null.
struct CachedSequences : Sequences {
  const int32_t* table;  // [batch, table_stride]; null: no pages
  const int32_t *entries, *leftpad, *cu_new, *rotary_position;  // null: not given
  int64_t table_stride;
  Divider page_size;
  int32_t pool;         // pages
  int32_t cache_batch;  // entries of a contiguous cache; with pages the batch
  int32_t rows_new;     // new keys of each sequence; packed: of the longest
  int32_t total_new;    // packed: new keys of all sequences
  int32_t rotary_dim, rotary_rows;
  bool rotary_interleaved;
  bool cuts_lengths;  // used_k out of range is cut, as without a cache
  // Queries in use of the sequences that this kernel attends for: those that have fewer or more are
  // another one's of the same launch, and have none here.
  int32_t least_q, most_q;

  STROBE_INLINE constexpr CachedRows sequence_rows(int64_t b) const {
    CachedRows s{};
    place_queries(s, b);
    s.new_entry = cu_new ? 0 : b;
    int64_t count = rows_new;
    if (cu_new) {
      s.new_row = cut(cu_new[b], 0, total_new);
      count = cut(cu_new[b + 1], s.new_row, total_new) - s.new_row;
    }
    int64_t used = used_k ? used_k[b] : seqlen_k;  // with the left pad, as the caller counts
    if (cuts_lengths) used = cut(used, 0, seqlen_k);
    s.keys = rows_at(b, entries ? entries[b] : b, leftpad ? leftpad[b] : 0);
    s.new_begin = used - s.keys.first;
    s.rotary_start = rotary_position ? rotary_position[b] : s.new_begin;
    // Of more queries than the plan knows of, the first ones: its workspace has room for no others.
    const int64_t length_q = used_q_of(b, cu_q ? cut(s.rows_q, 0, seqlen_q) : s.rows_q);
    s.in_range = 0 <= s.keys.first && s.keys.first <= used && used + count <= seqlen_k &&
                 count <= rows_new && 0 <= s.keys.entry && s.keys.entry < cache_batch &&
                 (rotary_dim == 0 || rotary_in_range(s.rotary_start, length_q, count));
    if (!s.in_range) {
      s.keys.entry = s.keys.first = s.new_begin = s.rotary_start = count = 0;
    }
    const bool own = least_q <= length_q && length_q <= most_q;
    s.seqlen_q = own ? length_q : 0;
    s.rows_k = s.seqlen_k = s.new_begin + count;
    return s;
  }
  STROBE_INLINE constexpr CachedSequence sequence(int64_t b, int64_t head) const {
    const CachedRows s = sequence_rows(b);
    return {s, mask_of(s, head)};
  }
  STROBE_INLINE constexpr CachedSequence sequence_of_all_heads(int64_t b) const {
    static_assert(!masks_differ_by_head());
    return sequence(b, 0);
  }

  /// The rows of sequence b, whose entry and first row are known.
  STROBE_INLINE constexpr KeyRows rows_at(int64_t b, int64_t entry, int64_t first) const {
    return {entry, table ? table + b * table_stride : nullptr, page_size, pool, first};
  }

  /// The same sequences, whoever attends for them: so that a kernel that updates the cache is not
  /// compiled to ask.
  STROBE_INLINE constexpr CachedSequences of_all() const {
    CachedSequences s = *this;
    s.least_q = 0;
    s.most_q = INT32_MAX;
    return s;
  }

  /// The same sequences, of which it is known that there are no chunks: what divides by them is not
  /// compiled.
  STROBE_INLINE constexpr CachedSequences without_chunks() const {
    CachedSequences s = *this;
    s.rule.attention_chunk = 0;
    return s;
  }

  /// Position of query i in the rotary tables, of a sequence with this rotary_start: queries move
  /// on where the mask looks at positions.
  STROBE_INLINE constexpr int64_t query_rotation(int64_t rotary_start, int64_t i) const {
    return rotary_start + (queries_move() ? i : 0);
  }
  STROBE_INLINE constexpr bool queries_move() const { return !rule.hides_nothing(); }

  /// Every sequence has places of its own.
  STROBE_INLINE constexpr bool sequences_differ() const { return true; }
  /// Not for caches: what the base class can promise of its sequences knows nothing of the cache's
  /// arrays.
  bool all_rows_used() const = delete;
  template <bool>
  void assuming() const = delete;

 private:
  // Where there is nothing to rotate, no position is in use.
  STROBE_INLINE constexpr bool rotary_in_range(int64_t start, int64_t queries_,
                                               int64_t keys_) const {
    const int64_t rotated = queries_ > 0 && !queries_move() ? 1 : queries_;
    const int64_t count = rotated > keys_ ? rotated : keys_;
    return count == 0 || (0 <= start && start + count <= rotary_rows);
  }
};

}  // namespace strobe

#endif  // STROBE_CORE_CACHE_H_
