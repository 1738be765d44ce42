// Shared memory by its 32-bit address.
#ifndef STROBE_CUDA_PTX_SHARED_ACCESS_H_
#define STROBE_CUDA_PTX_SHARED_ACCESS_H_

#include <cstdint>
#include <cstring>

namespace strobe::cuda::ptx {

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

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_SHARED_ACCESS_H_
