// Sequences of few queries: their keys are split over threads and merged along a tree.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/key_tree.h"
#include "environment.h"
#include "fixture.h"
#include "gtest/gtest.h"
#include "kernels.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::DType;

Case Base() {
  Case c;
  c.seed = 3;
  c.scale = std::nanf("");
  c.heads = 8;
  c.heads_kv = 2;
  c.head_dim = c.head_dim_v = 64;
  c.seqlens_q = {1};
  c.seqlens_k = {5000};
  return c;
}

// Lengths around the borders of blocks and items, and everything that changes which keys a row sees
// or what is merged.
std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Case c = Base();
    c.dtype = dtype;
    cases.push_back(c);
    c.scale = -0.3f;  // the largest score is the smallest product
    c.head_dim = 72;  // not whole vectors
    c.head_dim_v = 40;
    cases.push_back(c);
    c = Base();
    c.dtype = dtype;
    c.varlen = c.causal = true;
    c.seqlens_q = {1, 8, 0, 3, 1, 2, 300, 5};
    c.seqlens_k = {4097, 2048, 100, 63, 0, 6000, 310, 64};
    cases.push_back(c);
    c.window_left = 900;
    c.softcap = 20;
    c.alibi = STROBE_ALIBI_PER_HEAD;
    cases.push_back(c);
    c = Base();
    c.dtype = dtype;
    c.heads = 12;  // groups of 1 to 12 rows, and more rows than one item has
    c.causal = true;
    for (const int64_t heads_kv : {1, 3, 12}) {
      c.heads_kv = heads_kv;
      c.seqlens_q = c.seqlens_k = {7};
      c.seqlens_k = {1500};
      cases.push_back(c);
    }
  }
  return cases;
}

// Kernels that take all of the cases.
std::vector<CpuKernel> Kernels() {
  std::vector<CpuKernel> found;
  for (const CpuKernel& kernel : CpuKernels()) {
    if (kernel.Takes(Fixture(Base()).MakeProblem(STROBE_FORWARD))) found.push_back(kernel);
  }
  return found;
}

// The bits of a launch. Its results are compared with the oracle's, which is slow, where asked.
std::string Solve(const Case& c, const CpuKernel& kernel, bool compare = true) {
  Fixture f(c);
  kernel.RunIn(f);
  EXPECT_EQ(f.Forward(), "") << kernel.name << ": " << ToString(c);
  if (compare) {
    EXPECT_EQ(CompareForward(f), "") << kernel.name << ": " << ToString(c);
  }
  return Fixture::Bits(f.out) + f.LseBits();
}

#ifdef __SANITIZE_ADDRESS__
constexpr int kThreads[] = {3};  // there for memory alone, and four times as slow
#else
constexpr int kThreads[] = {2, 3, 7};
#endif

// STROBE_DECODE_ONE_OF=n leaves each kernel one of n cases; together, n kernels have all.
TEST(Decode, AgreesWithTheOracleAndThreadsChangeNoBit) {
  const uint64_t one_of = FromEnvironment("STROBE_DECODE_ONE_OF", 1);
  ASSERT_GT(one_of, 0);
  uint64_t turn = 0;
  for (const CpuKernel& kernel : Kernels()) {
    uint64_t first = turn++;
    for (Case c : Cases()) {
      if (first++ % one_of != 0) continue;
      c.threads = 1;
      const std::string one = Solve(c, kernel);
      for (const int threads : kThreads) {
        c.threads = threads;
        EXPECT_TRUE(Solve(c, kernel, false) == one) << kernel.name << ", " << threads << " threads";
      }
    }
  }
}

