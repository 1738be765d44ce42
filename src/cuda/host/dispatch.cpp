// The GPU's rows of the kernel table.
#include "cuda/host/dispatch.h"

#include <iterator>
#include <string>

#include "cuda/host/fill_plan.h"
#include "cuda/host/launch.h"
#include "cuda/host/machine.h"
#include "cuda/host/row_choice.h"

namespace strobe::cuda {

namespace {

template <int kArch>
const char* unavailable() {
  const Machine& m = machine();
  if (m.devices.empty()) return m.reason;
  if (m.forced_arch != 0 && m.forced_arch < kArch) {
    return "STROBE_CUDA_ARCH asks for an older architecture";
  }
  return nullptr;
}

template <int kArch>
std::string declines(const AttentionProblem& p) {
  const auto& devices = machine().devices;
  if (static_cast<size_t>(p.device_index) >= devices.size()) {
    return format("device_index = %d, expected below the number of CUDA devices, %zu",
                  p.device_index, devices.size());
  }
  return declines_on(kArch, p, devices[static_cast<size_t>(p.device_index)]);
}

template <int kArch>
void fill(Plan& plan) {
  fill_on(kArch, plan, machine().devices[static_cast<size_t>(plan.problem.device_index)]);
}

template <int kArch>
Status run_forward(const Plan& plan, const ForwardArgs& args) {
  return launch(kArch, plan, args);
}
template <int kArch>
Status run_backward(const Plan& plan, const BackwardArgs& args) {
  return launch(kArch, plan, args);
}

template <int kArch>
constexpr Kernel kernel(const char* name) {
  return {name,        STROBE_CUDA,        unavailable<kArch>, declines<kArch>,
          fill<kArch>, run_forward<kArch>, run_backward<kArch>};
}

constexpr Kernel kKernels[] = {kernel<90>("cuda_sm90"), kernel<80>("cuda_sm80")};
constexpr int kArchs[] = {90, 80};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }
std::span<const DeviceProperties> devices() { return machine().devices; }
const char* no_devices_reason() { return machine().reason; }

Status plan_for(const AttentionProblem& problem, const DeviceProperties& device, Plan& plan) {
  STROBE_RETURN_IF_ERROR(check_problem(problem));
  Plan made{};
  made.struct_size = sizeof made;
  made.problem = problem;
  resolve_defaults(made.problem);
  std::string reasons;
  for (size_t i = 0; i < std::size(kArchs); ++i) {
    const std::string reason = declines_on(kArchs[i], made.problem, device);
    if (reason.empty()) {
      made.kernel = kKernels[i].name;
      fill_on(kArchs[i], made, device);
      plan = made;
      return {};
    }
    reasons += format("%-14s declines: %s\n", kKernels[i].name, reason.c_str());
  }
  return {STROBE_UNSUPPORTED, "no kernel takes " + to_string(problem) + "\n" + reasons};
}

}  // namespace strobe::cuda
