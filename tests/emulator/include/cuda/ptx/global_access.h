// As src/cuda/ptx/global_access.h, on the CPU.
#ifndef STROBE_CUDA_PTX_GLOBAL_ACCESS_H_
#define STROBE_CUDA_PTX_GLOBAL_ACCESS_H_

#include <cstdint>

namespace strobe::cuda::ptx {

inline uint32_t load_relaxed(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline void store_release(uint32_t* p, uint32_t x) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }
inline unsigned long long add_acquire_release(unsigned long long* p, unsigned long long x) {
  return __atomic_fetch_add(p, x, __ATOMIC_ACQ_REL);
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_GLOBAL_ACCESS_H_
