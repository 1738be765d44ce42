// The checks of a problem with a KV cache, and of its launch arguments.
#ifndef STROBE_CORE_VALIDATE_CACHE_H_
#define STROBE_CORE_VALIDATE_CACHE_H_

#include <string>

#include "core/problem.h"

namespace strobe {

/// Checks all that a cache adds to a problem whose options and other extents passed their checks,
/// but the strides of k and v. Without a cache its fields have to be left at their
/// defaults.
Status check_cache(const AttentionProblem& problem);

/// Checks the values of the arrays of a launch on the CPU, whose pointers passed their checks.
Status check_cache_numbers(const AttentionProblem& problem, const ForwardArgs& args);

/// What to_string says of it: "" without a cache.
std::string cache_text(const AttentionProblem& problem);

}  // namespace strobe

#endif  // STROBE_CORE_VALIDATE_CACHE_H_
