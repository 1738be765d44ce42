// Packing a mask as data on the CPU.
#ifndef STROBE_CPU_MASK_PACK_H_
#define STROBE_CPU_MASK_PACK_H_

#include "core/validate_mask.h"

namespace strobe::cpu {

/// problem: resolved; args: passed check_mask_args. Refuses cu_seqlens that are wrong.
Status pack_mask(const AttentionProblem& problem, const MaskArgs& args);

}  // namespace strobe::cpu

#endif  // STROBE_CPU_MASK_PACK_H_
