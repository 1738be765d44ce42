#include "emulated_device.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "run_time.h"
#include "tensor_copies.h"

namespace strobe::emulator {

namespace {

struct Enlisted {
  std::function<Call(void**)> bind;
  unsigned cluster;
};
struct Launched {
  Call call;
  dim3 grid;
  int threads;
  uint32_t shared_bytes;
  unsigned cluster;

  cudaError_t run() const;
};
std::vector<Launched>* captured = nullptr;
std::map<const void*, Enlisted>& kernels() {
  static auto& all = *new std::map<const void*, Enlisted>;
  return all;
}
std::string failure;
int64_t blocks = 0;
std::function<bool(const void*)>& is_device_memory() {
  static std::function<bool(const void*)> says = [](const void*) { return true; };
  return says;
}

cudaError_t Launched::run() const {
  blocks += int64_t{grid.x} * grid.y;
  failure = emulator::run(grid.x, grid.y, threads, shared_bytes, call, cluster);
  return failure.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace

cuda::Machine& machine() {
  static cuda::Machine one;
  return one;
}

void enlist(const void* function, std::function<Call(void**)> bind, unsigned cluster) {
  kernels()[function] = {std::move(bind), cluster};
}

cudaError_t launch(const void* function, dim3 grid, int threads, uint32_t shared_bytes,
                   void** args) {
  // Launches of several threads come one after the other, as in one stream.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const auto found = kernels().find(function);
  if (found == kernels().end()) {
    failure = "a kernel that was not enlisted";
    return cudaErrorLaunchFailure;
  }
  const auto& [bind, cluster] = found->second;
  const Launched launched{bind(args), grid, threads, shared_bytes, cluster};
  if (captured) captured->push_back(launched);
  return launched.run();
}

std::function<cudaError_t()> capture(const std::function<void()>& work) {
  std::vector<Launched> graph;
  captured = &graph;
  work();
  captured = nullptr;
  return [graph] {
    for (const Launched& launched : graph) {
      if (const cudaError_t error = launched.run(); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  };
}

void set_device_memory(std::function<bool(const void*)> says) {
  is_device_memory() = std::move(says);
}

const std::string& launch_failure() { return failure; }
int64_t blocks_run() { return blocks; }

}  // namespace strobe::emulator

namespace strobe::cuda {

Machine::Machine() { devices.emplace_back(); }
const Machine& machine() { return emulator::machine(); }

}  // namespace strobe::cuda

const char* cudaGetErrorString(cudaError_t) { return strobe::emulator::launch_failure().c_str(); }
const char* cudaGetErrorName(cudaError_t) { return "emulated"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  const std::string wanted = name;
  if (wanted == "cuTensorMapEncodeTiled") {
    *function = reinterpret_cast<void*>(&strobe::emulator::encode_tiled);
  } else if (wanted == "cuTensorMapReplaceAddress") {
    *function = reinterpret_cast<void*>(&strobe::emulator::replace_address);
  } else {
    return cudaErrorSymbolNotFound;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {cudaMemoryTypeDevice, 0};
  if (!strobe::emulator::is_device_memory()(pointer)) attributes->type = cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t, unsigned long long* id) {
  *id = 0;
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
  *memory = std::malloc(bytes);
  return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) {
  std::free(memory);
  return cudaSuccess;
}
