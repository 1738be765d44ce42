// What became of the latest call, for `strobe.why()`: kept as it is, and put into words when
// somebody asks. Every call that computes something passes here, by whichever function of Python's
// it came.
#pragma once

#include <memory>

#include "library.h"

namespace strobe_python {

using SharedPlan = std::shared_ptr<const strobe_plan>;

// After a launch, with the GIL or without: this thread's latest call is one by the function `door`
// (of static storage) that this plan computed. On false an exception is set.
bool note_launch(const char* door, const SharedPlan& plan);

// Likewise, of a merge, under the GIL.
bool note_merge(const strobe_merge_args& arguments);

// In any thread, without the GIL: XLA's threads are nobody's, so that it is every thread's latest.
void note_launch_of_xla(const char* door, const SharedPlan& plan);

extern PyMethodDef latest_methods[];

}  // namespace strobe_python
