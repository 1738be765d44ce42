// A launch: what a plan says, done.
#ifndef STROBE_CUDA_HOST_LAUNCH_H_
#define STROBE_CUDA_HOST_LAUNCH_H_

#include "core/kernel.h"

namespace strobe::cuda {

/// Of a plan for an instance of this architecture.
Status launch(int arch, const Plan& plan, const ForwardArgs& args);
Status launch(int arch, const Plan& plan, const BackwardArgs& args);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_LAUNCH_H_
