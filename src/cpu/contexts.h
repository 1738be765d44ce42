// What the CPU's kernels are given of a launch: tensors, options and arrays, from the plan and the
// arguments.
#ifndef STROBE_CPU_CONTEXTS_H_
#define STROBE_CPU_CONTEXTS_H_

#include <cstdint>

#include "core/kernel.h"
#include "core/workspace.h"
#include "cpu/kernels.h"

namespace strobe::cpu {

/// args: {} of a launch that is only planned.
ForwardContext forward_context(const InstructionSet& isa, const Plan& plan,
                               const ForwardArgs& args);
/// lanes: the instruction set's.
BackwardContext backward_context(const Plan& plan, const BackwardArgs& args, int64_t lanes);
/// The shared part of a backward workspace; the threads' scratch follows.
void carve(Arena& arena, BackwardContext& context);

}  // namespace strobe::cpu

#endif  // STROBE_CPU_CONTEXTS_H_
