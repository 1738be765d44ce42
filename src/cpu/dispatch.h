// What the CPU back end gives to the API: its part of the kernel table, and merging.
#ifndef STROBE_CPU_DISPATCH_H_
#define STROBE_CPU_DISPATCH_H_

#include <span>

#include "core/kernel.h"
#include "core/merge.h"
#include "cpu/kernels.h"

namespace strobe::cpu {

/// Widest instruction set first; each that the CPU lacks, or that STROBE_CPU_ISA's limit leaves
/// out, declines.
std::span<const Kernel> kernels();

/// Those that this CPU has, widest first, whatever STROBE_CPU_ISA says: for tests.
std::span<const InstructionSet* const> instruction_sets();

/// Name of the widest one that plans may use.
const char* widest_in_use();

/// Merges partial results. args: as check_merge leaves them.
Status merge(const MergeArgs& args);

/// Adds gradients of a part. args: as check_add leaves them.
Status add(const AddArgs& args);

}  // namespace strobe::cpu

#endif  // STROBE_CPU_DISPATCH_H_
