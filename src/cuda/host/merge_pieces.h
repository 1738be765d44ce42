// The second kernel of a launch that divides keys and leaves the pieces to be merged.
#ifndef STROBE_CUDA_HOST_MERGE_PIECES_H_
#define STROBE_CUDA_HOST_MERGE_PIECES_H_

#include <cuda_runtime_api.h>

#include "cuda/common/config.h"
#include "cuda/common/params.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

struct Division;

/// Merges what the kernel before it in the stream has left, which had these parameters: the spans
/// of d.open_spans. config: of that kernel.
cudaError_t launch_merge_pieces(const CachedParams& p, const Division& d,
                                const CachedConfig& config, Features computes,
                                const LaunchTarget& target);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_MERGE_PIECES_H_
