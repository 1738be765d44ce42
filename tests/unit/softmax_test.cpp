// The online softmax where it is hardest, through the public API: huge and equal scores,
// infinities, NaN, and masked blocks full of them. The oracle says what has to come out, coordinate
// by coordinate.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "environment.h"
#include "gtest/gtest.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::DType;

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");
constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

struct Shape {
  int64_t q, k, d;
};
// Within one tile, across a few, and ragged.
constexpr Shape kShapes[] = {{1, 5, 1}, {7, 64, 8}, {70, 333, 32}, {140, 150, 24}};

Case MakeCase(DType dtype, const Shape& shape, uint64_t seed = 1) {
  Case c;
  c.seed = seed;
  c.dtype = dtype;
  c.heads = c.heads_kv = 2;
  c.head_dim = c.head_dim_v = shape.d;
  c.seqlens_q = {shape.q};
  c.seqlens_k = {shape.k};
  c.scale = 1;
  c.has_dlse = true;
  c.threads = 2;
  return c;
}

// Sets each element of a tensor from its row and column.
void Set(const Strided& t, const std::function<double(int64_t row, int64_t d)>& value) {
  t.ForEach([&](int64_t row, int64_t, int64_t d, int64_t e) { t.Set(e, value(row, d)); });
}

void ExpectRight(const Case& c, const std::function<void(Fixture&)>& edit) {
  EXPECT_EQ(RunCase(c, edit), "") << ToString(c);
}

void ForAll(const std::function<void(const Case&)>& test) {
  for (const DType dtype : kTypes) {
    for (const Shape& shape : kShapes) {
      for (const bool causal : {false, true}) {
        Case c = MakeCase(dtype, shape);
        c.causal = causal;
        test(c);
        if (::testing::Test::HasFailure()) return;  // one reproducer is enough
      }
    }
  }
}

// Score of query row i and key row j is s(j): q is (1, 0, ...), k is (s(j), anything).
void SetScores(Fixture& f, const std::function<double(int64_t j)>& s) {
  Set(f.q, [](int64_t, int64_t d) { return d == 0 ? 1 : 0; });
  f.k.ForEach([&](int64_t row, int64_t, int64_t d, int64_t e) {
    if (d == 0) f.k.Set(e, s(row));
  });
}

TEST(Softmax, EqualScoresGiveTheMean) {
  ForAll([](const Case& c) {
    for (const double score : {0.0, 3.0, -3.0, 10000.0, -10000.0}) {
      ExpectRight(c, [&](Fixture& f) { SetScores(f, [&](int64_t) { return score; }); });
    }
  });
}

TEST(Softmax, ScoresOfTenThousandEitherWay) {
  ForAll([](const Case& c) {
    ExpectRight(c, [](Fixture& f) { SetScores(f, [](int64_t j) { return j % 2 ? 1e4 : -1e4; }); });
    ExpectRight(c,
                [](Fixture& f) { SetScores(f, [](int64_t j) { return j % 3 ? -1e4 : -9984; }); });
  });
}

// exp(score) alone would overflow or vanish; the maximum that is taken away must be the row's.
TEST(Softmax, OneKeyFarAboveTheRestTakesAll) {
  ForAll([](const Case& c) {
    for (const int64_t winner : {int64_t{0}, c.seqlens_k[0] / 2, c.seqlens_k[0] - 1}) {
      Fixture f(c);
      SetScores(f, [&](int64_t j) { return j == winner ? 1e4 : -1e4; });
      ASSERT_EQ(f.Forward(), "");
      const oracle::Tensor out = f.out.Read(), v = f.v.Read(), lse = f.ReadLse();
      const int64_t last = c.seqlens_q[0] - 1;  // sees every key, causal or not
      const double rounded = oracle::Round(c.dtype, 1e4f);
      for (int64_t h = 0; h < c.heads; ++h) {
        EXPECT_EQ(*lse.at(last, h), rounded);
        for (int64_t d = 0; d < c.head_dim; ++d) EXPECT_EQ(out.at(last, h)[d], v.at(winner, h)[d]);
      }
    }
  });
}

