// What the library found on this machine: strobe::machine(). Part of strobe.hpp, which includes it.
#ifndef STROBE_MACHINE_HPP_
#define STROBE_MACHINE_HPP_

#include <strobe/strobe.h>

#include <cstdint>
#include <string>
#include <strobe/strobe.hpp>
#include <vector>

namespace strobe {
inline namespace v0 {

// A row of the kernel table.
struct Kernel {
  std::string name;         // "cpu_avx512"
  std::string unavailable;  // why it cannot run on this machine; "" when it can
};

// One CUDA device.
struct CudaDevice {
  std::string name;                // as the driver has it: "NVIDIA H100 80GB HBM3"
  int32_t compute_capability = 0;  // 90 for 9.0
  int32_t multiprocessors = 0;     // how many the GPU has
  int64_t memory_bytes = 0;        // of the GPU, in use or not
};

// What the library found on this machine.
struct Machine {
  std::string cpu_name;  // "" when unknown
  std::string cpu_isa;   // widest instruction set in use: "amx", "avx512_bf16", "avx512", "avx2",
                         // "neon", "portable"
  std::string cpu_isas;  // all that this CPU and build have, separated by spaces, widest first:
                         // STROBE_CPU_ISA limits the use to those from one of them on
  int32_t cpu_threads = 0;               // OpenMP's number
  std::vector<CudaDevice> cuda_devices;  // at the index that device_index names
  std::string cuda_reason;               // why there are none; "" when there are
  std::string compiler;                  // that built the library
  std::vector<Kernel> kernels;           // in the order in which a plan asks them
};

// Puts the choices of a file that "strobe tune" wrote on this machine into force: plans that are
// made from now on take them. Throws Error where it is none, or of another version; what was in
// force then stays.
inline void load_tuning(const std::string& path) {
  internal::throw_unless_ok(static_cast<Status>(strobe_tuning_load(path.c_str())));
}

// From now on the rules choose alone.
inline void unload_tuning() {
  internal::throw_unless_ok(static_cast<Status>(strobe_tuning_load(nullptr)));
}

// Which file of choices is in force, or "none", and why where there is a reason.
[[nodiscard]] inline std::string tuning() {
  return internal::all_text(
      [](char* text, size_t capacity) { return strobe_tuning_text(text, capacity); });
}

// Asks the library. Throws Error.
[[nodiscard]] inline Machine machine() {
  strobe_machine m = {};
  m.struct_size = sizeof m;
  internal::throw_unless_ok(static_cast<Status>(strobe_machine_info(&m)));
  Machine machine = {.cpu_name = m.cpu_name,
                     .cpu_isa = m.cpu_isa,
                     .cpu_isas = m.cpu_isas,
                     .cpu_threads = m.cpu_threads,
                     .cuda_devices = {},
                     .cuda_reason = m.cuda_reason,
                     .compiler = m.compiler,
                     .kernels = {}};
  for (int32_t i = 0; i < m.cuda_devices; ++i) {
    strobe_cuda_device d = {};
    d.struct_size = sizeof d;
    internal::throw_unless_ok(static_cast<Status>(strobe_cuda_device_info(i, &d)));
    machine.cuda_devices.push_back({.name = d.name,
                                    .compute_capability = d.compute_capability,
                                    .multiprocessors = d.multiprocessors,
                                    .memory_bytes = d.memory_bytes});
  }
  for (int32_t i = 0; const char* kernel = strobe_kernel_name(i); ++i) {
    const char* reason = strobe_kernel_unavailable(i);
    machine.kernels.push_back({.name = kernel, .unavailable = reason ? reason : ""});
  }
  return machine;
}

}  // namespace v0
}  // namespace strobe

#endif  // STROBE_MACHINE_HPP_
