// Time and floating-point operations of a launch.
#ifndef STROBE_CLI_MEASURE_H_
#define STROBE_CLI_MEASURE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cli/terminal.h"

namespace strobe::cli {

struct Timing {
  double median = 0;  // seconds
  double best = 0;
  int64_t runs = 0;
};

// Times `work`. runs > 0: exactly that often. Else once to warm up, then at least three times and
// for `seconds`; work that takes longer than `seconds` at the first call runs only once more.
template <typename Work>
[[nodiscard]] Timing Measure(Work work, double seconds, int64_t runs = 0) {
  std::vector<double> times;
  double total = 0;
  const auto run = [&] {
    const Stopwatch watch;
    work();
    return watch.Seconds();
  };
  if (runs == 0) {
    const int64_t least = run() > seconds ? 1 : 3;
    while (total < seconds || static_cast<int64_t>(times.size()) < least) {
      times.push_back(run());
      total += times.back();
    }
  } else {
    for (int64_t i = 0; i < runs; ++i) times.push_back(run());
  }
  std::sort(times.begin(), times.end());
  return {.median = times[times.size() / 2],
          .best = times.front(),
          .runs = static_cast<int64_t>(times.size())};
}

// Pairs of query and key that see each other: all, half of them when causal, counted one by one
// with a sliding window or unequal lengths.
[[nodiscard]] inline double VisiblePairs(int64_t seqlen_q, int64_t seqlen_k, bool causal,
                                         int64_t window_left, int64_t window_right) {
  const double all = static_cast<double>(seqlen_q) * static_cast<double>(seqlen_k);
  if (!causal && window_left < 0 && window_right < 0) return all;
  if (window_left < 0 && window_right < 0 && seqlen_q == seqlen_k) return all / 2;
  double pairs = 0;
  for (int64_t i = 0; i < seqlen_q; ++i) {
    const int64_t middle = i + seqlen_k - seqlen_q;
    int64_t first = 0;
    int64_t last = seqlen_k - 1;
    if (window_left >= 0 && window_left < middle) first = middle - window_left;
    if (causal || window_right == 0) last = std::min(last, middle);
    if (window_right > 0 && window_right < last - middle) last = middle + window_right;
    pairs += static_cast<double>(std::max<int64_t>(last - first + 1, 0));
  }
  return pairs;
}

// Two products with a multiplication and an addition each: 2 (head_dim + head_dim_v) a pair and
// head.
[[nodiscard]] inline double ForwardFlop(double pairs, int64_t heads, int64_t head_dim,
                                        int64_t head_dim_v) {
  return 2.0 * static_cast<double>(head_dim + head_dim_v) * static_cast<double>(heads) * pairs;
}

// Five products instead of two.
[[nodiscard]] inline double BackwardFlop(double forward) { return 2.5 * forward; }

}  // namespace strobe::cli

#endif  // STROBE_CLI_MEASURE_H_
