// The GPU's rows of the kernel table.
#include "cuda/host/dispatch.h"

#include <string>
#include <vector>

#include "cuda/host/fill_plan.h"
#include "cuda/host/instance_choice.h"
#include "cuda/host/launch.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

namespace {

template <int kArch>
const char* unavailable() {
  const Machine& m = machine();
  if (m.devices.empty()) return m.reason;
  if (m.forced_arch != 0 && m.forced_arch < kArch) {
    return "STROBE_CUDA_ARCH asks for an older architecture";
  }
  if (kArch == kTuring) {
    bool is_there = false;
    for (size_t i = 0; i < m.devices.size(); ++i)
      is_there |= planned_device(static_cast<int64_t>(i)).compute_capability == kTuring;
    if (!is_there) return "no device of compute capability 7.5";
  }
  return nullptr;
}

// Of a problem whose device is there.
DeviceProperties device_of(const AttentionProblem& problem) {
  return planned_device(problem.device_index);
}

template <int kArch>
std::string plan(Plan& plan, const Choice* choice) {
  if (const Status s = check_device(plan.problem.device_index); !s.ok()) return s.text();
  return plan_on(kArch, plan, device_of(plan.problem), choice);
}

template <int kArch>
constexpr const char* kName = kArch == 90   ? "cuda_sm90"
                              : kArch == 80 ? "cuda_sm80"
                                            : "cuda_sm75";

template <int kArch>
constexpr Kernel kernel() {
  return {kName<kArch>,
          STROBE_CUDA,
          unavailable<kArch>,
          plan<kArch>,
          [](const AttentionProblem& problem) {
            if (!check_device(problem.device_index).ok()) return std::vector<Choice>();
            return choices_on(kArch, kName<kArch>, problem, device_of(problem));
          },
          [](const Plan& plan, const ForwardArgs& args) { return launch(kArch, plan, args); },
          [](const Plan& plan, const BackwardArgs& args) { return launch(kArch, plan, args); },
          [](const Plan& plan) { return remark_on(plan, device_of(plan.problem)); }};
}

constexpr Kernel kKernels[] = {kernel<90>(), kernel<80>(), kernel<kTuring>()};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }
std::span<const DeviceProperties> devices() { return machine().devices; }
const char* no_devices_reason() { return machine().reason; }

}  // namespace strobe::cuda
