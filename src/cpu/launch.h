// Plan and launch on the CPU, the same for every instruction set.
#ifndef STROBE_CPU_LAUNCH_H_
#define STROBE_CPU_LAUNCH_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/kernel.h"
#include "cpu/kernels.h"

namespace strobe::cpu {

/// Fills a plan, whose (resolved) problem is there, and returns ""; or says why the choice is none
/// for it. choice: null: by the rules of launch.cpp.
std::string fill_plan(const InstructionSet& isa, Plan& plan, const Choice* choice);
/// The blocks that there are to choose from, as Choice has them, for a (resolved) problem; that of
/// the rules is among them.
std::vector<int64_t> blocks_to_choose(const InstructionSet& isa, const AttentionProblem& problem);
Status forward(const InstructionSet& isa, const Plan& plan, const ForwardArgs& args);
Status backward(const InstructionSet& isa, const Plan& plan, const BackwardArgs& args);

}  // namespace strobe::cpu

#endif  // STROBE_CPU_LAUNCH_H_
