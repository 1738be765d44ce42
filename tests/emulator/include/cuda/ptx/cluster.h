// As src/cuda/ptx/cluster.h, on the CPU.
#ifndef STROBE_CUDA_PTX_CLUSTER_H_
#define STROBE_CUDA_PTX_CLUSTER_H_

#include <cstdint>
#include <cstring>

#include "cuda/ptx/barrier.h"
#include "run_time.h"

namespace strobe::cuda::ptx {

inline uint32_t cluster_rank() { return emulator::cluster_rank(); }
inline void cluster_sync() { emulator::cluster_barrier(); }
inline uint32_t shared_of(uint32_t shared, uint32_t rank) {
  return emulator::cluster_address(shared, rank);
}
inline void arrive_at(uint32_t barrier) { emulator::mbarrier_arrive(barrier, 1, 0); }
inline void send_word(uint32_t to, uint32_t word, uint32_t barrier) {
  emulator::start_copy(to, 4, barrier, [word](char* memory) { std::memcpy(memory, &word, 4); });
}
inline void send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  if ((to | from | bytes) % 16 != 0) emulator::fail("cp.async.bulk: not whole units of 16 bytes");
  emulator::expect_fenced("cp.async.bulk", from, bytes);
  emulator::start_copy(to, bytes, barrier,
                       [bytes, source = emulator::own_shared(from, bytes)](char* memory) {
                         std::memcpy(memory, source(), bytes);
                       });
}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_CLUSTER_H_
