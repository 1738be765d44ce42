// cp.async: 16 bytes, or less, from global to shared memory, past the registers (and L1).
// (Before 8.0 through the registers: a copy is over before the next instruction, so that there is
// nothing to wait for.)
#ifndef STROBE_CUDA_PTX_CP_ASYNC_H_
#define STROBE_CUDA_PTX_CP_ASYNC_H_

#include <cstdint>

#include "cuda/ptx/instructions.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda::ptx {

/// Copies 16 bytes, or writes zeros where `there` is 0: nothing is read then, so the source may be
/// any address. (`there` as a word: a bit of a mask is tested where it is. A count of bytes instead
/// of a predicate takes three times the instructions: the machine has no counterpart.)
__device__ __forceinline__ void cp_async_16_if(uint32_t shared, const void* global,
                                               uint32_t there) {
#if STROBE_CUDA_INSTRUCTIONS >= 800
  asm volatile(
      "{\n.reg .pred absent;\nsetp.eq.s32 absent, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, absent;\n}" ::"r"(shared),
      "l"(global), "r"(there)
      : "memory");
#else
  uint32_t words[4] = {};
  if (there != 0) {
    asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(global)
                 : "memory");
  }
  store_shared_words(shared, words);
#endif
}

/// The same of the first `bytes` of the 16, 0 to 16; the rest are zeros. For 8.0 and newer.
__device__ __forceinline__ void cp_async_16_of(uint32_t shared, const void* global,
                                               uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(bytes)
               : "memory");
}

/// cp_async_16_if of 4 or 8 bytes.
template <int kBytes>
__device__ __forceinline__ void cp_async_if(uint32_t shared, const void* global, uint32_t there) {
  static_assert(kBytes == 4 || kBytes == 8);
  // Caches that need it, quantised ones, are for 8.0 and newer.
  asm volatile(
      "{\n.reg .pred absent;\nsetp.eq.s32 absent, %2, 0;\n"
      "cp.async.ca.shared.global.L2::128B [%0], [%1], %3, absent;\n}" ::"r"(shared),
      "l"(global), "r"(there), "n"(kBytes)
      : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
#if STROBE_CUDA_INSTRUCTIONS >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits until at most kPending of this thread's committed groups are under way. Other threads' and
/// other warps' data is there only after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
#if STROBE_CUDA_INSTRUCTIONS >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_CP_ASYNC_H_