// Every block raises the maximum, or none but the first does: the accumulator is rescaled always,
// or never.
TEST(Softmax, RisingAndFallingScores) {
  ForAll([](const Case& c) {
    for (const double step : {0.5, -0.5, 8.0, -8.0}) {
      ExpectRight(c, [&](Fixture& f) {
        SetScores(f, [&](int64_t j) { return step * static_cast<double>(j); });
      });
    }
  });
}

TEST(Softmax, PlusInfinityMakesItsRowsNan) {
  ForAll([](const Case& c) {
    for (const int64_t at : {int64_t{0}, c.seqlens_k[0] / 2, c.seqlens_k[0] - 1}) {
      ExpectRight(
          c, [&](Fixture& f) { SetScores(f, [&](int64_t j) { return j == at ? kInf : 0.25; }); });
    }
  });
}

// With head_dim 1 the score -inf comes without a NaN from 0 * inf in other columns.
TEST(Softmax, MinusInfinityIsWeightZero) {
  for (const DType dtype : kTypes) {
    for (const int64_t nk : {5, 64, 333}) {
      for (const bool causal : {false, true}) {
        Case c = MakeCase(dtype, {70, nk, 1});
        c.causal = causal;
        ExpectRight(
            c, [&](Fixture& f) { SetScores(f, [](int64_t j) { return j % 2 ? -kInf : 0.5; }); });
        // Whole blocks of -infinity first: the running maximum is -infinity when the first finite
        // score comes.
        ExpectRight(c, [&](Fixture& f) {
          SetScores(f, [&](int64_t j) { return j < nk - 2 ? -kInf : 0.5; });
        });
        ExpectRight(
            c, [&](Fixture& f) { SetScores(f, [&](int64_t j) { return j < 2 ? 0.5 : -kInf; }); });
        // Nothing else: NaN, not the 0 and -infinity of rows that see no key.
        ExpectRight(c, [](Fixture& f) { SetScores(f, [](int64_t) { return -kInf; }); });
        if (HasFailure()) return;
      }
    }
  }
}

// Under a sanitizer one problem of five, which goes round the twelve of a mask.
constexpr int kOneOf = kSanitized ? 5 : 1;

// NaN and infinity at one place of one input, tile borders and corners included, under several
// masks.
TEST(Softmax, NanAndInfinityGoWhereTheOracleSays) {
  struct {
    bool causal;
    int64_t left, right;
  } const masks[] = {{false, -1, -1}, {true, -1, -1}, {false, 20, 0},
                     {false, 0, 70},  {true, 3, -1},  {false, 90, 90}};
  const std::vector<int64_t> places = {0, 1, 63, 64, 65, 127, 129};  // in turn
  int place = 0, turn = 0;
  for (const DType dtype : kTypes) {
    for (const auto& mask : masks) {
      for (const auto& [nq, nk] : {std::pair<int64_t, int64_t>{130, 200}, {200, 130}}) {
        Case c = MakeCase(dtype, {nq, nk, 24});
        c.scale = static_cast<float>(kNan);
        c.causal = mask.causal;
        c.window_left = mask.left;
        c.window_right = mask.right;
        for (int input = 0; input < 4; ++input) {
          for (const double special : {kNan, kInf, -kInf}) {
            if (++turn % kOneOf != 0) continue;
            if (input == 3 && !std::isnan(special)) continue;  // see Fixture::PutSpecials
            const int64_t at = places[static_cast<size_t>(place++ % 7)];
            ExpectRight(c, [&](Fixture& f) {
              const Strided* const inputs[] = {&f.q, &f.k, &f.v, &f.dout};
              const Strided& t = *inputs[input];
              t.Set(t.Index(0, at, at % 2, at % 24), special);
            });
            if (HasFailure()) {
              FAIL() << "input qkvo[" << input << "], row " << at << ", value " << special;
            }
          }
        }
      }
    }
  }
}

