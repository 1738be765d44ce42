// Barriers between roles of a thread block: mbarriers in shared memory (phases, with a count of
// bytes that TMA still owes), and the 16 hardware barriers by number.
#ifndef STROBE_CUDA_PTX_BARRIER_H_
#define STROBE_CUDA_PTX_BARRIER_H_

#include <cstdint>
#include <cuda/ptx>

namespace strobe::cuda::ptx {

/// An mbarrier. A phase ends when `count` arrivals and all expected bytes are in; phases are told
/// apart by parity, 0 for the first. Waiting for parity 1 on a new barrier returns at once: the
/// phase "before the first" is over.
class Barrier {
 public:
  __device__ __forceinline__ void init(uint32_t count) {
    ::cuda::ptx::mbarrier_init(&word_, count);
  }
  __device__ __forceinline__ void arrive() {
    ::cuda::ptx::mbarrier_arrive(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                 ::cuda::ptx::space_shared, &word_);
  }
  __device__ __forceinline__ void arrive(uint32_t count) {
    ::cuda::ptx::mbarrier_arrive(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                 ::cuda::ptx::space_shared, &word_, count);
  }
  /// Arrives, and adds `bytes` to what TMA has to deliver before the phase ends.
  __device__ __forceinline__ void arrive_expect(uint32_t bytes) {
    ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                           ::cuda::ptx::space_shared, &word_, bytes);
  }
  __device__ __forceinline__ void wait(uint32_t parity) {
    while (!::cuda::ptx::mbarrier_try_wait_parity(&word_, parity)) {
    }
  }
  __device__ __forceinline__ uint64_t* word() { return &word_; }

 private:
  uint64_t word_;
};

/// Makes initialised barriers known to TMA.
__device__ __forceinline__ void fence_barrier_init() {
  ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
}

/// Hardware barrier `id` (0 is __syncthreads), of kThreads that sync or arrive.
template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int id) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_BARRIER_H_
