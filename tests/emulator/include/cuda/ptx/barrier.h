// As src/cuda/ptx/barrier.h, on the CPU.
#ifndef STROBE_CUDA_PTX_BARRIER_H_
#define STROBE_CUDA_PTX_BARRIER_H_

#include <cstdint>

#include "cuda/ptx/shared_access.h"
#include "run_time.h"

namespace strobe::cuda::ptx {

inline constexpr uint32_t kWarpArrivals = 1;
inline constexpr uint32_t kMostArrivals = (1u << 20) - 1;
inline bool arrives(int lane) { return lane == 0; }

inline void barrier_init(uint32_t barrier, uint32_t count) {
  emulator::mbarrier_init(barrier, count);
}
inline void barrier_arrive(uint32_t barrier) { emulator::mbarrier_arrive(barrier, 1, 0); }
inline void barrier_arrive_warp(uint32_t barrier, int lane) {
  emulator::exchange("__syncwarp", {}, true);
  if (arrives(lane)) barrier_arrive(barrier);
}
inline void barrier_arrive_after_copies(uint32_t barrier) {
  emulator::arrive_after_copies(barrier);
}
inline bool barrier_test(uint32_t barrier, uint32_t parity) {
  return emulator::mbarrier_test(barrier, parity);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  emulator::mbarrier_wait(barrier, parity);
}

class Barrier {
 public:
  void init(uint32_t count) { barrier_init(address(), count); }
  void arrive() { barrier_arrive(address()); }
  void arrive(uint32_t count) { emulator::mbarrier_arrive(address(), count, 0); }
  void arrive_expect(uint32_t bytes) { emulator::mbarrier_arrive(address(), 1, bytes); }
  void wait(uint32_t parity) { barrier_wait(address(), parity); }
  bool test(uint32_t parity) { return barrier_test(address(), parity); }
  uint32_t address() { return shared_address(&word_); }

 private:
  uint64_t word_;
};

inline void fence_barrier_init() {}

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_BARRIER_H_
