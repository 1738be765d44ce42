// How `strobe tune` decides: which of some choices is faster than the rules' by more than the
// noise, and for which problems that is so. It measures by functions that it is given, so that
// tests bring a clock of their own.
#ifndef STROBE_CLI_TUNER_H_
#define STROBE_CLI_TUNER_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace strobe::cli {

// Ratios of paired times, the rules' by another's: above 1 the other one is faster.
struct Ratios {
  double median = 1;
  double error = 0;  // the median's standard error, by the quartiles
};

[[nodiscard]] inline Ratios RatiosOf(std::vector<double> ratios) {
  std::sort(ratios.begin(), ratios.end());
  const size_t n = ratios.size();
  if (n == 0) return {};
  // Of a normal distribution the median's error is 1.25 deviations by the root of n, and a
  // deviation is the quartiles' distance by 1.35.
  const double quartiles = ratios[n - 1 - n / 4] - ratios[n / 4];
  return {ratios[n / 2], 1.25 / 1.35 * quartiles / std::sqrt(static_cast<double>(n))};
}

// Whether so much is a gain, and not noise.
[[nodiscard]] inline bool IsGain(const Ratios& r) {
  constexpr double kLeast = 0.03, kErrors = 3;
  return r.median >= 1 + kLeast && r.median - 1 > kErrors * r.error;
}

struct Verdict {
  size_t winner = 0;  // 0: the rules
  double gain = 0;    // 0.1: the rules take 1.1 times as long
};

class Tuner {
 public:
  // Runs choice number n, and returns the seconds that it takes when it has run before.
  using Run = std::function<double(size_t choice)>;
  // Seconds since some time.
  using Clock = std::function<double()>;

  explicit Tuner(Clock clock) : clock_(std::move(clock)) {}

  // Measures the choices against each other, number 0 being the rules', for about `seconds`, and at
  // least as long as it takes to know.
  [[nodiscard]] Verdict Decide(size_t choices, const Run& run, double seconds) const {
    const double begin = clock_();
    const std::vector<size_t> left = FastestFew(choices, run);
    if (left.size() < 2) return {};
    // One series finds the best of them, which luck may have had a hand in; another one, which
    // knows nothing of the first, has to find it faster too.
    const std::vector<std::vector<double>> ratios = InTurns(left, run, begin + seconds / 2);
    size_t best = 1;
    for (size_t i = 1; i < left.size(); ++i) {
      if (RatiosOf(ratios[i]).median > RatiosOf(ratios[best]).median) best = i;
    }
    if (!IsGain(RatiosOf(ratios[best]))) return {};
    const Ratios again = Compare(left[best], run, begin + seconds);
    return IsGain(again) ? Verdict{left[best], again.median - 1} : Verdict{};
  }

  // Of one choice against the rules, until the clock says `end`.
  [[nodiscard]] Ratios Compare(size_t choice, const Run& run, double end) const {
    return RatiosOf(InTurns({0, choice}, run, end)[1]);
  }

 private:
  static constexpr size_t kLeastRounds = 7, kMostRounds = 101;
  static constexpr size_t kMostLeft = 5;
  static constexpr double kFarSlower = 1.3;

  // The rules', and those that one run does not rule out: the fastest first.
  [[nodiscard]] static std::vector<size_t> FastestFew(size_t choices, const Run& run) {
    std::vector<std::pair<double, size_t>> times;
    for (size_t i = 0; i < choices; ++i) {
      times.emplace_back(run(i), i);
    }
    std::sort(times.begin(), times.end());
    std::vector<size_t> left = {0};
    for (const auto& [time, i] : times) {
      if (i != 0 && left.size() < kMostLeft && time <= kFarSlower * times.front().first)
        left.push_back(i);
    }
    return left;
  }

  // Rounds in which each runs once, there and back in turns, so that what slows the machine down
  // for a while, or little by little, meets all of them. Ratios to the first one of the same round.
  [[nodiscard]] std::vector<std::vector<double>> InTurns(const std::vector<size_t>& choices,
                                                         const Run& run, double end) const {
    std::vector<std::vector<double>> ratios(choices.size());
    std::vector<double> times(choices.size());
    for (size_t round = 0; round < kMostRounds && (round < kLeastRounds || clock_() < end);
         ++round) {
      for (size_t n = 0; n < choices.size(); ++n) {
        const size_t i = round % 2 == 0 ? n : choices.size() - 1 - n;
        times[i] = run(choices[i]);
      }
      for (size_t i = 0; i < choices.size(); ++i) ratios[i].push_back(times[0] / times[i]);
    }
    return ratios;
  }

  Clock clock_;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_TUNER_H_
