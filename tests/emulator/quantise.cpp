// The file that nvcc compiles, and its kernels' arguments.
#include "cuda/rows/quantise.cu"

#include "emulated_device.h"

namespace strobe::cuda {
static const struct Enlist {
  Enlist() {
    emulator::enlist(&largest_kernel);
    emulator::enlist(&quantise_kernel);
    emulator::enlist(&dequantise_kernel);
  }
} enlist_quantise;
}  // namespace strobe::cuda
