// What a mask as data is packed from, as both packers read it (cpu/mask_pack.cpp,
// cuda/rows/mask_pack.cu): where the sequences and heads of the mask lie, and the intervals of a
// query.
#ifndef STROBE_CORE_MASK_SOURCES_H_
#define STROBE_CORE_MASK_SOURCES_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/mask.h"
#include "core/packed_mask.h"
#include "core/problem.h"

namespace strobe {

/// The keys that a query sees by its two intervals: apart from each other, ascending.
struct MaskIntervals {
  Range first, second;

  /// numbers: begin, end, begin, end, which may be any.
  STROBE_INLINE static constexpr MaskIntervals of(const int32_t* numbers, int64_t keys) {
    const auto cut = [&](const int32_t* at) -> Range {
      const int64_t begin = max64(read_once(at), 0), end = min64(read_once(at + 1), keys);
      return begin < end ? Range{begin, end} : Range{0, 0};
    };
    const Range x = cut(numbers), y = cut(numbers + 2);
    if (y.empty()) return {x, {0, 0}};
    if (x.empty()) return {y, {0, 0}};
    const Range a = y.begin < x.begin ? y : x, b = y.begin < x.begin ? x : y;
    if (b.begin <= a.end) return {{a.begin, max64(a.end, b.end)}, {0, 0}};
    return {a, b};
  }
  STROBE_INLINE constexpr bool has(int64_t key) const {
    return first.contains(key) || second.contains(key);
  }
};

/// The rows of all that a mask is packed from.
struct MaskRows {
  const int32_t *cu_q, *cu_k;  // [batch + 1]: of packed sequences; null: dense
  int64_t seqlen_q, seqlen_k;  // packed: of the longest sequence
  int64_t total_q, total_k;    // packed: of all of them

  STROBE_INLINE static constexpr MaskRows of(const AttentionProblem& p, const int32_t* cu_q,
                                             const int32_t* cu_k) {
    return {cu_q, cu_k, p.seqlen_q, p.seqlen_k, p.total_q, p.total_k};
  }
};

/// A sequence and head of the mask, as far as packing goes.
struct MaskPlane {
  int64_t batch, head;  // of the mask
  int64_t q_row, k_row;
  int64_t rows_q, rows_k;
  int64_t first_q, first_k;  // numbers of its first blocks
  int64_t blocks_q, blocks_k;

  STROBE_INLINE static constexpr MaskPlane of(const MaskLayout& l, const MaskRows& rows,
                                              int64_t batch, int64_t head) {
    MaskPlane x{};
    x.batch = batch;
    x.head = head;
    place(rows.cu_q, batch, rows.total_q, rows.seqlen_q, x.q_row, x.rows_q);
    place(rows.cu_k, batch, rows.total_k, rows.seqlen_k, x.k_row, x.rows_k);
    x.first_q = l.first_q(batch, head, x.q_row);
    x.first_k = l.first_k(batch, head, x.k_row);
    x.blocks_q = ceil_div(x.rows_q, l.block_q);
    x.blocks_k = ceil_div(x.rows_k, l.block_k);
    return x;
  }

  /// Number of a query in the rows of intervals.
  STROBE_INLINE constexpr int64_t interval_row(const MaskLayout& l, const MaskRows& rows,
                                               int64_t query) const {
    if (rows.cu_q) return head * rows.total_q + q_row + query;
    return (batch * l.heads + head) * rows.seqlen_q + query;
  }
  /// Where the bools of a query begin, from where those of all do.
  STROBE_INLINE constexpr int64_t keep_row(const strobe_strides& s, const MaskRows& rows,
                                           int64_t query) const {
    return (rows.cu_q ? 0 : batch * s.batch) + head * s.head + (q_row + query) * s.seqlen;
  }

 private:
  /// Numbers that nobody has checked, since they lie on a device, are cut to the rows that there
  /// are.
  STROBE_INLINE static constexpr void place(const int32_t* begins, int64_t batch, int64_t total,
                                            int64_t longest, int64_t& row, int64_t& count) {
    row = 0;
    count = longest;
    if (!begins) return;
    row = min64(max64(begins[batch], 0), total);
    count = min64(max64(begins[batch + 1] - row, 0), min64(longest, total - row));
  }
};

}  // namespace strobe

#endif  // STROBE_CORE_MASK_SOURCES_H_
