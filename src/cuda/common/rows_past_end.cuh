// Rows of packed tensors that belong to no sequence: those past the end of the last one, where a
// caller's buffers are longer than what they hold. They are never read, and results are those of
// rows that are not in use: zeros, and -inf in lse. The host does not know where the last sequence
// ends, so the thread blocks of a launch that is made anyhow write them.
#ifndef STROBE_CUDA_COMMON_ROWS_PAST_END_CUH_
#define STROBE_CUDA_COMMON_ROWS_PAST_END_CUH_

#include <cstdint>

#include "core/sequence.h"
#include "cuda/common/load.cuh"
#include "cuda/common/params.h"
#include "cuda/common/softmax.cuh"

namespace strobe::cuda {

/// Which of the launch's warps this is, of all that share the rows.
struct WarpOfLaunch {
  int64_t number, count;
};

/// Writes zeros to rows [begin, total) of a packed tensor of 16-bit values, and -inf to those of
/// lse [heads, total]; lse: null where there is none. A warp takes a head's row at a time.
/// (rows/unused_rows.cu writes the same to unused rows within sequences, of which the host knows.)
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

/// Clears those of out and lse, where queries are packed. Not inlined, since it is rare that there
/// are such rows.
inline __device__ __noinline__ void clear_past_end(const ForwardParams& p, WarpOfLaunch warp) {
  const int32_t words = p.out_words();
  clear_rows(p.out.divided(words), p.heads, words * p.head_dim_v, p.lse, p.lse_head_stride,
             end_of_last(p.cu_q, p.batch, p.total_q), p.total_q, warp);
}

/// Whether this kernel clears them. Where two kernels attend for a batch, the one for sequences
/// with many queries does.
STROBE_INLINE constexpr bool has_rows_past_end(const ForwardParams&) { return true; }
STROBE_INLINE constexpr bool has_rows_past_end(const CachedParams& p) {
  return p.cache.most_q == INT32_MAX;
}

/// Clears those of dQ, where queries are packed, unless gradients are added to what is there.
inline __device__ __noinline__ void clear_past_end_of_dq(const BackwardParams& p,
                                                         WarpOfLaunch warp) {
  if (p.accumulates) return;
  const int32_t words = p.grad_words();
  clear_rows(p.dq.divided(words), p.heads, words * p.head_dim, nullptr, 0,
             end_of_last(p.cu_q, p.batch, p.total_q), p.total_q, warp);
}

/// Clears those of dK and dV, where keys are packed, unless gradients are added to what is there.
inline __device__ __noinline__ void clear_past_end_of_keys(const BackwardParams& p,
                                                           WarpOfLaunch warp) {
  if (p.accumulates) return;
  const int32_t words = p.grad_words();
  const int64_t begin = end_of_last(p.cu_k, p.batch, p.total_k);
  clear_rows(p.dk.divided(words), p.heads_kv, words * p.head_dim, nullptr, 0, begin, p.total_k,
             warp);
  clear_rows(p.dv.divided(words), p.heads_kv, words * p.head_dim_v, nullptr, 0, begin, p.total_k,
             warp);
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_ROWS_PAST_END_CUH_
