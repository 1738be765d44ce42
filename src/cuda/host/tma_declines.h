// What kernels that read by TMA leave to others.
#ifndef STROBE_CUDA_HOST_TMA_DECLINES_H_
#define STROBE_CUDA_HOST_TMA_DECLINES_H_

#include <string>

#include "core/problem.h"

namespace strobe::cuda {

/// What the sm90 kernels leave to mma.sync, or "". TMA moves 16-byte units: strides must be
/// multiples of 8 values, of float8 16, and it knows no stride of 0. Pointers are looked at when
/// they are there, at launch.
std::string tma_declines(const AttentionProblem& problem);
/// The same of the bias of a problem whose kernel reads that by TMA.
std::string bias_declines(const AttentionProblem& problem);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_TMA_DECLINES_H_
