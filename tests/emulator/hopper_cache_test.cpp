// Prompts over a KV cache on the CPU (run_time.h): Hopper's instances for caches, with the kernel
// that appends and rotates before them and the decode kernels for the sequences that have few
// queries after them, planned by the CUDA back end for devices that are not there, against float64.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <string>

#include "cache_fixture.h"
#include "emulated_launch.h"
#include "prompt_case.h"
#include "random_cases.h"
#include "runner.h"

namespace strobe_test {
namespace {

// Of float caches; and of quantised ones, which are unpacked first.
class EmulatedHopperCache : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(, EmulatedHopperCache, testing::Bool(), [](const auto& quantised) {
  return quantised.param ? "Quantised" : "Floats";
});

TEST_P(EmulatedHopperCache, RandomPromptsAgreeWithTheOracle) {
  const bool quantised = GetParam();
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  ExpectNoneIsWrong(Seeds::ByEnvironment(kHopperCases), [&](uint64_t seed) {
    const CacheCase c = DrawPromptCase(seed, quantised);
    DrawHopper(seed);
    strobe::emulator::machine().forced_instance = "cached_sm90_bf16_64";
    CacheFixture f(c);
    std::string wrong = f.Run(ThroughTheEmulator(HoldsOf(seed), 90));
    if (wrong.empty() && f.unpacks_first() != quantised) wrong = "the plan says otherwise";
    if (wrong.empty()) wrong = f.Judge();
    return Verdict{wrong, ToString(c)};
  });
  strobe::emulator::machine().forced_instance.clear();
}

}  // namespace
}  // namespace strobe_test
