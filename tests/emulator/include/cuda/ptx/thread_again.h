// As src/cuda/ptx/thread_again.h, on the CPU.
#ifndef STROBE_CUDA_PTX_THREAD_AGAIN_H_
#define STROBE_CUDA_PTX_THREAD_AGAIN_H_

#include "cuda_runtime_api.h"

namespace strobe::cuda::ptx {

inline int thread_again() { return static_cast<int>(threadIdx.x); }

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_THREAD_AGAIN_H_
