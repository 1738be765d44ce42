// That random problems of the forward pass agree with the oracle.
#ifndef STROBE_TESTS_EMULATOR_FORWARD_AGREEMENT_H_
#define STROBE_TESTS_EMULATOR_FORWARD_AGREEMENT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "fixture.h"
#include "hopper_case.h"
#include "problem_gen.h"
#include "random_cases.h"
#include "runner.h"

namespace strobe_test {

/// Of the seeds, those whose cases `fits` takes. draw(seed): a case, for which it prepares the
/// machine. launch(holds): plans and launches. edit(fixture, seed): before that.
template <typename Draw, typename Launch, typename Fits, typename Edit>
void ExpectAgreement(const Seeds& seeds, const Draw& draw, const Launch& launch, const Fits& fits,
                     const Edit& edit) {
  ExpectNoneIsWrong(seeds, [&](uint64_t seed) -> std::optional<Verdict> {
    const Case c = draw(seed);
    if (!fits(c)) return {};
    Fixture f(c);
    edit(f, seed);
    std::string wrong = f.Forward(launch(HoldsOf(seed)), true);
    if (wrong.empty()) wrong = CompareForward(f);
    return Verdict{wrong, ToString(c)};
  });
}

template <typename Draw, typename Launch, typename Fits>
void ExpectAgreement(const Seeds& seeds, const Draw& draw, const Launch& launch, const Fits& fits) {
  ExpectAgreement(seeds, draw, launch, fits, [](const Fixture&, uint64_t) {});
}

/// Any; those that hold infinities, which come together in a key's scores and its value.
inline bool IsCase(const Case& /*c*/) { return true; }
inline bool HasInfinities(const Case& c) { return c.special == Special::kInfinity; }

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_FORWARD_AGREEMENT_H_
