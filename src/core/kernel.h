// A row of the kernel table: what a back end gives to the planner.
#ifndef STROBE_CORE_KERNEL_H_
#define STROBE_CORE_KERNEL_H_

#include <string>

#include "core/problem.h"

namespace strobe {

using Plan = strobe_plan;

/// A row of the kernel table. All functions are pure but for the launches.
struct Kernel {
  const char* name;  // "cpu_avx512"
  strobe_device device;
  /// Null when this machine can run it, else why not. Static storage.
  const char* (*unavailable)();
  /// Empty when it takes the (resolved) problem, else why not and what would help.
  std::string (*declines)(const AttentionProblem& problem);
  /// Fills tiles, blocks, threads or grid, work items and workspace.
  void (*fill)(Plan& plan);
  Status (*forward)(const Plan& plan, const ForwardArgs& args);
  Status (*backward)(const Plan& plan, const BackwardArgs& args);
};

}  // namespace strobe

#endif  // STROBE_CORE_KERNEL_H_