// What a causal query does not see, and the queries that do not see a key, may hold anything in
// every element: results must not change by a bit.
TEST(Softmax, WhatIsNotSeenMayBeAnything) {
  constexpr int64_t kSeqlen = 260, kSplit = 131;
  // Rows [begin, end) of a tensor, as numbers.
  const auto rows = [](const Strided& t, int64_t begin, int64_t end) {
    const oracle::Tensor all = t.Read();
    return std::vector<double>(all.at(begin, 0),
                               all.at(begin, 0) + (end - begin) * all.heads * all.dim);
  };
  const auto spoil = [](const Strided& t, int64_t begin, int64_t end, double special) {
    t.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
      if (begin <= row && row < end) t.Set(e, special);
    });
  };
  for (const DType dtype : kTypes) {
    for (const double special : {kNan, kInf, -kInf}) {
      for (const int64_t left : {-1, 40}) {
        Case c = MakeCase(dtype, {kSeqlen, kSeqlen, 40});
        c.scale = 0.2f;
        c.causal = true;
        c.window_left = left;
        c.has_dlse = false;
        Fixture clean(c), keys(c), queries(c);
        for (const Strided* t : {&keys.k, &keys.v}) spoil(*t, kSplit, kSeqlen, special);
        for (const Strided* t : {&queries.q, &queries.dout}) spoil(*t, 0, kSplit, special);
        for (Fixture* f : {&clean, &keys, &queries}) {
          ASSERT_EQ(f->Forward(), "");
          ASSERT_EQ(f->Backward(), "");
        }
        const std::string where = ToString(c);
        EXPECT_TRUE(rows(clean.out, 0, kSplit) == rows(keys.out, 0, kSplit)) << where;
        EXPECT_TRUE(rows(clean.dq, 0, kSplit) == rows(keys.dq, 0, kSplit)) << where;
        EXPECT_TRUE(rows(clean.out, kSplit, kSeqlen) == rows(queries.out, kSplit, kSeqlen))
            << where;
        EXPECT_TRUE(rows(clean.dq, kSplit, kSeqlen) == rows(queries.dq, kSplit, kSeqlen)) << where;
        EXPECT_TRUE(rows(clean.dk, kSplit, kSeqlen) == rows(queries.dk, kSplit, kSeqlen)) << where;
        EXPECT_TRUE(rows(clean.dv, kSplit, kSeqlen) == rows(queries.dv, kSplit, kSeqlen)) << where;
        if (HasFailure()) return;
      }
    }
  }
}

TEST(Softmax, RowsThatSeeNoKeyGiveZeroEvenFromNan) {
  for (const DType dtype : kTypes) {
    for (const int64_t nk : {0, 3, 70}) {
      Case c = MakeCase(dtype, {200, nk, 20});
      c.causal = true;  // the first 200 - nk queries see nothing
      Fixture f(c);
      const int64_t empty = 200 - nk;
      for (const Strided* t : {&f.q, &f.dout}) {
        t->ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
          if (row < empty) t->Set(e, kNan);
        });
      }
      for (int64_t row = 0; row < empty; ++row) f.SetDlse(row, 0, std::nanf(""));
      ASSERT_EQ(f.Forward(), "");
      EXPECT_EQ(CompareForward(f), "");
      ASSERT_EQ(f.Backward(), "");
      EXPECT_EQ(CompareBackward(f), "");
      const oracle::Tensor out = f.out.Read(), lse = f.ReadLse(), dq = f.dq.Read();
      for (int64_t row = 0; row < empty; ++row) {
        for (int64_t h = 0; h < c.heads; ++h) {
          ASSERT_EQ(*lse.at(row, h), -kInf);
          for (int64_t d = 0; d < c.head_dim; ++d) {
            ASSERT_EQ(out.at(row, h)[d], 0);
            ASSERT_EQ(dq.at(row, h)[d], 0);
          }
        }
      }
    }
  }
}

// What follows is asked of the kernels that compute in float32 whatever the dtype is: bfloat16 may
// go to AMX tiles, which have rules of their own.
constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16};

// Largest |got - wanted|, in parts of the largest |wanted|; NaN counts as infinity.
double RelativeError(const oracle::Tensor& got, const oracle::Tensor& wanted) {
  double error = 0, size = 0;
  for (size_t i = 0; i < wanted.data.size(); ++i) {
    const double e = std::fabs(got.data[i] - wanted.data[i]);
    error = std::isnan(e) ? kInf : std::max(error, e);
    size = std::max(size, std::fabs(wanted.data[i]));
  }
  return size > 0 ? error / size : error;
}

