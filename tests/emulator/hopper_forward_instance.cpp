// The Hopper forward kernels with the tiles of STROBE_EMULATED_CONFIG: what CMake writes of them
// for nvcc is in STROBE_EMULATED_INSTANCES. STROBE_EMULATED_BIASES, _UNBIASED: whether some of them
// take a bias, and whether some take none.
#include STROBE_EMULATED_INSTANCES
#include "emulated_device.h"

namespace strobe::cuda {

namespace {

template <ForwardConfig kConfig>
void enlist_unbiased() {
  using Tr = sm90::TraitsOf<kConfig, features::kNothing>;
  emulator::enlist(&sm90::forward_kernel<Tr, false, true, ForwardParams>);
  emulator::enlist(&sm90::forward_kernel<Tr, false, false, ForwardParams>);
  if constexpr (!Tr::kFloat8) {
    using General = sm90::TraitsOf<kConfig, features::kInvariantRows | features::kScores>;
    emulator::enlist(&sm90::forward_kernel<General, true, false, ForwardParams>);
    using Invariant = sm90::TraitsOf<kConfig, features::kInvariantRows>;
    emulator::enlist(&sm90::forward_kernel<Invariant, false, false, ForwardParams>);
    emulator::enlist(&sm90::merge_chunks_kernel<Invariant, ForwardParams>);
  }
  if constexpr (!Tr::kFloat8 && kConfig.tile_q == 128 && kConfig.tile_k % 64 == 0) {
    using Masked = sm90::TraitsOf<kConfig, features::kMask>;
    emulator::enlist(&sm90::forward_kernel<Masked, false, false, ForwardParams>);
  }
}

template <ForwardConfig kConfig>
void enlist() {
  if constexpr (STROBE_EMULATED_UNBIASED) enlist_unbiased<kConfig>();
  if constexpr (STROBE_EMULATED_BIASES) {
    using Biased = sm90::TraitsOf<kConfig, features::kBias>;
    emulator::enlist(&sm90::forward_kernel<Biased, false, false, ForwardParams>);
  }
}

const bool enlisted = (enlist<ForwardConfig{STROBE_EMULATED_CONFIG}>(), true);

}  // namespace

}  // namespace strobe::cuda
