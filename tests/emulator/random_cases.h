// The random problems of an emulator test: which there are, and what is said of those that fail.
#ifndef STROBE_TESTS_EMULATOR_RANDOM_CASES_H_
#define STROBE_TESTS_EMULATOR_RANDOM_CASES_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>

#include "environment.h"

namespace strobe_test {

/// Problems of so many seeds, from `first` on.
struct Seeds {
  uint64_t first, count;

  /// As STROBE_EMULATOR_SEED and STROBE_EMULATOR_CASES say; else these.
  static Seeds ByEnvironment(uint64_t cases, uint64_t first = 1) {
    return {FromEnvironment("STROBE_EMULATOR_SEED", first),
            FromEnvironment("STROBE_EMULATOR_CASES", cases)};
  }
};

/// What is wrong with a problem, or "", and the problem in words.
struct Verdict {
  std::string wrong, problem;
};

/// run(seed) is a Verdict, or an optional one: where there is none the seed's problem is of another
/// kind, and does not count. Returns how many are wrong; after some it ends.
template <typename Run>
int ExpectNoneIsWrong(const Seeds& seeds, const Run& run) {
  constexpr int kMostShown = 5;
  int failures = 0;
  uint64_t tried = 0;
  for (uint64_t seed = seeds.first; tried < seeds.count && failures < kMostShown; ++seed) {
    const std::optional<Verdict> verdict = run(seed);
    if (!verdict) continue;
    ++tried;
    if (verdict->wrong.empty()) continue;
    ++failures;
    ADD_FAILURE() << "STROBE_EMULATOR_SEED=" << seed
                  << " STROBE_EMULATOR_CASES=1: " << verdict->wrong << "\n"
                  << verdict->problem;
  }
  return failures;
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_RANDOM_CASES_H_