// Against the oracle alone: the comparator's draws allow for the rounding of lse to float32, which
// at such scores is most of the weights.
void ExpectGradients(Fixture& f, double tolerance) {
  ASSERT_EQ(f.Forward(), "");
  ASSERT_EQ(f.Backward(), "");
  const oracle::Tensor dlse = f.ReadDlse();
  const oracle::BackwardResult wanted =
      oracle::Backward(f.OracleProblem(), f.q.Read(), f.k.Read(), f.v.Read(), f.dout.Read(),
                       f.c().has_dlse ? &dlse : nullptr);
  EXPECT_LE(RelativeError(f.dq.Read(), wanted.dq), tolerance) << "dq, " << ToString(f.c());
  EXPECT_LE(RelativeError(f.dk.Read(), wanted.dk), tolerance) << "dk, " << ToString(f.c());
  EXPECT_LE(RelativeError(f.dv.Read(), wanted.dv), tolerance) << "dv, " << ToString(f.c());
}

// lse is a float32: of scores of 1e7 it keeps no fraction, of 1e11 not the thousands. The gradients
// must not be off by as much.
TEST(Softmax, GradientsOfHugeScores) {
  for (const DType dtype : kFloatTypes) {
    const double tolerance = dtype == DType::kFloat32 ? 2e-5 : 3e-3;
    for (const Shape& shape : kShapes) {
      for (const float scale : {1.0f, 0.3f, -0.3f}) {
        Case c = MakeCase(dtype, shape);
        c.causal = shape.q > 7;
        c.scale = scale;
        c.dropout_p = scale == 1 && shape.d == 32 ? 0.25f : 0;
        {
          Fixture f(c);  // all equal, the largest that float16 gives: 4e9 times head_dim
          Set(f.q, [](int64_t, int64_t) { return 65504; });
          Set(f.k, [](int64_t, int64_t) { return 65504; });
          ASSERT_EQ(f.Forward(), "");
          ASSERT_EQ(f.Backward(), "");
          const oracle::BackwardResult wanted = oracle::Backward(
              f.OracleProblem(), f.q.Read(), f.k.Read(), f.v.Read(), f.dout.Read());
          EXPECT_LE(RelativeError(f.dv.Read(), wanted.dv), tolerance) << ToString(c);
        }
        {
          Fixture f(c);  // many keys share the weight, the others have none
          const double size = dtype == DType::kFloat32 ? 1e7 : 1e4;
          SetScores(f, [&](int64_t j) { return j % 3 ? size : -size; });
          ExpectGradients(f, tolerance);
        }
        if (dtype == DType::kFloat32) {
          Fixture f(c);  // neighbours differ by 2 before the scale
          SetScores(f, [](int64_t j) { return 16777216.0 + 2.0 * static_cast<double>(j % 7); });
          ExpectGradients(f, tolerance);
        }
        if (HasFailure()) return;
      }
    }
  }
}

// The mean of numbers near the largest is not infinite because their sum is. Columns of small
// values beside them, and rows that are truly infinite or NaN, stay what they are.
TEST(Softmax, OutputsOfHugeValues) {
  for (const Shape& shape : kShapes) {
    for (const bool causal : {false, true}) {
      for (const float dropout : {0.0f, 0.5f}) {
        Case c = MakeCase(DType::kFloat32, shape);
        c.causal = causal;
        c.dropout_p = dropout;
        const double huge = dropout > 0 ? 1.6e38 : 3.2e38;
        for (const double special : {1.0, kInf, kNan}) {
          Fixture f(c);
          const auto value = [&](int64_t row, int64_t d) {
            return d % 3 == 0                   ? huge * (d % 2 && row % 5 == 0 ? -1 : 1)
                   : d % 3 == 1                 ? 1e-30 * static_cast<double>(row)
                   : special == 1.0 || row != 3 ? 1.0
                                                : special;
          };
          Set(f.v, value);
          ASSERT_EQ(f.Forward(), "");
          const oracle::Tensor out = f.out.Read();
          const oracle::Tensor wanted =
              oracle::Forward(f.OracleProblem(), f.q.Read(), f.k.Read(), f.v.Read()).out;
          for (int64_t row = 0; row < wanted.rows; ++row) {
            for (int64_t h = 0; h < wanted.heads; ++h) {
              for (int64_t d = 0; d < wanted.dim; ++d) {
                const double x = out.at(row, h)[d], y = wanted.at(row, h)[d];
                if (std::isnan(y) || std::isinf(y)) {
                  ASSERT_TRUE(std::isnan(y) ? std::isnan(x) : x == y) << ToString(c);
                  continue;
                }
                const double size = d % 3 == 0   ? huge
                                    : d % 3 == 1 ? 1e-30 * static_cast<double>(shape.k)
                                                 : 1;
                ASSERT_LE(std::fabs(x - y), 4e-6 * size)
                    << "row " << row << ", dim " << d << ", " << ToString(c);
              }
            }
          }
        }
      }
    }
  }
}

