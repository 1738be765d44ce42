// An append to a quantised cache: new keys are rotated, and quantised with new values, and queries
// are rotated, before the kernel that attends.
#include <cstdint>

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/quantised.h"
#include "cuda/cache/cache_update.cuh"
#include "cuda/cache/coded_row.cuh"
#include "cuda/cache/update_kernel.cuh"
#include "cuda/common/element.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/quantised_update.h"
#include "cuda/host/row_blocks.h"
#include "cuda/rows/quantised_lanes.cuh"

namespace strobe::cuda {

/// What update_kernel.cuh asks of a kernel.
template <int kDtype>
struct QuantisedUpdateShape {
  using T = Element<kDtype>;
  static constexpr int kWarps = cuda::kWarps;
};

/// Writes all new keys and values to the cache. After the rotary embedding a value is float32: it
/// is rounded once, to its code, or to T where these are floats beside codes. A warp has a row.
template <typename T>
__device__ __forceinline__ void append_quantised(const CachedLaunchParams& p) {
  if (!p.k_new.data) return;
  const CachedSequences& c = p.cache;
  const QuantisedCache& q = p.quantised;
  const int64_t rows = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
  const int64_t first = int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
  for (int64_t n = first; n < rows * p.heads_kv; n += int64_t{gridDim.x} * kWarps) {
    const int64_t row = n / p.heads_kv;
    const auto head = static_cast<int32_t>(n - row * p.heads_kv);
    visit_new_row(p, row, [&](const CachedRows& s, int64_t key, const KeyRows::Place& place) {
      const int64_t own = key - s.new_begin;
      const auto rotation = Rotation<T>::at(p, s.rotary_start + own);
      const auto write = [&](const Tensor& from, const Tensor& to, const RowScales& scales,
                             int32_t dtype, int dim, bool rotates) {
        const T* const x =
            static_cast<const T*>(from.data) + from.element(s.new_entry, s.new_row + own, head);
        const Part part = Part::of(32, dim);
        float values[kShare] = {};
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const int d = part.first + i;
          if (i < part.count) values[i] = rotates ? rotation.exact(x, d) : static_cast<float>(x[d]);
        }
        char* const at = static_cast<char*>(to.data) + to.element(place.entry, place.row, head);
        if (!is_quantised(dtype)) {
          write_values(dtype, at + part.first * sizeof(T), part.count, values);
          return;
        }
        const RowForm form{dtype, scales.is_half ? STROBE_FLOAT16 : STROBE_FLOAT32,
                           q.has_row_scales != 0};
        const uint32_t largest = form.makes_scale ? largest_of_row(largest_of_lane(values), 32) : 0;
        quantise_by_lanes(form, values, part, at,
                          const_cast<char*>(scales.at(s.batch, place.entry, place.row, head)),
                          largest, true);
      };
      write(p.k_new, p.k, q.k_scale, q.k_dtype, p.head_dim, true);
      write(p.v_new, p.v, q.v_scale, q.v_dtype, p.head_dim_v, false);
    });
  }
}

template <int kDtype>
__global__ void __launch_bounds__(kThreads)
    quantised_update_kernel(const __grid_constant__ CachedLaunchParams p,
                            const __grid_constant__ Tensor rotated) {
  append_quantised<Element<kDtype>>(p);
  if (rotated.data) rotate_queries<QuantisedUpdateShape<kDtype>, true>(p, rotated);
}

namespace {

template <int kDtype>
cudaError_t launch_update(const CachedLaunchParams& p, const Tensor& rotated, int64_t rows,
                          const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&quantised_update_kernel<kDtype>));
  void* args[] = {const_cast<CachedLaunchParams*>(&p), const_cast<Tensor*>(&rotated)};
  return kernel.launch(grid_of(blocks_for(rows, kWarps, target)), kThreads, args, target);
}

}  // namespace

cudaError_t launch_quantised_update(const CachedLaunchParams& p, const Tensor& rotated,
                                    int64_t rotated_rows, int dtype, const LaunchTarget& target) {
  const CachedSequences& c = p.cache;
  const int64_t new_rows = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
  const int64_t fresh = p.k_new.data ? new_rows : 0;  // else the cache has them already
  const int64_t rows = max64(fresh * p.heads_kv, rotated_rows);
  if (rows == 0) return cudaSuccess;
  return dtype == kBfloat16 ? launch_update<kBfloat16>(p, rotated, rows, target)
                            : launch_update<kFloat16>(p, rotated, rows, target);
}

}  // namespace strobe::cuda
