// As src/cuda/ptx/packed.h, on the CPU.
#ifndef STROBE_CUDA_PTX_PACKED_H_
#define STROBE_CUDA_PTX_PACKED_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/ptx/arithmetic.h"

namespace strobe::cuda::ptx {

/// The values that `combine` makes of two words' halves.
template <typename T, typename Combine>
uint32_t combine_pairs(uint32_t x, uint32_t y, const Combine& combine) {
  uint32_t result = 0;
  for (int half = 0; half < 2; ++half) {
    T a, b;
    a.bits = static_cast<uint16_t>(x >> 16 * half);
    b.bits = static_cast<uint16_t>(y >> 16 * half);
    const T z(combine(static_cast<float>(a), static_cast<float>(b)));
    result |= uint32_t{z.bits} << 16 * half;
  }
  return result;
}

template <typename T>
uint32_t min_or_nan_pair(uint32_t x, uint32_t y) {
  return combine_pairs<T>(x, y, [](float a, float b) { return min_or_nan(a, b); });
}
template <uint32_t kMask>
uint32_t masked_or(uint32_t x, uint32_t y) {
  return (x & kMask) | y;
}
// (A product of two such values has a float's bits at most: it is rounded once.)
template <typename T>
uint32_t multiply_pair(uint32_t x, uint32_t y) {
  return combine_pairs<T>(x, y, [](float a, float b) { return a * b; });
}

inline uint32_t sign_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t signs = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = selector >> 4 * i & 7;
    const uint32_t byte = (from < 4 ? x : y) >> 8 * (from % 4);
    if (byte & 0x80) signs |= uint32_t{0xff} << 8 * i;
  }
  return signs;
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_PACKED_H_
