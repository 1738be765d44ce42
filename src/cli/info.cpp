#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "cli/commands.h"
#include "cli/machine_json.h"
#include "cli/terminal.h"

namespace strobe::cli {

int Info(const InfoOptions& options) {
  const Machine m = machine();
  if (options.json) {
    nlohmann::ordered_json json = MachineJson(m);
    Print("{}\n", json.dump(2));
    return 0;
  }
  const auto line = [](const char* what, const std::string& value) {
    Print("{:<18}{}\n", what, value);
  };
  line("Strobe", fmt::format("{}, built by {}", version(), m.compiler));
  line("CPU", m.cpu_name.empty() ? "unknown" : m.cpu_name);
  line("Instruction sets",
       fmt::format("{}  (in use: {}; STROBE_CPU_ISA limits them)", m.cpu_isas, m.cpu_isa));
  line("Threads", fmt::format("{} of {} (OMP_NUM_THREADS sets how many)", m.cpu_threads,
                              std::thread::hardware_concurrency()));
  if (m.cuda_devices.empty()) line("GPU", fmt::format("none: {}", m.cuda_reason));
  for (size_t i = 0; i < m.cuda_devices.size(); ++i) {
    const CudaDevice& d = m.cuda_devices[i];
    line(fmt::format("GPU {}", i).c_str(),
         fmt::format("{}, compute capability {}.{}, {} multiprocessors, {}", d.name,
                     d.compute_capability / 10, d.compute_capability % 10, d.multiprocessors,
                     BytesText(static_cast<double>(d.memory_bytes))));
  }
  line("Tuning", tuning());
  size_t width = 0;
  for (const Kernel& kernel : m.kernels) width = std::max(width, kernel.name.size());
  const char* heading = "Kernels";
  for (const Kernel& kernel : m.kernels) {
    line(heading, fmt::format("{:<{}}  {}", kernel.name, width,
                              kernel.unavailable.empty() ? Green("ready")
                                                         : Dim("no: " + kernel.unavailable)));
    heading = "";
  }
  return 0;
}

nlohmann::ordered_json MachineJson(const Machine& m) {
  nlohmann::ordered_json json = {{"strobe", version()},
                                 {"compiler", m.compiler},
                                 {"cpu", m.cpu_name},
                                 {"cpu_isa", m.cpu_isa},
                                 {"cpu_isas", m.cpu_isas},
                                 {"cpu_threads", m.cpu_threads},
                                 {"cuda_reason", m.cuda_reason},
                                 {"cuda_devices", nlohmann::ordered_json::array()},
                                 {"tuning", tuning()},
                                 {"kernels", nlohmann::ordered_json::array()}};
  for (const CudaDevice& d : m.cuda_devices) {
    json["cuda_devices"].push_back({{"name", d.name},
                                    {"compute_capability", d.compute_capability},
                                    {"multiprocessors", d.multiprocessors},
                                    {"memory_bytes", d.memory_bytes}});
  }
  for (const Kernel& kernel : m.kernels) {
    json["kernels"].push_back({{"name", kernel.name}, {"unavailable", kernel.unavailable}});
  }
  return json;
}

}  // namespace strobe::cli
