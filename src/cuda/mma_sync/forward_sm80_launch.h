// Launches forward_sm80.cuh.
#ifndef STROBE_CUDA_MMA_SYNC_FORWARD_SM80_LAUNCH_H_
#define STROBE_CUDA_MMA_SYNC_FORWARD_SM80_LAUNCH_H_

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/common/config.h"
#include "cuda/common/stagger.cuh"
#include "cuda/common/static_order.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"
#include "cuda/mma_sync/forward_sm80.cuh"

namespace strobe::cuda::sm80 {

template <ForwardConfig kC, Features kComputes>
struct ForwardKernel {
  static constexpr bool kGeneral = kComputes.has(features::kScores);
  static constexpr bool kBias = kComputes.has(features::kBias);
  static constexpr ForwardTuning kT = kBias      ? bias_tuning(kC)
                                      : kGeneral ? general_tuning(kC)
                                                 : forward_tuning(kC);
  using Shape = ForwardShape<kC.dtype, kC.width, kC.tile_q, kC.tile_k, kC.stages, kC.warps, kT.step,
                             kT.kept, kT.split, kT.min_blocks>;
  static constexpr int kSharedBytes = Shape::template kSharedBytes<kBias>;
};

template <ForwardConfig kConfig, Features kComputes>
constexpr LaunchShape forward_shape() {
  using Kernel = ForwardKernel<kConfig, kComputes>;
  return {Kernel::Shape::kThreads, Kernel::kSharedBytes};
}

template <ForwardConfig kConfig, Features kComputes>
void forward_carve(Arena&, const AttentionProblem&, ForwardParams&) {}

template <ForwardConfig kConfig, Features kComputes>
cudaError_t launch_forward(const ForwardParams& params, const LaunchTarget& target) {
  using Kernel = ForwardKernel<kConfig, kComputes>;
  using Shape = typename Kernel::Shape;
  static KernelHandle kernel(
      reinterpret_cast<const void*>(&forward_kernel<Shape, Kernel::kGeneral, Kernel::kBias>),
      Kernel::kSharedBytes);
  StaticOrder order = StaticOrder::make(params, Shape::kTileQ);
  const GridSize grid = grid_for(order.items);
  Stagger stagger =
      Stagger::make(params, order.items,
                    blocks_at_once(target.multiprocessors, target.shared_bytes,
                                   Kernel::kSharedBytes, Shape::kMinBlocks),
                    2 * Shape::QTile::kBytes + 2 * Shape::KTile::kBytes, Shape::kTileQ);
  void* args[] = {const_cast<ForwardParams*>(&params), &order, &stagger};
  return kernel.launch(dim3(grid.x, grid.y), Shape::kThreads, args, target);
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_FORWARD_SM80_LAUNCH_H_
