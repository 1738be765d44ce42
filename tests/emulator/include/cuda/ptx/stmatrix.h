// As src/cuda/ptx/stmatrix.h, on the CPU.
#ifndef STROBE_CUDA_PTX_STMATRIX_H_
#define STROBE_CUDA_PTX_STMATRIX_H_

#include <cstdint>

#include "instructions.h"

namespace strobe::cuda::ptx {

inline void stmatrix(uint32_t address, const uint32_t (&r)[4]) { emulator::stmatrix(address, r); }

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_STMATRIX_H_
