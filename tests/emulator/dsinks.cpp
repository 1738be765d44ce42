// The file that nvcc compiles, and its kernel's arguments.
#include "cuda/rows/dsinks.cu"

#include "emulated_device.h"

namespace strobe::cuda {
static const struct Enlist {
  Enlist() { emulator::enlist(&dsinks_kernel); }
} enlist_dsinks;
}  // namespace strobe::cuda
