// What the tool asks the library's core about a launch, with the arrays of the host at hand: also
// where the launch runs on a GPU, which looks at no number before it runs.
#ifndef STROBE_CLI_LAUNCH_CHECK_H_
#define STROBE_CLI_LAUNCH_CHECK_H_

#include <cstdint>

#include "strobe/strobe.h"

namespace strobe::cli {

// Throws UserError with the text with which a launch on the CPU refuses these arguments. problem:
// of a plan. args: pointers of the host.
void CheckLaunch(const strobe_problem& problem, const strobe_forward_args& args);

// Pairs of query and key of a launch with a cache that see each other. Arguments as above, and
// checked.
[[nodiscard]] double CachedPairs(const strobe_problem& problem, const strobe_forward_args& args);
// The same of a launch with a mask as data, on average over the heads.
[[nodiscard]] double MaskedPairs(const strobe_problem& problem, const strobe_forward_args& args);

}  // namespace strobe::cli

#endif  // STROBE_CLI_LAUNCH_CHECK_H_
