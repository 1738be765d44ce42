// The Hopper forward kernels of one instance of kernels.def, that of STROBE_EMULATED_CONFIG.
#include "cuda/hopper/forward_sm90_launch.h"
#include "cuda/host/instance.h"
#include "emulated_device.h"

namespace strobe::cuda {

namespace {

constexpr int bf16 = kBfloat16, fp16 = kFloat16;

template <ForwardConfig kConfig>
void enlist() {
  using Tr = sm90::TraitsOf<kConfig>;
  emulator::enlist(&sm90::forward_kernel<Tr, false, true, ForwardParams>);
  emulator::enlist(&sm90::forward_kernel<Tr, false, false, ForwardParams>);
  emulator::enlist(&sm90::forward_kernel<Tr, true, false, ForwardParams>);
}

}  // namespace

}  // namespace strobe::cuda

#define STROBE_EMULATED_INSTANCE(name, ...)                                                   \
  namespace strobe::cuda {                                                                    \
  constexpr ForwardConfig kConfig{90, __VA_ARGS__};                                           \
  extern const ForwardInstance name;                                                          \
  const ForwardInstance name = {kConfig, sm90::forward_shape<kConfig>(),                      \
                                sm90::forward_carve<kConfig>, sm90::launch_forward<kConfig>}; \
  static const bool enlisted = (enlist<kConfig>(), true);                                     \
  }
STROBE_EMULATED_INSTANCE(STROBE_EMULATED_NAME, STROBE_EMULATED_CONFIG)
