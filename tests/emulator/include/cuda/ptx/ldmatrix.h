// As src/cuda/ptx/ldmatrix.h, on the CPU.
#ifndef STROBE_CUDA_PTX_LDMATRIX_H_
#define STROBE_CUDA_PTX_LDMATRIX_H_

#include <cstdint>

#include "cuda/ptx/shared_access.h"
#include "instructions.h"
#include "run_time.h"

namespace strobe::cuda::ptx {

inline void ldmatrix(uint32_t (&r)[4], uint32_t address) { emulator::ldmatrix(r, address, false); }
inline void ldmatrix_trans(uint32_t (&r)[4], uint32_t address) {
  emulator::ldmatrix(r, address, true);
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_LDMATRIX_H_
