// Random problems over the whole feature space against the oracle.
//
//   STROBE_RANDOM_CASES  how many (default 2000; 300 under a sanitizer)
//   STROBE_RANDOM_SEED   of the first case; case n has seed + n, so that one case can be run again
//   alone:
//                        STROBE_RANDOM_SEED=<its seed> STROBE_RANDOM_CASES=1
//   STROBE_CPU_ISA       the instruction set, forced in the library (one ctest entry for each)
#include <cstdio>
#include <cstdlib>
#include <string>

#include "gtest/gtest.h"
#include "problem_gen.h"
#include "runner.h"

namespace strobe_test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr unsigned long long kCases = 300;
#else
constexpr unsigned long long kCases = 2000;
#endif
constexpr int kMostFailuresShown = 10;

unsigned long long FromEnvironment(const char* name, unsigned long long otherwise) {
  const char* const text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 0) : otherwise;
}

// share: one of so many cases, of problems that are one kind of all.
void RunCases(Case (*generate)(uint64_t), unsigned long long share) {
  std::string problem;
  if (!ForcedIsaAvailable(&problem)) {
    GTEST_SKIP() << "this machine or build lacks the instruction set "
                 << std::getenv("STROBE_CPU_ISA");
  }
  ASSERT_EQ(problem, "");
  const unsigned long long all = FromEnvironment("STROBE_RANDOM_CASES", kCases);
  const unsigned long long cases = (all + share - 1) / share;
  const unsigned long long seed = FromEnvironment("STROBE_RANDOM_SEED", 1);
  int failures = 0;
  for (unsigned long long n = 0; n < cases; ++n) {
    Case c = generate(seed + n);
    // Kernels of CPUs take any, or leave it to one that does.
    if (c.dropout_first_key > 0 && c.seed % 3 != 0) {
      c.dropout_first_key += static_cast<int64_t>(c.seed % 8);
    }
    const std::string errors = RunCase(c);
    if (errors.empty()) continue;
    if (++failures <= kMostFailuresShown) {
      ADD_FAILURE() << ToString(c) << "\n"
                    << errors << "  alone: STROBE_RANDOM_SEED=" << c.seed
                    << " STROBE_RANDOM_CASES=1";
    }
  }
  std::printf("%llu cases from seed %llu: %d failed\n", cases, seed, failures);
  EXPECT_EQ(failures, 0);
}

TEST(Random, AgreesWithTheOracle) { RunCases(GenerateCase, 1); }
TEST(Random, Float8AgreesWithTheOracle) { RunCases(GenerateFloat8Case, 3); }
TEST(Random, RowsWithBitsOfTheirOwnAgreeWithTheOracle) { RunCases(GenerateOwnRowsCase, 3); }
// With a mask as data.
TEST(RandomMasks, AgreeWithTheOracle) { RunCases(GenerateMaskedCase, 4); }

}  // namespace
}  // namespace strobe_test
