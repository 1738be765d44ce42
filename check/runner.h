// Runs a case through the C ABI, forward and backward, and holds the results against the oracle.
#ifndef STROBE_CHECK_RUNNER_H_
#define STROBE_CHECK_RUNNER_H_

#include <functional>
#include <string>

#include "compare.h"
#include "fixture.h"

namespace strobe_test {

/// "" when everything is right, else what is wrong, one line each. `edit` may change input values
/// first.
std::string RunCase(const Case& c, const std::function<void(Fixture&)>& edit = {});

/// As one fixture stands after Forward() and Backward(): only the comparison with the oracle.
/// spare: as Yardstick has it.
oracle::Verdict JudgeForward(const Fixture& f, double spare = 0);
oracle::Verdict JudgeBoth(const Fixture& f, double spare = 0);
std::string CompareForward(const Fixture& f);
std::string CompareBackward(const Fixture& f);

/// Whether the instruction set that STROBE_CPU_ISA names can run here; true when it is not set. A
/// library with another one in use than the one asked for is an error: `problem` gets the text.
bool ForcedIsaAvailable(std::string* problem);

}  // namespace strobe_test

#endif  // STROBE_CHECK_RUNNER_H_
