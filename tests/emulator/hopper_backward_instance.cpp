// The Hopper backward kernels of one instance of kernels.def, that of STROBE_EMULATED_CONFIG: what
// CMake writes into a file for each.
#include "cuda/host/instance.h"
#include "emulated_device.h"
#include "enlist_stages.h"
#if STROBE_EMULATED_WIDTH > 128
#include "cuda/hopper/backward_sm90_wide_launch.h"
#else
#include "cuda/hopper/backward_sm90_launch.h"
#endif

namespace strobe::cuda {

namespace {

constexpr int bf16 = kBfloat16, fp16 = kFloat16;

#if STROBE_EMULATED_WIDTH > 128

namespace hopper = sm90_wide;

template <BackwardConfig kConfig, int kWidthV>
void enlist_widths() {
  const auto enlist_kernel = [](auto* kernel) { emulator::enlist(kernel, hopper::kBlocks); };
  enlist_kernel(&hopper::backward_kernel<hopper::TraitsOf<kConfig, kWidthV, false, false>>);
  enlist_kernel(&hopper::backward_kernel<hopper::TraitsOf<kConfig, kWidthV, false, true>>);
  enlist_kernel(&hopper::backward_kernel<hopper::TraitsOf<kConfig, kWidthV, true, false>>);
  enlist_kernel(&hopper::backward_kernel<hopper::TraitsOf<kConfig, kWidthV, true, true>>);
}

template <BackwardConfig kConfig>
void enlist() {
  using Tr = hopper::TraitsOf<kConfig>;
  enlist_stages<BackwardStages<typename Tr::T, hopper::kQueries, hopper::kItemKeys, Tr::kWidth,
                               typename Tr::StageTraits>>();
  constexpr int kWidth = kConfig.width;
  enlist_widths<kConfig, kWidth>();
  if constexpr (kWidth == 192) enlist_widths<kConfig, 128>();
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
}

#endif

}  // namespace

}  // namespace strobe::cuda

#define STROBE_EMULATED_INSTANCE(name, ...)                                  \
  namespace strobe::cuda {                                                   \
  constexpr BackwardConfig kConfig{90, __VA_ARGS__};                         \
  extern const BackwardInstance name;                                        \
  const BackwardInstance name = {kConfig, hopper::backward_shape<kConfig>(), \
                                 hopper::backward_carve<kConfig>,            \
                                 hopper::launch_backward<kConfig>};          \
  static const bool enlisted = (enlist<kConfig>(), true);                    \
  }
STROBE_EMULATED_INSTANCE(STROBE_EMULATED_NAME, STROBE_EMULATED_CONFIG)
