// Choices: each gives the problem's result, which of them give the same bits, and what is refused.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "fixture.h"
#include "gtest/gtest.h"
#include "runner.h"
#include "small_problem.h"
#include "strobe/strobe.h"

namespace strobe_test {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kCases = 20;
#else
constexpr uint64_t kCases = 120;
#endif

std::vector<strobe_choice> ChoicesOf(const strobe_problem& p) {
  std::vector<strobe_choice> found;
  strobe_choice choice{};
  choice.struct_size = sizeof choice;
  while (strobe_plan_choice(&p, static_cast<int32_t>(found.size()), &choice) == STROBE_OK)
    found.push_back(choice);
  return found;
}

std::string ToText(const strobe_choice& choice) {
  return std::string(choice.kernel) + " block " + std::to_string(choice.block);
}

strobe_plan Chosen(const strobe_problem& p, const strobe_choice& choice) {
  strobe_plan plan{};
  plan.struct_size = sizeof plan;
  EXPECT_EQ(strobe_plan_make_chosen(&p, &choice, &plan), STROBE_OK)
      << ToText(choice) << ": " << strobe_last_error();
  return plan;
}

int64_t BlockOf(const strobe_plan& plan) {
  return plan.problem.direction == STROBE_FORWARD ? plan.block_q : plan.block_k;
}

constexpr strobe_direction kDirections[] = {STROBE_FORWARD, STROBE_BACKWARD};

TEST(Choice, TheFirstIsThatOfTheRules) {
  for (uint64_t seed = 1; seed <= kCases; ++seed) {
    const Fixture f(GenerateCase(seed));
    for (const strobe_direction direction : kDirections) {
      const strobe_problem p = f.MakeProblem(direction);
      const std::vector<strobe_choice> choices = ChoicesOf(p);
      ASSERT_FALSE(choices.empty());
      strobe_plan ruled{};
      ruled.struct_size = sizeof ruled;
      ASSERT_EQ(strobe_plan_make(&p, &ruled), STROBE_OK);
      strobe_plan chosen = Chosen(p, choices[0]);
      EXPECT_EQ(chosen.chosen_by, STROBE_CHOSEN_BY_CALLER);
      chosen.chosen_by = STROBE_CHOSEN_BY_RULES;
      EXPECT_EQ(std::memcmp(&ruled, &chosen, sizeof ruled), 0) << ToString(f.c());
    }
  }
}

TEST(Choice, NoTwoAreTheSamePlan) {
  for (const strobe_direction direction : kDirections) {
    const strobe_problem p = ProblemOf(3000, direction);
    const std::vector<strobe_choice> choices = ChoicesOf(p);
    EXPECT_GE(choices.size(), 3U);
    for (size_t i = 0; i < choices.size(); ++i) {
      const strobe_plan a = Chosen(p, choices[i]);
      EXPECT_EQ(BlockOf(a), choices[i].block);
      EXPECT_STREQ(a.kernel, choices[i].kernel);
      for (size_t j = 0; j < i; ++j) {
        const strobe_plan b = Chosen(p, choices[j]);
        EXPECT_FALSE(a.kernel == b.kernel && BlockOf(a) == BlockOf(b)) << i << " " << j;
      }
    }
  }
}

// All of them, in turns from problem to problem: whatever a table says is right.
TEST(Choice, EveryOneAgreesWithTheOracle) {
  std::vector<std::string> seen;
  for (uint64_t seed = 1000; seed < 1000 + kCases; ++seed) {
    Fixture f(GenerateCase(seed));
    std::string what;
    f.edit_plan = [&](strobe_plan& plan) {
      const strobe_problem p = plan.problem;
      const std::vector<strobe_choice> choices = ChoicesOf(p);
      const strobe_choice& choice = choices[seed % choices.size()];
      what += " " + ToText(choice);
      plan = Chosen(p, choice);
    };
    std::string error = f.Forward();
    if (error.empty()) error = f.Backward();
    EXPECT_EQ(error, "") << ToString(f.c()) << what;
    const oracle::Verdict verdict = JudgeBoth(f);
    EXPECT_EQ(verdict.errors, "") << ToString(f.c()) << what;
  }
}

// Which is what batch_invariant allows a table to choose.
TEST(Choice, BlocksOfQueriesHaveTheSameBits) {
  int compared = 0;
  for (uint64_t seed = 2000; seed < 2000 + kCases; ++seed) {
    Fixture f(seed % 4 == 3 ? GenerateMaskedCase(seed) : GenerateCase(seed));
    const std::vector<strobe_choice> choices = ChoicesOf(f.MakeProblem(STROBE_FORWARD));
    std::string kernel, bits;
    for (const strobe_choice& choice : choices) {
      f.edit_plan = [&](strobe_plan& plan) { plan = Chosen(strobe_problem(plan.problem), choice); };
      f.Poison(STROBE_FORWARD);
      ASSERT_EQ(f.Forward(), "") << ToString(f.c()) << ToText(choice);
      const std::string got = Fixture::Bits(f.out) + f.LseBits();
      if (kernel == choice.kernel) {
        EXPECT_EQ(got == bits, true) << ToString(f.c()) << " " << ToText(choice);
        ++compared;
      }
      kernel = choice.kernel;
      bits = got;
    }
  }
  EXPECT_GT(compared, 20);
}

TEST(Choice, WhatIsNoneIsRefused) {
  const strobe_problem p = ProblemOf(512, STROBE_FORWARD);
  strobe_choice choice = ChoicesOf(p)[0];
  strobe_plan plan{};
  plan.struct_size = sizeof plan;
  const auto refused = [&](const strobe_problem& problem, strobe_status status) {
    const strobe_plan before = plan;
    EXPECT_EQ(strobe_plan_make_chosen(&problem, &choice, &plan), status);
    EXPECT_EQ(std::memcmp(&before, &plan, sizeof plan), 0);
    return std::string(strobe_last_error());
  };
  const int64_t block = choice.block;
  for (const int64_t bad : {int64_t{0}, block - 1, int64_t{1} << 40, int64_t{-64}}) {
    choice.block = bad;
    EXPECT_NE(refused(p, STROBE_UNSUPPORTED).find("choice.block = " + std::to_string(bad)),
              std::string::npos);
  }
  choice.block = block;
  strobe_problem few = p;  // decoded: items are of keys
  few.seqlen_q = 1;
  EXPECT_NE(refused(few, STROBE_UNSUPPORTED).find("expected 0"), std::string::npos);
  for (const char* const kernel : {"", "cpu_abacus", "cuda_sm90"}) {
    choice.kernel = kernel;
    EXPECT_NE(refused(p, STROBE_INVALID_ARGUMENT).find("choice.kernel = "), std::string::npos);
  }
  choice.kernel = nullptr;
  EXPECT_EQ(refused(p, STROBE_INVALID_ARGUMENT), "choice.kernel = NULL, expected a pointer");
  choice.struct_size = 1;
  EXPECT_NE(refused(p, STROBE_INVALID_ARGUMENT).find("choice.struct_size"), std::string::npos);
  const auto count = static_cast<int32_t>(ChoicesOf(p).size());
  choice.struct_size = sizeof choice;
  for (const int32_t index : {-1, count})
    EXPECT_EQ(strobe_plan_choice(&p, index, &choice), STROBE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace strobe_test
