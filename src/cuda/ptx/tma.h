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
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier.address()),
      "l"(static_cast<uint64_t>(policy))
      : "memory");
}

/// The same of a map of five dimensions: the box at (column, head, row, group, batch).
__device__ __forceinline__ void tma_load(void* shared, const CUtensorMap& map, Barrier& barrier,
                                         L2 policy, int column, int head, int row, int group,
                                         int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(shared)),
      "l"(&map), "r"(column), "r"(head), "r"(row), "r"(group), "r"(batch), "r"(barrier.address()),
      "l"(static_cast<uint64_t>(policy))
      : "memory");
}

/// Loads `bytes` from global memory, both ends multiples of 16; they count towards `barrier`.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(barrier.address())
      : "memory");
}

/// Stores a box from shared memory; what lies outside the tensor is left out. Shared memory was
/// written before a fence_proxy_async() of the writers.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* shared, int column,
                                          int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::
          "l"(&map),
      "r"(column), "r"(row), "r"(head), "r"(batch), "r"(shared_address(shared))
      : "memory");
}
/// The same of a map of five dimensions.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* shared, int column,
                                          int head, int row, int group, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], "
      "[%6];" ::"l"(&map),
      "r"(column), "r"(head), "r"(row), "r"(group), "r"(batch), "r"(shared_address(shared))
      : "memory");
}
/// Waits until this thread's stores have read their shared memory.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Waits until this thread's stores are in global memory, for this thread's ordinary reads too.
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
/// Makes this thread's ordinary writes to shared memory visible to TMA and wgmma, and keeps its
/// ordinary reads before what they write there.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_TMA_H_
