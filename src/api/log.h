// STROBE_LOG=1: a line on stderr for each new problem. docs/semantics.md has the format.
#ifndef STROBE_API_LOG_H_
#define STROBE_API_LOG_H_

#include <string_view>

#include "core/kernel.h"

namespace strobe {

/// Looks at the environment, once: when a plan is made, as a launch looks nothing up.
void read_log_setting();

/// Before a launch: says which kernel computes the plan's problem, and why those before it
/// declined, unless this was said before.
void log_launch(const Plan& plan);

/// Says what a caller is told whose problem no kernel takes, likewise once.
void log_declined(std::string_view text);

}  // namespace strobe

#endif  // STROBE_API_LOG_H_
