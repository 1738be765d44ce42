// As src/cuda/ptx/float8.h, on the CPU.
#ifndef STROBE_CUDA_PTX_FLOAT8_H_
#define STROBE_CUDA_PTX_FLOAT8_H_

#include <cstdint>

#include "core/codes.h"

namespace strobe::cuda::ptx {

struct E4m3 {
  uint8_t bits;
  E4m3() = default;
  explicit E4m3(float x) : bits(e4m3_from_float(x)) {}
  explicit operator float() const { return float_from_e4m3(bits); }
};

inline uint32_t pack_e4m3(float a, float b, float c, float d) {
  return e4m3_from_float(a) | uint32_t{e4m3_from_float(b)} << 8 |
         uint32_t{e4m3_from_float(c)} << 16 | uint32_t{e4m3_from_float(d)} << 24;
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_FLOAT8_H_
