// Formulas of the kernels at the ends of their range, with the errors that a GPU's approximations
// have: what can be checked of them without a GPU. run_gpu_tests.py --only extremes has the rest.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <random>

#include "cuda/backward/scratch.cuh"
#include "cuda/common/softcap.h"

namespace strobe::cuda {
namespace {

constexpr double kLog2e = 1.4426950408889634;

/// ex2.approx.ftz and rcp.approx.ftz: subnormal results are 0, and the relative error is the
/// largest that they are documented to have, up or down.
struct ApproximateMath {
  float sign;
  static float flushed(float x) {
    return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
  }
  float exp2(float x) const {
    return flushed(static_cast<float>(std::exp2(static_cast<double>(x)) * (1 + sign * 0x1p-22)));
  }
  float reciprocal(float x) const {
    return flushed(static_cast<float>(1 / static_cast<double>(flushed(x)) * (1 - sign * 0x1p-23)));
  }
};

template <bool kPrecise = true>
SoftcappedScore capped(float qk, float scale, float softcap, float sign) {
  const SoftcapConstants c = SoftcapConstants::make(scale, softcap);
  return softcapped<kPrecise, true>(qk, c.cap_log2, c.cap_power, ApproximateMath{sign});
}

TEST(Softcap, ErrorIsRelativeForEveryCap) {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> exponent(-12, 12), side(-1, 1);
  for (const float cap : {1e-30f, 1e-10f, 0.5f, 30.f, 1e3f, 1e5f, 1e7f, 1e10f, 1e20f, 1e30f}) {
    double worst = 0, worst_slope = 0;
    for (int i = 0; i < 20000; ++i) {
      // Scores from far below the cap to beyond it, and one per decade where that is out of range.
      const double size = cap * std::pow(10., exponent(random));
      const float scale = 0.125f;
      const auto qk = static_cast<float>(std::copysign(size, side(random)) / scale);
      if (!(std::fabs(qk) > 1e-30f) || !std::isfinite(qk)) continue;
      const double x = static_cast<double>(qk) * scale / cap, t = std::tanh(x);
      const SoftcappedScore got = capped(qk, scale, cap, i % 2 ? 1.f : -1.f);
      worst = std::max(worst, std::fabs(got.score / (cap * kLog2e * t) - 1));
      const double slope = 1 / (std::cosh(x) * std::cosh(x));
      if (slope > 1e-30) worst_slope = std::max(worst_slope, std::fabs(got.slope / slope - 1));
    }
    EXPECT_LT(worst, 8e-7) << "softcap " << cap;
    EXPECT_LT(worst_slope, 2e-5) << "softcap " << cap;  // e^2x of x up to 34, a float
  }
}

// The short forms, with and without slope, are for caps whose rounding error nobody sees.
TEST(Softcap, TheShortFormIsGoodEnoughForSmallCaps) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> of_cap(-12, 12);
  for (const float cap : {1e-30f, 0.5f, 30.f, kSmallCap}) {
    for (int i = 0; i < 20000; ++i) {
      const float qk = of_cap(random) * cap * 8.f, sign = i % 2 ? 1.f : -1.f;
      const double x = static_cast<double>(qk) * 0.125 / cap;
      const SoftcapConstants c = SoftcapConstants::make(0.125f, cap);
      const SoftcappedScore got = capped<false>(qk, 0.125f, cap, sign);
      const SoftcappedScore forward =
          softcapped<false, false>(qk, c.cap_log2, c.cap_power, ApproximateMath{sign});
      ASSERT_NEAR(got.score / (cap * kLog2e), std::tanh(x), 6e-7) << cap << " " << x;
      ASSERT_NEAR(forward.score / (cap * kLog2e), std::tanh(x), 6e-7) << cap << " " << x;
      ASSERT_NEAR(got.slope * std::cosh(x) * std::cosh(x), 1, 2e-5) << cap << " " << x;
    }
  }
}

TEST(Softcap, EndsOfTheRange) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float cap : {1e-45f, 1e-40f, 2.9e-39f, 1.f, 1e30f, 3e38f}) {
    for (const float sign : {-1.f, 1.f}) {
      EXPECT_EQ(capped(0.f, 0.125f, cap, sign).score, 0.f) << cap;
      EXPECT_NEAR(capped(0.f, 0.125f, cap, sign).slope, 1.f, 1e-6f) << cap;
      EXPECT_TRUE(std::isnan(capped(std::nanf(""), 0.125f, cap, sign).score)) << cap;
      const double most = std::min(cap * kLog2e, 1e38);
      const double step = std::max(0.01 * most, 1.5e-45);  // of the smallest caps: one float
      if (cap < 1e30f) {
        EXPECT_NEAR(capped(kInf, 0.125f, cap, sign).score, most, step) << cap;
        EXPECT_NEAR(capped(-kInf, 0.125f, cap, sign).score, -most, step) << cap;
      }
    }
  }
}

/// The exponent of the weight of a row's only key, on the way that a score takes: the forward
/// pass's maximum and lse, then the backward pass's product less what is subtracted.
double exponent_of_only_key(float qk, float scale_log2, float lse_error) {
  constexpr float kLn2 = 0.69314718055994530942f;
  const float max = qk * scale_log2;
  const float lse = std::nextafter(max * kLn2, lse_error);
  return static_cast<double>(qk) * scale_log2 - weight_reference(lse);
}

TEST(WeightReference, TheOnlyKeyGetsAllOfARowFarFromZero) {
  std::mt19937 random(2);
  std::uniform_real_distribution<double> exponent(23, 60), scale(0.05, 1.5);
  int below = 0;
  for (int i = 0; i < 200000; ++i) {
    const auto scale_log2 = static_cast<float>(scale(random));
    const auto qk = static_cast<float>(std::exp2(exponent(random)) / scale_log2 * (i % 2 ? 1 : -1));
    // Also where lse came out one float higher.
    for (const float towards : {qk, std::numeric_limits<float>::infinity()}) {
      below += exponent_of_only_key(qk, scale_log2, towards) < kWeightShift;
    }
  }
  EXPECT_EQ(below, 0);
}

TEST(WeightReference, NothingIsShiftedWhereAFloatIsFine) {
  for (const float lse : {-100.f, 0.f, 7.f, 1e5f, 2e6f}) {
    EXPECT_FLOAT_EQ(weight_reference(lse), lse * static_cast<float>(kLog2e) - kWeightShift) << lse;
  }
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(weight_reference(kInf), kInf);
  EXPECT_EQ(weight_reference(-kInf), -kInf);
  EXPECT_TRUE(std::isnan(weight_reference(std::nanf(""))));
}

}  // namespace
}  // namespace strobe::cuda
