// The file that nvcc compiles, and its kernels' arguments.
#include "cuda/rows/mask_pack.cu"

#include "emulated_device.h"

namespace strobe::cuda {
static const struct Enlist {
  Enlist() {
    for (void (*const kernel)(MaskPack) :
         {&mask_clear_kernel, &mask_find_kernel, &mask_room_kernel, &mask_write_kernel,
          &mask_begins_kernel, &mask_keys_kernel, &mask_order_kernel}) {
      emulator::enlist(kernel);
    }
  }
} enlist_mask_pack;
}  // namespace strobe::cuda
