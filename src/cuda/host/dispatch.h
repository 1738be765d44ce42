// The GPU's part of the kernel table.
#ifndef STROBE_CUDA_HOST_DISPATCH_H_
#define STROBE_CUDA_HOST_DISPATCH_H_

#include <span>

#include "core/kernel.h"

namespace strobe::cuda {

/// What a plan needs to know of a device: plain data, so that tests plan for devices that are not
/// there.
struct DeviceProperties {
  char name[128] = {};
  int compute_capability = 0;  // 90 for 9.0
  int multiprocessors = 0;
  int64_t shared_bytes = 0;  // that a block can have when it asks
  int64_t memory_bytes = 0;
};

/// Newest first: cuda_sm90 (TMA and wgmma), cuda_sm80 (mma.sync).
std::span<const Kernel> kernels();

/// Devices of this machine, found at the first call. Never fails: with no driver there are none.
std::span<const DeviceProperties> devices();
/// Why there are none; "" when there are.
const char* no_devices_reason();

/// The plan that the CUDA kernels would make on such a device, whatever this machine has.
Status plan_for(const AttentionProblem& problem, const DeviceProperties& device, Plan& plan);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_DISPATCH_H_
