// The file that nvcc compiles, and its kernel's arguments.
#include "cuda/rows/unite_lists.cu"

#include "emulated_device.h"

namespace strobe::cuda {
static const struct Enlist {
  Enlist() { emulator::enlist(&unite_lists_kernel); }
} enlist_unite_lists;
}  // namespace strobe::cuda
