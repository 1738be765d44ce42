// Problem -> Plan: an ordered table of kernels, each of which checks itself and says why it
// declines.
#ifndef STROBE_CORE_PLAN_H_
#define STROBE_CORE_PLAN_H_

#include <span>
#include <string>

#include "core/problem.h"

namespace strobe {

using Plan = strobe_plan;

/// What a build without CUDA kernels says of itself: at most 127 bytes, as strobe_machine has room.
inline constexpr char kNoCuda[] =
    "this build has no CUDA kernels: build Strobe where nvcc is (cmake -DSTROBE_CUDA=ON; pip too)";

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

/// In the order in which they are asked.
std::span<const Kernel> kernel_table();

/// Checks, resolves defaults and lets the first kernel that takes the problem fill the plan.
Status make_plan(const AttentionProblem& problem, Plan& plan);

/// The plan in words.
std::string describe(const Plan& plan);

/// One line per kernel of the problem's device: takes it, or why not.
std::string why(const AttentionProblem& problem);

}  // namespace strobe

#endif  // STROBE_CORE_PLAN_H_
