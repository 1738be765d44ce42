// A launch on the CPU, the same for every instruction set.
#ifndef STROBE_CPU_LAUNCH_H_
#define STROBE_CPU_LAUNCH_H_

#include "core/kernel.h"
#include "cpu/kernels.h"

namespace strobe::cpu {

Status forward(const InstructionSet& isa, const Plan& plan, const ForwardArgs& args);
Status backward(const InstructionSet& isa, const Plan& plan, const BackwardArgs& args);

}  // namespace strobe::cpu

#endif  // STROBE_CPU_LAUNCH_H_
