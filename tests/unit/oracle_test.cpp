// The oracle itself, and what stands beside it: gradients against finite differences, cases that
// can be solved by hand, the comparator, the test's own rounding, and the comparison rule. No
// library code takes part.
#include "oracle.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "comparator.h"
#include "compare.h"
#include "gtest/gtest.h"
#include "numeric.h"

namespace oracle {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

Tensor RandomTensor(int64_t rows, int64_t heads, int64_t dim, Rng& rng) {
  Tensor t(rows, heads, dim);
  for (double& x : t.data) x = rng.Normal();
  return t;
}

struct Sample {
  Problem problem;
  Tensor q, k, v, dout, dlse;
};

Sample MakeSample(uint64_t seed, const std::vector<Sequence>& sequences, int64_t heads,
                  int64_t heads_kv, int64_t d, int64_t dv) {
  Rng rng(seed);
  Sample s;
  s.problem.sequences = sequences;
  s.problem.heads = heads;
  s.problem.heads_kv = heads_kv;
  s.problem.head_dim = d;
  s.problem.head_dim_v = dv;
  s.problem.scale = 0.7;
  int64_t rows_q = 0, rows_k = 0;
  for (const Sequence& x : sequences) {
    rows_q += x.q_length;
    rows_k += x.k_length;
  }
  s.q = RandomTensor(rows_q, heads, d, rng);
  s.k = RandomTensor(rows_k, heads_kv, d, rng);
  s.v = RandomTensor(rows_k, heads_kv, dv, rng);
  s.dout = RandomTensor(rows_q, heads, dv, rng);
  s.dlse = RandomTensor(rows_q, heads, 1, rng);
  return s;
}

// The number whose gradient Backward() gives: sum(out * dout) + sum(lse * dlse). Rows that see no
// key add nothing.
double Loss(const Sample& s) {
  const ForwardResult r = Forward(s.problem, s.q, s.k, s.v);
  double sum = 0;
  for (size_t i = 0; i < r.out.data.size(); ++i) sum += r.out.data[i] * s.dout.data[i];
  for (size_t i = 0; i < r.lse.data.size(); ++i) {
    if (r.lse.data[i] != -kInf) sum += r.lse.data[i] * s.dlse.data[i];
  }
  return sum;
}

// input: numbers of `s`, one for each of the gradient.
void ExpectGradient(const Sample& s, std::vector<double>& input, const Tensor& gradient,
                    const char* name) {
  constexpr double kStep = 1e-5;
  ASSERT_EQ(input.size(), gradient.data.size()) << name;
  for (size_t i = 0; i < gradient.data.size(); ++i) {
    double& x = input[i];
    const double before = x;
    x = before + kStep;
    const double up = Loss(s);
    x = before - kStep;
    const double down = Loss(s);
    x = before;
    ASSERT_NEAR(gradient.data[i], (up - down) / (2 * kStep), 2e-8) << name << " element " << i;
  }
}

void ExpectGradients(Sample s) {
  const BackwardResult r = Backward(s.problem, s.q, s.k, s.v, s.dout, &s.dlse);
  ExpectGradient(s, s.q.data, r.dq, "dq");
  ExpectGradient(s, s.k.data, r.dk, "dk");
  ExpectGradient(s, s.v.data, r.dv, "dv");
  if (!s.problem.sinks.empty()) ExpectGradient(s, s.problem.sinks, r.dsinks, "dsinks");
  if (s.problem.bias.rows > 0) ExpectGradient(s, s.problem.bias.data, r.dbias, "dbias");
}

TEST(Oracle, GradientsArePlainAttentions) {
  ExpectGradients(MakeSample(1, {{0, 5, 0, 7}}, 1, 1, 4, 3));
}

TEST(Oracle, GradientsOfGroupedHeadsAndSequences) {
  ExpectGradients(
      MakeSample(2, {{0, 3, 0, 4}, {3, 0, 4, 2}, {3, 4, 6, 0}, {7, 2, 6, 3}}, 6, 2, 3, 5));
}

TEST(Oracle, GradientsUnderMasks) {
  Sample s = MakeSample(3, {{0, 7, 0, 5}}, 2, 1, 3, 2);
  s.problem.causal = true;
  ExpectGradients(s);
  s.problem.window_left = 2;
  ExpectGradients(s);
  s.problem.causal = false;
  s.problem.window_right = 1;
  ExpectGradients(s);
}

TEST(Oracle, GradientsOfSoftcapAndAlibi) {
  Sample s = MakeSample(4, {{0, 4, 0, 6}, {4, 3, 6, 3}}, 2, 2, 4, 4);
  s.problem.softcap = 1.5;
  s.problem.slopes = {0.3, -0.1, 0.7, 0.05};
  ExpectGradients(s);
}

TEST(Oracle, GradientsOfDropout) {
  Sample s = MakeSample(5, {{0, 5, 0, 6}, {5, 4, 6, 5}}, 2, 1, 3, 3);
  s.problem.dropout_p = 0.4;
  s.problem.keep_rows = 5;
  s.problem.keep_columns = 6;
  Rng rng(6);
  for (int i = 0; i < 2 * 2 * 5 * 6; ++i) s.problem.keep.push_back(rng.Chance(0.6));
  ExpectGradients(s);
}

// Two sequences; of the second one the first two queries see no key, so that their lse is the sink
// where it has one.
TEST(Oracle, GradientsOfSinks) {
  Sample s = MakeSample(11, {{0, 3, 0, 5}, {3, 4, 5, 2}}, 4, 2, 3, 2);
  s.problem.causal = true;
  s.problem.sinks = {0.3, -1.2, 2, 0};
  for (const bool outside : {false, true}) {
    s.problem.sinks_outside_lse = outside;
    ExpectGradients(s);
  }
}

// Sequences of 3 and 2 queries and of 4 and 3 keys. Where an axis is 1, what all share is summed.
TEST(Oracle, GradientsOfBias) {
  Sample s = MakeSample(12, {{0, 3, 0, 4}, {3, 2, 4, 3}}, 4, 2, 3, 2);
  s.problem.softcap = 1.5;
  Rng rng(13);
  for (const int64_t sequences : {1, 2}) {
    for (const int64_t heads : {1, 4}) {
      for (const int64_t queries : {1, 3}) {
        s.problem.bias_queries = queries;
        s.problem.bias = RandomTensor(sequences * queries, heads, 4, rng);
        ExpectGradients(s);
      }
    }
  }
}

TEST(Oracle, OneRowByHand) {
  Sample s = MakeSample(7, {{0, 1, 0, 2}}, 1, 1, 1, 1);
  s.problem.scale = 1;
  s.q.data = {2};
  s.k.data = {0, std::log(3.0) / 2};  // scores 0 and log 3: weights 1/4 and 3/4
  s.v.data = {10, 20};
  const ForwardResult r = Forward(s.problem, s.q, s.k, s.v);
  EXPECT_NEAR(r.out.data[0], 17.5, 1e-12);
  EXPECT_NEAR(r.lse.data[0], std::log(4.0), 1e-12);
  s.dout.data = {1};
  const BackwardResult b = Backward(s.problem, s.q, s.k, s.v, s.dout);
  // d(out)/d(s_1) = P_0 P_1 (v_1 - v_0) = 1.875; d(s_1)/dq = k_1, d(s_1)/dk_1 = q.
  EXPECT_NEAR(b.dq.data[0], 1.875 * std::log(3.0) / 2, 1e-12);
  EXPECT_NEAR(b.dk.data[0], -1.875 * 2, 1e-12);
  EXPECT_NEAR(b.dk.data[1], 1.875 * 2, 1e-12);
  EXPECT_NEAR(b.dv.data[0], 0.25, 1e-12);
  EXPECT_NEAR(b.dv.data[1], 0.75, 1e-12);
}

TEST(Oracle, RowsWithoutKeysAreZeroAndMinusInfinity) {
  Sample s = MakeSample(8, {{0, 3, 0, 1}}, 1, 1, 2, 2);
  s.problem.causal = true;  // only the last query sees the key
  for (double& x : s.dout.data) x = std::nan("");
  for (int d = 0; d < 2; ++d) s.dout.at(2, 0)[d] = 1;
  const ForwardResult r = Forward(s.problem, s.q, s.k, s.v);
  const BackwardResult b = Backward(s.problem, s.q, s.k, s.v, s.dout, &s.dlse);
  for (int64_t row = 0; row < 2; ++row) {
    EXPECT_EQ(*r.lse.at(row, 0), -kInf);
    for (int d = 0; d < 2; ++d) {
      EXPECT_EQ(r.out.at(row, 0)[d], 0);
      EXPECT_EQ(b.dq.at(row, 0)[d], 0);
    }
  }
  for (int d = 0; d < 2; ++d) {
    EXPECT_EQ(r.out.at(2, 0)[d], s.v.at(0, 0)[d]);
    EXPECT_TRUE(std::isfinite(b.dk.at(0, 0)[d]));
    EXPECT_EQ(b.dv.at(0, 0)[d], 1);
  }
}

TEST(Oracle, UnseenNanStaysOutAndSeenNanGoesWhereItShould) {
  Sample s = MakeSample(9, {{0, 3, 0, 3}}, 1, 1, 2, 2);
  s.problem.causal = true;
  s.v.at(1, 0)[0] = std::nan("");  // rows 1 and 2 see it, in column 0 of out alone
  const ForwardResult r = Forward(s.problem, s.q, s.k, s.v);
  EXPECT_FALSE(std::isnan(r.out.at(0, 0)[0]));
  EXPECT_TRUE(std::isnan(r.out.at(1, 0)[0]));
  EXPECT_TRUE(std::isnan(r.out.at(2, 0)[0]));
  for (int64_t row = 0; row < 3; ++row) EXPECT_FALSE(std::isnan(r.out.at(row, 0)[1]));
  const BackwardResult b = Backward(s.problem, s.q, s.k, s.v, s.dout);
  EXPECT_FALSE(std::isnan(b.dq.at(0, 0)[0]));
  EXPECT_TRUE(std::isnan(b.dq.at(1, 0)[0]));
  EXPECT_TRUE(std::isnan(b.dk.at(2, 0)[0]));  // through row 2, whose mean is NaN
  for (int64_t row = 0; row < 3; ++row) EXPECT_FALSE(std::isnan(b.dv.at(row, 0)[0]));
}

TEST(Oracle, InfiniteScoresAreAsInPlainSoftmax) {
  Sample s = MakeSample(10, {{0, 3, 0, 2}}, 1, 1, 1, 1);
  s.problem.scale = 1;
  s.q.data = {1, -1, 0.5};
  s.k.data = {kInf, 3};
  s.v.data = {5, 7};
  const ForwardResult r = Forward(s.problem, s.q, s.k, s.v);
  EXPECT_TRUE(std::isnan(r.out.data[0]) && std::isnan(r.lse.data[0]));  // exp(inf - inf)
  EXPECT_EQ(r.out.data[1], 7);                                          // weight exp(-inf) = 0
  EXPECT_NEAR(r.lse.data[1], -3, 1e-12);
  s.k.data = {-kInf, -kInf};
  const ForwardResult all = Forward(s.problem, s.q, s.k, s.v);
  EXPECT_TRUE(std::isnan(all.out.data[0]) && std::isnan(all.lse.data[0]));
}

TEST(Comparator, IsCloseToTheOracleAndRoundsWhereItShould) {
  Sample s = MakeSample(11, {{0, 20, 0, 30}}, 2, 1, 16, 16);
  s.problem.causal = true;
  for (Tensor* t : {&s.q, &s.k, &s.v, &s.dout}) {
    for (double& x : t->data) x = Round(DType::kBFloat16, static_cast<float>(x));
  }
  const ForwardResult f = Forward(s.problem, s.q, s.k, s.v);
  const BackwardResult b = Backward(s.problem, s.q, s.k, s.v, s.dout, &s.dlse);
  const double unit[] = {6e-8, 4e-3, 5e-4};  // half of the spacing at 1
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const uint64_t noise : {0, 1, 2}) {
      const Plain p = PlainAttention(s.problem, dtype, s.q, s.k, s.v, &s.dout, &s.dlse, noise);
      const double u = unit[static_cast<int>(dtype)];
      const std::pair<const Tensor*, const Tensor*> pairs[] = {
          {&p.out, &f.out}, {&p.dq, &b.dq}, {&p.dk, &b.dk}, {&p.dv, &b.dv}};
      for (const auto& [plain, truth] : pairs) {
        ASSERT_EQ(plain->data.size(), truth->data.size());
        const double error = oracle::LargestError({plain}, *truth);
        EXPECT_LT(error, 100 * u) << Name(dtype) << " noise " << noise;
        EXPECT_GT(error, u / 4) << Name(dtype) << " noise " << noise;
        if (noise != 0) continue;
        for (const double x : plain->data) ASSERT_EQ(x, Round(dtype, static_cast<float>(x)));
      }
    }
  }
}

