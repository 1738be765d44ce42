// How long the demo waits for a table, and what it says of a length that would take longer.
#ifndef STROBE_EXAMPLES_DEMO_LIMITS_H_
#define STROBE_EXAMPLES_DEMO_LIMITS_H_

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <string>

namespace strobe::demo {

// Seconds since a table's start by which each half of it has to be done. What would take longer
// is left out, so that the demo ends in time on any machine; Strobe's half is the one to see.
struct Deadlines {
  double standard, strobe;
};

// Of the longest sequence that was timed so far.
struct LatestTime {
  double seconds = 0;
  int64_t tokens = 0;  // 0: none yet

  // Seconds of another length: the work grows with its square. 0 where nothing is known.
  [[nodiscard]] double Expected(int64_t other) const {
    const double factor = tokens > 0 ? static_cast<double>(other) / static_cast<double>(tokens) : 0;
    return factor * factor * seconds;
  }
};

// Why a length is left out that would take so long. deadline: the one that it would pass.
[[nodiscard]] inline std::string TooLong(double seconds, double deadline) {
  return fmt::format("it would take about {:.0f} s, and the demo waits {:.0f} s for this table",
                     std::ceil(seconds), deadline);
}

}  // namespace strobe::demo

#endif  // STROBE_EXAMPLES_DEMO_LIMITS_H_
