// A plan on the CPU: into what a launch cuts its work, and what workspace it needs.
#ifndef STROBE_CPU_FILL_PLAN_H_
#define STROBE_CPU_FILL_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/kernel.h"
#include "cpu/kernels.h"

namespace strobe::cpu {

/// Fills a plan, whose (resolved) problem is there, and returns ""; or says why the choice is none
/// for it. choice: null: by the rules of fill_plan.cpp.
std::string fill_plan(const InstructionSet& isa, Plan& plan, const Choice* choice);
/// Bytes at the beginning of a plan's workspace that all threads of a launch use, of which there
/// are `threads`; each one's scratch follows. The plan has its tiles and blocks.
size_t shared_bytes(const InstructionSet& isa, const Plan& plan, int64_t threads);
/// The blocks that there are to choose from, as Choice has them, for a (resolved) problem; that of
/// the rules is among them.
std::vector<int64_t> blocks_to_choose(const InstructionSet& isa, const AttentionProblem& problem);

}  // namespace strobe::cpu

#endif  // STROBE_CPU_FILL_PLAN_H_
