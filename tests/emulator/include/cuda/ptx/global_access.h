// As src/cuda/ptx/global_access.h, on the CPU.
#ifndef STROBE_CUDA_PTX_GLOBAL_ACCESS_H_
#define STROBE_CUDA_PTX_GLOBAL_ACCESS_H_

#include <cstdint>
#include <cstring>

#include "run_time.h"

namespace strobe::cuda::ptx {

// Kernels call these until they give what they wait for.
inline uint32_t load_relaxed(const uint32_t* p) {
  emulator::poll();
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline uint32_t load_acquire(const uint32_t* p) {
  emulator::poll();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline void store_release(uint32_t* p, uint32_t x) { __atomic_store_n(p, x, __ATOMIC_RELEASE); }
inline unsigned long long add_acquire_release(unsigned long long* p, unsigned long long x) {
  return __atomic_fetch_add(p, x, __ATOMIC_ACQ_REL);
}

inline float4 load_in_turn(const float4* p) { return *p; }
inline void store_in_turn(float4* p, const float4& x) { *p = x; }

inline void load_half_if(uint32_t& x, const void* p, bool condition) {
  if (!condition) return;
  if (reinterpret_cast<uintptr_t>(p) % 2 != 0) emulator::fail("ld.u16: an odd address");
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  x = half;
}

inline void prefetch(const void* p) {
  volatile const char read = *static_cast<const char*>(p);  // of memory that is there
  (void)read;
}

inline void add(float* p, float x) {
  auto* const word = reinterpret_cast<uint32_t*>(p);
  uint32_t before = __atomic_load_n(word, __ATOMIC_RELAXED), after = 0;
  do {
    float sum;
    std::memcpy(&sum, &before, sizeof sum);
    sum += x;
    std::memcpy(&after, &sum, sizeof sum);
  } while (
      !__atomic_compare_exchange_n(word, &before, after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}
inline void add_four(float* p, const float (&x)[4]) {
  if (reinterpret_cast<uintptr_t>(p) % 16 != 0) emulator::fail("red.v4: not a multiple of 16");
  for (int i = 0; i < 4; ++i) add(p + i, x[i]);
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_GLOBAL_ACCESS_H_
