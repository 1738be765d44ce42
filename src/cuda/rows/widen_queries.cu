// Float8 queries over a cache as bf16, which holds every code of e4m3: codes alone, since bf16 does
// not hold them times a scale. The scale goes to the keys instead, which have one in float32 that
// every kernel for codes multiplies scores by: the query heads of a key head share theirs. New keys
// and values are codes of the cache's dtype, whose bytes go there in the same launch.
#include <cstdint>

#include "core/arithmetic.h"
#include "core/codes.h"
#include "core/problem.h"
#include "core/quantised.h"
#include "cuda/cache/cache_update.cuh"
#include "cuda/common/params.h"
#include "cuda/host/fill_params.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/row_blocks.h"
#include "cuda/host/widened_queries.h"
#include "cuda/rows/quantised_lanes.cuh"

namespace strobe::cuda {

struct WideningParams : CachedUpdateParams {  // elements of q, k and v are bytes
  WidenedQueries to;
  int64_t rows_of_entry, rows;  // of queries of all heads; packed: all are of one entry
};

/// Copies all new keys and values to the cache. A warp has a row.
__device__ __forceinline__ void append_codes(const CachedUpdateParams& p) {
  if (!p.k_new.data) return;
  const CachedSequences& c = p.cache;
  const int64_t rows = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
  const int64_t first = int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
  for (int64_t n = first; n < rows * p.heads_kv; n += int64_t{gridDim.x} * kWarps) {
    const int64_t row = n / p.heads_kv, head = n - row * p.heads_kv;
    visit_new_row(p, row, [&](const CachedRows& s, int64_t key, const KeyRows::Place& place) {
      const auto copy = [&](const Tensor& from, const Tensor& to, int32_t dim) {
        const Part part = Part::of(32, dim);
        const char* const x = static_cast<const char*>(from.data) +
                              from.element(s.new_entry, s.new_row + key - s.new_begin, head) +
                              part.first;
        char* const at =
            static_cast<char*>(to.data) + to.element(place.entry, place.row, head) + part.first;
        if (part.count > 0) store_bytes(at, load_bytes(x, part.count), part.count);
      };
      copy(p.k_new, p.k, p.head_dim);
      copy(p.v_new, p.v, p.head_dim_v);
    });
  }
}

/// The scales by a thread each, and the queries by a warp for some rows at a time.
__global__ void __launch_bounds__(kThreads)
    widen_queries_kernel(const __grid_constant__ WideningParams p) {
  append_codes(p);
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
#pragma unroll 1
  for (int64_t n = thread; n < int64_t{p.batch} * p.heads_kv; n += int64_t{gridDim.x} * kThreads) {
    const int64_t b = n / p.heads_kv, head = n - b * p.heads_kv;
    p.to.k_scale[n] = usable_scale(p.q_scale.of(b, head)) * usable_scale(p.k_scale.of(b, head));
    p.to.v_scale[n] = p.v_scale.of(b, head);
  }
  int lanes = 1;
  while (lanes * kShare < p.head_dim) lanes *= 2;
  const Part part = Part::of(lanes, p.head_dim);
  const int at_once = 32 / lanes;  // rows
  const int64_t first = thread / 32 * at_once + lane_of_warp() / lanes;
  if (part.count == 0) return;
#pragma unroll 1
  for (int64_t n = first; n < p.rows; n += int64_t{gridDim.x} * kWarps * at_once) {
    const int64_t row = n / p.heads, entry = row / p.rows_of_entry;
    const char* const from = static_cast<const char*>(p.q.data) +
                             p.q.element(entry, row - entry * p.rows_of_entry, n - row * p.heads) +
                             part.first;
    const uint2 codes = load_bytes(from, part.count);
    float x[kShare];
#pragma unroll
    for (int i = 0; i < kShare; ++i)
      x[i] = float_from_e4m3(static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> (8 * (i % 4))));
    write_values(kBfloat16, p.to.q + n * WidenedQueries::width(p.head_dim) + part.first, part.count,
                 x);
  }
}

cudaError_t launch_widening(const AttentionProblem& p, const ForwardArgs& args,
                            const WidenedQueries& to, const LaunchTarget& target) {
  WideningParams w{};
  fill_params(p, args, static_cast<CachedUpdateParams&>(w));
  w.to = to;
  w.rows = WidenedQueries::rows(p);
  w.rows_of_entry = p.varlen ? p.total_q : p.seqlen_q;
  const CachedSequences& c = w.cache;
  const int64_t new_rows = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
  const int64_t fresh = w.k_new.data ? new_rows * w.heads_kv : 0;
  const int64_t rows = max64(w.rows, fresh);
  if (rows == 0) return cudaSuccess;
  static KernelHandle kernel(reinterpret_cast<const void*>(&widen_queries_kernel));
  void* kernel_args[] = {&w};
  return kernel.launch(grid_of(blocks_for(rows, kWarps, target)), kThreads, kernel_args, target);
}

}  // namespace strobe::cuda
