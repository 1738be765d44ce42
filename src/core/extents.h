// How many rows a problem's tensors have.
#ifndef STROBE_CORE_EXTENTS_H_
#define STROBE_CORE_EXTENTS_H_

#include <cstdint>

#include "core/macros.h"
#include "strobe/strobe.h"

namespace strobe {

/// Extents of k and v: entries (of the batch, of a cache; or pages), and the rows of each. Packed:
/// one entry.
STROBE_INLINE constexpr int64_t kv_entries(const strobe_problem& p) {
  if (p.cache == STROBE_CACHE_PAGED) return p.pages;
  if (p.cache == STROBE_CACHE_CONTIGUOUS) return p.cache_batch ? p.cache_batch : p.batch;
  return p.varlen ? 1 : p.batch;
}
STROBE_INLINE constexpr int64_t kv_rows(const strobe_problem& p) {
  if (p.cache == STROBE_CACHE_PAGED) return p.page_size;
  return p.varlen && !p.cache ? p.total_k : p.seqlen_k;
}

/// Rows of q (or k) that the tensors hold, all sequences together.
STROBE_INLINE constexpr int64_t rows_q(const strobe_problem& p) {
  return p.varlen ? p.total_q : p.batch * p.seqlen_q;
}
STROBE_INLINE constexpr int64_t rows_k(const strobe_problem& p) {
  if (p.cache) return kv_entries(p) * kv_rows(p);
  return p.varlen ? p.total_k : p.batch * p.seqlen_k;
}

}  // namespace strobe

#endif  // STROBE_CORE_EXTENTS_H_
