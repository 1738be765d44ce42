// ldmatrix: four 8 x 8 matrices of 16-bit values from shared memory into mma fragments.
//
// Lane i gives the address of row i % 8 of matrix i / 8; register m of a lane then holds elements
// (lane / 4, 2 * (lane % 4) + {0, 1}) of matrix m, or of its transpose. tile.cuh's fragment offsets
// choose the matrices so that, for a 16 x 16 block [row][column] in memory, neighbouring registers
// are mma operands (an operand in registers that are not neighbours costs moves):
//
//   fragment_offset, plain    r[0..3]: the A fragment of the block (Q in Q K^T)
//   fragment_offset, trans    B with k = row, n = column (V in P V): (r[0], r[1]) for columns 0-7,
//                             (r[2], r[3]) for columns 8-15
//   fragment_offset_b, plain  B with n = row, k = column (K in Q K^T): (r[0], r[1]) for rows 0-7,
//                             (r[2], r[3]) for rows 8-15
#ifndef STROBE_CUDA_PTX_LDMATRIX_H_
#define STROBE_CUDA_PTX_LDMATRIX_H_

#include <cstdint>

#include "cuda/ptx/shared_access.h"

namespace strobe::cuda::ptx {

// Volatile, so that loads stay on their side of barriers and of waits for cp.async.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_LDMATRIX_H_
