// Gradients in float32 and gradients that are added to what is there, against those that are
// written in the inputs' dtype: the sums are the same, and are rounded once or not at all.
#include <cmath>
#include <string>

#include "fixture.h"
#include "gtest/gtest.h"
#include "numeric.h"
#include "problem_gen.h"

namespace strobe_test {
namespace {

struct Gradients {
  oracle::Tensor dq, dk, dv;
};

Gradients Computed(const Case& c, Fixture::Gradients* before = nullptr) {
  Fixture f(c);
  EXPECT_EQ(f.Forward(), "");
  EXPECT_EQ(f.Backward(), "");
  if (before) *before = f.Before();
  return {f.dq.Read(), f.dk.Read(), f.dv.Read()};
}

/// Calls visit(name, a, b) for each gradient.
template <typename A, typename B, typename Visit>
void ForEach(const A& a, const B& b, const Visit& visit) {
  visit("dq", a.dq, b.dq);
  visit("dk", a.dk, b.dk);
  visit("dv", a.dv, b.dv);
}

/// What one rounding to the dtype may move a number by.
double RoundingError(oracle::DType dtype, double x) {
  const double unit = dtype == oracle::DType::kFloat32    ? 0x1p-24
                      : dtype == oracle::DType::kBFloat16 ? 0x1p-8
                                                          : 0x1p-11;
  return unit * std::fabs(x) + (dtype == oracle::DType::kFloat16 ? 0x1p-25 : 0x1p-130);
}

/// visit(case) for problems whose gradients repeat and hold no infinity.
template <typename Visit>
void ForEachCase(const Visit& visit) {
  int cases = 0;
  for (uint64_t seed = 1; cases < 40; ++seed) {
    Case c = GenerateCase(seed).WithPlainGradients();
    if (c.special != Special::kNone || c.rows_q() == 0 || c.rows_k() == 0) continue;
    ++cases;
    c.deterministic = true;
    SCOPED_TRACE(ToString(c));
    visit(c);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Gradients, InFloat32TheyAreNotRounded) {
  int64_t unrounded = 0;
  ForEachCase([&](Case c) {
    if (c.dtype == oracle::DType::kFloat32) c.dtype = oracle::DType::kBFloat16;
    const Gradients narrow = Computed(c);
    c.grad_float32 = true;
    const Gradients wide = Computed(c);
    ForEach(narrow, wide, [&](const char* name, const auto& rounded, const auto& exact) {
      for (size_t i = 0; i < exact.data.size(); ++i) {
        const auto x = static_cast<float>(exact.data[i]);
        // AMX flushes what bf16 has only as denormal numbers.
        if (std::fabs(x) < 0x1p-126F) continue;
        ASSERT_EQ(oracle::Round(c.dtype, x), rounded.data[i]) << name << "[" << i << "]";
        unrounded += oracle::Round(c.dtype, x) != x;
      }
    });
  });
  EXPECT_GT(unrounded, 10'000);
}

TEST(Gradients, WhatIsAddedIsRoundedOnce) {
  ForEachCase([&](Case c) {
    const bool narrow = c.dtype != oracle::DType::kFloat32;
    c.grad_float32 = narrow;
    const Gradients added = Computed(c);
    c.accumulate = true;
    for (const bool wide : {false, true}) {
      if (wide && !narrow) continue;
      c.grad_float32 = wide;
      Fixture::Gradients before;
      const Gradients sums = Computed(c, &before);
      const auto check = [&](const char* name, const auto& old, const auto& more,
                             const auto& found) {
        for (size_t i = 0; i < found.data.size(); ++i) {
          const double sum = old.data[i] + more.data[i];
          if (std::fabs(sum) > 1e4) continue;  // float16 may overflow
          // `more` is itself rounded to float32.
          const double allowed = RoundingError(c.grad_dtype(), sum) +
                                 0x1p-22 * (std::fabs(old.data[i]) + std::fabs(more.data[i]));
          ASSERT_NEAR(found.data[i], sum, allowed) << name << "[" << i << "], float32 " << wide;
        }
      };
      check("dq", before.dq, added.dq, sums.dq);
      check("dk", before.dk, added.dk, sums.dk);
      check("dv", before.dv, added.dv, sums.dv);
    }
  });
}

// A query that sees no key, and rows that are not in use, have the gradient 0: what is added up
// stays, whatever it is.
TEST(Gradients, RowsWithoutGradientsStay) {
  Case c;
  c.seqlens_q = {70, 70};
  c.seqlens_k = {50, 50};
  c.heads = c.heads_kv = 2;
  c.head_dim = c.head_dim_v = 32;
  c.dtype = oracle::DType::kBFloat16;
  c.causal = c.accumulate = c.has_seqused_q = c.has_seqused_k = true;
  c.arrays.seqused_q = {70, 33};
  c.arrays.seqused_k = {50, 0};
  for (const bool wide : {false, true}) {
    c.grad_float32 = wide;
    Fixture::Gradients before;
    const Gradients found = Computed(c, &before);
    const auto rows_stay = [](const oracle::Tensor& old, const oracle::Tensor& now, int64_t begin,
                              int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t e = 0; e < now.heads * now.dim; ++e) {
          ASSERT_EQ(old.at(row, 0)[e], now.at(row, 0)[e]) << "row " << row;
        }
      }
    };
    rows_stay(before.dq, found.dq, 0, 20);  // causal: the last query is at the last key
    rows_stay(before.dq, found.dq, 70, 140);
    rows_stay(before.dk, found.dk, 50, 100);
    rows_stay(before.dv, found.dv, 50, 100);
    EXPECT_NE(before.dq.at(69, 0)[0], found.dq.at(69, 0)[0]);
  }
}

}  // namespace
}  // namespace strobe_test
