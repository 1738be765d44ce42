// A quantised cache unpacked to the workspace, for a kernel that reads a float cache.
#include <cstddef>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/cache/coded_row.cuh"
#include "cuda/cache/rotated_queries.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/quantised_update.h"
#include "cuda/host/row_blocks.h"
#include "cuda/rows/quantised_lanes.cuh"

namespace strobe::cuda {

constexpr int kRowsOfStep = 8;        // of a sequence, that a warp has at a time
constexpr int64_t kZeroedUpTo = 128;  // rows: no kernel that attends reads a larger block of keys

/// K and V of every row in use, to the same row of the sequence's entry; each of the two may be
/// codes, or floats of the type that is written. A key that has no page is
/// NaN, and so is the result of every query that sees it. Behind the last key there are zeros up to
/// the end of a block, so that no product with what lay there is NaN. entries, where the cache has
/// such numbers: becomes each sequence's own, or -1 where its numbers are out of range.
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ CachedLaunchParams p, const __grid_constant__ Tensor k,
                  const __grid_constant__ Tensor v, int32_t dtype, int32_t* entries) {
  const CachedSequences cache = p.cache.of_all();
  const QuantisedCache& q = p.quantised;
  const int64_t of_sequence = ceil_div(cache.seqlen_k, kRowsOfStep);
  const int64_t steps = int64_t{cache.batch} * of_sequence;
#pragma unroll 1
  for (int64_t n = int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x / 32); n < steps;
       n += int64_t{gridDim.x} * kWarps) {
    const int64_t b = n / of_sequence;
    const CachedRows s = cache.sequence_rows(b);
    if (entries && n == b * of_sequence && lane_of_warp() == 0)
      entries[b] = s.in_range ? static_cast<int32_t>(b) : -1;
    const int64_t first = (n - b * of_sequence) * kRowsOfStep - s.keys.first;  // a key's number
    const int64_t room = cache.seqlen_k - s.keys.first;
    const int64_t end = min64(room, round_up(s.seqlen_k, kZeroedUpTo));
    const auto unpack = [&](const Tensor& from, const RowScales& scales, int32_t from_dtype,
                            const Tensor& to, int32_t dim, bool nan_without_page) {
      int lanes = kLanesOfBlock;
      while (lanes * kShare < dim) lanes *= 2;
      const Part part = Part::of(lanes, dim);
      const int at_once = 32 / lanes;  // rows of heads
#pragma unroll 1
      for (int i = lane_of_warp() / lanes; i < kRowsOfStep * p.heads_kv; i += at_once) {
        const int64_t key = first + i / p.heads_kv;
        const int32_t head = i % p.heads_kv;
        if (key < 0 || key >= end || part.count == 0) continue;
        float x[kShare] = {};
        if (key < s.seqlen_k) {
          const KeyRows::Place place = s.keys.place(key);
          if (place.there) {
            const char* const row =
                static_cast<const char*>(from.data) + from.element(place.entry, place.row, head);
            if (is_quantised(from_dtype)) {
              dequantise_part(from_dtype, scales.is_half ? STROBE_FLOAT16 : STROBE_FLOAT32, row,
                              scales.at(b, place.entry, place.row, head), part, x);
            } else {
              read_values(from_dtype, row + part.first * element_bytes(from_dtype), part.count, x);
            }
          } else if (nan_without_page) {
#pragma unroll
            for (int j = 0; j < kShare; ++j) x[j] = __int_as_float(0x7fffffff);
          }
        }
        write_values(
            dtype,
            static_cast<uint16_t*>(to.data) + to.element(b, s.keys.first + key, head) + part.first,
            part.count, x);
      }
    };
    unpack(p.k, q.k_scale, q.k_dtype, k, p.head_dim, true);
    unpack(p.v, q.v_scale, q.v_dtype, v, p.head_dim_v, false);
  }
}

namespace {

struct Unpacked {
  Tensor k, v, q;    // q: rotated, without data where it is not
  int32_t* entries;  // of the sequences
};
Unpacked carve_unpacked(Arena& arena, const CachedUpdateParams& p) {
  const auto take = [&](int32_t dim) {
    Tensor t{};
    t.head_stride = round_up(dim, 8);
    t.row_stride = t.head_stride * p.heads_kv;
    t.batch_stride = t.row_stride * p.cache.seqlen_k;
    t.data = arena.take<uint16_t>(t.batch_stride * p.cache.batch);
    return t;
  };
  Unpacked to{take(p.head_dim), take(p.head_dim_v), {}, arena.take<int32_t>(p.cache.batch)};
  if (p.cache.rotary_dim > 0) to.q = carve_queries(arena, p);
  return to;
}

}  // namespace

int64_t unpacked_bytes(const CachedUpdateParams& p) {
  Arena arena;
  carve_unpacked(arena, p);
  return static_cast<int64_t>(arena.used());
}

cudaError_t launch_unpacked(const CachedInstance& instance, const CachedLaunchParams& p,
                            const LaunchTarget& target, const CachedInstance* for_few_queries) {
  Arena arena(p.workspace);
  Unpacked to = carve_unpacked(arena, p);
  const int32_t dtype = instance.config.dtype;
  STROBE_RETURN_IF_CUDA_ERROR(
      launch_quantised_update(p, to.q, to.q.data ? query_rows(p) : 0, dtype, target));
  const int64_t rows = int64_t{p.cache.batch} * ceil_div(p.cache.seqlen_k, kRowsOfStep);
  if (rows > 0) {
    static KernelHandle kernel(reinterpret_cast<const void*>(&unpack_kernel));
    int32_t to_dtype = dtype;
    if (!p.cache.entries) to.entries = nullptr;
    void* args[] = {const_cast<CachedLaunchParams*>(&p), &to.k, &to.v, &to_dtype, &to.entries};
    STROBE_RETURN_IF_CUDA_ERROR(
        kernel.launch(grid_of(blocks_for(rows, kWarps, target)), kThreads, args, target));
  }
  // As a launch of its own over another cache, which finds everything done. The cache still counts
  // the new keys, and knows which positions are out of range.
  CachedLaunchParams attends = p;
  attends.workspace = arena.take<std::byte>(0);
  attends.k = to.k;
  attends.v = to.v;
  if (to.q.data) attends.q = to.q;
  attends.k_new = attends.v_new = {};
  attends.rotary_cos = attends.rotary_sin = nullptr;
  attends.quantised = {};
  attends.cache.table = nullptr;
  if (rows > 0) {  // else no key is read, and the caller's numbers say which are out of range
    attends.cache.entries = to.entries;
    attends.cache.cache_batch = attends.cache.batch;
  }
  return instance.launch(attends, target, for_few_queries);
}

}  // namespace strobe::cuda
