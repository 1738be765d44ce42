// Tables of tuning: the file's text, which problems share a choice, what a plan takes of a table
// and what it does not, and the tuner's judgement under a clock of the test's own.
#include <omp.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cli/tuner.h"
#include "core/machine.h"
#include "core/problem.h"
#include "core/tuning_bucket.h"
#include "core/tuning_file.h"
#include "fixture.h"
#include "gtest/gtest.h"
#include "runner.h"
#include "small_problem.h"
#include "strobe/strobe.h"

namespace strobe_test {
namespace {

using strobe::TunedChoice;
using strobe::TunedDevice;
using strobe::TuningFile;
using strobe::cli::Tuner;
using strobe::cli::Verdict;

// ------------------------------------------------------------------------------------- the file

TuningFile SomeFile() {
  TuningFile file{.version = strobe_version(), .devices = {}};
  file.devices.push_back(
      {.device = "cuda", .name = "NVIDIA H9", .compute_capability = 90, .choices = {}});
  file.devices.push_back(
      {.device = "cpu", .name = "Some CPU", .compute_capability = 0, .choices = {}});
  file.devices[0].choices.push_back({"a", "cuda_sm80", "forward_sm80_bf16_64", 0, 7});
  file.devices[0].choices.push_back({"b", "cuda_sm90", "forward_sm90_bf16_64", 0, 12});
  return file;
}

TEST(TuningFile, IsReadAsItWasWritten) {
  for (const TuningFile& file : {SomeFile(), TuningFile{.version = "1.2.3", .devices = {}}}) {
    const std::string text = to_text(file);
    TuningFile read;
    ASSERT_EQ(parse_tuning(text, read), "") << text;
    EXPECT_EQ(to_text(read), text);
  }
  TuningFile read;
  ASSERT_EQ(parse_tuning(to_text(SomeFile()), read), "");
  EXPECT_EQ(read.devices[0].find("b")->gain_percent, 12);
  EXPECT_EQ(read.devices[0].find("c"), nullptr);
  EXPECT_EQ(read.devices[1].find("a"), nullptr);
}

TEST(TuningFile, WhatIsWrongIsSaidWithItsLine) {
  const std::string good = to_text(SomeFile());
  const auto error = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    TuningFile read{.version = "kept", .devices = {}};
    const std::string wrong = parse_tuning(text, read);
    EXPECT_EQ(read.version, "kept");
    return wrong;
  };
  EXPECT_EQ(error("{", "["), "line 1: expected {");
  EXPECT_EQ(error("strobe_tuning", "tuning"), "line 2: expected \"strobe_tuning\"");
  EXPECT_EQ(error(": 1", ": 2"), "line 2: expected a number from 1 to 1");
  EXPECT_EQ(error("\"cuda\"", "\"tpu\""), "line 6: expected \"cpu\" or \"cuda\"");
  EXPECT_EQ(error("H9", "H\\u0039"), "line 7: expected a string of letters, digits and spaces");
  EXPECT_EQ(error("NVIDIA H9", std::string(201, 'x')), "line 7: expected at most 200 characters");
  EXPECT_EQ(error("\"block\": 0", "\"block\": -1"),
            "line 11: expected a number from 0 to 1000000000");
  EXPECT_EQ(error("\"problems\": \"b\"", "\"problems\": \"a\""),
            "line 14: expected one choice for a");
  EXPECT_EQ(error("]\n}\n", "]\n}\n{"), "line 24: expected the end of the file");
  TuningFile read;
  for (size_t cut = 0; cut + 1 < good.size(); ++cut) {
    EXPECT_NE(parse_tuning(good.substr(0, cut), read), "") << cut;
  }
  EXPECT_EQ(parse_tuning(std::string(TuningFile::kMostBytes + 1, ' '), read),
            "more than 1048576 bytes");
}

// ---------------------------------------------------------------------------------- the buckets

strobe_plan PlanOf(const strobe_problem& p) {
  strobe_plan plan{};
  plan.struct_size = sizeof plan;
  EXPECT_EQ(strobe_plan_make(&p, &plan), STROBE_OK) << strobe_last_error();
  return plan;
}

std::string BucketOf(strobe_problem p) {
  strobe::resolve_defaults(p);
  return strobe::tuning_bucket(p, 2);
}

TEST(TuningBucket, HoldsProblemsThatAreAlike) {
  EXPECT_EQ(BucketOf(ProblemOf(600)),
            "forward fp32 head_dim 64/64, 2 heads of 1, 1024 x 1024, threads 2");
  EXPECT_EQ(BucketOf(ProblemOf(600)), BucketOf(ProblemOf(1024)));
  EXPECT_NE(BucketOf(ProblemOf(1024)), BucketOf(ProblemOf(1025)));
  const auto changed = [](auto change) {
    strobe_problem p = ProblemOf(600);
    change(p);
    return BucketOf(p);
  };
  std::vector<std::string> all = {BucketOf(ProblemOf(600)),
                                  changed([](auto& p) { p.causal = 1; }),
                                  changed([](auto& p) { p.window_left = 9; }),
                                  changed([](auto& p) { p.softcap = 9; }),
                                  changed([](auto& p) { p.dropout_p = 0.5F; }),
                                  changed([](auto& p) { p.has_sinks = 1; }),
                                  changed([](auto& p) { p.alibi = 1; }),
                                  changed([](auto& p) { p.heads = 4; }),
                                  changed([](auto& p) { p.heads_kv = 1; }),
                                  changed([](auto& p) { p.head_dim = 32; }),
                                  changed([](auto& p) { p.dtype = STROBE_BFLOAT16; }),
                                  changed([](auto& p) { p.batch_invariant = 1; }),
                                  changed([](auto& p) { p.direction = STROBE_BACKWARD; })};
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::unique(all.begin(), all.end()), all.end());
}

