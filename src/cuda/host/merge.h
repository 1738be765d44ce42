// Merging partial results on a GPU.
#ifndef STROBE_CUDA_HOST_MERGE_H_
#define STROBE_CUDA_HOST_MERGE_H_

#include "core/merge.h"

namespace strobe::cuda {

/// Enqueues the merge. The arguments have passed check_merge.
Status merge(const MergeArgs& args);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_MERGE_H_
