// Launches the backward pass: backward/pre.cuh, backward_sm80.cuh, backward/post.cuh; and for the
// gradient of a bias backward/dbias.cuh.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_LAUNCH_H_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_LAUNCH_H_

#include <cstddef>
#include <type_traits>

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/backward/dbias_launch.h"
#include "cuda/backward/order.cuh"
#include "cuda/backward/stages_launch.h"
#include "cuda/common/config.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"
#include "cuda/mma_sync/backward_sm80.cuh"
#include "cuda/mma_sync/dbias_form.cuh"

namespace strobe::cuda::sm80 {

template <BackwardConfig kConfig, Features kComputes>
using BackwardShapeOf = BackwardShape<kConfig, kComputes.has(features::kMask)>;

template <BackwardConfig kConfig, Features kComputes>
constexpr LaunchShape backward_shape() {
  using Shape = BackwardShapeOf<kConfig, kComputes>;
  return {Shape::kThreads, Shape::kSharedBytes};
}

/// Whether the kernel keeps an order of additions whether it is asked to or not
/// (BackwardThread::deterministic): where somebody asks for it by name.
template <Features kComputes>
inline constexpr bool kAlwaysOrders = kComputes.has(features::kOrder) &&
                                      !kComputes.has(features::kScores);

/// Counters of a query tile, of a problem or of a launch's params.
template <BackwardConfig kConfig, Features kComputes, typename Problem>
int32_t counters_of(const Problem& p) {
  return kAlwaysOrders<kComputes> || p.deterministic ? BackwardShape<kConfig>::kHalfWarps : 0;
}

template <BackwardConfig kConfig, Features kComputes, typename Problem>
BackwardScratch carve(Arena& arena, const Problem& p) {
  return carve_backward(arena, sizes_of(p), kConfig.width, kConfig.tile_q, kConfig.tile_k,
                        counters_of<kConfig, kComputes>(p), -1, true,
                        BackwardShapeOf<kConfig, kComputes>::kMask);
}

template <BackwardConfig kConfig, Features kComputes>
void backward_carve(Arena& arena, const AttentionProblem& problem, BackwardParams& params) {
  Arena count;
  carve<kConfig, kComputes>(count, problem);
  params.workspace = arena.take<std::byte>(static_cast<int64_t>(count.used()));
}

template <BackwardConfig kConfig, Features kComputes>
cudaError_t launch_backward_kernel(BackwardParams p, BackwardScratch scratch, BackwardOrder order,
                                   const LaunchTarget& target) {
  using Shape = BackwardShapeOf<kConfig, kComputes>;
  constexpr bool kGeneral = kComputes.has(features::kScores);
  constexpr bool kOrdered = kComputes.has(features::kOrder);
  constexpr bool kBias = kComputes.has(features::kBias);
  static_assert(!kGeneral || Shape::kHasGeneral, "no registers for it: take it from kernels.def");
  static KernelHandle kernel(
      reinterpret_cast<const void*>(&backward_kernel<Shape, kGeneral, kOrdered, kBias>),
      Shape::kSharedBytes);
  const auto blocks = static_cast<uint32_t>(
      min64(order.items, int64_t{target.multiprocessors} * Shape::kMinBlocks));
  void* args[] = {&p, &scratch, &order};
  return kernel.launch(dim3(blocks), Shape::kThreads, args, target);
}

template <BackwardConfig kConfig, Features kComputes>
cudaError_t launch_backward(const BackwardParams& params, const LaunchTarget& target) {
  using Shape = BackwardShapeOf<kConfig, kComputes>;
  using T = typename Shape::T;
  BackwardParams p = params;
  Arena arena(p.workspace);
  if (kAlwaysOrders<kComputes>) p.deterministic = 1;
  BackwardScratch scratch = carve<kConfig, kComputes>(arena, p);
  const BackwardSizes sizes = sizes_of(p);
  // Under a mask as data the rule does not say which tiles get an addition.
  scratch.stores_sum =
      Shape::kStoresSum && !Shape::kMask &&
      adds_once(sizes.seqlen_k, kConfig.tile_k, sizes.batch_invariant, sizes.lengths_differ);
  const int32_t counters = counters_of<kConfig, kComputes>(p);
  BackwardOrder order = backward_order(p, kConfig.width, kConfig.tile_k);
  // Items are drawn in 32 bits, and each thread block draws one past the end.
  if (order.items > int64_t{UINT32_MAX} - 65536) return cudaErrorInvalidValue;

  using StageTraits = std::conditional_t<Shape::kMask, MaskedStageTraits, MmaSyncStageTraits>;
  using Stages = BackwardStages<T, kConfig.tile_q, kConfig.tile_k, kConfig.width, StageTraits>;
  STROBE_RETURN_IF_CUDA_ERROR(Stages::launch_pre(p, scratch, counters, target));

  if (order.items > 0) {
    const cudaError_t error = launch_backward_kernel<kConfig, kComputes>(p, scratch, order, target);
    STROBE_RETURN_IF_CUDA_ERROR(error);
  }
  if constexpr (kComputes.has(features::kDbias))
    STROBE_RETURN_IF_CUDA_ERROR(
        (launch_dbias<T, DbiasForm, StageTraits>(p, scratch, kConfig.tile_q, target)));
  return Stages::launch_post(p, scratch, order, target);
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_LAUNCH_H_
