// The Hopper kernels for keys in a cache with the tiles of STROBE_EMULATED_CONFIG: what CMake
// writes of them for nvcc is in STROBE_EMULATED_INSTANCES.
#include STROBE_EMULATED_INSTANCES
#include "emulated_device.h"

namespace strobe::cuda {

namespace {

template <CachedConfig kConfig>
void enlist() {
  using Tr = sm90::TraitsOf<kConfig, features::kNothing>;
  using Invariant = sm90::TraitsOf<kConfig, features::kInvariantRows>;
  emulator::enlist(&sm90::forward_kernel<Tr, false, false, TileParams>);
  emulator::enlist(&sm90::forward_kernel<Invariant, false, false, TileParams>);
  emulator::enlist(&sm90::merge_chunks_kernel<Invariant, TileParams>);
  using General = sm90::TraitsOf<kConfig, features::kInvariantRows | features::kScores>;
  emulator::enlist(&sm90::forward_kernel<General, true, false, TileParams>);
  emulator::enlist(&update_kernel<sm90::UpdateShape<kConfig>, false>);
  emulator::enlist(&update_kernel<sm90::UpdateShape<kConfig>, true>);
}

const bool enlisted = (enlist<CachedConfig{STROBE_EMULATED_CONFIG}>(), true);

}  // namespace

}  // namespace strobe::cuda
