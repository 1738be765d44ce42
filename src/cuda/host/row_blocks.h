// How many thread blocks go through rows.
#ifndef STROBE_CUDA_HOST_ROW_BLOCKS_H_
#define STROBE_CUDA_HOST_ROW_BLOCKS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/arithmetic.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

/// Of a kernel whose thread blocks take rows_each rows at a time, and wait for memory alone.
inline int64_t blocks_for(int64_t rows, int64_t rows_each, const LaunchTarget& target) {
  constexpr int64_t kBlocksEach = 16;  // of a multiprocessor
  const int64_t most = max64(1, target.multiprocessors * kBlocksEach);
  return min64(ceil_div(rows, rows_each), most);
}
inline dim3 grid_of(int64_t blocks) { return {static_cast<unsigned>(blocks)}; }

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_ROW_BLOCKS_H_
