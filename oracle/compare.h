// The rule that decides whether a result is right (docs/semantics.md, "How correctness is
// decided").
//
// A result passes when max|x - oracle| <= factor * max|plain - oracle| + 1e-5, where `plain` is
// attention in plain tensor steps in the same dtype, and factor is 2 for out, 3 for gradients, 8
// for gradients with ALiBi and for those of sinks. NaN passes only where the oracle has NaN, an
// infinity only where the oracle has the same one, and those places must have them; but for
// infinities by weights that float32 takes for 0 (FaintInfinities).
#ifndef STROBE_ORACLE_COMPARE_H_
#define STROBE_ORACLE_COMPARE_H_

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comparator.h"
#include "numeric.h"
#include "oracle.h"

namespace oracle {

inline constexpr double kOutFactor = 2, kGradientFactor = 3, kAlibiGradientFactor = 8;
/// There are few of them, one a head, so that the largest of plain's errors is small by luck.
inline constexpr double kSinkGradientFactor = 8;
inline constexpr double kFloor = 1e-5;

/// lse is float32 whatever the inputs are: products of 16-bit values are exact in float32, so its
/// error comes from adding up head_dim products and from exp and log, in every dtype alike. Both
/// grow with the size of the scores' terms: one rounding is 6e-8 of it, a sum of 256 terms takes
/// about sqrt(256) = 16 of them when they fall randomly, the scale, the change to base 2 and the
/// maximum a few more. 4e-6 of the size is 64 roundings.
inline double LseTolerance(double size) { return 1e-5 + 4e-6 * size; }

/// Elements of out that are infinite because of an infinity of v whose weight a float32 takes for
/// 0, or may: kernels that flush what is below the least normal number do, the others below the
/// least number of all. 0 times infinity is NaN, so that NaN is as good there as the infinity.
class FaintInfinities {
 public:
  FaintInfinities() = default;
  explicit FaintInfinities(const ForwardResult& exact) : exact_(&exact) {}

  bool operator()(int64_t row, int64_t head, int64_t d) const {
    if (!exact_) return false;
    return exact_->faintest.at(row, head)[d] < kLeast + LseTolerance(*exact_->size.at(row, head));
  }

