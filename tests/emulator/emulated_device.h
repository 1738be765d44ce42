// The device that the CUDA back end finds in tests: the kernels that it can launch, and its
// properties.
#ifndef STROBE_TESTS_EMULATOR_EMULATED_DEVICE_H_
#define STROBE_TESTS_EMULATOR_EMULATED_DEVICE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <utility>

#include "cuda/host/machine.h"
#include "cuda_runtime_api.h"

namespace strobe::emulator {

/// Device 0: tests may change it between launches.
cuda::Machine& machine();

/// A kernel with its arguments.
using Call = std::function<void()>;
/// A launch calls a kernel by its address: this says what arguments it has, and of how many thread
/// blocks its clusters are.
void enlist(const void* function, std::function<Call(void**)> bind, unsigned cluster);
template <typename... Params>
void enlist(void (*kernel)(Params...), unsigned cluster = 1) {
  const auto bind = [kernel](void** args) {
    return [&]<size_t... kN>(std::index_sequence<kN...>)->Call {
      return [kernel, copies = std::tuple<Params...>(*static_cast<Params*>(args[kN])...)] {
        std::apply(kernel, copies);
      };
    }
    (std::index_sequence_for<Params...>());
  };
  enlist(reinterpret_cast<const void*>(kernel), bind, cluster);
}

cudaError_t launch(const void* function, dim3 grid, int threads, uint32_t shared_bytes,
                   void** args);
/// The launches of `work`, which run, as a CUDA graph would have them: what is returned runs them
/// again with the same arguments.
std::function<cudaError_t()> capture(const std::function<void()>& work);
/// What says of an address whether it is the device's memory. Before, all is.
void set_device_memory(std::function<bool(const void*)> is_device_memory);
/// What went wrong in the last launch, "" if nothing did.
const std::string& launch_failure();
/// Thread blocks launched so far.
int64_t blocks_run();

}  // namespace strobe::emulator

#endif  // STROBE_TESTS_EMULATOR_EMULATED_DEVICE_H_
