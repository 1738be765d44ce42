// As src/cuda/ptx/opaque.h, on the CPU.
#ifndef STROBE_CUDA_PTX_OPAQUE_H_
#define STROBE_CUDA_PTX_OPAQUE_H_

#include <cstdint>

namespace strobe::cuda::ptx {

inline int opaque(int x) { return x; }
inline void make_opaque(uint32_t&) {}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_OPAQUE_H_
