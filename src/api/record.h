// STROBE_RECORD=FILE: a line of JSON in the file for each new problem, which `strobe tune` reads.
#ifndef STROBE_API_RECORD_H_
#define STROBE_API_RECORD_H_

#include "core/kernel.h"

namespace strobe {

/// Looks at the environment, once: when a plan is made.
void read_record_setting();

/// Before a launch: notes the plan's problem, unless this process has.
void record_launch(const Plan& plan);

}  // namespace strobe

#endif  // STROBE_API_RECORD_H_
