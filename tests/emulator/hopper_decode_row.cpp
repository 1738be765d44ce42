// The Hopper kernels for keys in a cache of one row of kernels.def, that of STROBE_EMULATED_CONFIG.
#include "cuda/hopper/decode_sm90_launch.h"
#include "cuda/host/rows.h"
#include "emulated_device.h"

namespace strobe::cuda {

namespace {

constexpr int bf16 = kBfloat16, fp16 = kFloat16;

template <DecodeConfig kConfig>
void enlist() {
  using Tr = sm90::TraitsOf<kConfig>;
  emulator::enlist(&sm90::forward_kernel<Tr, false, false, TileParams>);
  emulator::enlist(&sm90::forward_kernel<Tr, true, false, TileParams>);
  emulator::enlist(&update_kernel<sm90::UpdateShape<kConfig>, false>);
  emulator::enlist(&update_kernel<sm90::UpdateShape<kConfig>, true>);
}

}  // namespace

}  // namespace strobe::cuda

#define STROBE_EMULATED_ROW(name, ...)                                                         \
  namespace strobe::cuda {                                                                     \
  constexpr DecodeConfig kConfig{90, __VA_ARGS__};                                             \
  extern const DecodeRow name;                                                                 \
  const DecodeRow name = {kConfig, sm90::decode_shape<kConfig>(), sm90::decode_carve<kConfig>, \
                          sm90::launch_decode<kConfig>, nullptr};                              \
  static const bool enlisted = (enlist<kConfig>(), true);                                      \
  }
STROBE_EMULATED_ROW(STROBE_EMULATED_NAME, STROBE_EMULATED_CONFIG)
