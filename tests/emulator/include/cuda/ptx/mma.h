// As src/cuda/ptx/mma.h, on the CPU.
#ifndef STROBE_CUDA_PTX_MMA_H_
#define STROBE_CUDA_PTX_MMA_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "instructions.h"

namespace strobe::cuda::ptx {

template <typename T>
void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::mma(c, a, b0, b1,
                std::is_same_v<T, __nv_bfloat16> ? emulator::from_bfloat16 : emulator::from_half);
}

template <typename T>
uint32_t pack(float low, float high) {
  return T(low).bits | uint32_t{T(high).bits} << 16;
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_MMA_H_
