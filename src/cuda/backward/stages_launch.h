// The stages of a backward pass around its main kernel, which an instance composes:
// launch_pre, the main kernel, launch_post. And the sizes that decide its scratch, of a problem.
#ifndef STROBE_CUDA_BACKWARD_STAGES_LAUNCH_H_
#define STROBE_CUDA_BACKWARD_STAGES_LAUNCH_H_

#include <cstdint>

#include "core/problem.h"
#include "cuda/backward/order.cuh"
#include "cuda/backward/post.cuh"
#include "cuda/backward/pre.cuh"
#include "cuda/backward/scratch.cuh"
#include "cuda/common/static_order.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

STROBE_INLINE constexpr BackwardSizes sizes_of(const AttentionProblem& p) {
  return {p.batch,
          p.heads,
          p.heads_kv,
          p.seqlen_q,
          p.seqlen_k,
          p.varlen != 0,
          p.total_q,
          rows_k(p),
          p.batch_invariant != 0,
          p.varlen || p.has_seqused_k,
          p.grad_dtype == STROBE_FLOAT32 || p.accumulate};
}

/// What pre and post share of a main kernel: its type, tiles and StageTraits (backward/pre.cuh).
template <typename T_, int kTileQ_, int kTileK_, int kWidth_, typename StageTraits_>
struct BackwardStages {
  using T = T_;
  using StageTraits = StageTraits_;
  static constexpr int kTileQ = kTileQ_, kTileK = kTileK_, kWidth = kWidth_;

  /// lse and delta; `counters` counters of each query tile set to 0. Also without a query: the
  /// ticket, and what is prepared of the keys.
  static cudaError_t launch_pre(BackwardParams& p, BackwardScratch& scratch, int32_t counters,
                                const LaunchTarget& target) {
    int64_t items = query_tiles(p, scratch.tiles);
    const GridSize grid = grid_for(max64(max64(1, items), scratch.key_blocks));
    void* args[] = {&p, &scratch, &items, &counters};
    static KernelHandle kernel(
        reinterpret_cast<const void*>(&backward_pre_kernel<T, kTileQ, kWidth, StageTraits>));
    return kernel.launch(dim3(grid.x, grid.y), kPreThreads, args, target);
  }

  template <bool kKeepsSums>
  static cudaError_t launch_dq(BackwardParams& p, BackwardScratch& scratch, int64_t items,
                               const LaunchTarget& target) {
    const GridSize grid = grid_for(items);
    void* args[] = {&p, &scratch, &items};
    static KernelHandle kernel(reinterpret_cast<const void*>(
        &backward_post_kernel<T, kTileQ, kWidth, StageTraits, kKeepsSums>));
    return kernel.launch(dim3(grid.x, grid.y), kPostThreads, args, target,
                         !StageTraits::kMarksNonfinite);
  }

  /// dQ, unless the main kernel has written it; and dK and dV where it has left their sums.
  static cudaError_t launch_post(BackwardParams& p, BackwardScratch& scratch, BackwardOrder& order,
                                 const LaunchTarget& target) {
    int64_t items = query_tiles(p, scratch.tiles);
    if (items > 0) {
      if (scratch.dq) {
        STROBE_RETURN_IF_CUDA_ERROR(p.keeps_sums() ? launch_dq<true>(p, scratch, items, target)
                                                   : launch_dq<false>(p, scratch, items, target));
      }
      if constexpr (!StageTraits::kMarksNonfinite) {
        void* pairwise_args[] = {&p, &scratch, &order, &items};
        static KernelHandle pairwise(reinterpret_cast<const void*>(
            &backward_pairwise_kernel<T, kTileQ, kWidth, kTileK, StageTraits::kMask>));
        const auto blocks = static_cast<unsigned>(min64(items, 2 * target.multiprocessors));
        STROBE_RETURN_IF_CUDA_ERROR(
            pairwise.launch(dim3(blocks), kPostThreads, pairwise_args, target, true));
      }
    }
    if (!scratch.dk || order.items <= 0) return cudaSuccess;
    auto parts = static_cast<int32_t>(order.parts);
    int64_t pieces = int64_t{p.batch} * p.seqlen_k * p.heads_kv * (kWidth / 8);
    const GridSize grid = grid_for(ceil_div(pieces, kPostThreads));
    void* args[] = {&p, &scratch, &parts, &pieces};
    static KernelHandle kernel(reinterpret_cast<const void*>(&backward_parts_kernel<T, kWidth>));
    return kernel.launch(dim3(grid.x, grid.y), kPostThreads, args, target);
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_STAGES_LAUNCH_H_
