// Merging partial results and adding gradients of parts: the arguments, checked.
#ifndef STROBE_CORE_MERGE_H_
#define STROBE_CORE_MERGE_H_

#include "core/status.h"
#include "strobe/strobe.h"

namespace strobe {

using MergeArgs = strobe_merge_args;
using AddArgs = strobe_add_args;

/// Every check of the arguments; then fills in the strides that were left at zero.
Status check_merge(MergeArgs& args);
/// The same of an addition.
Status check_add(AddArgs& args);

}  // namespace strobe

#endif  // STROBE_CORE_MERGE_H_
