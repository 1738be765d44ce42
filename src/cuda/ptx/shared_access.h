// Shared memory by its 32-bit address, as PTX instructions take it.
#ifndef STROBE_CUDA_PTX_SHARED_ACCESS_H_
#define STROBE_CUDA_PTX_SHARED_ACCESS_H_

#include <cstdint>
#include <cstring>

namespace strobe::cuda::ptx {

/// The address of a generic pointer.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// A value of eight bytes.
template <typename Value>
__device__ __forceinline__ Value load_shared_wide(uint32_t address) {
  static_assert(sizeof(Value) == 8);
  uint64_t bits;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(bits) : "r"(address) : "memory");
  Value x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
/// Adds to a word, and returns what was there before.
__device__ __forceinline__ uint32_t add_shared(uint32_t address, uint32_t x) {
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(address), "r"(x)
               : "memory");
  return before;
}

__device__ __forceinline__ void store_shared_half(uint32_t address, uint16_t x) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

__device__ __forceinline__ uint16_t load_shared_half(uint32_t address) {
  uint16_t x;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
  return x;
}

/// Four words. The address is a multiple of 16.
__device__ __forceinline__ void store_shared_words(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
__device__ __forceinline__ void load_shared_words(uint32_t address, uint32_t (&x)[4]) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared_float(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

/// Writes x if it is -1. The caller knows that it never is. The compiler does not, and so computes
/// x, and all that x is made of, before this place.
__device__ __forceinline__ void never_store_shared(uint32_t address, float x) {
  asm volatile(
      "{ .reg .pred p; setp.eq.f32 p, %0, 0fBF800000; @p st.shared.f32 [%1], %0; }" ::"f"(x),
      "r"(address)
      : "memory");
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_SHARED_ACCESS_H_