TEST(TuningBucket, IsNoneWhereNothingMayBeChosen) {
  const auto changed = [](auto change) {
    strobe_problem p = ProblemOf(600, STROBE_BACKWARD);
    change(p);
    return BucketOf(p);
  };
  EXPECT_NE(changed([](auto&) {}), "");
  EXPECT_EQ(changed([](auto& p) { p.deterministic = 1; }), "");
  EXPECT_EQ(changed([](auto& p) { p.batch_invariant = 1; }), "");
  EXPECT_EQ(changed([](auto& p) { p.has_bias = 1; }), "");
  EXPECT_EQ(changed([](auto& p) { p.accumulate = 1; }), "");
  EXPECT_EQ(changed([](auto& p) { p.has_prefix = 1; }), "");
  EXPECT_EQ(changed([](auto& p) {
              p.device = STROBE_CUDA;
              p.batch_invariant = 1;
              p.direction = STROBE_FORWARD;
            }),
            "");
}

// -------------------------------------------------------------------------------- plans by a table

std::string TemporaryPath(const char* name) {
  return testing::TempDir() + name + std::to_string(getpid()) + ".json";
}

void Write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Which chooses, for the bucket of each of these problems, choice number n of its own.
void LoadTable(const std::vector<strobe_problem>& problems,
               const std::function<size_t(const std::vector<strobe_choice>&)>& pick) {
  TuningFile file{.version = strobe_version(), .devices = {}};
  file.devices.push_back({.device = "cpu",
                          .name = strobe::cpu_features().name,
                          .compute_capability = 0,
                          .choices = {}});
  for (const strobe_problem& given : problems) {
    strobe_problem p = given;
    strobe::resolve_defaults(p);
    const std::string bucket =
        strobe::tuning_bucket(p, p.threads > 0 ? p.threads : omp_get_max_threads());
    const auto known = [&](const TunedChoice& c) { return c.problems == bucket; };
    auto& choices = file.devices[0].choices;
    if (bucket.empty() || std::any_of(choices.begin(), choices.end(), known)) continue;
    std::vector<strobe_choice> found;
    strobe_choice choice{};
    choice.struct_size = sizeof choice;
    while (strobe_plan_choice(&p, static_cast<int32_t>(found.size()), &choice) == STROBE_OK)
      found.push_back(choice);
    const strobe_choice& picked = found[pick(found)];
    choices.push_back({bucket, picked.kernel, "", picked.block, 5});
  }
  const std::string path = TemporaryPath("table");
  Write(path, to_text(file));
  ASSERT_EQ(strobe_tuning_load(path.c_str()), STROBE_OK) << strobe_last_error();
  unlink(path.c_str());
}

class TuningTable : public testing::Test {
 protected:
  void TearDown() override { strobe_tuning_load(nullptr); }
};

std::string Text(size_t (*function)(char*, size_t)) {
  std::string text(function(nullptr, 0), '\0');
  function(text.data(), text.size() + 1);
  return text;
}

std::string TextOf(const strobe_plan& plan) {
  std::string text(strobe_plan_text(&plan, nullptr, 0), '\0');
  strobe_plan_text(&plan, text.data(), text.size() + 1);
  return text;
}

constexpr auto kLast = [](const std::vector<strobe_choice>& choices) { return choices.size() - 1; };

