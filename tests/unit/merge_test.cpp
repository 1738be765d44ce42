// strobe_merge against float64, strobe_add bit for bit, and their refusals.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "numeric.h"
#include "oracle.h"
#include "strobe/strobe.h"

namespace {

using oracle::Rng;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Merge {
  int64_t parts, batch, rows, heads, dim;
  std::vector<float> outs, lses, lse;
  std::vector<char> out;
  oracle::DType dtype;
  strobe_merge_args a{};

  Merge(Rng& rng, int64_t n, int64_t b, int64_t i, int64_t h, int64_t d, oracle::DType type)
      : parts(n), batch(b), rows(i), heads(h), dim(d), dtype(type) {
    const int64_t count = batch * rows * heads;
    for (int64_t e = 0; e < parts * count * dim; ++e) {
      outs.push_back(static_cast<float>(rng.Normal()));
    }
    for (int64_t e = 0; e < parts * count; ++e) {
      lses.push_back(static_cast<float>(rng.Uniform(-40, 40)));
    }
    out.assign(static_cast<size_t>(count * dim * oracle::ElementSize(type)), '\xA5');
    lse.assign(static_cast<size_t>(count), 12345);
    a.struct_size = sizeof a;
    a.out_dtype = static_cast<int32_t>(type);  // the enumerations agree
    a.parts = parts;
    a.batch = batch;
    a.seqlen_q = rows;
    a.heads = heads;
    a.head_dim_v = dim;
    a.outs = outs.data();
    a.lses = lses.data();
    a.out = out.data();
    a.lse = lse.data();
  }
  size_t Out(int64_t n, int64_t b, int64_t i, int64_t h) const {
    return static_cast<size_t>((((n * batch + b) * rows + i) * heads + h) * dim);
  }
  size_t Lse(int64_t n, int64_t b, int64_t i, int64_t h) const {
    return static_cast<size_t>(((n * batch + b) * heads + h) * rows + i);
  }
  bool HasNoKeys(int64_t n, int64_t b, int64_t i, int64_t h) const {
    return std::isinf(lses[Lse(n, b, i, h)]);
  }
  // Against the oracle.
  void Check() const {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t h = 0; h < heads; ++h) CheckRow(b, i, h);
      }
    }
  }
  void CheckRow(int64_t b, int64_t i, int64_t h) const {
    std::vector<oracle::Tensor> all_outs, all_lses;
    for (int64_t n = 0; n < parts; ++n) {
      const auto first = outs.begin() + static_cast<std::ptrdiff_t>(Out(n, b, i, h));
      all_outs.emplace_back(1, 1, dim);
      all_outs.back().data.assign(first, first + dim);
      all_lses.emplace_back(1, 1, 1, lses[Lse(n, b, i, h)]);
    }
    oracle::ForwardResult wanted{oracle::Tensor(1, 1, dim), oracle::Tensor(1, 1, 1, -HUGE_VAL), {}};
    if (parts > 0) wanted = oracle::Merge(all_outs, all_lses);
    const double lse_wanted = wanted.lse.data[0];
    const double got_lse = lse[Lse(0, b, i, h)];
    if (std::isnan(lse_wanted)) {
      EXPECT_TRUE(std::isnan(got_lse));
    } else if (std::isinf(lse_wanted)) {
      EXPECT_EQ(got_lse, lse_wanted);
    } else {
      EXPECT_NEAR(got_lse, lse_wanted, 1e-5 + 1e-6 * std::fabs(lse_wanted));
    }
    for (int64_t d = 0; d < dim; ++d) {
      const double x = wanted.out.data[static_cast<size_t>(d)];
      const double got = oracle::Load(dtype, out.data(), static_cast<int64_t>(Out(0, b, i, h)) + d);
      const double room = 2e-5 + oracle::Spacing(dtype, static_cast<float>(x));
      if (std::isnan(x)) {
        EXPECT_TRUE(std::isnan(got));
      } else {
        EXPECT_LE(std::fabs(got - x), room) << b << " " << i << " " << h << " " << d;
      }
    }
  }
};

