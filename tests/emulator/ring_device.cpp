// The device on which tests/unit/ring_test.cpp runs here: a Hopper GPU with few multiprocessors,
// whose memory is what the driver, a fake, has allocated.
#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>

#include "emulated_device.h"

namespace {

const struct Device {
  Device() {
    auto& device = strobe::emulator::machine().devices[0];
    device.compute_capability = 90;
    device.multiprocessors = 4;
    device.shared_bytes = 227 << 10;
    strobe::emulator::set_device_memory([](const void* pointer) {
      using Ask = int (*)(void*, unsigned, uint64_t);
      static void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
      static const auto ask =
          driver ? reinterpret_cast<Ask>(dlsym(driver, "cuPointerGetAttribute")) : nullptr;
      if (!ask) throw std::runtime_error("no fake of libcuda.so.1: LD_LIBRARY_PATH leads to it");
      unsigned type = 0;
      return ask(&type, 2, reinterpret_cast<uintptr_t>(pointer)) == 0;
    });
  }
} device;

}  // namespace