// 0 * NaN: dropping a weight multiplies it by 0, in plain attention too.
TEST(Softmax, ADroppedNanStaysNan) {
  for (const DType dtype : kFloatTypes) {
    for (const Shape& shape : kShapes) {
      for (const bool causal : {false, true}) {
        Case c = MakeCase(dtype, shape);
        c.causal = causal;
        c.dropout_p = 0.5f;
        ExpectRight(c, [&](Fixture& f) { f.q.Set(f.q.Index(0, shape.q - 1, 1, 0), kNan); });
        ExpectRight(c, [&](Fixture& f) { f.dout.Set(f.dout.Index(0, shape.q / 2, 0, 0), kNan); });
        ExpectRight(c, [&](Fixture& f) { f.v.Set(f.v.Index(0, shape.k / 2, 1, 0), kNan); });
        if (HasFailure()) return;
      }
    }
  }
}

// c * tanh(s / c) from caps that flush every score to nothing to caps that leave them alone, with
// scores far below and far above, and none at all.
TEST(Softmax, SoftcapsOfEverySize) {
  for (const float cap : {1e-45f, 1e-40f, 2.9e-39f, 1e-38f, 1e-30f, 1e-3f, 1.0f, 50.0f, 1e5f, 1e7f,
                          1e15f, 1e30f, 3e38f}) {
    for (const double size : {0.0, 0.05, 1.0, 3.0}) {
      Case c = MakeCase(DType::kFloat32, {70, 150, 16});
      c.softcap = cap;
      c.size_qk = size;
      Fixture f(c);
      // Where the cap is far below the scores, the slope there sees what rounding does to a score.
      ExpectGradients(f, std::min(2e-5 + 4e-7 * size * size / cap, 1e-2));
      const oracle::ForwardResult wanted =
          oracle::Forward(f.OracleProblem(), f.q.Read(), f.k.Read(), f.v.Read());
      const double scores = std::min<double>(cap, 16 * size * size);
      const oracle::Tensor lse = f.ReadLse();
      double worst = 0;
      for (size_t i = 0; i < lse.data.size(); ++i) {
        const double e = std::fabs(lse.data[i] - wanted.lse.data[i]);
        worst = std::isnan(e) ? kInf : std::max(worst, e);
      }
      EXPECT_LE(worst, 1e-6 + 5e-7 * scores) << "lse, cap " << cap << ", size " << size;
      EXPECT_LE(RelativeError(f.out.Read(), wanted.out), 2e-5) << "cap " << cap;
      if (HasFailure()) FAIL() << "cap " << cap << ", size " << size;
    }
  }
  // A cap and scores that are both subnormal: value and slope still follow tanh.
  Case c = MakeCase(DType::kFloat32, {70, 150, 1});
  c.softcap = 4e-40f;
  c.has_dlse = false;
  Fixture f(c);
  Set(f.q, [](int64_t, int64_t) { return 1e-20; });
  f.k.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
    f.k.Set(e, 1e-20 * static_cast<double>(row % 13));
  });
  ExpectGradients(f, 1e-4);
}

}  // namespace
}  // namespace strobe_test