TEST_F(TuningTable, ChoosesAndThePlanSaysSo) {
  if (*strobe::cpu_features().name == '\0') GTEST_SKIP() << "this CPU has no name";
  for (const strobe_direction direction : {STROBE_FORWARD, STROBE_BACKWARD}) {
    const strobe_problem p = ProblemOf(700, direction);
    const strobe_plan ruled = PlanOf(p);
    EXPECT_EQ(ruled.chosen_by, STROBE_CHOSEN_BY_RULES);
    LoadTable({p}, kLast);
    EXPECT_NE(Text(strobe_tuning_text).find("1 choices for this machine: "), std::string::npos);
    const strobe_plan tuned = PlanOf(p);
    EXPECT_EQ(tuned.chosen_by, STROBE_CHOSEN_BY_TUNING);
    EXPECT_NE(TextOf(tuned).find("chosen by tuning\n"), std::string::npos) << TextOf(tuned);
    EXPECT_EQ(TextOf(ruled).find("tuning"), std::string::npos);
    strobe_problem other = p;  // of another bucket
    other.causal = 1;
    EXPECT_EQ(PlanOf(other).chosen_by, STROBE_CHOSEN_BY_RULES);
    EXPECT_EQ(strobe_tuning_load(nullptr), STROBE_OK);
    EXPECT_EQ(PlanOf(p).chosen_by, STROBE_CHOSEN_BY_RULES);
  }
}

// Promises of bits hold whatever the table says: it may be edited.
TEST_F(TuningTable, PromisesOfBitsAreKept) {
  if (*strobe::cpu_features().name == '\0') GTEST_SKIP() << "this CPU has no name";
  strobe_problem forward = ProblemOf(700), backward = ProblemOf(700, STROBE_BACKWARD);
  forward.batch_invariant = 1;
  const strobe_plan ruled = PlanOf(forward);
  LoadTable({forward, backward}, kLast);  // of another kernel, where there is one
  const strobe_plan tuned = PlanOf(forward);
  EXPECT_EQ(tuned.kernel, ruled.kernel);
  EXPECT_EQ(PlanOf(backward).chosen_by, STROBE_CHOSEN_BY_TUNING);
  for (int32_t strobe_problem::*promise :
       {&strobe_problem::deterministic, &strobe_problem::batch_invariant}) {
    strobe_problem p = backward;
    p.*promise = 1;
    EXPECT_EQ(PlanOf(p).chosen_by, STROBE_CHOSEN_BY_RULES);
  }
  // A block of queries may be chosen: its bits are the same
  // (Choice.BlocksOfQueriesHaveTheSameBits).
  LoadTable({forward}, [](const auto& choices) {
    return choices.size() > 1 && choices[1].kernel == choices[0].kernel ? 1U : 0U;
  });
  EXPECT_EQ(PlanOf(forward).chosen_by, STROBE_CHOSEN_BY_TUNING);
}

// Whatever is chosen, results are right.
TEST_F(TuningTable, RandomProblemsAgreeWithTheOracle) {
  if (*strobe::cpu_features().name == '\0') GTEST_SKIP() << "this CPU has no name";
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  constexpr uint64_t kCases = 30;
#else
  constexpr uint64_t kCases = 150;
#endif
  int tuned = 0;
  for (uint64_t seed = 5000; seed < 5000 + kCases; ++seed) {
    const Case c = GenerateCase(seed);
    const Fixture f(c);
    LoadTable({f.MakeProblem(STROBE_FORWARD), f.MakeProblem(STROBE_BACKWARD)},
              [&](const auto& choices) { return seed % choices.size(); });
    tuned += PlanOf(f.MakeProblem(STROBE_FORWARD)).chosen_by == STROBE_CHOSEN_BY_TUNING;
    EXPECT_EQ(RunCase(c), "") << ToString(c);
  }
  EXPECT_GT(tuned, static_cast<int>(kCases / 15));
}

