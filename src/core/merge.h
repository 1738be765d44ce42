// Merging partial results: its arguments, checked.
#ifndef STROBE_CORE_MERGE_H_
#define STROBE_CORE_MERGE_H_

#include "core/status.h"
#include "strobe/strobe.h"

namespace strobe {

using MergeArgs = strobe_merge_args;

/// Every check of the arguments; then fills in the strides that were left at zero.
Status check_merge(MergeArgs& args);

}  // namespace strobe

#endif  // STROBE_CORE_MERGE_H_
