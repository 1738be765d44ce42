// As src/cuda/ptx/named_barrier.h, on the CPU.
#ifndef STROBE_CUDA_PTX_NAMED_BARRIER_H_
#define STROBE_CUDA_PTX_NAMED_BARRIER_H_

#include "run_time.h"

namespace strobe::cuda::ptx {

template <int kThreads>
void named_barrier_sync(int id) {
  emulator::barrier(id, kThreads);
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_NAMED_BARRIER_H_
