// The plan that the CUDA kernels would make on such a device, whatever this machine has.
#ifndef STROBE_TESTS_GPU_PLAN_FOR_H_
#define STROBE_TESTS_GPU_PLAN_FOR_H_

#include <string>

#include "cuda/host/dispatch.h"
#include "cuda/host/fill_plan.h"
#include "cuda/host/instance_choice.h"

namespace strobe::cuda {

inline Status plan_for(const AttentionProblem& problem, const DeviceProperties& device,
                       Plan& plan) {
  STROBE_RETURN_IF_ERROR(check_problem(problem));
  Plan made{};
  made.struct_size = sizeof made;
  made.problem = problem;
  resolve_defaults(made.problem);
  std::string reasons;
  for (const int arch : {90, 80}) {
    const char* const name = kernels()[arch == 90 ? 0 : 1].name;
    const std::string reason = declines_on(arch, made.problem, device);
    if (reason.empty()) {
      made.kernel = name;
      fill_on(arch, made, device);
      plan = made;
      return {};
    }
    reasons += format("%-14s declines: %s\n", name, reason.c_str());
  }
  return {STROBE_UNSUPPORTED, "no kernel takes " + to_string(problem) + "\n" + reasons};
}

}  // namespace strobe::cuda

#endif  // STROBE_TESTS_GPU_PLAN_FOR_H_
