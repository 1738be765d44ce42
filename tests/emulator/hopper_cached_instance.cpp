// The Hopper kernels for keys in a cache of one instance of kernels.def, that of
// STROBE_EMULATED_CONFIG.
#include "cuda/hopper/cached_sm90_launch.h"
#include "cuda/host/instance.h"
#include "emulated_device.h"

namespace strobe::cuda {

namespace {

constexpr int bf16 = kBfloat16, fp16 = kFloat16;

template <CachedConfig kConfig>
void enlist() {
  using Tr = sm90::TraitsOf<kConfig>;
  emulator::enlist(&sm90::forward_kernel<Tr, false, false, TileParams>);
  emulator::enlist(&sm90::forward_kernel<Tr, true, false, TileParams>);
  emulator::enlist(&update_kernel<sm90::UpdateShape<kConfig>, false>);
  emulator::enlist(&update_kernel<sm90::UpdateShape<kConfig>, true>);
}

}  // namespace

}  // namespace strobe::cuda

#define STROBE_EMULATED_INSTANCE(name, ...)                                               \
  namespace strobe::cuda {                                                                \
  constexpr CachedConfig kConfig{90, __VA_ARGS__};                                        \
  extern const CachedInstance name;                                                       \
  const CachedInstance name = {kConfig, sm90::cached_shape<kConfig>(),                    \
                               sm90::cached_carve<kConfig>, sm90::launch_cached<kConfig>, \
                               nullptr};                                                  \
  static const bool enlisted = (enlist<kConfig>(), true);                                 \
  }
STROBE_EMULATED_INSTANCE(STROBE_EMULATED_NAME, STROBE_EMULATED_CONFIG)
