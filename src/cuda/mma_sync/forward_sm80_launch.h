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

template <ForwardConfig kC, ForwardTuning kT>
using ShapeOf = ForwardShape<kC.dtype, kC.width, kC.tile_q, kC.tile_k, kC.stages, kC.warps, kT.step,
                             kT.kept, kT.split, kT.min_blocks>;

template <ForwardConfig kConfig>
constexpr LaunchShape forward_shape() {
  using Plain = ShapeOf<kConfig, forward_tuning(kConfig)>;
  using General = ShapeOf<kConfig, general_tuning(kConfig)>;
  return {Plain::kThreads, max64(Plain::kSharedBytes, General::kSharedBytes)};
}

template <ForwardConfig kConfig>
void forward_carve(Arena&, const AttentionProblem&, ForwardParams&) {}

template <typename Shape, bool kGeneral>
cudaError_t launch_kernel(const ForwardParams& params, const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&forward_kernel<Shape, kGeneral>),
                             Shape::kSharedBytes);
  StaticOrder order = StaticOrder::make(params, Shape::kTileQ);
  const GridSize grid = grid_for(order.items);
  Stagger stagger =
      Stagger::make(params, order.items,
                    blocks_at_once(target.multiprocessors, target.shared_bytes, Shape::kSharedBytes,
                                   Shape::kMinBlocks),
                    2 * Shape::QTile::kBytes + 2 * Shape::KTile::kBytes, Shape::kTileQ);
  void* args[] = {const_cast<ForwardParams*>(&params), &order, &stagger};
  return kernel.launch(dim3(grid.x, grid.y), Shape::kThreads, args, target);
}

/// Whether the rows of all heads are made of whole 16-byte units.
inline bool in_units(const Tensor& t, int32_t dim) {
  const auto address = reinterpret_cast<uintptr_t>(t.data);
  return address % 16 == 0 && ((t.batch_stride | t.row_stride | t.head_stride | dim) & 7) == 0;
}

template <ForwardConfig kConfig>
cudaError_t launch_forward(const ForwardParams& p, const LaunchTarget& target) {
  const bool plain = p.scale > 0 && p.softcap == 0 && !p.alibi_slopes && !p.dropout.enabled() &&
                     in_units(p.q, p.head_dim) && in_units(p.k, p.head_dim) &&
                     in_units(p.v, p.head_dim_v) && in_units(p.out, p.head_dim_v);
  using Plain = ShapeOf<kConfig, forward_tuning(kConfig)>;
  using General = ShapeOf<kConfig, general_tuning(kConfig)>;
  return plain ? launch_kernel<Plain, false>(p, target) : launch_kernel<General, true>(p, target);
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_FORWARD_SM80_LAUNCH_H_
