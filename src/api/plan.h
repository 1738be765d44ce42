// Problem -> Plan: an ordered table of kernels, each of which checks itself and says why it
// declines.
#ifndef STROBE_API_PLAN_H_
#define STROBE_API_PLAN_H_

#include <span>
#include <string>
#include <vector>

#include "core/kernel.h"

namespace strobe {

/// What a build without CUDA kernels says of itself: at most 127 bytes, as strobe_machine has room.
inline constexpr char kNoCuda[] =
    "this build has no CUDA kernels: build Strobe where nvcc is (cmake -DSTROBE_CUDA=ON; pip too)";

/// In the order in which they are asked.
std::span<const Kernel> kernel_table();

/// Checks, resolves defaults and lets the first kernel that takes the problem fill the plan.
Status make_plan(const AttentionProblem& problem, Plan& plan);

/// The same, of this choice alone: its kernel takes the problem so, or says why not.
Status make_plan_chosen(const AttentionProblem& problem, const Choice& choice, Plan& plan);

/// All choices that there are for the problem, that of the rules first.
Status find_choices(const AttentionProblem& problem, std::vector<Choice>& choices);

/// The plan in words.
std::string describe(const Plan& plan);

/// One line per kernel of the problem's device: takes it, and what there is to say of that, or why
/// not.
std::string why(const AttentionProblem& problem);

/// In one line: which kernel computes the plan's problem, and why those before it declined.
std::string who_computes(const Plan& plan);

}  // namespace strobe

#endif  // STROBE_API_PLAN_H_
