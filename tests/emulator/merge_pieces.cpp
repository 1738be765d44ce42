// The file that nvcc compiles, and its kernels' arguments.
#include "cuda/rows/merge_pieces.cu"

#include "emulated_device.h"

namespace strobe::cuda {
static const struct Enlist {
  Enlist() {
    enlist<kBfloat16>();
    enlist<kFloat16>();
  }
  template <int kDtype>
  static void enlist() {
    emulator::enlist(&merge_pieces_kernel<kDtype, 64>);
    emulator::enlist(&merge_pieces_kernel<kDtype, 128>);
    emulator::enlist(&merge_pieces_kernel<kDtype, 192>);
    emulator::enlist(&merge_pieces_kernel<kDtype, 256>);
  }
} enlist_merge_pieces;
}  // namespace strobe::cuda
