// The Hopper backward kernels with the tiles of STROBE_EMULATED_CONFIG: what CMake writes of them
// for nvcc is in STROBE_EMULATED_INSTANCES.
#include STROBE_EMULATED_INSTANCES
#include "emulated_device.h"

namespace strobe::cuda {

namespace {

template <BackwardConfig kConfig, typename Stages>
void enlist_stages() {
  using T = typename Stages::T;
  using StageTraits = typename Stages::StageTraits;
  emulator::enlist(&backward_pre_kernel<T, Stages::kTileQ, Stages::kWidth, StageTraits>);
  emulator::enlist(&backward_post_kernel<T, Stages::kTileQ, Stages::kWidth, StageTraits>);
  emulator::enlist(&backward_pairwise_kernel<T, Stages::kTileQ, Stages::kWidth, Stages::kTileK>);
  emulator::enlist(&backward_parts_kernel<T, Stages::kWidth>);
}

#if STROBE_EMULATED_WIDTH > 128

namespace hopper = sm90_wide;

template <BackwardConfig kConfig>
void enlist() {
  constexpr int kDtype = kConfig.dtype, kWidth = kConfig.width;
  using Tr = hopper::WideTraits<kDtype, kWidth, kWidth, false>;
  enlist_stages<kConfig, BackwardStages<typename Tr::T, hopper::kQueries, hopper::kItemKeys,
                                        Tr::kWidth, typename Tr::StageTraits>>();
  emulator::enlist(&hopper::backward_kernel<Tr>, hopper::kBlocks);
  emulator::enlist(&hopper::backward_kernel<hopper::WideTraits<kDtype, kWidth, kWidth, true>>,
                   hopper::kBlocks);
  if constexpr (kWidth == 192) {
    emulator::enlist(&hopper::backward_kernel<hopper::WideTraits<kDtype, kWidth, 128, false>>,
                     hopper::kBlocks);
    emulator::enlist(&hopper::backward_kernel<hopper::WideTraits<kDtype, kWidth, 128, true>>,
                     hopper::kBlocks);
  }
}

#else

namespace hopper = sm90;

template <BackwardConfig kConfig>
void enlist() {
  using Tr = hopper::BackwardTraitsOf<kConfig>;
  enlist_stages<kConfig, BackwardStages<typename Tr::T, Tr::kTileQ, Tr::kTileK, Tr::kWidth,
                                        typename Tr::StageTraits>>();
  emulator::enlist(&hopper::backward_kernel<Tr>);
  emulator::enlist(&hopper::backward_kernel<hopper::BackwardTraitsOf<kConfig, true>>);
  emulator::enlist(&hopper::backward_kernel<hopper::BackwardTraitsOf<kConfig, false, true>>);
  emulator::enlist(&hopper::backward_kernel<hopper::BackwardTraitsOf<kConfig, true, true>>);
  emulator::enlist(&hopper::backward_kernel<hopper::BackwardTraitsOf<kConfig, false, false, true>>);
  emulator::enlist(&hopper::backward_kernel<hopper::BackwardTraitsOf<kConfig, false, true, true>>);
}

#endif

const bool enlisted = (enlist<BackwardConfig{STROBE_EMULATED_CONFIG}>(), true);

}  // namespace

}  // namespace strobe::cuda
