// Launches the gradient of a bias: dbias.cuh.
#ifndef STROBE_CUDA_BACKWARD_DBIAS_LAUNCH_H_
#define STROBE_CUDA_BACKWARD_DBIAS_LAUNCH_H_

#include <cstdint>

#include "cuda/backward/dbias.cuh"
#include "cuda/common/static_order.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

/// Where the gradient is wanted: from what the kernel before has left in the scratch. tile_q: the
/// scratch's.
template <typename T, typename Form, typename StageTraits>
cudaError_t launch_dbias(BackwardParams& p, BackwardScratch& scratch, int32_t tile_q,
                         const LaunchTarget& target) {
  int64_t pieces = DbiasPiece::count(p);
  if (!p.dbias.data || pieces == 0) return cudaSuccess;
  const GridSize grid = grid_for(pieces);
  static KernelHandle kernel(
      reinterpret_cast<const void*>(&dbias_kernel<T, Form, StageTraits>),
      DbiasProduct<T, Form>::kSharedBytes + Form::template StepBias<T>::kSharedBytes);
  void* args[] = {&p, &scratch, &pieces, &tile_q};
  return kernel.launch(dim3(grid.x, grid.y), kDbiasThreads, args, target);
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_DBIAS_LAUNCH_H_
