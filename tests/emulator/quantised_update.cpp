// The file that nvcc compiles, and its kernels' arguments.
#include "cuda/rows/quantised_update.cu"

#include "emulated_device.h"

namespace strobe::cuda {
static const struct Enlist {
  Enlist() {
    emulator::enlist(&quantised_update_kernel<kBfloat16>);
    emulator::enlist(&quantised_update_kernel<kFloat16>);
  }
} enlist_quantised_update;
}  // namespace strobe::cuda
