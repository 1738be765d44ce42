// What runs before a kernel that does not append and rotate itself (updates_before in
// host/instance.h): new keys and values go to the cache, and rotated queries to the workspace. The
// other kernel then reads both from memory, as if nothing had been new.
#ifndef STROBE_CUDA_CACHE_UPDATE_KERNEL_CUH_
#define STROBE_CUDA_CACHE_UPDATE_KERNEL_CUH_

#include <cstdint>

#include "cuda/cache/cache_update.cuh"
#include "cuda/common/load.cuh"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// Writes each query that is in use to the same row of `to`, rotated and rounded once: each row by
/// one warp of the launch. Every warp of every thread block has to call it. Rows of `to` are made
/// of whole 16-byte units.
template <typename Shape, bool kElements>
__device__ __forceinline__ void rotate_queries(const CachedUpdateParams& p, const Tensor& to) {
  const CachedSequences& c = p.cache;
  const int column = 8 * static_cast<int>(threadIdx.x % 32);
  const int32_t heads = p.heads_kv * p.group;
  const int64_t rows = c.cu_q ? p.total_q : int64_t{c.batch} * c.seqlen_q;
  const int64_t step = int64_t{gridDim.x} * Shape::kWarps;
#pragma unroll 1
  for (int64_t n = int64_t{blockIdx.x} * Shape::kWarps + threadIdx.x / 32; n < rows * heads;
       n += step) {
    const int64_t row = n / heads;
    const auto head = static_cast<int32_t>(n - row * heads);
    const int32_t b =
        c.cu_q ? sequence_of_row(c.cu_q, c.batch, row) : static_cast<int32_t>(row / c.seqlen_q);
    if (b < 0) continue;
    const CachedRows s = c.of_all().sequence_rows(b);
    const int64_t query = c.cu_q ? row - s.q_row : row - int64_t{b} * c.seqlen_q;
    if (query < 0 || query >= s.seqlen_q || column >= p.head_dim) continue;
    const auto row_of = [&](const Tensor& t) {
      return static_cast<char*>(t.data) + 2 * t.element(s.batch, s.q_row + query, head);
    };
    uint32_t word[4];
    // Where the sequence's numbers are out of range, so is the position, and the row becomes NaN
    // anyhow.
    if (column < c.rotary_dim && s.in_range) {
      rotate_chunk<typename Shape::T>(word, p, row_of(p.q), c.query_rotation(s.rotary_start, query),
                                      column, p.head_dim - column);
    } else {
      read_chunk<kElements>(word, row_of(p.q) + 2 * column, p.head_dim - column);
    }
    store_words(row_of(to), column, column + 8, true, word);
  }
}

/// rotated: where the queries go; its data is null where nothing is rotated. kElements: tensors
/// that are not made of whole 16-byte units.
template <typename Shape, bool kElements>
__global__ void __launch_bounds__(Shape::kThreads)
    update_kernel(const __grid_constant__ CachedUpdateParams p,
                  const __grid_constant__ Tensor rotated) {
  append<Shape, kElements>(p);
  if (rotated.data) rotate_queries<Shape, kElements>(p, rotated);
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_CACHE_UPDATE_KERNEL_CUH_
