// As src/cuda/ptx/cp_async.h, on the CPU.
#ifndef STROBE_CUDA_PTX_CP_ASYNC_H_
#define STROBE_CUDA_PTX_CP_ASYNC_H_

#include <cstdint>

#include "run_time.h"

namespace strobe::cuda::ptx {

inline void cp_async_16_if(uint32_t shared, const void* global, bool there) {
  emulator::copy_async(shared, global, there ? 16 : 0);
}
inline void cp_async_16_of(uint32_t shared, const void* global, uint32_t bytes) {
  emulator::copy_async(shared, global, bytes);
}
template <int kBytes>
void cp_async_if(uint32_t shared, const void* global, bool there) {
  emulator::copy_async(shared, global, there ? kBytes : 0, kBytes);
}
inline void cp_async_commit() { emulator::commit_copies(); }
template <int kPending>
void cp_async_wait() {
  emulator::wait_for_copies(kPending);
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_CP_ASYNC_H_
