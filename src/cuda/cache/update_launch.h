// Launches update_kernel.cuh.
#ifndef STROBE_CUDA_CACHE_UPDATE_LAUNCH_H_
#define STROBE_CUDA_CACHE_UPDATE_LAUNCH_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/workspace.h"
#include "cuda/cache/rotated_queries.h"
#include "cuda/cache/update_kernel.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"
#include "cuda/host/row_blocks.h"

namespace strobe::cuda {

/// Whether rows of the tensor are made of whole 16-byte units.
inline bool in_units(const Tensor& t, int32_t dim) {
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  return address % 16 == 0 && ((t.batch_stride | t.row_stride | t.head_stride | dim) & 7) == 0;
}
/// Whether there are new keys whose rows are not.
inline bool new_elements(const CachedUpdateParams& p) {
  return p.cache.rows_new > 0 &&
         (!in_units(p.k_new, p.head_dim) || !in_units(p.v_new, p.head_dim_v));
}
/// Whether the launch does anything to the cache besides reading it, or to queries. (Where another
/// kernel of the launch has done so, pointers are null.)
inline bool updates(const CachedUpdateParams& p) {
  return (p.cache.rows_new > 0 && p.k_new.data) || p.rotary_cos;
}

/// What runs before the kernel that attends. Shape: type, warps and threads of its kernel.
template <typename Shape>
class UpdateBefore {
 public:
  /// arena: takes room for queries, if any are rotated.
  UpdateBefore(Arena& arena, const CachedUpdateParams& p) : p_(p) {
    if (p.rotary_cos) rotated_ = carve_queries(arena, p);
  }
  /// The parameters of the kernel that attends.
  CachedParams attends() const {
    CachedParams attends = p_;
    if (rotated_.data) attends.q = rotated_;
    return attends;
  }
  /// Appends and rotates; launches nothing where there is nothing to be done.
  cudaError_t launch(const LaunchTarget& target) const {
    const CachedSequences& c = p_.cache;
    static KernelHandle kernels[] = {
        KernelHandle(reinterpret_cast<const void*>(&update_kernel<Shape, false>)),
        KernelHandle(reinterpret_cast<const void*>(&update_kernel<Shape, true>))};
    const int64_t new_rows = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
    const int64_t rows = max64(new_rows * p_.heads_kv, rotated_.data ? query_rows(p_) : 0);
    if (!updates(p_) || rows == 0) return cudaSuccess;
    const bool elements = !in_units(p_.q, p_.head_dim) || !in_units(p_.k, p_.head_dim) ||
                          !in_units(p_.v, p_.head_dim_v) || new_elements(p_);
    const dim3 blocks = grid_of(blocks_for(rows, Shape::kWarps, target));
    void* args[] = {const_cast<CachedUpdateParams*>(&p_), const_cast<Tensor*>(&rotated_)};
    return kernels[elements].launch(blocks, Shape::kThreads, args, target);
  }

 private:
  const CachedUpdateParams& p_;
  Tensor rotated_{};
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_CACHE_UPDATE_LAUNCH_H_
