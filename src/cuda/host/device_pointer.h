// Whether a pointer is memory that a device can read.
#ifndef STROBE_CUDA_HOST_DEVICE_POINTER_H_
#define STROBE_CUDA_HOST_DEVICE_POINTER_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/checks.h"

namespace strobe::cuda {

// A kernel that reads host memory ends the process's CUDA context, so pointers are checked before.
// Asking the driver takes a few hundred nanoseconds a pointer; addresses keep their kind, so each
// thread remembers the 2 MB pages (the granularity of the driver's address ranges) that it has
// asked about. A page that is freed and comes back as host memory is not noticed.
//
// Of what has no values the pointer is not asked about: that of an empty part of a tensor may be
// where its memory ends, which is nobody's or somebody else's.
inline bool on_device(const void* pointer, int device, cudaPointerAttributes& attributes) {
  constexpr int kPageBits = 21;
  constexpr size_t kSlots = 256;
  thread_local uint64_t known[kSlots] = {};
  const uint64_t page = reinterpret_cast<uintptr_t>(pointer) >> kPageBits;
  const uint64_t key = (page << 11 | static_cast<uint64_t>(device)) + 1;
  uint64_t& slot = known[(page ^ page >> 8) % kSlots];
  if (slot == key) return true;
  if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
    cudaGetLastError();
    attributes.type = cudaMemoryTypeUnregistered;
  }
  const bool good = attributes.type == cudaMemoryTypeManaged ||
                    attributes.type == cudaMemoryTypeHost ||  // pinned: mapped on every device
                    (attributes.type == cudaMemoryTypeDevice && attributes.device == device);
  if (good) slot = key;
  return good;
}

inline Status check_device_pointer(const char* name, const void* pointer, int device) {
  cudaPointerAttributes attributes{};
  if (!pointer || on_device(pointer, device, attributes)) return {};
  if (attributes.type == cudaMemoryTypeDevice) {
    return invalid(format("%s = %p is memory of device %d, expected device %d", name, pointer,
                          attributes.device, device));
  }
  return invalid(
      format("%s = %p is host memory, expected memory of CUDA device %d", name, pointer, device));
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_DEVICE_POINTER_H_