// Masks as data, whose lists leave out blocks, and biases, which hide keys among those that are
// read: few queries, and everything else that a score may have.
Case MaskedCase(uint64_t seed) {
  oracle::Rng rng(seed);
  Case c = Base();
  c.seed = seed;
  static constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  c.dtype = rng.Pick(kTypes);
  c.varlen = rng.Chance(0.4);
  const int64_t batch = rng.Integer(1, 3), queries = rng.Integer(1, 8), keys = rng.Integer(1, 1500);
  c.seqlens_q.assign(static_cast<size_t>(batch), queries);
  c.seqlens_k.assign(static_cast<size_t>(batch), keys);
  for (size_t b = 0; c.varlen && b < c.seqlens_q.size(); ++b) {
    c.seqlens_q[b] = rng.Integer(0, 8);
    c.seqlens_k[b] = rng.Integer(0, 1500);
  }
  c.heads_kv = rng.Integer(1, 3);
  c.heads = c.heads_kv * rng.Integer(1, 4);
  c.head_dim = rng.Integer(1, 80);
  c.head_dim_v = rng.Integer(1, 80);
  c.causal = rng.Chance(0.4);
  if (rng.Chance(0.3)) c.window_left = rng.Integer(0, 400);
  if (rng.Chance(0.2)) c.softcap = 10;
  if (rng.Chance(0.2)) c.alibi = STROBE_ALIBI_PER_HEAD;
  c.has_sinks = rng.Chance(0.3);
  if (rng.Chance(0.85)) c.mask = PickMaskChoice(rng, c.varlen);
  if (rng.Chance(0.4)) c.special = rng.Chance(0.5) ? Special::kNan : Special::kInfinity;
  if (!c.mask.there || rng.Chance(0.4)) {
    c.has_bias = true;
    std::swap(c.bias.layout.order[1], c.bias.layout.order[2]);  // [batch, heads, queries, keys]
    if (c.special == Special::kInfinity) c.bias.size = 0.3;
    c.bias.one_head = rng.Chance(0.5);
    c.bias.one_query = rng.Chance(0.3);
    c.bias.hides = rng.Chance(0.7) ? rng.Uniform(0.05, 0.95) : 0;
    c.bias.spoils = rng.Chance(0.4);
  }
  return c;
}

TEST(Decode, MasksAndBiasesAgreeWithTheOracleAndThreadsChangeNoBit) {
  const uint64_t cases = FromEnvironment("STROBE_DECODE_ONE_OF", 1) > 1 ? 60 : 200;
  for (const CpuKernel& kernel : Kernels()) {
    for (uint64_t seed = 0; seed < cases; ++seed) {
      Case c = MaskedCase(seed);
      c.threads = 1;
      const std::string one = Solve(c, kernel);
      c.threads = 3;
      ASSERT_TRUE(Solve(c, kernel, false) == one) << kernel.name << ": " << ToString(c);
    }
  }
}

// Leaves that are left out take no part: what is merged, and in which order, is what the tree of
// all leaves has without them, and the stack does not grow past the tree's levels.
TEST(Decode, TreeOfTheLeavesThatAreThere) {
  oracle::Rng rng(1);
  for (int repeat = 0; repeat < 3000; ++repeat) {
    const int64_t first = rng.Integer(0, 40), leaves = rng.Integer(1, 200);
    const double density = rng.Uniform(0.02, 1);
    std::vector<std::string> wanted(static_cast<size_t>(first + leaves));
    std::string stack[64];
    strobe::cpu::KeyTree tree;
    int64_t highest = 0;
    const auto merge = [&](int64_t place) {
      stack[place] = "(" + stack[place] + " " + stack[place + 1] + ")";
    };
    for (int64_t leaf = first; leaf < first + leaves; ++leaf) {
      if (!rng.Chance(density)) {
        tree.leave_out(0, leaf, merge);
        continue;
      }
      wanted[static_cast<size_t>(leaf)] = stack[tree.top()] = std::to_string(leaf);
      tree.add(0, leaf, merge);
      highest = std::max(highest, tree.top());
    }
    const bool some = tree.top() > 0;
    tree.end(merge);
    while (wanted.size() > 1) {
      std::vector<std::string> above;
      for (size_t i = 0; i < wanted.size(); i += 2) {
        const std::string right = i + 1 < wanted.size() ? wanted[i + 1] : "";
        above.push_back(wanted[i].empty() ? right
                        : right.empty()   ? wanted[i]
                                          : "(" + wanted[i] + " " + right + ")");
      }
      wanted = above;
    }
    ASSERT_EQ(some ? stack[0] : "", wanted[0]);
    ASSERT_LE(highest, strobe::cpu::KeyTree::levels(first + leaves) + 1);
  }
}

