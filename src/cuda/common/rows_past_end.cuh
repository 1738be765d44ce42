// Rows of packed tensors that belong to no sequence: those past the end of the last one, where a
// caller's buffers are longer than what they hold. What they hold counts for nothing, and results
// are what rows get that are not in use: zeros, and -inf in lse. The host does not know where the
// last sequence ends, so the thread blocks of a launch that is made anyhow write them.
#ifndef STROBE_CUDA_COMMON_ROWS_PAST_END_CUH_
#define STROBE_CUDA_COMMON_ROWS_PAST_END_CUH_

#include <cstdint>

#include "core/sequence.h"
#include "cuda/common/load.cuh"
#include "cuda/common/params.h"
#include "cuda/common/softmax.cuh"

namespace strobe::cuda {

/// A warp among those that share the rows.
struct WarpOfLaunch {
  int64_t number, count;
};

/// Zeros to rows [begin, total) of a packed tensor of 16-bit values, -inf to those of lse
/// [heads, total]; lse: null where there is none. A warp takes a head's row at a time.
__device__ __forceinline__ void clear_rows(const Tensor& t, int32_t heads, int32_t dim, float* lse,
                                           int64_t lse_head_stride, int64_t begin, int64_t total,
                                           WarpOfLaunch warp) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  constexpr uint32_t kZeros[4] = {};
  const int64_t items = (total - begin) * heads;
#pragma unroll 1
  for (int64_t i = warp.number; i < items; i += warp.count) {
    const int64_t row = begin + i / heads;
    const auto head = static_cast<int32_t>(i % heads);
    const RowsView view = rows_view(t, 0, row, head, 1, dim);
#pragma unroll 1
    for (int column = 8 * lane; column < dim; column += 8 * 32)
      store_words(view.data, column, dim, view.aligned(), kZeros);
    if (lse && lane == 0) lse[head * lse_head_stride + row] = -infinity();
  }
}

/// Those of out and lse, where queries are packed. words: 16-bit values in an element of out. Not
/// inlined: it is rare that there are any.
inline __device__ __noinline__ void clear_past_end(const ForwardParams& p, int32_t words,
                                                   WarpOfLaunch warp) {
  Tensor out = p.out;
  out.row_stride *= words;
  out.head_stride *= words;
  clear_rows(out, p.heads, words * p.head_dim_v, p.lse, p.lse_head_stride,
             end_of_last(p.cu_q, p.batch, p.total_q), p.total_q, warp);
}

/// Whether this kernel writes them: of two that attend for a batch, the one that has the sequences
/// with many queries.
STROBE_INLINE constexpr bool has_rows_past_end(const ForwardParams&) { return true; }
STROBE_INLINE constexpr bool has_rows_past_end(const CachedParams& p) {
  return p.cache.most_q == INT32_MAX;
}

/// Those of dQ, where queries are packed.
inline __device__ __noinline__ void clear_past_end_of_dq(const BackwardParams& p,
                                                         WarpOfLaunch warp) {
  clear_rows(p.dq, p.heads, p.head_dim, nullptr, 0, end_of_last(p.cu_q, p.batch, p.total_q),
             p.total_q, warp);
}

/// Those of dK and dV, where keys are packed.
inline __device__ __noinline__ void clear_past_end_of_keys(const BackwardParams& p,
                                                           WarpOfLaunch warp) {
  const int64_t begin = end_of_last(p.cu_k, p.batch, p.total_k);
  clear_rows(p.dk, p.heads_kv, p.head_dim, nullptr, 0, begin, p.total_k, warp);
  clear_rows(p.dv, p.heads_kv, p.head_dim_v, nullptr, 0, begin, p.total_k, warp);
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_ROWS_PAST_END_CUH_
