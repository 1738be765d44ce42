// The backward kernels through mma.sync of one instance of kernels.def, that of
// STROBE_EMULATED_CONFIG: what CMake writes into a file for each.
#include "cuda/host/instance.h"
#include "cuda/mma_sync/backward_sm80_launch.h"
#include "emulated_device.h"
#include "enlist_stages.h"

namespace strobe::cuda {

namespace {

constexpr int bf16 = kBfloat16, fp16 = kFloat16;

template <BackwardConfig kConfig>
void enlist() {
  using Shape = sm80::BackwardShape<kConfig>;
  enlist_stages<BackwardStages<typename Shape::T, kConfig.tile_q, kConfig.tile_k, kConfig.width,
                               MmaSyncStageTraits>>();
  emulator::enlist(&sm80::backward_kernel<Shape, false, false>);
  emulator::enlist(&sm80::backward_kernel<Shape, false, true>);
  if constexpr (Shape::kHasGeneral) emulator::enlist(&sm80::backward_kernel<Shape, true, true>);
}

}  // namespace

}  // namespace strobe::cuda

#define STROBE_EMULATED_INSTANCE(name, ...)                                                      \
  namespace strobe::cuda {                                                                       \
  constexpr BackwardConfig kConfig{80, __VA_ARGS__};                                             \
  extern const BackwardInstance name;                                                            \
  const BackwardInstance name = {kConfig, sm80::backward_shape<kConfig>(),                       \
                                 sm80::backward_carve<kConfig>, sm80::launch_backward<kConfig>}; \
  static const bool enlisted = (enlist<kConfig>(), true);                                        \
  }
STROBE_EMULATED_INSTANCE(STROBE_EMULATED_NAME, STROBE_EMULATED_CONFIG)
