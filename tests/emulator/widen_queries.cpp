// The file that nvcc compiles, and its kernel's arguments.
#include "cuda/rows/widen_queries.cu"

#include "emulated_device.h"

namespace strobe::cuda {
static const struct Enlist {
  Enlist() { emulator::enlist(&widen_queries_kernel); }
} enlist_widen_queries;
}  // namespace strobe::cuda
