// What a kernel is given, from a problem and a launch's arguments.
#ifndef STROBE_CUDA_HOST_FILL_PARAMS_H_
#define STROBE_CUDA_HOST_FILL_PARAMS_H_

#include "core/problem.h"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// All but the workspace. For a plan, with empty arguments.
void fill_params(const AttentionProblem& problem, const ForwardArgs& args, ForwardParams& params);
/// Of keys in a cache.
void fill_params(const AttentionProblem& problem, const ForwardArgs& args,
                 CachedUpdateParams& params);
void fill_params(const AttentionProblem& problem, const BackwardArgs& args, BackwardParams& params);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_FILL_PARAMS_H_
