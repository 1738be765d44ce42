// CUDA C++ for the host compiler: included before all else where kernels are compiled, as nvcc
// includes its own header.
#ifndef STROBE_TESTS_EMULATOR_CUDA_EMULATION_H_
#define STROBE_TESTS_EMULATOR_CUDA_EMULATION_H_

// Whatever of the standard library uses names that are macros below.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"
#include "instructions.h"
#include "run_time.h"

#define __CUDACC__ 1
#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __builtin_assume(...) \
  ((__VA_ARGS__) ? void() : strobe::emulator::fail("what is assumed is not so: " #__VA_ARGS__))

using std::isfinite;
using std::isnan;
using std::max;
using std::min;

inline void __syncthreads() { strobe::emulator::barrier(0, static_cast<int>(blockDim.x)); }
inline int __syncthreads_or(int x) {
  return strobe::emulator::barrier_or(0, static_cast<int>(blockDim.x), x != 0) ? 1 : 0;
}
inline void __syncwarp() { strobe::emulator::exchange("__syncwarp", {}, true); }

template <typename T>
T shuffled(const char* name, uint32_t mask, T x, int lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint32_t words[2] = {};
  __builtin_memcpy(words, &x, sizeof x);
  for (size_t i = 0; i < sizeof x / 4; ++i)
    words[i] = strobe::emulator::shuffle(name, mask, words[i], lane);
  __builtin_memcpy(&x, words, sizeof x);
  return x;
}
inline int lane_of_thread() { return static_cast<int>(threadIdx.x % 32); }
template <typename T>
T __shfl_sync(uint32_t mask, T x, int lane) {
  return shuffled("__shfl_sync", mask, x, lane % 32);
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T x, int bits) {
  return shuffled("__shfl_xor_sync", mask, x, lane_of_thread() ^ bits);
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T x, int distance) {
  const int lane = lane_of_thread();
  return shuffled("__shfl_up_sync", mask, x, lane >= distance ? lane - distance : lane);
}
inline uint32_t __ballot_sync(uint32_t mask, bool x) {
  return strobe::emulator::ballot("__ballot_sync", mask, x);
}
inline bool __any_sync(uint32_t mask, bool x) {
  return strobe::emulator::ballot("__any_sync", mask, x) != 0;
}
inline bool __all_sync(uint32_t mask, bool x) {
  return strobe::emulator::ballot("__all_sync", mask, x) == 0xffffffffu;
}
inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t x) {
  for (int bits = 16; bits > 0; bits /= 2) x |= __shfl_xor_sync(mask, x, bits);
  return x;
}
inline void __nanosleep(unsigned) {}
/// Bytes of y:x by number: that of each byte of the result is four bits of the selector.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = x | uint64_t{y} << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = selector >> (4 * i) & 7;
    result |= static_cast<uint32_t>(both >> (8 * byte) & 0xff) << (8 * i);
  }
  return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
template <typename T>
void __stcg(T* p, T x) {
  *p = x;
}
inline unsigned atomicAdd(unsigned* p, unsigned x) {
  return __atomic_fetch_add(p, x, __ATOMIC_RELAXED);
}
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long x) {
  return __atomic_fetch_add(p, x, __ATOMIC_RELAXED);
}
// (ThreadSanitizer knows no fences.)
inline void __threadfence() {
  static unsigned all = 0;
  __atomic_fetch_add(&all, 0, __ATOMIC_SEQ_CST);
}
inline unsigned atomicOr(unsigned* p, unsigned x) {
  return __atomic_fetch_or(p, x, __ATOMIC_RELAXED);
}
inline unsigned atomicMax(unsigned* p, unsigned x) {
  unsigned before = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (before < x &&
         !__atomic_compare_exchange_n(p, &before, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}
template <typename T>
T atomicExch(T* p, T x) {
  return __atomic_exchange_n(p, x, __ATOMIC_RELAXED);
}
inline unsigned long long atomicCAS(unsigned long long* p, unsigned long long expected,
                                    unsigned long long x) {
  __atomic_compare_exchange_n(p, &expected, x, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __log2f(float x) { return std::log2(x); }
/// 0 where y is beyond 2^126, as CUDA documents it.
inline float __fdividef(float x, float y) {
  return std::fabs(y) > 0x1p126f && std::fabs(y) < INFINITY ? std::copysign(0.f, x) : x / y;
}
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(uint32_t x) { return __builtin_bit_cast(float, x); }
inline uint32_t __float_as_uint(float x) { return __builtin_bit_cast(uint32_t, x); }

#endif  // STROBE_TESTS_EMULATOR_CUDA_EMULATION_H_
