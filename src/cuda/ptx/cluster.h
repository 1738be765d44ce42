// A cluster: thread blocks that run at the same time on neighbouring multiprocessors, and may reach
// into each other's shared memory. sm_90.
#ifndef STROBE_CUDA_PTX_CLUSTER_H_
#define STROBE_CUDA_PTX_CLUSTER_H_

#include <cstdint>

#include "cuda/ptx/barrier.h"

namespace strobe::cuda::ptx {

/// This block's number within its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Waits until all threads of the cluster have come here; what they wrote before is visible then.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/// Where block `rank` of the cluster has what lies at `shared` here.
__device__ __forceinline__ uint32_t shared_of(uint32_t shared, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}
/// Arrives at another block's barrier (shared_of).
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}
/// Writes a word into another block's shared memory; its four bytes count towards its barrier.
__device__ __forceinline__ void send_word(uint32_t to, uint32_t word, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
      "r"(word), "r"(barrier)
      : "memory");
}
/// Copies `bytes`, a multiple of 16, from here to another block's shared memory; they count towards
/// its barrier. This memory was written before a fence_proxy_async() of the writers.
__device__ __forceinline__ void send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_CLUSTER_H_
