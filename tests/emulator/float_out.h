// That out in float32 is what 16 bits are rounded from.
#ifndef STROBE_TESTS_EMULATOR_FLOAT_OUT_H_
#define STROBE_TESTS_EMULATOR_FLOAT_OUT_H_

#include <cmath>
#include <string>

#include "fixture.h"
#include "problem_gen.h"

namespace strobe_test {

/// Runs a case with out in float32 and in its own dtype. "" where each number of the one, rounded,
/// is that of the other. unrounded: grows by the numbers that rounding changed.
inline std::string CompareFloatOut(Case c, const Fixture::ForwardLaunch& launch,
                                   int64_t* unrounded) {
  c.special = Special::kNone;
  c.out_float32 = true;
  Fixture whole(c);
  c.out_float32 = false;
  Fixture rounded(c);
  for (Fixture* const f : {&whole, &rounded}) {
    if (std::string wrong = f->Forward(launch, true); !wrong.empty()) return wrong;
  }
  if (whole.LseBits() != rounded.LseBits()) return "lse differs";
  const oracle::Tensor x = whole.out.Read(), y = rounded.out.Read();
  for (size_t i = 0; i < x.data.size(); ++i) {
    const auto value = static_cast<float>(x.data[i]);
    const float expected = oracle::Round(c.dtype, value);
    if (!(static_cast<double>(expected) == y.data[i]))
      return "out[" + std::to_string(i) + "] = " + std::to_string(value) + ", and in 16 bits " +
             std::to_string(y.data[i]);
    *unrounded += expected != value;
  }
  return "";
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_FLOAT_OUT_H_