// Nearest value by search over all patterns, ties to the even pattern.
uint16_t NearestBySearch(float x, float (*decode)(uint16_t)) {
  uint16_t best = 0;
  double best_error = kInf;
  for (uint32_t bits = 0; bits < 0x8000; ++bits) {
    const double value = decode(static_cast<uint16_t>(bits));
    if (!std::isfinite(value)) break;
    const double error = std::fabs(value - std::fabs(static_cast<double>(x)));
    if (error < best_error || (error == best_error && bits % 2 == 0)) {
      best = static_cast<uint16_t>(bits);
      best_error = error;
    }
  }
  return static_cast<uint16_t>(best | (std::signbit(x) ? 0x8000 : 0));
}

TEST(Numeric, EncodesToTheNearestValueTiesToEven) {
  Rng rng(12);
  for (int n = 0; n < 300; ++n) {
    float x =
        static_cast<float>(std::ldexp(rng.Uniform(-1, 1), static_cast<int>(rng.Integer(-26, 15))));
    if (n % 3 == 0) x = DecodeFloat16(EncodeFloat16(x)) * (1 + 0x1p-11f);  // halfway, or nearly so
    EXPECT_EQ(EncodeFloat16(x), NearestBySearch(x, DecodeFloat16)) << x;
    EXPECT_EQ(EncodeBFloat16(x), NearestBySearch(x, DecodeBFloat16)) << x;
    EXPECT_EQ(Round(DType::kFloat16, x), DecodeFloat16(EncodeFloat16(x))) << x;
  }
}