TEST(Decode, PlanSaysHowKeysAreSplit) {
  Case c = Base();
  c.threads = 2;
  const strobe_problem problem = Fixture(c).MakeProblem(STROBE_FORWARD);
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  ASSERT_EQ(strobe_plan_make(&problem, &plan), STROBE_OK) << strobe_last_error();
  EXPECT_EQ(plan.block_q, 0);
  EXPECT_GT(plan.block_k, 0);
  EXPECT_LT(plan.block_k, 5000);
  EXPECT_GT(plan.work_items, 1);
  EXPECT_EQ(plan.threads, 2);
}

// Two queries see keys that begin and end one key apart. A NaN in a value that only one of them
// sees reaches only that one.
TEST(Decode, UnseenNeighboursReachNobody) {
  for (const CpuKernel& kernel : Kernels()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const int64_t keys : {100, 101}) {
        Case c = Base();
        c.dtype = dtype;
        c.seqlens_q = {2};
        c.seqlens_k = {keys};
        c.window_left = 20;
        c.window_right = 0;
        Fixture f(c);
        kernel.RunIn(f);
        // Query 0 sees the keys [keys - 22, keys - 1), query 1 [keys - 21, keys).
        for (int64_t head = 0; head < c.heads_kv; ++head) {
          f.v.Set(f.v.Index(0, keys - 1, head, 5), std::nanf(""));
          f.v.Set(f.v.Index(0, keys - 22, head, 6), std::nanf(""));
        }
        ASSERT_EQ(f.Forward(), "") << kernel.name << ": " << ToString(c);
        for (int64_t head = 0; head < c.heads; ++head) {
          EXPECT_FALSE(std::isnan(f.out.Get(f.out.Index(0, 0, head, 5)))) << kernel.name;
          EXPECT_TRUE(std::isnan(f.out.Get(f.out.Index(0, 1, head, 5)))) << kernel.name;
          EXPECT_TRUE(std::isnan(f.out.Get(f.out.Index(0, 0, head, 6)))) << kernel.name;
          EXPECT_FALSE(std::isnan(f.out.Get(f.out.Index(0, 1, head, 6)))) << kernel.name;
        }
        EXPECT_EQ(CompareForward(f), "") << kernel.name << ": " << ToString(c);
      }
    }
  }
}

// What comes before and after in the batch, however long it is, changes no bit of a sequence.
TEST(Decode, BatchChangesNoBit) {
  for (const CpuKernel& kernel : Kernels()) {
    Case c = Base();
    c.varlen = true;
    c.threads = 3;
    c.seqlens_q = {2};
    c.seqlens_k = {3000};
    Fixture alone(c);
    kernel.RunIn(alone);
    ASSERT_EQ(alone.Forward(), "");
    c.seqlens_q = {1, 2, 20};
    c.seqlens_k = {40000, 3000, 20};
    Fixture among(c);
    kernel.RunIn(among);
    for (int64_t head = 0; head < c.heads_kv; ++head) {
      for (int64_t e = 0; e < c.head_dim; ++e) {
        for (int64_t j = 0; j < 3000; ++j) {
          among.k.Set(among.k.Index(0, 40000 + j, head, e),
                      alone.k.Get(alone.k.Index(0, j, head, e)));
          among.v.Set(among.v.Index(0, 40000 + j, head, e),
                      alone.v.Get(alone.v.Index(0, j, head, e)));
        }
      }
    }
    for (int64_t head = 0; head < c.heads; ++head) {
      for (int64_t e = 0; e < c.head_dim; ++e) {
        for (int64_t i = 0; i < 2; ++i) {
          among.q.Set(among.q.Index(0, 1 + i, head, e), alone.q.Get(alone.q.Index(0, i, head, e)));
        }
      }
    }
    ASSERT_EQ(among.Forward(), "");
    for (int64_t head = 0; head < c.heads; ++head) {
      for (int64_t e = 0; e < c.head_dim; ++e) {
        for (int64_t i = 0; i < 2; ++i) {
          EXPECT_EQ(among.out.Get(among.out.Index(0, 1 + i, head, e)),
                    alone.out.Get(alone.out.Index(0, i, head, e)))
              << kernel.name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace strobe_test
