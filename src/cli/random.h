// Seeded random numbers that are the same on every machine.
#ifndef STROBE_CLI_RANDOM_H_
#define STROBE_CLI_RANDOM_H_

#include <cmath>
#include <cstdint>
#include <numbers>

namespace strobe::cli {

// SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15U;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
    z = (z ^ z >> 27) * 0x94d049bb133111ebU;
    return z ^ z >> 31;
  }
  // In (0, 1).
  double Uniform() { return (static_cast<double>(Bits() >> 11) + 0.5) * 0x1p-53; }
  // In [low, high].
  int64_t Integer(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Bits() % static_cast<uint64_t>(high - low + 1));
  }
  // Mean 0, variance 1 (Box and Muller).
  double Normal() {
    const double radius = std::sqrt(-2 * std::log(Uniform()));
    return radius * std::cos(2 * std::numbers::pi * Uniform());
  }

 private:
  uint64_t state_;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_RANDOM_H_
