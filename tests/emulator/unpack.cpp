// The file that nvcc compiles, and its kernel's arguments.
#include "cuda/rows/unpack.cu"

#include "emulated_device.h"

namespace strobe::cuda {
static const struct Enlist {
  Enlist() { emulator::enlist(&unpack_kernel); }
} enlist_unpack;
}  // namespace strobe::cuda
