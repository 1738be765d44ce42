// The Hopper backward kernels with the tiles of STROBE_EMULATED_CONFIG: what CMake writes of them
// for nvcc is in STROBE_EMULATED_INSTANCES.
#include STROBE_EMULATED_INSTANCES
#include "emulated_device.h"
#include "enlist_stages.h"

namespace strobe::cuda {

namespace {

#if STROBE_EMULATED_WIDTH > 128

namespace hopper = sm90_wide;

template <BackwardConfig kConfig, int kWidthV>
void enlist_widths() {
  const auto enlist_kernel = [](auto* kernel) { emulator::enlist(kernel, hopper::kBlocks); };
  enlist_kernel(&hopper::backward_kernel<
                hopper::WideTraits<kConfig.dtype, kConfig.width, kWidthV, false, false>>);
  enlist_kernel(&hopper::backward_kernel<
                hopper::WideTraits<kConfig.dtype, kConfig.width, kWidthV, false, true>>);
  enlist_kernel(&hopper::backward_kernel<
                hopper::WideTraits<kConfig.dtype, kConfig.width, kWidthV, true, false>>);
  enlist_kernel(&hopper::backward_kernel<
                hopper::WideTraits<kConfig.dtype, kConfig.width, kWidthV, true, true>>);
}

template <BackwardConfig kConfig>
void enlist() {
  // The stages around the main kernel are the same, whatever V's width is.
  using Tr = hopper::WideTraits<kConfig.dtype, kConfig.width, kConfig.width, false, false>;
  enlist_stages<BackwardStages<typename Tr::T, hopper::kQueries, hopper::kItemKeys, Tr::kWidth,
                               typename Tr::StageTraits>>();
  enlist_widths<kConfig, kConfig.width>();
  if constexpr (kConfig.width == 192) enlist_widths<kConfig, 128>();
}

#else

namespace hopper = sm90;

template <BackwardConfig kConfig>
void enlist() {
  using Tr = hopper::BackwardTraitsOf<kConfig>;
  enlist_stages<BackwardStages<typename Tr::T, Tr::kTileQ, Tr::kTileK, Tr::kWidth,
                               typename Tr::StageTraits>>();
  emulator::enlist(&hopper::backward_kernel<Tr>);
  emulator::enlist(&hopper::backward_kernel<hopper::BackwardTraitsOf<kConfig, true>>);
  emulator::enlist(&hopper::backward_kernel<hopper::BackwardTraitsOf<kConfig, false, true>>);
  emulator::enlist(&hopper::backward_kernel<hopper::BackwardTraitsOf<kConfig, true, true>>);
  emulator::enlist(&hopper::backward_kernel<hopper::BackwardTraitsOf<kConfig, false, false, true>>);
  emulator::enlist(&hopper::backward_kernel<hopper::BackwardTraitsOf<kConfig, false, true, true>>);
  using Biased = hopper::BackwardTraitsOf<kConfig, false, false, false, false, true>;
  emulator::enlist(&hopper::backward_kernel<Biased>);
  emulator::enlist(&dbias_kernel<typename Tr::T, hopper::DbiasForm, typename Biased::StageTraits>);
  using Masked = hopper::BackwardTraitsOf<kConfig, true, false, false, true>;
  enlist_stages<BackwardStages<typename Tr::T, Tr::kTileQ, Tr::kTileK, Tr::kWidth,
                               typename Masked::StageTraits>>();
  emulator::enlist(&hopper::backward_kernel<Masked>);
  emulator::enlist(
      &hopper::backward_kernel<hopper::BackwardTraitsOf<kConfig, true, true, false, true>>);
}

#endif

const bool enlisted = (enlist<BackwardConfig{STROBE_EMULATED_CONFIG}>(), true);

}  // namespace

}  // namespace strobe::cuda
