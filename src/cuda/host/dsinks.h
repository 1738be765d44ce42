// The gradient of attention sinks, after the kernels of a backward launch.
#ifndef STROBE_CUDA_HOST_DSINKS_H_
#define STROBE_CUDA_HOST_DSINKS_H_

#include <cuda_runtime_api.h>

#include "cuda/common/params.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

/// Sums what the rows in use have left in sink_rows, head by head and in one order, to dsinks.
cudaError_t launch_dsinks(const BackwardParams& params, const LaunchTarget& target);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_DSINKS_H_
