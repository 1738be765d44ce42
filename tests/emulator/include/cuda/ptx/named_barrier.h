// As src/cuda/ptx/named_barrier.h, on the CPU.
#ifndef STROBE_CUDA_PTX_NAMED_BARRIER_H_
#define STROBE_CUDA_PTX_NAMED_BARRIER_H_

#include "run_time.h"

namespace strobe::cuda::ptx {

template <int kThreads>
void named_barrier_sync(int id) {
  emulator::barrier(id, kThreads);
}
template <int kThreads>
void named_barrier_arrive(int id) {
  emulator::barrier_arrive(id, kThreads);
}
template <int kId, int kThreads>
void named_barrier_sync() {
  emulator::barrier(kId, kThreads);
}
template <int kId, int kThreads>
void named_barrier_arrive() {
  emulator::barrier_arrive(kId, kThreads);
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_NAMED_BARRIER_H_
