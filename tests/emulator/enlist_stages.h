// The kernels of a backward pass around the main kernel, for emulator::launch.
#ifndef STROBE_TESTS_EMULATOR_ENLIST_STAGES_H_
#define STROBE_TESTS_EMULATOR_ENLIST_STAGES_H_

#include "cuda/backward/stages_launch.h"
#include "emulated_device.h"

namespace strobe::cuda {

/// Stages: a BackwardStages.
template <typename Stages>
void enlist_stages() {
  using T = typename Stages::T;
  using StageTraits = typename Stages::StageTraits;
  constexpr int kTileQ = Stages::kTileQ, kWidth = Stages::kWidth;
  emulator::enlist(&backward_pre_kernel<T, kTileQ, kWidth, StageTraits>);
  emulator::enlist(&backward_post_kernel<T, kTileQ, kWidth, StageTraits, false>);
  emulator::enlist(&backward_post_kernel<T, kTileQ, kWidth, StageTraits, true>);
  if constexpr (!StageTraits::kMarksNonfinite)
    emulator::enlist(
        &backward_pairwise_kernel<T, kTileQ, kWidth, Stages::kTileK, StageTraits::kMask>);
  emulator::enlist(&backward_parts_kernel<T, kWidth>);
}

}  // namespace strobe::cuda

#endif  // STROBE_TESTS_EMULATOR_ENLIST_STAGES_H_
