// What a problem asks of a kernel.
#ifndef STROBE_CUDA_HOST_FEATURES_OF_H_
#define STROBE_CUDA_HOST_FEATURES_OF_H_

#include "core/problem.h"
#include "cuda/common/features.h"

namespace strobe::cuda {

/// The features that a (resolved) problem asks of a kernel whose tiles have tile_k keys. Of
/// addresses, which a plan does not know, they are those of aligned ones.
Features features_of(const AttentionProblem& problem, int64_t tile_k);

/// A problem with a cache as the main kernel sees it where a kernel of its own has appended the new
/// keys and left rotated queries in the workspace (cache/update_kernel.cuh).
AttentionProblem after_update(const AttentionProblem& problem);

/// The same of a quantised cache whose keys and values have been unpacked besides, to a contiguous
/// cache of the queries' type in the workspace that every sequence has an entry of
/// (rows/unpack.cu).
AttentionProblem after_unpacking(const AttentionProblem& problem);

/// Float8 queries over a cache (widened_queries.h) as the kernels see them where a kernel of its
/// own has written them as bf16: a quantised cache whose keys and values have scales of each
/// sequence's heads. Out in fp16 is float32 there, which is rounded afterwards. That kernel has
/// appended the new keys too, which the problem still counts.
AttentionProblem after_widening(const AttentionProblem& problem);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_FEATURES_OF_H_
