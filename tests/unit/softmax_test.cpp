// The online softmax where it is hardest, through the public API: huge and equal scores,
// infinities, NaN, and masked blocks full of them. The oracle says what has to come out, coordinate
// by coordinate.
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

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
  c.dlse = true;
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

// Under a sanitizer one problem of five, which goes round the twelve of a mask: ten times slower,
// and looking for something else.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kOneOf = 5;
#else
constexpr int kOneOf = 1;
#endif

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
        c.dlse = false;
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

}  // namespace
}  // namespace strobe_test