TEST(Merge, AgreesWithTheDefinition) {
  Rng rng(1);
  for (int n = 0; n < 200; ++n) {
    Merge m(rng, rng.Integer(0, 7), rng.Integer(0, 3), rng.Integer(0, 9), rng.Integer(0, 5),
            rng.Integer(1, rng.Chance(0.5) ? 512 : 40),
            static_cast<oracle::DType>(rng.Integer(0, 2)));
    for (size_t e = 0; e < m.lses.size(); ++e) {
      if (!rng.Chance(0.3)) continue;
      // A part without keys, by either convention: whatever its outs hold.
      m.lses[e] = rng.Chance(0.5) ? -kInfinity : kInfinity;
    }
    for (int64_t part = 0; part < m.parts; ++part) {
      for (int64_t b = 0; b < m.batch; ++b) {
        for (int64_t i = 0; i < m.rows; ++i) {
          for (int64_t h = 0; h < m.heads; ++h) {
            if (m.HasNoKeys(part, b, i, h)) m.outs[m.Out(part, b, i, h)] = kNan;
          }
        }
      }
    }
    m.a.threads = static_cast<int32_t>(rng.Integer(0, 3));
    ASSERT_EQ(strobe_merge(&m.a), STROBE_OK) << strobe_last_error();
    m.Check();
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Merge, ManyRowsOnSeveralThreads) {
  Rng rng(2);
  Merge m(rng, 5, 3, 300, 7, 65, oracle::DType::kBFloat16);
  m.a.threads = 4;
  ASSERT_EQ(strobe_merge(&m.a), STROBE_OK) << strobe_last_error();
  m.Check();
}

TEST(Merge, NanArrivesAndLseMayBeLeftOut) {
  Rng rng(3);
  Merge m(rng, 2, 1, 3, 1, 4, oracle::DType::kFloat32);
  m.lses[m.Lse(0, 0, 0, 0)] = kNan;
  m.outs[m.Out(1, 0, 1, 0) + 2] = kNan;
  ASSERT_EQ(strobe_merge(&m.a), STROBE_OK);
  EXPECT_TRUE(std::isnan(m.lse[m.Lse(0, 0, 0, 0)]));
  for (int64_t d = 0; d < 4; ++d) {
    EXPECT_TRUE(std::isnan(oracle::Load(m.dtype, m.out.data(), d)));
    EXPECT_EQ(std::isnan(oracle::Load(m.dtype, m.out.data(), 4 + d)), d == 2);
  }
  m.CheckRow(0, 2, 0);
  const std::vector<char> before = m.out;
  m.a.lse = nullptr;
  ASSERT_EQ(strobe_merge(&m.a), STROBE_OK);
  EXPECT_EQ(m.out, before);
}

// Rows without keys by the two conventions that libraries have for their lse.
TEST(Merge, AnInfiniteLseIsThatOfARowWithoutKeys) {
  for (const float empty : {-kInfinity, kInfinity}) {
    Rng rng(3);
    Merge m(rng, 2, 1, 2, 1, 4, oracle::DType::kFloat32);
    for (size_t d = 0; d < 4; ++d) m.outs[m.Out(1, 0, 0, 0) + d] = d == 0 ? kNan : 0;
    m.lses[m.Lse(1, 0, 0, 0)] = m.lses[m.Lse(0, 0, 1, 0)] = m.lses[m.Lse(1, 0, 1, 0)] = empty;
    ASSERT_EQ(strobe_merge(&m.a), STROBE_OK);
    EXPECT_EQ(m.lse[0], m.lses[0]);
    EXPECT_EQ(m.lse[1], -kInfinity);
    for (size_t d = 0; d < 4; ++d) {
      EXPECT_EQ(oracle::Load(m.dtype, m.out.data(), static_cast<int64_t>(d)),
                m.outs[m.Out(0, 0, 0, 0) + d]);
      EXPECT_EQ(oracle::Load(m.dtype, m.out.data(), static_cast<int64_t>(4 + d)), 0);
    }
  }
}

TEST(Merge, WhatHasNoWeightDoesNotCount) {
  Rng rng(3);
  Merge m(rng, 3, 1, 1, 1, 3, oracle::DType::kFloat32);
  m.lses = {50, -200, 49};
  m.outs = {1, 2, 3, kNan, kInfinity, -kInfinity, 3, 2, 1};
  ASSERT_EQ(strobe_merge(&m.a), STROBE_OK);
  m.outs[3] = m.outs[4] = m.outs[5] = 0;
  m.CheckRow(0, 0, 0);
}

// The weights' sum may pass 1: the average of equal values is that value nevertheless, and no other
// one leaves the values between which it lies.
TEST(Merge, NoAverageLeavesItsValues) {
  constexpr float kLargest[] = {std::numeric_limits<float>::max(), 0x1.FEp127f, 65504};
  for (int64_t parts = 1; parts < 400; ++parts) {
    for (const oracle::DType dtype :
         {oracle::DType::kFloat32, oracle::DType::kBFloat16, oracle::DType::kFloat16}) {
      Rng rng(static_cast<uint64_t>(parts));
      Merge m(rng, parts, 1, 2, 1, 3, dtype);
      const float largest = kLargest[static_cast<int>(dtype)];
      for (int64_t n = 0; n < parts; ++n) {
        for (const int64_t i : {0, 1}) {
          float* const row = &m.outs[m.Out(n, 0, i, 0)];
          row[0] = largest;
          row[1] = -largest;
          row[2] = rng.Chance(0.5) ? largest : largest / 2;
        }
        m.lses[m.Lse(n, 0, 0, 0)] = 0;
        m.lses[m.Lse(n, 0, 1, 0)] = static_cast<float>(rng.Uniform(-3, 3));
      }
      ASSERT_EQ(strobe_merge(&m.a), STROBE_OK);
      for (const int64_t row : {0, 3}) {
        const auto got = [&](int64_t d) { return oracle::Load(dtype, m.out.data(), row + d); };
        EXPECT_EQ(got(0), largest) << parts << " parts";
        EXPECT_EQ(got(1), -largest) << parts << " parts";
        EXPECT_LE(got(2), largest) << parts << " parts";
        EXPECT_GE(got(2), largest / 2) << parts << " parts";
      }
    }
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(Merge, WithoutRowsThereIsNothingToDo) {
  for (const int spoiled : {0, 1, 2}) {
    Rng rng(5);
    Merge m(rng, 3, spoiled != 0, spoiled != 1, spoiled != 2, 4, oracle::DType::kFloat32);
    m.a.outs_strides = {0, 4, 4, 1};
    m.a.lses_strides = {0, 1, 1, 1};
    m.a.out_strides = m.a.outs_strides;
    EXPECT_EQ(strobe_merge(&m.a), STROBE_OK) << strobe_last_error();
    m.a.outs = m.a.lses = nullptr;
    m.a.out = nullptr;
    EXPECT_EQ(strobe_merge(&m.a), STROBE_OK) << strobe_last_error();
  }
}

// Parts side by side in each row, and lses that lie as outs do.
TEST(Merge, Strides) {
  Rng rng(4);
  Merge m(rng, 3, 2, 5, 4, 8, oracle::DType::kFloat32);
  std::vector<float> outs(m.outs.size()), lses(m.lses.size());
  for (int64_t n = 0; n < 3; ++n) {
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < 5; ++i) {
        for (int64_t h = 0; h < 4; ++h) {
          const auto row = static_cast<size_t>(((b * 5 + i) * 4 + h) * 3 + n);
          lses[row] = m.lses[m.Lse(n, b, i, h)];
          for (size_t d = 0; d < 8; ++d) outs[row * 8 + d] = m.outs[m.Out(n, b, i, h) + d];
        }
      }
    }
  }
  m.a.outs = outs.data();
  m.a.lses = lses.data();
  m.a.outs_strides = {5 * 4 * 24, 4 * 24, 24, 1};
  m.a.outs_part = 8;
  m.a.lses_strides = {5 * 4 * 3, 4 * 3, 3, 0};
  m.a.lses_part = 1;
  ASSERT_EQ(strobe_merge(&m.a), STROBE_OK) << strobe_last_error();
  m.Check();
}

// The whole may take the place of a part: the same bits as elsewhere, and the other parts stay.
TEST(Merge, InPlaceOfAPart) {
  Rng rng(8);
  for (int n = 0; n < 60; ++n) {
    Merge m(rng, rng.Integer(1, 4), rng.Integer(0, 2), rng.Integer(0, 9), rng.Integer(1, 4),
            rng.Integer(1, 80), oracle::DType::kFloat32);
    const int64_t part = rng.Integer(0, m.parts - 1), lse_part = rng.Integer(0, m.parts - 1);
    ASSERT_EQ(strobe_merge(&m.a), STROBE_OK) << strobe_last_error();
    std::vector<float> outs = m.outs, lses = m.lses;
    const auto at = static_cast<std::ptrdiff_t>(m.Out(part, 0, 0, 0));
    const auto lse_at = static_cast<std::ptrdiff_t>(m.Lse(lse_part, 0, 0, 0));
    const auto* const whole = reinterpret_cast<const float*>(m.out.data());
    std::copy(whole, whole + m.out.size() / sizeof(float), outs.begin() + at);
    std::copy(m.lse.begin(), m.lse.end(), lses.begin() + lse_at);
    m.a.out = m.outs.data() + at;
    m.a.lse = m.lses.data() + lse_at;
    m.a.threads = static_cast<int32_t>(rng.Integer(0, 3));
    ASSERT_EQ(strobe_merge(&m.a), STROBE_OK) << strobe_last_error();
    EXPECT_EQ(m.outs, outs);
    EXPECT_EQ(m.lses, lses);
  }
}

TEST(Merge, BadArgumentsAreRefusedByName) {
  using A = strobe_merge_args;
  const struct {
    std::function<void(A&)> spoil;
    const char* text;
  } all[] = {
      {[](A& a) { a.struct_size = 8; }, "args.struct_size = 8, expected"},
      {[](A& a) { a.device = 2; }, "device = 2, expected 0 to 1"},
      {[](A& a) { a.device_index = 1; }, "device_index = 1, expected 0 to 0"},
      {[](A& a) { a.out_dtype = 3; }, "out_dtype = 3, expected 0 to 2"},
      {[](A& a) { a.threads = -1; }, "threads = -1, expected 0 to"},
      {[](A& a) { a.parts = -1; }, "parts = -1, expected 0 to"},
      {[](A& a) { a.batch = -1; }, "batch = -1, expected 0 to"},
      {[](A& a) { a.seqlen_q = -1; }, "seqlen_q = -1, expected 0 to"},
      {[](A& a) { a.heads = -1; }, "heads = -1, expected 0 to"},
      {[](A& a) { a.head_dim_v = 513; }, "head_dim_v = 513, expected 1 to 512"},
      {[](A& a) { a.outs = nullptr; }, "outs = NULL, expected a pointer"},
      {[](A& a) { a.lses = nullptr; }, "lses = NULL, expected a pointer"},
      {[](A& a) { a.out = nullptr; }, "out = NULL, expected a pointer"},
      {[](A& a) {
         a.outs_strides = {64, 16, 8, 1};
       },
       "outs_part = 0 elements with strides given"},
      {[](A& a) {
         a.out_strides = {64, 4, 8, 1};
       },
       "out_strides."},
      {[](A& a) { a.outs_strides.dim = 2; }, "outs_strides.dim = 2 elements, expected 1"},
      {[](A& a) { a.batch = a.seqlen_q = a.heads = INT32_MAX; }, "outs_strides: "},
      {[](A& a) { a.parts = INT32_MAX, a.seqlen_q = INT32_MAX; }, "parts = 2147483647 of "},
      {[](A& a) { a.out = const_cast<float*>(a.outs) + 8; },
       "out shares memory with outs, expected memory of its own"},
      {[](A& a) { a.out = const_cast<float*>(a.outs), a.out_dtype = STROBE_BFLOAT16; },
       "out shares memory with outs"},
      {[](A& a) {
         a.out = const_cast<float*>(a.outs), a.out_strides = {64, 8, 32, 1};
       },
       "out shares memory with outs"},
      {[](A& a) {
         a.out = const_cast<float*>(a.outs), a.outs_strides = {64, 16, 8, 1}, a.outs_part = 32;
       },
       "out shares memory with outs"},
      {[](A& a) { a.out = const_cast<float*>(a.outs) + 127; }, "out shares memory with outs"},
      {[](A& a) { a.lse = const_cast<float*>(a.lses) + 4; }, "lse shares memory with lses"},
      {[](A& a) { a.lse = const_cast<float*>(a.outs) + 3; }, "lse shares memory with outs"},
      {[](A& a) { a.out = a.lse; }, "out shares memory with lse"},
  };
  for (const auto& bad : all) {
    Rng rng(5);
    Merge m(rng, 2, 1, 4, 2, 8, oracle::DType::kFloat32);
    const std::vector<char> before = m.out;
    bad.spoil(m.a);
    EXPECT_EQ(strobe_merge(&m.a), STROBE_INVALID_ARGUMENT) << bad.text;
    EXPECT_EQ(std::string(strobe_last_error()).find(bad.text), 0U)
        << "got: " << strobe_last_error() << "\nwanted: " << bad.text;
    EXPECT_EQ(m.out, before);
  }
  EXPECT_EQ(strobe_merge(nullptr), STROBE_INVALID_ARGUMENT);
}

// [batch, seqlen, heads, head_dim] of float32, with room between heads, and what it is added to.
struct Addition {
  std::vector<float> x;
  std::vector<char> out;
  strobe_add_args a{};

  Addition(Rng& rng, oracle::DType dtype, bool accumulate) {
    a.struct_size = sizeof a;
    a.out_dtype = static_cast<int32_t>(dtype);
    a.accumulate = accumulate;
    a.batch = rng.Integer(1, 3);
    a.seqlen = rng.Integer(1, 90);
    a.heads = rng.Integer(1, 4);
    a.head_dim = rng.Integer(1, rng.Chance(0.3) ? 512 : 70);
    const auto strides = [&] {
      if (rng.Chance(0.3)) return strobe_strides{};
      const int64_t head = a.head_dim + rng.Integer(0, 9);
      const int64_t rows = a.seqlen + rng.Integer(0, 2);
      if (rng.Chance(0.5)) return strobe_strides{rows * a.heads * head, a.heads * head, head, 1};
      return strobe_strides{rows * a.heads * head, head, rows * head, 1};
    };
    a.x_strides = strides();
    a.out_strides = strides();
    const auto room = static_cast<size_t>(a.batch * (a.seqlen + 2) * a.heads * (a.head_dim + 9));
    for (size_t i = 0; i < room; ++i) x.push_back(static_cast<float>(rng.Normal()));
    out.assign(room * static_cast<size_t>(oracle::ElementSize(dtype)), '\x22');
    a.x = x.data();
    a.out = out.data();
    a.threads = static_cast<int32_t>(rng.Integer(0, 3));
  }
  int64_t At(const strobe_strides& given, int64_t b, int64_t i, int64_t h) const {
    strobe_strides s = given;
    if (s.dim == 0) s = {a.seqlen * a.heads * a.head_dim, a.heads * a.head_dim, a.head_dim, 1};
    return b * s.batch + i * s.seqlen + h * s.head;
  }
};

TEST(Add, SumsAreFloat32AndRoundedOnce) {
  Rng rng(7);
  for (int n = 0; n < 300; ++n) {
    const auto dtype = static_cast<oracle::DType>(n % 3);
    Addition add(rng, dtype, n % 2 == 0);
    const std::vector<char> before = add.out;
    ASSERT_EQ(strobe_add(&add.a), STROBE_OK) << strobe_last_error();
    std::vector<char> wanted = before;
    for (int64_t b = 0; b < add.a.batch; ++b) {
      for (int64_t i = 0; i < add.a.seqlen; ++i) {
        for (int64_t h = 0; h < add.a.heads; ++h) {
          for (int64_t d = 0; d < add.a.head_dim; ++d) {
            const int64_t to = add.At(add.a.out_strides, b, i, h) + d;
            float sum = add.x[static_cast<size_t>(add.At(add.a.x_strides, b, i, h) + d)];
            if (add.a.accumulate) sum += oracle::Load(dtype, before.data(), to);
            oracle::Store(dtype, wanted.data(), to, sum);
          }
        }
      }
    }
    ASSERT_EQ(add.out, wanted) << n;  // and no byte beside
  }
}

TEST(Add, BadArgumentsAreRefusedByName) {
  using A = strobe_add_args;
  const struct {
    std::function<void(A&)> spoil;
    const char* text;
  } all[] = {
      {[](A& a) { a.struct_size = 8; }, "args.struct_size = 8, expected"},
      {[](A& a) { a.device = 2; }, "device = 2, expected 0 to 1"},
      {[](A& a) { a.out_dtype = 3; }, "out_dtype = 3, expected 0 to 2"},
      {[](A& a) { a.accumulate = 2; }, "accumulate = 2, expected 0 to 1"},
      {[](A& a) { a.batch = -1; }, "batch = -1, expected 0 to"},
      {[](A& a) { a.seqlen = -1; }, "seqlen = -1, expected 0 to"},
      {[](A& a) { a.heads = -1; }, "heads = -1, expected 0 to"},
      {[](A& a) { a.head_dim = 513; }, "head_dim = 513, expected 1 to 512"},
      {[](A& a) { a.x = nullptr; }, "x = NULL, expected a pointer"},
      {[](A& a) { a.out = nullptr; }, "out = NULL, expected a pointer"},
      {[](A& a) {
         a.x_strides = {1, 1, 1, 2};
       },
       "x_strides.dim = 2 elements, expected 1"},
      {[](A& a) { a.out = const_cast<float*>(a.x); }, "out shares memory with x"},
  };
  for (const auto& bad : all) {
    Rng rng(8);
    Addition add(rng, oracle::DType::kFloat32, true);
    const std::vector<char> before = add.out;
    bad.spoil(add.a);
    EXPECT_EQ(strobe_add(&add.a), STROBE_INVALID_ARGUMENT) << bad.text;
    EXPECT_EQ(std::string(strobe_last_error()).find(bad.text), 0U)
        << "got: " << strobe_last_error() << "\nwanted: " << bad.text;
    EXPECT_EQ(add.out, before);
  }
  EXPECT_EQ(strobe_add(nullptr), STROBE_INVALID_ARGUMENT);
}

}  // namespace
