// The forward kernels through mma.sync with the tiles of STROBE_EMULATED_CONFIG: what CMake writes
// of them for nvcc is in STROBE_EMULATED_INSTANCES.
#include STROBE_EMULATED_INSTANCES
#include "emulated_device.h"

namespace strobe::cuda {

namespace {

template <ForwardConfig kConfig, Features kComputes>
void enlist_one() {
  using Kernel = sm80::ForwardKernel<kConfig, kComputes>;
  emulator::enlist(&sm80::forward_kernel<typename Kernel::Shape, Kernel::kGeneral, Kernel::kBias>);
}

template <ForwardConfig kConfig>
void enlist() {
  if constexpr (kConfig.dtype == kE4m3Codes) {
    enlist_one<kConfig, features::kScores>();
    emulator::enlist(&sm80::unpack_codes_kernel<sm80::kPassThreads>);
    emulator::enlist(&sm80::scale_out_kernel<sm80::kPassThreads>);
  } else {
    enlist_one<kConfig, features::kNothing>();
    enlist_one<kConfig, features::kScores>();
    enlist_one<kConfig, features::kScores | features::kBias>();
  }
}

const bool enlisted = (enlist<ForwardConfig{STROBE_EMULATED_CONFIG}>(), true);

}  // namespace

}  // namespace strobe::cuda
