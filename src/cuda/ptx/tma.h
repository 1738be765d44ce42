// TMA: boxes of a tensor into shared memory, by one thread.
#ifndef STROBE_CUDA_PTX_TMA_H_
#define STROBE_CUDA_PTX_TMA_H_

#include <cstdint>

#include "cuda/ptx/barrier.h"
#include "cuda/ptx/tensor_map.h"

namespace strobe::cuda::ptx {

/// L2 eviction policies, as createpolicy would make them.
enum class L2 : uint64_t { kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000 };

/// Fetches the descriptor ahead of its first use.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Loads the box at (column, row, head, batch); its bytes count towards `barrier`. What lies
/// outside the tensor arrives as zeros.
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, Barrier& barrier,
                                         L2 policy, int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier.word()))),
      "l"(static_cast<uint64_t>(policy))
      : "memory");
}

/// Stores a box from shared memory; what lies outside the tensor is left out. Shared memory was
/// written before a fence_proxy_async() of the writers.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* shared, int column,
                                          int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::
          "l"(&map),
      "r"(column), "r"(row), "r"(head), "r"(batch),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared)))
      : "memory");
}
/// Waits until this thread's stores have read their shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
  ::cuda::ptx::cp_async_bulk_commit_group();
  ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>());
}
/// Waits until this thread's stores are in global memory, for this thread's ordinary reads too.
__device__ __forceinline__ void tma_store_wait() {
  ::cuda::ptx::cp_async_bulk_wait_group(::cuda::ptx::n32_t<0>());
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_global);
}
/// Makes this thread's ordinary writes to shared memory visible to TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
  ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared);
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_TMA_H_
