// Merging partial results on the CPU.
#ifndef STROBE_CPU_MERGE_H_
#define STROBE_CPU_MERGE_H_

#include "core/merge.h"

namespace strobe::cpu {

/// args: as check_merge leaves them.
Status merge(const MergeArgs& args);

}  // namespace strobe::cpu

#endif  // STROBE_CPU_MERGE_H_
