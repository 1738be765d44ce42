// What CUDA devices this machine has, and what its environment asks for.
#ifndef STROBE_CUDA_HOST_MACHINE_H_
#define STROBE_CUDA_HOST_MACHINE_H_

#include <cinttypes>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/arithmetic.h"
#include "core/checks.h"

namespace strobe::cuda {

/// Compute capability 7.5, and what a thread block can have there at most.
inline constexpr int kTuring = 75;
inline constexpr int64_t kTuringSharedBytes = 64 << 10;

/// What a plan needs to know of a device: plain data, so that tests plan for devices that are not
/// there.
struct DeviceProperties {
  char name[128] = {};
  int compute_capability = 0;  // 90 for 9.0
  int multiprocessors = 0;
  int64_t shared_bytes = 0;  // that a block can have when it asks
  int64_t memory_bytes = 0;
  double memory_rate = 0;  // kilobytes a microsecond, at the memory's own clock; 0: not known
};

/// The name of a kernel instance, or a part of it, as kernels.def has it today: the instances for
/// keys in a cache were called decode_sm80_... and decode_sm90_... once.
inline std::string current_name(std::string_view name) {
  constexpr std::string_view kOld = "decode_sm", kNew = "cached_sm";
  std::string current(name);
  if (const size_t at = current.find(kOld); at != std::string::npos) {
    current.replace(at, kOld.size(), kNew);
  }
  return current;
}

/// Whose kernels through mma.sync a device runs.
inline int mma_sync_arch(const DeviceProperties& device) {
  return device.compute_capability >= 80 ? 80 : kTuring;
}

struct Machine {
  std::vector<DeviceProperties> devices;
  char reason[128] = "";        // why there are no devices; "" when there are
  int forced_arch = 0;          // STROBE_CUDA_ARCH: 80 rules cuda_sm90 out, 75 cuda_sm80 too
  std::string forced_instance;  // STROBE_CUDA_ROW: those with this in their name come first

  Machine();
};

/// Looked up at the first call. Never fails: with no driver there are no devices.
const Machine& machine();

/// A device that this machine has, as plans and launches see it: where STROBE_CUDA_ARCH is 75, as
/// one of that compute capability.
inline DeviceProperties planned_device(int64_t device_index) {
  DeviceProperties device = machine().devices[static_cast<size_t>(device_index)];
  if (machine().forced_arch == kTuring) {
    device.compute_capability = kTuring;
    device.shared_bytes = min64(device.shared_bytes, kTuringSharedBytes);
  }
  return device;
}

/// Whether this machine has the device.
inline Status check_device(int64_t device_index) {
  const size_t count = machine().devices.size();
  if (static_cast<size_t>(device_index) < count) return {};
  return invalid(format("device_index = %" PRId64
                        ", expected below the number of CUDA devices, %zu",
                        device_index, count));
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_MACHINE_H_
