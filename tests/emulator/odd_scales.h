// Float8 attention whose scales are anything.
#ifndef STROBE_TESTS_EMULATOR_ODD_SCALES_H_
#define STROBE_TESTS_EMULATOR_ODD_SCALES_H_

#include <cmath>
#include <cstdint>
#include <limits>

#include "fixture.h"
#include "numeric.h"
#include "problem_gen.h"

namespace strobe_test {

/// Scales of all three tensors, each in a place of its own.
inline void GiveScales(Case& c) {
  c.has_q_scale = c.float8_case.scaled = true;
  c.special = Special::kNone;
  for (Layout* l : {&c.float8_case.q_scale, &c.float8_case.k_scale, &c.float8_case.v_scale})
    *l = Layout();
}

/// Negative ones, 0, and what is not finite, which makes NaN of codes that are 0 too: some heads
/// have no others. AnyFixture: Fixture or CacheFixture.
template <typename AnyFixture>
void MakeScalesOdd(const AnyFixture& f, oracle::Rng& rng) {
  const double others[] = {0., -0., std::numeric_limits<double>::infinity(), std::nan("")};
  for (const Strided* const t : {&f.q_scale, &f.k_scale, &f.v_scale}) {
    if (!t->memory) continue;
    t->ForEach([&](int64_t, int64_t, int64_t, int64_t e) {
      if (rng.Chance(0.4)) t->Set(e, -static_cast<double>(t->Get(e)));
      if (rng.Chance(0.2)) t->Set(e, rng.Pick(others));
      // A product of infinity and 0 is NaN either way; one of infinity and a number is NaN here.
      if (std::isinf(t->Get(e))) t->Set(e, std::nan(""));
    });
  }
  for (const Strided* const t : {&f.q, &f.k, &f.v}) {
    if (!rng.Chance(0.3)) continue;
    t->ForEach([&](int64_t, int64_t head, int64_t, int64_t e) {
      if (head % 2 == 0) t->Set(e, 0);
    });
  }
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_ODD_SCALES_H_
