// A ring of shared-memory stages between producers and consumers, each stage with a full and an
// empty barrier.
//
//     producer                               consumer
//     ring.empty[at.stage()].wait(at.free()) ring.full[at.stage()].wait(at.phase())
//     fill the stage, arrive at full         read the stage, arrive at empty
//     ++at.count                             ++at.count
#ifndef STROBE_CUDA_HOPPER_PIPELINE_CUH_
#define STROBE_CUDA_HOPPER_PIPELINE_CUH_

#include <cstdint>

#include "cuda/ptx/barrier.h"

namespace strobe::cuda {

template <int kStages>
struct Ring {
  ptx::Barrier full[kStages], empty[kStages];

  __device__ void init(uint32_t producers, uint32_t consumers) {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(producers);
      empty[i].init(consumers);
    }
  }
};

/// Where one role is in a ring, as the number of stages it has gone through: one register, and with
/// a power of two no more than a mask and a shift to take it apart.
template <int kStages>
struct RingPosition {
  static_assert((kStages & (kStages - 1)) == 0);
  uint32_t count = 0;

  __device__ __forceinline__ int stage() const { return static_cast<int>(count % kStages); }
  /// Parity of the stage's `full` phase.
  __device__ __forceinline__ uint32_t phase() const { return count / kStages & 1; }
  /// Parity of the `empty` phase that has to be over before the stage may be filled: the one before
  /// (which, the first time round, counts as over).
  __device__ __forceinline__ uint32_t free() const { return phase() ^ 1; }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOPPER_PIPELINE_CUH_
