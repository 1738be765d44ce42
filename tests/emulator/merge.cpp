// The file that nvcc compiles, and its kernels' arguments.
#include "cuda/rows/merge.cu"

#include "emulated_device.h"

namespace strobe::cuda {
namespace {
const struct Enlist {
  Enlist() {
    emulator::enlist(&merge_kernel);
    emulator::enlist(&add_kernel);
  }
} enlist_merges;
}  // namespace
}  // namespace strobe::cuda
