// The backward kernels through mma.sync with the tiles of STROBE_EMULATED_CONFIG: what CMake writes
// of them for nvcc is in STROBE_EMULATED_INSTANCES. STROBE_EMULATED_MASKS: whether some of them
// take a mask as data; STROBE_EMULATED_BIASES: whether some take a bias, and those with a mask too.
#include STROBE_EMULATED_INSTANCES
#include "emulated_device.h"
#include "enlist_stages.h"

namespace strobe::cuda {

namespace {

template <BackwardConfig kConfig>
void enlist() {
  using Shape = sm80::BackwardShape<kConfig>;
  enlist_stages<BackwardStages<typename Shape::T, kConfig.tile_q, kConfig.tile_k, kConfig.width,
                               MmaSyncStageTraits>>();
  emulator::enlist(&sm80::backward_kernel<Shape, false, false, false>);
  emulator::enlist(&sm80::backward_kernel<Shape, false, true, false>);
  if constexpr (Shape::kHasGeneral) {
    emulator::enlist(&sm80::backward_kernel<Shape, true, true, false>);
    emulator::enlist(&sm80::backward_kernel<Shape, true, true, true>);
    emulator::enlist(&dbias_kernel<typename Shape::T, sm80::DbiasForm, MmaSyncStageTraits>);
  }
  if constexpr (STROBE_EMULATED_MASKS) {
    enlist_stages<BackwardStages<typename Shape::T, kConfig.tile_q, kConfig.tile_k, kConfig.width,
                                 MaskedStageTraits>>();
    emulator::enlist(&sm80::backward_kernel<sm80::BackwardShape<kConfig, true>, true, true,
                                            STROBE_EMULATED_BIASES>);
    emulator::enlist(&dbias_kernel<typename Shape::T, sm80::DbiasForm, MaskedStageTraits>);
  }
}

const bool enlisted = (enlist<BackwardConfig{STROBE_EMULATED_CONFIG}>(), true);

}  // namespace

}  // namespace strobe::cuda
