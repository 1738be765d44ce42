// bf16 at the ends of float32's range, in the CPU kernels of this machine: softcaps, scores and
// values of any size.
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>

#include "gtest/gtest.h"
#include "kernels.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::Tensor;

class Extremes : public ::testing::TestWithParam<CpuKernel> {
 protected:
  void ExpectRight(const Case& c, const std::function<void(Fixture&)>& edit = {}) {
    EXPECT_EQ(RunCase(c,
                      [&](Fixture& f) {
                        GetParam().RunIn(f);
                        if (edit) edit(f);
                      }),
              "")
        << ToString(c);
  }
};
INSTANTIATE_TEST_SUITE_P(Cpu, Extremes, ::testing::ValuesIn(CpuKernels()),
                         [](const auto& kernel) { return kernel.param.name; });

Case MakeCase(int64_t q, int64_t k, int64_t d) {
  Case c;
  c.seed = 5;
  c.dtype = oracle::DType::kBFloat16;
  c.heads = c.heads_kv = 2;
  c.seqlens_q = {q};
  c.seqlens_k = {k};
  c.head_dim = c.head_dim_v = d;
  c.scale = std::nanf("");
  return c;
}

void Set(const Strided& t, const std::function<double(int64_t row, int64_t d)>& value) {
  t.ForEach([&](int64_t row, int64_t, int64_t d, int64_t e) { t.Set(e, value(row, d)); });
}

// The error of a capped score has to be relative to the score, and not to the cap.
TEST_P(Extremes, SoftcapOfAnySize) {
  for (const float cap : {1e-3f, 1.0f, 50.0f, 1e3f, 1e5f, 1e7f, 1e20f, 3e38f}) {
    for (const double size : {0.01, 1.0, 3.0}) {
      Case c = MakeCase(70, 150, 40);
      c.softcap = cap;
      c.size_qk = size;
      c.has_dlse = true;
      ExpectRight(c);
    }
  }
}

TEST_P(Extremes, TinySoftcapLeavesZeroScores) {
  for (const float cap : {1e-37f, 2e-39f, 1e-42f, 1e-45f}) {
    Case c = MakeCase(33, 70, 24);
    c.softcap = cap;
    ExpectRight(c);
    ExpectRight(c, [](Fixture& f) {
      f.q.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
        if (row % 3 == 0) f.q.Set(e, 0);
      });
    });
  }
}

// dv is the weight where dout is 1 in a single row: no weight is more than 1, and the one key that
// is far above the rest has exactly that. A single query is decoded; where there are more, the rest
// have a dout of 0.
TEST_P(Extremes, WeightsOfHugeScoresAreAtMostOne) {
  for (const double size : {1e3, 1e4, 1e5}) {
    for (const int64_t d : {64, 128}) {
      Case c = MakeCase(d == 64 ? 1 : 40, 200, d);
      c.heads = c.heads_kv = 8;
      c.scale = d == 64 ? 1 : 0.7f;
      c.size_qk = size;
      Fixture f(c);
      GetParam().RunIn(f);
      const int64_t query = c.seqlens_q[0] / 2;
      Set(f.dout, [query](int64_t row, int64_t) { return row == query; });
      ASSERT_EQ(f.Forward(), "");
      ASSERT_EQ(f.Backward(), "");
      const Tensor dv = f.dv.Read();
      for (int64_t head = 0; head < c.heads; ++head) {
        double largest = 0, sum = 0;
        for (int64_t key = 0; key < 200; ++key) {
          largest = std::max(largest, *dv.at(key, head));
          sum += *dv.at(key, head);
        }
        EXPECT_EQ(largest, 1) << "size " << size << ", head " << head;
        EXPECT_NEAR(sum, 1, 0.01) << "size " << size << ", head " << head;
      }
    }
  }
}

// The sum of all keys' values is beyond float32, their mean is not.
TEST_P(Extremes, ValuesNearTheLargest) {
  for (const bool causal : {false, true}) {
    for (const float softcap : {0.0f, 5.0f}) {
      for (const double rising : {0.0, 1.0}) {
        Case c = MakeCase(70, 333, 40);
        c.causal = causal;
        c.softcap = softcap;
        Fixture f(c);
        GetParam().RunIn(f);
        Set(f.v, [](int64_t row, int64_t d) {
          return d % 3 == 0 ? 3.3e38 : d % 3 == 1 ? (row % 4 ? 3.3e38 : -3.3e38) : 1e-3;
        });
        f.k.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
          f.k.Set(e, rising * 0.05 * static_cast<double>(row));
        });
        ASSERT_EQ(f.Forward(), "");
        EXPECT_EQ(CompareForward(f), "") << ToString(c);
      }
    }
  }
}

// A dropped weight counts as 0 times itself.
TEST_P(Extremes, DroppedNanStaysNan) {
  Case c = MakeCase(40, 70, 24);
  c.dropout_p = 0.5;
  c.dropout_seed = 11;
  ExpectRight(c, [](Fixture& f) {
    f.q.ForEach([&](int64_t row, int64_t, int64_t d, int64_t e) {
      if (row == 3 && d == 5) f.q.Set(e, std::nan(""));
    });
  });
}

}  // namespace
}  // namespace strobe_test
