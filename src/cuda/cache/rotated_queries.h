// Room in a workspace for queries after the rotary embedding.
#ifndef STROBE_CUDA_CACHE_ROTATED_QUERIES_H_
#define STROBE_CUDA_CACHE_ROTATED_QUERIES_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/workspace.h"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// Rows of Q, of all heads.
inline int64_t query_rows(const CachedParams& p) {
  return (p.packed_q ? 1 : p.cache.batch) * p.total_q * p.heads_kv * p.group;
}

/// Takes room for the queries after the rotary embedding.
inline Tensor carve_queries(Arena& arena, const CachedParams& p) {
  Tensor t{};
  t.head_stride = round_up(p.head_dim, 8);
  t.row_stride = t.head_stride * p.heads_kv * p.group;
  t.batch_stride = p.packed_q ? 0 : t.row_stride * p.total_q;
  t.data = arena.take<uint16_t>(query_rows(p) * t.head_stride);
  return t;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_CACHE_ROTATED_QUERIES_H_
