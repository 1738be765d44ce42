// What a kernel is given, from a problem and a launch's arguments.
#ifndef STROBE_CUDA_HOST_FILL_PARAMS_H_
#define STROBE_CUDA_HOST_FILL_PARAMS_H_

#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// All but the workspace. For a plan, with empty arguments.
void fill_params(const AttentionProblem& problem, const ForwardArgs& args, ForwardParams& params);
/// Of keys in a cache.
void fill_params(const AttentionProblem& problem, const ForwardArgs& args,
                 CachedUpdateParams& params);
/// The same, and what a launch has to know of a quantised cache.
void fill_params(const AttentionProblem& problem, const ForwardArgs& args,
                 CachedLaunchParams& params);
void fill_params(const AttentionProblem& problem, const BackwardArgs& args, BackwardParams& params);

/// What a launch needs of the workspace whichever its instance is: the first piece of it.
void take_rows(Arena& arena, const AttentionProblem& problem, BackwardParams& params);
inline void take_rows(Arena&, const AttentionProblem&, const ForwardParams&) {}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_FILL_PARAMS_H_
