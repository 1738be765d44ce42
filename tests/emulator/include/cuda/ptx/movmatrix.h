// As src/cuda/ptx/movmatrix.h, on the CPU.
#ifndef STROBE_CUDA_PTX_MOVMATRIX_H_
#define STROBE_CUDA_PTX_MOVMATRIX_H_

#include <cstdint>

#include "instructions.h"

namespace strobe::cuda::ptx {

inline uint32_t transpose_fragment(uint32_t x) { return emulator::movmatrix(x); }

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_MOVMATRIX_H_
