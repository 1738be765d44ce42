// A row of the kernel table: what a back end gives to the planner.
#ifndef STROBE_CORE_KERNEL_H_
#define STROBE_CORE_KERNEL_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.h"

namespace strobe {

using Plan = strobe_plan;

/// What may be chosen of how a problem is computed, where several ways give its result: a plan is
/// made of a problem and of this.
struct Choice {
  std::string_view kernel;    // row of the kernel table
  std::string_view instance;  // CUDA: name of the compiled kernel; CPU: ""
  int64_t block = 0;          // CPU: most queries (forward) or keys (backward) of a work item, of
                              // which it gets a whole number of tiles; 0: the kernel cuts none so
};

/// A row of the kernel table. All functions are pure but for the launches.
struct Kernel {
  const char* name;  // "cpu_avx512"
  strobe_device device;
  /// Null when this machine can run it, else why not. Static storage.
  const char* (*unavailable)();
  /// Fills a plan, whose (resolved) problem is there: tiles, blocks, threads or grid, work items
  /// and workspace. Returns "" when it takes the problem, else why not and what would help; then
  /// what is filled in is of no use. choice: of this kernel; null: by its own rules.
  std::string (*plan)(Plan& plan, const Choice* choice);
  /// All choices with which this kernel takes the (resolved) problem, also where it declines it by
  /// its rules. Names end in NUL and are in static storage.
  std::vector<Choice> (*choices)(const AttentionProblem& problem);
  Status (*forward)(const Plan& plan, const ForwardArgs& args);
  Status (*backward)(const Plan& plan, const BackwardArgs& args);
  /// What there is to say of a plan of this kernel besides its numbers, or ""; null: nothing.
  std::string (*remark)(const Plan& plan) = nullptr;
};

}  // namespace strobe

#endif  // STROBE_CORE_KERNEL_H_
