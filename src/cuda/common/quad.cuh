// Words handed around among the four lanes of a quad, which hold a row of an mma accumulator
// between them.
#ifndef STROBE_CUDA_COMMON_QUAD_CUH_
#define STROBE_CUDA_COMMON_QUAD_CUH_

#include <cstdint>

#include "core/macros.h"

namespace strobe::cuda {

// The transpose of 4 x 4 words, lane t holding row t, in two steps: lanes 2 apart swap the 2 x 2
// blocks off the diagonal, then lanes 1 apart do the same within the blocks. What a lane gives and
// where it puts what it gets are functions of their own, so that a test on the CPU can play all
// lanes.

/// What the lane gives to the lane `lane ^ distance` for slots i and i + distance, i without that
/// bit.
STROBE_INLINE constexpr uint32_t quad_gives(const uint32_t (&w)[4], int lane, int distance, int i) {
  return (lane & distance) != 0 ? w[i] : w[i + distance];
}
STROBE_INLINE constexpr void quad_takes(uint32_t (&w)[4], int lane, int distance, int i,
                                        uint32_t got) {
  const bool high = (lane & distance) != 0;
  w[i] = high ? got : w[i];
  w[i + distance] = high ? w[i + distance] : got;
}

#if defined(__CUDACC__)

/// Lane t's word d becomes lane d's word t.
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4], int lane) {
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int i = n * (3 - distance);  // 0 and 1, then 0 and 2
      quad_takes(w, lane, distance, i,
                 __shfl_xor_sync(0xffffffffu, quad_gives(w, lane, distance, i), distance));
    }
  }
}

#endif  // __CUDACC__

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_QUAD_CUH_