TEST(Numeric, DecodesAndEncodesEveryPattern) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto b = static_cast<uint16_t>(bits);
    const float half = DecodeFloat16(b), brain = DecodeBFloat16(b);
    if (std::isnan(half)) {
      EXPECT_TRUE(std::isnan(DecodeFloat16(EncodeFloat16(half))));
    } else {
      ASSERT_EQ(EncodeFloat16(half), b);
    }
    if (std::isnan(brain)) {
      EXPECT_TRUE(std::isnan(DecodeBFloat16(EncodeBFloat16(brain))));
    } else {
      ASSERT_EQ(EncodeBFloat16(brain), b);
    }
  }
  EXPECT_EQ(EncodeFloat16(65519.99f), 0x7BFF);
  EXPECT_EQ(EncodeFloat16(65520), 0x7C00);
  EXPECT_EQ(EncodeFloat16(0x1p-25f), 0);
  EXPECT_EQ(EncodeFloat16(0x1.01p-25f), 1);
  EXPECT_EQ(EncodeFloat16(-0.0f), 0x8000);
  EXPECT_EQ(EncodeBFloat16(3.4e38f), 0x7F80);
  EXPECT_EQ(Spacing(DType::kFloat16, 1.5f), 0x1p-10f);
  EXPECT_EQ(Spacing(DType::kBFloat16, -3.0f), 0x1p-6f);
  EXPECT_EQ(Spacing(DType::kFloat32, 1.0f), 0x1p-23f);
  EXPECT_EQ(Spacing(DType::kFloat16, 1e-6f), 0x1p-24f);
}

