// The device on which tests/unit/ring_test.cpp runs here: a Hopper GPU with few multiprocessors.
#include "emulated_device.h"

namespace {

const struct Device {
  Device() {
    auto& device = strobe::emulator::machine().devices[0];
    device.compute_capability = 90;
    device.multiprocessors = 4;
    device.shared_bytes = 227 << 10;
  }
} device;

}  // namespace