// A plan that is being made goes on with the table that it began with.
TEST_F(TuningTable, ThreadsPlanWhileTablesChange) {
  const strobe_problem p = ProblemOf(700);
  std::atomic<bool> done = false;
  std::vector<std::thread> threads;
  for (int n = 0; n < 3; ++n) {
    threads.emplace_back([&] {
      while (!done) {
        const strobe_plan plan = PlanOf(p);
        EXPECT_TRUE(plan.chosen_by == STROBE_CHOSEN_BY_RULES ||
                    plan.chosen_by == STROBE_CHOSEN_BY_TUNING);
        EXPECT_FALSE(Text(strobe_tuning_text).empty());
      }
    });
  }
  for (int n = 0; n < 20; ++n) {
    LoadTable({p}, kLast);
    EXPECT_EQ(strobe_tuning_load(nullptr), STROBE_OK);
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
}

TEST_F(TuningTable, FilesThatAreNoneChangeNothing) {
  const std::string path = TemporaryPath("bad");
  const auto refused = [&](const char* file) {
    EXPECT_EQ(strobe_tuning_load(file), STROBE_INVALID_ARGUMENT);
    EXPECT_EQ(PlanOf(ProblemOf(700)).chosen_by, STROBE_CHOSEN_BY_RULES);
    return std::string(strobe_last_error());
  };
  EXPECT_NE(refused("/no/such/file").find("cannot be opened: No such file"), std::string::npos);
  EXPECT_NE(refused("/").find("is not a regular file"), std::string::npos);
  EXPECT_NE(refused("/dev/zero").find("is not a regular file"), std::string::npos);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);  // which nobody writes to
  EXPECT_NE(refused(path.c_str()).find("is not a regular file"), std::string::npos);
  unlink(path.c_str());
  Write(path, "{}");
  EXPECT_NE(refused(path.c_str()).find("is no tuning file: line 1: expected \"strobe_tuning\""),
            std::string::npos);
  Write(path, std::string(2 << 20, ' '));
  EXPECT_NE(refused(path.c_str()).find("has more than 1048576 bytes"), std::string::npos);
  TuningFile old = SomeFile();
  old.version = "0.0.1";
  Write(path, to_text(old));
  EXPECT_NE(refused(path.c_str()).find("is of Strobe 0.0.1, and this is "), std::string::npos);
  // One of other devices is good, and chooses nothing here.
  Write(path, to_text(SomeFile()));
  EXPECT_EQ(strobe_tuning_load(path.c_str()), STROBE_OK);
  EXPECT_EQ(Text(strobe_tuning_text), "0 choices for this machine, 2 for others: " + path);
  EXPECT_EQ(PlanOf(ProblemOf(700)).chosen_by, STROBE_CHOSEN_BY_RULES);
  unlink(path.c_str());
}

// ------------------------------------------------------------------------------------- the tuner

// Choices whose times are these, with noise of so much, under a clock that they alone move.
class FakeMachine {
 public:
  FakeMachine(std::vector<double> times, double noise, uint64_t seed)
      : times_(std::move(times)), noise_(noise), rng_(seed) {}
  Verdict Decide(double seconds) {
    const Tuner tuner([this] { return now_; });
    return tuner.Decide(
        times_.size(),
        [this](size_t n) {
          ++runs_;
          const double time = times_[n] * (1 + noise_ * rng_.Uniform(-1, 1));
          now_ += time;
          return time;
        },
        seconds);
  }
  double now() const { return now_; }
  int runs() const { return runs_; }

 private:
  std::vector<double> times_;
  double noise_, now_ = 100;
  int runs_ = 0;
  oracle::Rng rng_;
};

TEST(Tuner, TakesWhatIsFasterByMoreThanTheNoise) {
  int right = 0, wrong = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    FakeMachine machine({1e-3, 0.9e-3, 1.1e-3, 5e-3}, 0.05, seed);
    const Verdict verdict = machine.Decide(0.5);
    right += verdict.winner == 1;
    if (verdict.winner == 1) {
      EXPECT_NEAR(verdict.gain, 0.11, 0.04);
    }
    FakeMachine alike({1e-3, 1e-3, 1e-3, 1e-3, 1e-3}, 0.1, seed);
    wrong += alike.Decide(0.5).winner != 0;
    FakeMachine busy({1e-3, 1e-3, 1e-3, 1e-3, 1e-3}, 0.3, seed);  // and little time
    wrong += busy.Decide(0).winner != 0;
    FakeMachine little({1e-3, 0.99e-3}, 0.001, seed);
    wrong += little.Decide(0.5).winner != 0;  // less than 3 %
  }
  EXPECT_GE(right, 198);
  EXPECT_EQ(wrong, 0);
}

TEST(Tuner, IsDeterministicAndKeepsToItsTime) {
  for (const double seconds : {0.0, 0.05, 0.3}) {
    FakeMachine first({1e-3, 0.8e-3, 0.9e-3}, 0.05, 7), second({1e-3, 0.8e-3, 0.9e-3}, 0.05, 7);
    const Verdict a = first.Decide(seconds), b = second.Decide(seconds);
    EXPECT_EQ(a.winner, b.winner);
    EXPECT_EQ(a.gain, b.gain);
    EXPECT_EQ(first.runs(), second.runs());
    EXPECT_LE(first.now() - 100, seconds + 0.05);
  }
}

// What is far slower runs once, and no more.
TEST(Tuner, LooksOnceAtWhatIsFarSlower) {
  std::vector<int> runs(2);
  double now = 0;
  const Tuner tuner([&] { return now; });
  const Verdict verdict = tuner.Decide(
      2, [&](size_t n) { return ++runs[n], now += 1e-3, n == 0 ? 1e-3 : 2e-3; }, 1);
  EXPECT_EQ(verdict.winner, 0U);
  EXPECT_EQ(runs, (std::vector<int>{1, 1}));
}

}  // namespace
}  // namespace strobe_test