TEST(Oracle, HalvesMergeToTheWhole) {
  const Sample s = MakeSample(5, {{0, 4, 0, 7}}, 2, 1, 3, 5);
  const ForwardResult whole = Forward(s.problem, s.q, s.k, s.v);
  std::vector<Tensor> outs, lses;
  for (const Sequence& part : {Sequence{0, 4, 0, 3}, Sequence{0, 4, 3, 4}}) {
    Problem p = s.problem;
    p.sequences = {part};
    const ForwardResult r = Forward(p, s.q, s.k, s.v);
    outs.push_back(r.out);
    lses.push_back(r.lse);
  }
  outs.push_back(Tensor(4, 2, 5, std::nan("")));  // a part without keys, by either convention
  lses.push_back(Tensor(4, 2, 1, -kInf));
  *lses.back().at(2, 0) = kInf;
  const ForwardResult merged = Merge(outs, lses);
  for (size_t n = 0; n < whole.out.data.size(); ++n)
    EXPECT_NEAR(merged.out.data[n], whole.out.data[n], 1e-14);
  for (size_t n = 0; n < whole.lse.data.size(); ++n)
    EXPECT_NEAR(merged.lse.data[n], whole.lse.data[n], 1e-14);
  outs = {outs[2]};
  lses = {lses[2]};
  const ForwardResult nothing = Merge(outs, lses);
  EXPECT_EQ(nothing.out.data, std::vector<double>(nothing.out.data.size(), 0.0));
  EXPECT_EQ(nothing.lse.data, std::vector<double>(nothing.lse.data.size(), -kInf));
}

