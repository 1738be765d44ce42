// Launches the backward pass: backward/pre.cuh, backward_sm80.cuh, backward/post.cuh.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_LAUNCH_H_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_LAUNCH_H_

#include <cstddef>

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/backward/order.cuh"
#include "cuda/backward/stages_launch.h"
#include "cuda/common/config.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"
#include "cuda/mma_sync/backward_sm80.cuh"

namespace strobe::cuda::sm80 {

template <BackwardConfig kConfig>
constexpr LaunchShape backward_shape() {
  using Shape = BackwardShape<kConfig>;
  return {Shape::kThreads, Shape::kSharedBytes};
}

/// Whether additions to dQ have an order, of a problem or of a launch's params: where it matters,
/// and there is a second one.
template <BackwardConfig kConfig, typename Problem>
bool has_order(const Problem& p) {
  return p.deterministic && !adds_once(sizes_of(p), kConfig.tile_k);
}
/// Counters of a query tile.
template <BackwardConfig kConfig, typename Problem>
int32_t counters_of(const Problem& p) {
  return has_order<kConfig>(p) ? BackwardShape<kConfig>::kHalfWarps : 0;
}

template <BackwardConfig kConfig, typename Problem>
BackwardScratch carve(Arena& arena, const Problem& p) {
  return carve_backward(arena, sizes_of(p), kConfig.width, kConfig.tile_q, kConfig.tile_k,
                        counters_of<kConfig>(p));
}

template <BackwardConfig kConfig>
void backward_carve(Arena& arena, const AttentionProblem& problem, BackwardParams& params) {
  Arena count;
  carve<kConfig>(count, problem);
  params.workspace = arena.take<std::byte>(static_cast<int64_t>(count.used()));
}

template <BackwardConfig kConfig, bool kGeneral, bool kOrdered>
cudaError_t launch_backward_kernel(BackwardParams p, BackwardScratch scratch, BackwardOrder order,
                                   const LaunchTarget& target) {
  using Shape = BackwardShape<kConfig>;
  static KernelHandle kernel(
      reinterpret_cast<const void*>(&backward_kernel<Shape, kGeneral, kOrdered>),
      Shape::kSharedBytes);
  const auto blocks = static_cast<uint32_t>(
      min64(order.items, int64_t{target.multiprocessors} * Shape::kMinBlocks));
  void* args[] = {&p, &scratch, &order};
  return kernel.launch(dim3(blocks), Shape::kThreads, args, target);
}

template <BackwardConfig kConfig>
cudaError_t launch_backward(const BackwardParams& params, const LaunchTarget& target) {
  using Shape = BackwardShape<kConfig>;
  using T = typename Shape::T;
  BackwardParams p = params;
  Arena arena(p.workspace);
  BackwardScratch scratch = carve<kConfig>(arena, p);
  scratch.stores_sum = Shape::kStoresSum && adds_once(sizes_of(p), kConfig.tile_k);
  const int32_t counters = counters_of<kConfig>(p);
  p.deterministic = has_order<kConfig>(p);
  BackwardOrder order = backward_order(p, kConfig.width, kConfig.tile_k);
  // Items are drawn in 32 bits, and each thread block draws one past the end.
  if (order.items > int64_t{UINT32_MAX} - 65536) return cudaErrorInvalidValue;

  using Stages =
      BackwardStages<T, kConfig.tile_q, kConfig.tile_k, kConfig.width, MmaSyncStageTraits>;
  STROBE_RETURN_IF_CUDA_ERROR(Stages::launch_pre(p, scratch, counters, target));

  if (order.items > 0) {
    const bool general = p.softcap > 0 || p.alibi_slopes || p.dropout.enabled();
    cudaError_t error = cudaErrorNotSupported;  // kernels.def says `plain`: the plan never does
    if (general) {
      if constexpr (Shape::kHasGeneral)
        error = launch_backward_kernel<kConfig, true, true>(p, scratch, order, target);
    } else if (p.deterministic) {
      error = launch_backward_kernel<kConfig, false, true>(p, scratch, order, target);
    } else {
      error = launch_backward_kernel<kConfig, false, false>(p, scratch, order, target);
    }
    STROBE_RETURN_IF_CUDA_ERROR(error);
  }
  return Stages::launch_post(p, scratch, order, target);
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_LAUNCH_H_
