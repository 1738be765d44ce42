// The kernels' own arithmetic: exp2 over its whole range, and conversion to and from the 16-bit
// types, for every instruction set of this machine.
#include "numeric.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/dispatch.h"

namespace {

using strobe::cpu::InstructionSet;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float Nan() { return std::numeric_limits<float>::quiet_NaN(); }

class Numeric : public testing::TestWithParam<const InstructionSet*> {};

std::vector<float> Exp2(const InstructionSet& isa, const std::vector<float>& x) {
  std::vector<float> y(x.size());
  isa.exp2(x.data(), y.data(), static_cast<int64_t>(x.size()));
  return y;
}

TEST_P(Numeric, Exp2IsExactToAnUlpAndABit) {
  // From where results are normal numbers to where they end, 2^-20 apart: denser than any
  // polynomial's wiggles.
  std::vector<float> x;
  oracle::Rng rng(7);
  for (int whole = -125; whole < 127; ++whole) {
    for (int i = 0; i < 8192; ++i) x.push_back(static_cast<float>(whole + rng.Uniform()));
    x.push_back(static_cast<float>(whole));
    x.push_back(static_cast<float>(whole) + 0.5f);
  }
  const std::vector<float> y = Exp2(*GetParam(), x);
  double worst = 0;
  float worst_at = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double exact = std::exp2(static_cast<double>(x[i]));
    const double ulp = std::exp2(std::floor(std::log2(exact)) - 23);
    const double error = std::abs(y[i] - exact) / ulp;
    ASSERT_FALSE(std::isnan(y[i])) << "exp2(" << x[i] << ")";
    if (error > worst) {
      worst = error;
      worst_at = x[i];
    }
  }
  // AMX multiplies bfloat16 weights, and its exp2 has one coefficient less.
  EXPECT_LE(worst, std::string(GetParam()->name) == "amx" ? 2.25 : 1.25) << "at " << worst_at;
  RecordProperty("worst_ulp", std::to_string(worst));
}

TEST_P(Numeric, Exp2AtTheEnds) {
  const std::vector<float> y = Exp2(*GetParam(), {0, -kInfinity, -200, -1e30f, Nan(), 1, -1, 127});
  EXPECT_EQ(y[0], 1);
  EXPECT_EQ(y[1], 0);
  EXPECT_EQ(y[2], 0);
  EXPECT_EQ(y[3], 0);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_EQ(y[5], 2);
  EXPECT_EQ(y[6], 0.5f);
  EXPECT_EQ(y[7], 0x1p127f);
}

TEST_P(Numeric, SmallResultsAreTinyOrZero) {
  // Below 2^-126 a kernel may flush to zero; it may not give anything larger than the truth, nor
  // negative.
  std::vector<float> x;
  for (float at = -150; at < -126; at += 0.01f) x.push_back(at);
  const std::vector<float> y = Exp2(*GetParam(), x);
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_GE(y[i], 0) << x[i];
    EXPECT_LE(y[i], std::exp2(static_cast<double>(x[i])) * (1 + 1e-6) + 0x1p-149) << x[i];
  }
}

struct Type {
  strobe_dtype strobe;
  oracle::DType oracle;
};
std::vector<Type> Types(const InstructionSet& isa) {
  if (std::string(isa.name) == "amx") return {{STROBE_BFLOAT16, oracle::DType::kBFloat16}};
  return {{STROBE_BFLOAT16, oracle::DType::kBFloat16}, {STROBE_FLOAT16, oracle::DType::kFloat16}};
}

TEST_P(Numeric, WideningIsExactForEveryBitPattern) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (const Type& type : Types(*GetParam())) {
    std::vector<float> wide(all.size());
    GetParam()->to_float(type.strobe, all.data(), wide.data(), static_cast<int64_t>(all.size()));
    for (size_t i = 0; i < all.size(); ++i) {
      const float expected = oracle::Load(type.oracle, all.data(), static_cast<int64_t>(i));
      if (std::isnan(expected)) {
        EXPECT_TRUE(std::isnan(wide[i])) << i;
      } else {
        EXPECT_EQ(wide[i], expected) << i;
        EXPECT_EQ(std::signbit(wide[i]), std::signbit(expected)) << i;
      }
    }
  }
}

TEST_P(Numeric, NarrowingRoundsToNearestEven) {
  std::vector<float> x = {0,          -0.0f,     1,          65504,    65519.99f, 65520,
                          -65520,     1e30f,     3.4e38f,    0x1p-24f, 0x1p-25f,  0x1p-14f,
                          0x1.8p-25f, kInfinity, -kInfinity, 0x1p-149f};
  oracle::Rng rng(11);
  for (int i = 0; i < 40000; ++i) {
    // Random values and, as they are rare among those, exact ties of either type.
    const float value =
        static_cast<float>(std::ldexp(rng.Uniform(-2, 2), static_cast<int>(rng.Integer(-30, 16))));
    x.push_back(value);
    for (const oracle::DType type : {oracle::DType::kBFloat16, oracle::DType::kFloat16}) {
      const float near = oracle::Round(type, value);
      x.push_back(near + oracle::Spacing(type, near) / 2);
    }
  }
  for (const Type& type : Types(*GetParam())) {
    std::vector<uint16_t> narrow(x.size());
    GetParam()->from_float(type.strobe, x.data(), narrow.data(), static_cast<int64_t>(x.size()));
    for (size_t i = 0; i < x.size(); ++i) {
      uint16_t expected;
      oracle::Store(type.oracle, &expected, 0, x[i]);
      EXPECT_EQ(narrow[i], expected) << x[i];
    }
    const float nan = Nan();
    uint16_t bits;
    GetParam()->from_float(type.strobe, &nan, &bits, 1);
    EXPECT_TRUE(std::isnan(oracle::Load(type.oracle, &bits, 0)));
  }
}

INSTANTIATE_TEST_SUITE_P(AllInstructionSets, Numeric,
                         testing::ValuesIn(strobe::cpu::instruction_sets().begin(),
                                           strobe::cpu::instruction_sets().end()),
                         [](const auto& param) { return std::string(param.param->name); });

}  // namespace