// Keys in pages of two, a left pad, an append and a rotation by a quarter of a circle at
// position 1.
TEST(Oracle, CacheInPages) {
  const int32_t pages[] = {2, 0, 1};
  CachedSequence sequence{1, 3, 1, 0, 2, {}};  // rows 1 and 2, and row 3 is new
  for (int64_t n = 0; n < 4; ++n) sequence.rows.push_back(PagedRow(pages, 2, n));
  EXPECT_EQ(sequence.rows, (std::vector<int64_t>{4, 5, 0, 1}));
  Cache cache;
  cache.sequences = {sequence};
  cache.k = cache.v = Tensor(6, 1, 2);
  for (size_t n = 0; n < 12; ++n) cache.k.data[n] = cache.v.data[n] = static_cast<double>(n);
  cache.k_new = cache.v_new = Tensor(1, 1, 2, 3);
  cache.k_new.data = {1, 2};
  cache.cosines = Tensor(4, 1, 1, 1);
  cache.sines = Tensor(4, 1, 1);
  cache.cosines.data = {1, 0, 0, 1};
  cache.sines.data = {0, 1, 1, 0};
  const Appended added = Append(cache);
  EXPECT_EQ(added.rows, std::vector<int64_t>{1});
  EXPECT_EQ(added.k.data, (std::vector<double>{-2, 1}));  // turned: its position is 2
  EXPECT_EQ(added.v.data, (std::vector<double>{3, 3}));

  Problem p;
  p.head_dim = p.head_dim_v = 2;
  p.sequences = {{0, 2, 0, 0}};
  Tensor q(2, 1, 2);
  q.data = {1, 2, 1, 2};
  Gathered found = Gather(p, cache, q);
  EXPECT_EQ(found.k.data, (std::vector<double>{10, 11, 0, 1, 2, 3}));
  EXPECT_EQ(found.problem.sequences[0].k_length, 3);
  EXPECT_EQ(found.q.data, (std::vector<double>{-2, 1, -2, 1}));  // all at the first new key
  p.causal = true;
  found = Gather(p, cache, q);
  EXPECT_EQ(found.q.data, (std::vector<double>{-2, 1, 1, 2}));  // each at its own
}

TEST(Compare, SeesWhatItShould) {
  using oracle::Compare;
  Tensor wanted(2, 1, 2);
  wanted.data = {1, kInf, std::nan(""), 4};
  const Tensor plain = [&] {
    Tensor t = wanted;
    t.data[0] = 1.001;
    return t;
  }();
  const auto ok = [&](std::vector<double> data) {
    Tensor got(2, 1, 2);
    got.data = std::move(data);
    return Compare("x", got, wanted, {&plain}, DType::kFloat32, 2).ok;
  };
  const double nan = std::nan("");
  EXPECT_TRUE(ok({1, kInf, nan, 4}));
  EXPECT_TRUE(ok({1.002, kInf, nan, 4.002}));
  EXPECT_FALSE(ok({1.0021, kInf, nan, 4}));
  EXPECT_FALSE(ok({1, -kInf, nan, 4}));
  EXPECT_FALSE(ok({1, 1e30, nan, 4}));
  EXPECT_FALSE(ok({1, kInf, 0, 4}));
  EXPECT_FALSE(ok({1, kInf, kInf, 4}));
  EXPECT_FALSE(ok({nan, kInf, nan, 4}));
  EXPECT_FALSE(ok({1, kInf, nan, kInf}));
  EXPECT_FALSE(ok({1, nan, nan, 4}));
}

// Of an infinity that float32 takes for 0 times infinity NaN is as good as the infinity.
TEST(Compare, FaintInfinitiesMayBeNan) {
  Problem p;
  p.sequences = {{0, 1, 0, 3}};
  p.head_dim_v = 3;
  Tensor q(1, 1, 1, 1), k(3, 1, 1), v(3, 1, 3, 1);
  k.data = {0, -80, -90};
  v.at(1, 0)[0] = kInf;
  v.at(2, 0)[1] = kInf;
  const ForwardResult wanted = Forward(p, q, k, v);
  ASSERT_EQ(wanted.out.data, (std::vector<double>{kInf, kInf, 1}));
  const auto ok = [&](std::vector<double> data) {
    Tensor got(1, 1, 3);
    got.data = std::move(data);
    return Compare("out", got, wanted.out, {&wanted.out}, DType::kFloat32, 2, kFloor,
                   FaintInfinities(wanted))
        .ok;
  };
  const double nan = std::nan("");
  EXPECT_TRUE(ok({kInf, kInf, 1}));
  EXPECT_TRUE(ok({kInf, nan, 1}));
  EXPECT_FALSE(ok({nan, kInf, 1}));
  EXPECT_FALSE(ok({kInf, -kInf, 1}));
  EXPECT_FALSE(ok({kInf, 1, 1}));
  EXPECT_FALSE(ok({kInf, kInf, nan}));
}

}  // namespace
}  // namespace oracle
