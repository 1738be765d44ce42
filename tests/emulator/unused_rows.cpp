// The file that nvcc compiles, and its kernel's arguments.
#include "cuda/rows/unused_rows.cu"

#include "emulated_device.h"

namespace strobe::cuda {
static const struct Enlist {
  Enlist() { emulator::enlist(&unused_rows_kernel); }
} enlist_unused_rows;
}  // namespace strobe::cuda
