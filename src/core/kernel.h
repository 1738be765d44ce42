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
  /// Fills a plan, whose (resolved) problem is there: tiles, blocks, threads or grid, work items
  /// and workspace. Returns "" when it takes the problem, else why not and what would help; then
  /// what is filled in is of no use.
  std::string (*plan)(Plan& plan);
  Status (*forward)(const Plan& plan, const ForwardArgs& args);
  Status (*backward)(const Plan& plan, const BackwardArgs& args);
  /// What there is to say of a plan of this kernel besides its numbers, or ""; null: nothing.
  std::string (*remark)(const Plan& plan) = nullptr;
};

}  // namespace strobe

#endif  // STROBE_CORE_KERNEL_H_
