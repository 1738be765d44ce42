// A value of which the compiler no longer knows where it comes from.
#ifndef STROBE_CUDA_PTX_OPAQUE_H_
#define STROBE_CUDA_PTX_OPAQUE_H_

#include <cstdint>

namespace strobe::cuda::ptx {

/// x. What follows from it is computed from it, and not kept from before.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
/// Leaves x as it is. From here on the compiler cannot compute x anew, nor move what follows from x
/// to before this place: it keeps x alone.
__device__ __forceinline__ void make_opaque(uint32_t& x) { asm volatile("" : "+r"(x)); }

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_OPAQUE_H_
