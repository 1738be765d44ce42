// What the demo leaves out, and what it says of that: examples/demo_limits.h.
#include "demo_limits.h"

#include <gtest/gtest.h>

namespace {

using strobe::demo::LatestTime;
using strobe::demo::TooLong;

TEST(DemoLimits, TimesGrowWithTheSquareOfTheLength) {
  const LatestTime none, latest = {.seconds = 0.9, .tokens = 2048};
  EXPECT_EQ(none.Expected(4096), 0);
  EXPECT_DOUBLE_EQ(latest.Expected(2048), 0.9);
  EXPECT_DOUBLE_EQ(latest.Expected(4096), 3.6);
  // Also where the length between was left out.
  EXPECT_DOUBLE_EQ(latest.Expected(8192), 14.4);
}

TEST(DemoLimits, SaysHowLongItWouldTakeAndHowLongTheDemoWaits) {
  EXPECT_EQ(TooLong(14.4, 12), "it would take about 15 s, and the demo waits 12 s for this table");
}

}  // namespace
