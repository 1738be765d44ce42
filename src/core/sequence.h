// Where the sequences of a batch lie, how long each is, and which keys the queries of its heads
// see. One definition for CPU and CUDA.
//
// Rows and lengths are a sequence's, the mask is that of one of its heads: who works for a head
// asks `sequence(b, head)`, who asks for rows alone `sequence_rows(b)`. Who works for several heads
// at once with one mask asks `sequence_of_all_heads(b)`, which there is as long as heads do not
// differ (`masks_differ_by_head`).
#ifndef STROBE_CORE_SEQUENCE_H_
#define STROBE_CORE_SEQUENCE_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/mask.h"

namespace strobe {

/// Where one sequence of a batch lies. Its queries are the rows [q_row, q_row + seqlen_q) of the
/// batch entry `batch` of q, out and their gradients, its keys the rows [k_row, k_row + seqlen_k)
/// of k, v and theirs. Where a part of the rows is in use, the rows that follow up to rows_q and
/// rows_k are the sequence's too: they are never read, and get zeros (lse: -inf).
struct SequenceRows {
  int64_t batch;
  int64_t q_row, k_row;        // packed: of the one tensor that holds all sequences; else 0
  int64_t lse_row;             // of (batch, head 0, query 0) in lse
  int64_t rows_q, rows_k;      // at least seqlen_q, seqlen_k
  int64_t seqlen_q, seqlen_k;  // in use
};

/// The same, and the mask of a head of it, which has the lengths too.
template <typename Rows>
struct WithMask : Rows {
  Mask mask;
};
using Sequence = WithMask<SequenceRows>;

/// Whether the heads of a sequence may see different keys. No rule makes them so: whoever asks, in
/// order to serve several heads with one mask, compiles to nothing.
STROBE_INLINE constexpr bool masks_differ_by_head() { return false; }

/// Where the last of packed sequences ends, by the sequences' begins [batch + 1], of the `total`
/// rows of the tensor. Rows from there on belong to no sequence.
STROBE_INLINE constexpr int64_t end_of_last(const int32_t* begins, int32_t batch, int64_t total) {
  return min64(max64(begins[batch], 0), total);
}

/// What tells the sequences of a launch apart. The arrays lie in the memory of the device that runs
/// the launch, int32, null where they were not given. Numbers from the arrays are cut to what the
/// tensors hold: no length, position or prefix leads out of them.
struct Sequences {
  const int32_t *cu_q, *cu_k;      // [batch + 1]: packed end to end from the first row on
  const int32_t *used_q, *used_k;  // [batch]: rows in use, of those that a sequence has
  const int32_t* q_position;       // [batch]: key position of a sequence's first query
  const int32_t* prefix;           // [batch]: keys that every query sees
  int32_t batch, heads;            // query heads
  int32_t seqlen_q, seqlen_k;      // rows of a batch entry; packed: of the longest sequence
  int64_t lse_head_stride;         // from one head to the next in lse: seqlen_q, or all rows
  MaskRule rule;

  /// q_position is cut to this on both sides of 0.
  static constexpr int64_t kFurthestPosition = int64_t{1} << 30;

  STROBE_INLINE constexpr SequenceRows sequence_rows(int64_t b) const {
    SequenceRows s{};
    place_queries(s, b);
    s.rows_k = static_cast<uint32_t>(seqlen_k);
    if (cu_k) {
      s.k_row = cu_k[b];
      s.rows_k = cu_k[b + 1] - s.k_row;
    }
    s.seqlen_q = used_q_of(b, s.rows_q);
    s.seqlen_k = used_k ? cut(used_k[b], 0, s.rows_k) : s.rows_k;
    return s;
  }
  STROBE_INLINE constexpr Sequence sequence(int64_t b, int64_t head) const {
    const SequenceRows s = sequence_rows(b);
    return {s, mask_of(s, head)};
  }
  /// The sequence with the mask that all its heads have. For whoever has one mask for several
  /// heads: tiles of several heads, a block of keys with its limits in the backward, spans in
  /// decoding, the division of a launch. Where heads differ, these have to ask for each.
  STROBE_INLINE constexpr Sequence sequence_of_all_heads(int64_t b) const {
    static_assert(!masks_differ_by_head());
    return sequence(b, 0);
  }

  /// Whether all rows of all sequences are in use, and besides no sequence has a position, a prefix
  /// or chunks of its own: the last query then stands at the last key. Most launches are so.
  STROBE_INLINE constexpr bool all_rows_used() const {
    return !used_q && !used_k && !q_position && !prefix && rule.attention_chunk == 0;
  }
  /// The same sequences. kAllRowsUsed: the caller promises that all_rows_used(), and the code that
  /// looks for used lengths, positions, prefixes and chunks is not compiled.
  template <bool kAllRowsUsed>
  STROBE_INLINE constexpr decltype(auto) assuming() const {
    if constexpr (kAllRowsUsed) {
      Sequences s = *this;
      s.used_q = s.used_k = s.q_position = s.prefix = nullptr;
      s.rule.attention_chunk = 0;
      return s;
    } else {
      return (*this);
    }
  }
  /// Whether the sequences may differ in their numbers of queries: those of a tile past the end are
  /// then another sequence's rows, or rows that are not in use.
  STROBE_INLINE constexpr bool query_counts_differ() const { return cu_q || used_q; }
  /// Whether anything but its place tells one sequence from another.
  STROBE_INLINE constexpr bool sequences_differ() const {
    return cu_q || cu_k || used_q || used_k || q_position || prefix;
  }
  /// Whether a sequence may have rows that are not in use.
  STROBE_INLINE constexpr bool has_unused_rows() const { return used_q || used_k; }

 protected:
  /// Where the queries of sequence b are; of its keys nothing yet.
  STROBE_INLINE constexpr void place_queries(SequenceRows& s, int64_t b) const {
    s.batch = b;
    // Never negative: without a sign there is nothing for a kernel to extend, and to keep.
    s.rows_q = static_cast<uint32_t>(seqlen_q);
    if (cu_q) {
      s.lse_row = s.q_row = cu_q[b];
      s.rows_q = cu_q[b + 1] - s.q_row;
    } else {
      s.lse_row = b * static_cast<uint32_t>(heads) * s.rows_q;
    }
  }
  STROBE_INLINE constexpr int64_t used_q_of(int64_t b, int64_t rows_q) const {
    return used_q ? cut(used_q[b], 0, rows_q) : rows_q;
  }
  STROBE_INLINE constexpr Mask mask_of(const SequenceRows& s, int64_t /*head*/) const {
    const int64_t offset = q_position
                               ? cut(q_position[s.batch], -kFurthestPosition, kFurthestPosition)
                               : s.seqlen_k - s.seqlen_q;
    return Mask::make(rule, s.seqlen_q, s.seqlen_k, offset,
                      prefix ? cut(prefix[s.batch], 0, s.seqlen_k) : 0);
  }
  STROBE_INLINE static constexpr int64_t cut(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
  }
};

}  // namespace strobe

#endif  // STROBE_CORE_SEQUENCE_H_
