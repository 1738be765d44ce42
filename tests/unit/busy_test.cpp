// Whether `strobe bench` and the demo call a computer too busy to time: cli/busy.h.
#include "cli/busy.h"

#include <gtest/gtest.h>

#include <ctime>
#include <sstream>

namespace {

using strobe::cli::HowToTime;
using strobe::cli::OtherPrograms;
using strobe::cli::ReadProcessorTicks;
using strobe::cli::ReadProcessTicks;
using strobe::cli::Stopwatch;
using strobe::cli::Timing;
using strobe::cli::WhyTooBusy;

TEST(BusyTest, ReadsTheProcessorsTime) {
  std::istringstream stat(
      "cpu  1 20 300 4000 50000 6 70 800 9 0\n"
      "cpu0 1 10 100 2000 25000 3 30 400 0 0\n"
      "cpu1 0 10 200 2000 25000 3 40 400 9 0\n"
      "intr 12345\ncpu2 is not here\n");
  const auto ticks = ReadProcessorTicks(stat);
  ASSERT_TRUE(ticks.has_value());
  // Neither idle nor waiting for a disk; time of this machine's own guests is user's already.
  EXPECT_EQ(ticks->busy, 1 + 20 + 300 + 6 + 70 + 800);
  EXPECT_EQ(ticks->processors, 2);
}

TEST(BusyTest, KnowsNothingOfOtherFiles) {
  for (const char* text : {"", "intr 5\n", "cpu  1 2 three\n", "cpu  1 2 3 4 5 6 7 8\n"}) {
    std::istringstream stat(text);
    EXPECT_FALSE(ReadProcessorTicks(stat).has_value()) << text;
  }
  for (const char* text : {"", "1 no parentheses", "1 (cut short) S 1 2 3"}) {
    std::istringstream stat(text);
    EXPECT_FALSE(ReadProcessTicks(stat).has_value()) << text;
  }
}

TEST(BusyTest, ReadsAProcesssTime) {
  std::istringstream stat("77 (a ) name) S 4 5 6 7 8 9 10 11 12 13 1400 15 16 17");
  EXPECT_EQ(ReadProcessTicks(stat), 1400 + 15);
}

TEST(BusyTest, DoesNotCountThisProgramAmongTheOthers) {
  const Stopwatch watch;
  const OtherPrograms all({}), others({getpid()});
  // However long that takes beside other programs.
  const std::clock_t begin = std::clock();
  while (std::clock() - begin < CLOCKS_PER_SEC / 2) {
  }
  const auto everyone = all.Mean(), rest = others.Mean();
  if (!everyone) GTEST_SKIP() << "no /proc/stat";
  ASSERT_TRUE(rest.has_value());
  EXPECT_NEAR((*everyone - *rest) * watch.Seconds(), 0.5, 0.15);
  EXPECT_LE(*rest, all.processors());
}

TEST(BusyTest, ProcessorsThatAreFreeAreEnough) {
  EXPECT_EQ(WhyTooBusy(0.0, 2, 2, {}), "");
  EXPECT_EQ(WhyTooBusy(0.25, 2, 2, {}), "");  // an eighth of each
  EXPECT_EQ(WhyTooBusy(0.5, 2, 2, {}), "other programs had 0.5 of the 2 processors");
  EXPECT_EQ(WhyTooBusy(1.0, 2, 1, {}), "");  // the other one is free
  EXPECT_EQ(WhyTooBusy(60.0, 64, 8, {}), "other programs had 60.0 of the 64 processors");
  EXPECT_EQ(WhyTooBusy(50.0, 64, 8, {}), "");
  EXPECT_EQ(WhyTooBusy(std::nullopt, 0, 8, {}), "");  // nobody knows
}

TEST(BusyTest, SaysHowToGetTimes) {
  const std::string later = "Run `make demo` again when the other programs rest.";
  EXPECT_EQ(HowToTime("make demo", 1.9, 2, 2), later);           // they leave no processor
  EXPECT_EQ(HowToTime("make demo", std::nullopt, 0, 8), later);  // nobody knows
  EXPECT_EQ(HowToTime("make demo", 0.0, 2, 2), later);           // the repetitions lay apart
  const std::string fewer = HowToTime("make demo", 3.5, 8, 8);
  EXPECT_NE(fewer.find("when the other programs rest"), std::string::npos) << fewer;
  EXPECT_NE(fewer.find("`OMP_NUM_THREADS=4 make demo`"), std::string::npos) << fewer;
  EXPECT_EQ(HowToTime("strobe bench", 1.9, 2, 2),
            "Run `strobe bench` again when the other programs rest.");
  // Which is not too busy, if all stays as it was.
  EXPECT_EQ(WhyTooBusy(3.5, 8, 4, {}), "");
  EXPECT_NE(HowToTime("make demo", 1.05, 2, 2).find("OMP_NUM_THREADS=1 "), std::string::npos);
  EXPECT_EQ(WhyTooBusy(1.05, 2, 1, {}), "");
}

TEST(BusyTest, RepetitionsThatLieApartAreNoTiming) {
  const Timing steady = {.median = 1.1, .best = 1.0, .runs = 9};
  const Timing apart = {.median = 1.6, .best = 1.0, .runs = 9};
  const Timing once = {.median = 1.6, .best = 1.0, .runs = 2};
  EXPECT_EQ(WhyTooBusy(0.0, 2, 2, {steady, steady}), "");
  EXPECT_EQ(WhyTooBusy(0.0, 2, 2, {steady, apart}),
            "half of the repetitions took over 1.6 times as long as the fastest");
  EXPECT_EQ(WhyTooBusy(0.0, 2, 2, {once}), "");
}

}  // namespace
