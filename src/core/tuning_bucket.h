// Which problems have one choice of a tuning file in common: a bucket of problems, in words.
#ifndef STROBE_CORE_TUNING_BUCKET_H_
#define STROBE_CORE_TUNING_BUCKET_H_

#include <string>

#include "strobe/strobe.h"

namespace strobe {

/// The bucket of a (resolved) problem: what it asks for as it is, its lengths and heads up to the
/// next power of two. On a CPU with the number of threads that a launch may use. "" where there is
/// none: no table chooses for what `strobe tune` does not measure, nor where batch_invariant, or
/// deterministic in a backward pass, leaves no choice.
std::string tuning_bucket(const strobe_problem& problem, int threads);

}  // namespace strobe

#endif  // STROBE_CORE_TUNING_BUCKET_H_
