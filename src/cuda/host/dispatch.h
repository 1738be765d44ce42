// The GPU's part of the kernel table.
#ifndef STROBE_CUDA_HOST_DISPATCH_H_
#define STROBE_CUDA_HOST_DISPATCH_H_

#include <span>

#include "core/kernel.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

/// Newest first: cuda_sm90 (TMA and wgmma), cuda_sm80 (mma.sync).
std::span<const Kernel> kernels();

/// Devices of this machine, found at the first call. Never fails: with no driver there are none.
std::span<const DeviceProperties> devices();
/// Why there are none; "" when there are.
const char* no_devices_reason();

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_DISPATCH_H_
