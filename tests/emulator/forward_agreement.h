// That random problems of the forward pass agree with the oracle.
#ifndef STROBE_TESTS_EMULATOR_FORWARD_AGREEMENT_H_
#define STROBE_TESTS_EMULATOR_FORWARD_AGREEMENT_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "fixture.h"
#include "hopper_case.h"
#include "problem_gen.h"
#include "runner.h"

namespace strobe_test {

/// Of the seeds from `first` on, `count` whose cases `fits` takes. draw(seed): a case, for which it
/// prepares the machine. launch(holds): plans and launches. edit(fixture, seed): before that.
template <typename Draw, typename Launch, typename Fits, typename Edit>
void ExpectAgreement(uint64_t first, uint64_t count, const Draw& draw, const Launch& launch,
                     const Fits& fits, const Edit& edit) {
  constexpr int kMostFailuresShown = 5;
  int failures = 0;
  uint64_t tried = 0;
  for (uint64_t seed = first; tried < count && failures < kMostFailuresShown; ++seed) {
    const Case c = draw(seed);
    if (!fits(c)) continue;
    ++tried;
    Fixture f(c);
    edit(f, seed);
    std::string wrong = f.Forward(launch(HoldsOf(seed)), true);
    if (wrong.empty()) wrong = CompareForward(f);
    if (wrong.empty()) continue;
    ++failures;
    ADD_FAILURE() << "STROBE_EMULATOR_SEED=" << seed << " STROBE_EMULATOR_CASES=1: " << wrong
                  << "\n"
                  << ToString(c);
  }
}

template <typename Draw, typename Launch, typename Fits>
void ExpectAgreement(uint64_t first, uint64_t count, const Draw& draw, const Launch& launch,
                     const Fits& fits) {
  ExpectAgreement(first, count, draw, launch, fits, [](const Fixture&, uint64_t) {});
}

/// Any; those that hold infinities, which come together in a key's scores and its value.
inline bool IsCase(const Case& /*c*/) { return true; }
inline bool HasInfinities(const Case& c) { return c.special == Special::kInfinity; }

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_FORWARD_AGREEMENT_H_
