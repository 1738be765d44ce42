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
  AttentionProblem resolved = problem;
  resolve_defaults(resolved);
  std::string reasons;
  for (size_t i = 0; const int arch : {90, 80, kTuring}) {
    const char* const name = kernels()[i++].name;
    Plan made{};
    made.struct_size = sizeof made;
    made.problem = resolved;
    const std::string reason = plan_on(arch, made, device);
    if (reason.empty()) {
      made.kernel = name;
      plan = made;
      return {};
    }
    reasons += format("%-14s declines: %s\n", name, reason.c_str());
  }
  return {STROBE_UNSUPPORTED, "no kernel takes " + to_string(problem) + "\n" + reasons};
}

}  // namespace strobe::cuda

#endif  // STROBE_TESTS_GPU_PLAN_FOR_H_
