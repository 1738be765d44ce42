#include "cli/mirror.h"

#include <fmt/format.h>

#include "cli/errors.h"

#if STROBE_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace strobe::cli {

#if STROBE_HAVE_CUDA

namespace {

void Expect(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw UserError(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

}  // namespace

Mirror::Mirror(Device device, int64_t device_index) : transparent_(device == Device::kCpu) {
  if (!transparent_) Expect(cudaSetDevice(static_cast<int>(device_index)), "choosing the GPU");
}

Mirror::~Mirror() {
  for (const Copy& copy : copies_) cudaFree(copy.device);
}

void* Mirror::Find(void* host, size_t bytes, bool out) {
  if (transparent_ || host == nullptr) return host;
  auto* const begin = static_cast<std::byte*>(host);
  for (const Copy& copy : copies_) {
    const bool inside = copy.host <= begin && begin + bytes <= copy.host + copy.bytes;
    if (inside && (copy.out || !out)) return copy.device + (begin - copy.host);
  }
  void* device = nullptr;
  Expect(cudaMalloc(&device, bytes > 0 ? bytes : 1), "memory on the GPU");
  copies_.push_back({begin, static_cast<std::byte*>(device), bytes, out});
  Expect(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "copying to the GPU");
  return device;
}

void Mirror::CopyOnGpu(void* to, const void* from, size_t bytes) const {
  Expect(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, nullptr), "copying on the GPU");
}

void Mirror::Wait() const {
  if (!transparent_) Expect(cudaDeviceSynchronize(), "on the GPU");
}

void Mirror::Fetch() const {
  Wait();
  for (const Copy& copy : copies_) {
    if (!copy.out) continue;
    Expect(cudaMemcpy(copy.host, copy.device, copy.bytes, cudaMemcpyDeviceToHost),
           "copying from the GPU");
  }
}

#else

Mirror::Mirror(Device device, int64_t /*device_index*/) : transparent_(true) {
  if (device != Device::kCpu) throw UserError("--device cuda: this build has no CUDA");
}
Mirror::~Mirror() = default;
void* Mirror::Find(void* host, size_t /*bytes*/, bool /*out*/) { return host; }
void Mirror::CopyOnGpu(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const {}
void Mirror::Wait() const {}
void Mirror::Fetch() const {}

#endif

}  // namespace strobe::cli
