// Global memory by single instructions: counters that thread blocks wait for, and sums that they
// add to.
#ifndef STROBE_CUDA_PTX_GLOBAL_ACCESS_H_
#define STROBE_CUDA_PTX_GLOBAL_ACCESS_H_

#include <cstdint>

namespace strobe::cuda::ptx {

/// Reads a counter that other thread blocks write. It orders nothing.
__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

/// Loads two bytes that nobody writes meanwhile into a register, which keeps what it has where the
/// condition is false. Nothing waits for them until the register is read.
__device__ __forceinline__ void load_half_if(uint32_t& x, const void* p, bool condition) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.nc.u16 %0, [%1];\n}"
               : "+r"(x)
               : "l"(p), "r"(static_cast<int>(condition)));
}

/// Loads four floats that no other thread writes. The compiler leaves these loads, and the stores
/// below, in the order in which the program has them: so it cannot begin loads early that it would
/// need registers for.
__device__ __forceinline__ float4 load_in_turn(const float4* p) {
  float4 x;
  asm volatile("ld.volatile.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(p)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_in_turn(float4* p, const float4& x) {
  asm volatile("st.volatile.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}

/// Has L2 fetch the line of 128 bytes with this address. The thread does not wait for it.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/// Reads a counter with acquire semantics. Everything that was written, or added, before the
/// release that wrote the value read here comes before what this thread does next, and before what
/// threads do that this thread in turn synchronises with.
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

/// Writes x when all that this thread has written or added before, and all that it knows others to
/// have, is visible to the whole GPU; the thread waits until it is.
__device__ __forceinline__ void store_release(uint32_t* p, uint32_t x) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

/// Adds x to *p and gives what was there before. What this thread has written, and knows others to
/// have written, is visible to all whose addition comes later, and this thread knows what those
/// had written whose addition came earlier.
__device__ __forceinline__ unsigned long long add_acquire_release(unsigned long long* p,
                                                                  unsigned long long x) {
  unsigned long long before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(p), "l"(x)
               : "memory");
  return before;
}

/// Adds x to *p in L2. The thread does not wait for it.
__device__ __forceinline__ void add(float* p, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}

#if __CUDA_ARCH__ >= 900
/// The same for four neighbours at once; p is aligned to 16 bytes.
__device__ __forceinline__ void add_four(float* p, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
#endif

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_GLOBAL_ACCESS_H_