 private:
  static constexpr double kLeast = -87.3;  // the log of 2^-126
  const ForwardResult* exact_ = nullptr;   // null: there are none
};

struct Worst {
  bool ok = true;
  double error = 0;    // largest difference where oracle and result are finite
  double allowed = 0;  // there
  double ratio = 0;    // of the two; infinite for NaN or infinity out of place
  std::string text;    // the worst coordinate in words
};

inline std::string Describe(const std::string& name, int64_t row, int64_t head, int64_t d,
                            double got, double wanted, double allowed) {
  char text[256];
  std::snprintf(
      text, sizeof text,
      "%s[row %lld, head %lld, dim %lld] = %.9g, oracle %.9g, difference %.3g, allowed %.3g",
      name.c_str(), static_cast<long long>(row), static_cast<long long>(head),
      static_cast<long long>(d), got, wanted, std::fabs(got - wanted), allowed);
  return text;
}

/// Calls visit(row, head, dim, index) for each element.
template <typename Visit>
void ForEachElement(const Tensor& t, Visit visit) {
  size_t index = 0;
  for (int64_t row = 0; row < t.rows; ++row) {
    for (int64_t head = 0; head < t.heads; ++head) {
      for (int64_t d = 0; d < t.dim; ++d) visit(row, head, d, index++);
    }
  }
}

/// Largest difference of the comparators from the oracle where both are finite.
inline double LargestError(const std::vector<const Tensor*>& plain, const Tensor& wanted) {
  double worst = 0;
  for (const Tensor* t : plain) {
    for (size_t i = 0; i < wanted.data.size(); ++i) {
      const double error = std::fabs(t->data[i] - wanted.data[i]);
      if (std::isfinite(error)) worst = std::max(worst, error);
    }
  }
  return worst;
}

/// `allowed` gives the tolerance of element (row, head).
template <typename Allowed>
Worst CompareWith(const std::string& name, const Tensor& got, const Tensor& wanted, DType dtype,
                  Allowed allowed, const FaintInfinities& faint = {}) {
  Worst worst;
  double worst_ratio = -1;
  ForEachElement(wanted, [&](int64_t row, int64_t head, int64_t d, size_t i) {
    const double x = got.data[i], reference = wanted.data[i];
    const double limit = allowed(row, head);
    double ratio;  // error / allowed; infinite for NaN and infinity out of place
    if (std::isfinite(reference) && std::fabs(reference) <= 0.999 * LargestFinite(dtype)) {
      ratio = std::isfinite(x) ? std::fabs(x - reference) / limit : HUGE_VAL;
    } else if (std::isfinite(reference)) {  // overflows the dtype, or may
      ratio = !std::isnan(x) && std::signbit(x) == std::signbit(reference) &&
                      std::fabs(x) >= 0.99 * LargestFinite(dtype)
                  ? 0
                  : HUGE_VAL;
    } else if (std::isinf(reference) && std::isnan(x) && faint(row, head, d)) {
      ratio = 0;
    } else {
      ratio =
          std::isnan(reference) ? (std::isnan(x) ? 0 : HUGE_VAL) : (x == reference ? 0 : HUGE_VAL);
    }
    if (!(ratio > worst_ratio)) return;
    worst_ratio = worst.ratio = ratio;
    worst.ok = ratio <= 1;
    worst.error = std::fabs(x - reference);
    worst.allowed = limit;
    worst.text = Describe(name, row, head, d, x, reference, limit);
  });
  return worst;
}

/// The rule above. plain: one or more draws of the comparator.
inline Worst Compare(const std::string& name, const Tensor& got, const Tensor& wanted,
                     const std::vector<const Tensor*>& plain, DType dtype, double factor,
                     double floor = kFloor, const FaintInfinities& faint = {}) {
  const double allowed = factor * LargestError(plain, wanted) + floor;
  return CompareWith(
      name, got, wanted, dtype, [&](int64_t, int64_t) { return allowed; }, faint);
}

/// The rule with as many draws of the comparator as a result needs to pass, up to `most` of them
/// and the one with true rounding. A draw can only raise what is allowed, so what passes with few
/// draws passes with all.
class Yardstick {
 public:
  /// draw(n): PlainAttention with the noise seed n. spare: so much of a tensor's largest value is
  /// allowed on top of the rule.
  Yardstick(std::function<Plain(uint64_t)> draw, size_t most, double spare = 0)
      : draw_(std::move(draw)), most_(most), spare_(spare) {}

  /// out, by kOutFactor.
  Worst CheckOut(const Tensor& got, const ForwardResult& wanted, DType dtype) {
    return Check("out", got, wanted.out, &Plain::out, dtype, kOutFactor, FaintInfinities(wanted));
  }
  Worst Check(const std::string& name, const Tensor& got, const Tensor& wanted,
              Tensor Plain::*which, DType dtype, double factor, const FaintInfinities& faint = {}) {
    double largest = 0;
    for (const double x : wanted.data) {
      if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
    }
    while (true) {
      while (draws_.size() < 2) draws_.push_back(draw_(draws_.size()));
      std::vector<const Tensor*> all;
      for (const Plain& each : draws_) all.push_back(&(each.*which));
      Worst worst =
          Compare(name, got, wanted, all, dtype, factor, kFloor + spare_ * largest, faint);
      if (worst.ok || draws_.size() > most_) return worst;
      draws_.push_back(draw_(draws_.size()));
    }
  }

 private:
  std::function<Plain(uint64_t)> draw_;
  size_t most_;
  double spare_;
  std::vector<Plain> draws_;
};

/// What was found about the results of a launch.
struct Verdict {
  std::string errors;  // one line each; "" when everything is right
  double worst = 0;    // the largest error over what is allowed

  void Add(const Worst& found) {
    worst = std::max(worst, found.ratio);
    if (!found.ok) errors += "  " + found.text + "\n";
  }
};

/// lse: [rows, heads, 1]; size: ForwardResult::size.
inline Worst CompareLse(const Tensor& got, const Tensor& wanted, const Tensor& size) {
  return CompareWith("lse", got, wanted, DType::kFloat32,
                     [&](int64_t row, int64_t head) { return LseTolerance(*size.at(row, head)); });
}

}  // namespace oracle

#endif  // STROBE_ORACLE_COMPARE_H_
