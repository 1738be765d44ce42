// The same bits again: from run to run, across thread counts, and with other callers at work.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "environment.h"
#include "fixture.h"
#include "gtest/gtest.h"

namespace strobe_test {
namespace {

using oracle::DType;

std::vector<DType> Types() {
  if (kSanitized) return {DType::kFloat32, DType::kBFloat16};
  return {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
}

/// How often a problem is solved again. Emulated vectors are some fifty times slower: once there.
int Repeats() {
  static const auto repeats =
      static_cast<int>(FromEnvironment("STROBE_REPEATS", kSanitized ? 1 : 4));
  return repeats;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const DType dtype : Types()) {
    Case c;
    c.seed = 5;
    c.dtype = dtype;
    c.scale = std::nanf("");
    c.heads = c.heads_kv = 1;  // only the sequence can be split
    c.head_dim = c.head_dim_v = 64;
    c.seqlens_q = {700};
    c.seqlens_k = {900};
    cases.push_back(c);

    c.window_left = 100;  // blocks of queries begin at different keys
    c.window_right = 30;
    cases.push_back(c);
    c.window_left = c.window_right = -1;

    c.causal = true;
    c.has_dlse = true;
    c.heads = 6;
    c.heads_kv = 2;
    c.head_dim = 40;
    c.head_dim_v = 24;
    c.seqlens_q = c.seqlens_k = {333, 333};
    c.dropout_p = 0.2f;
    cases.push_back(c);

    c.varlen = true;
    c.DropDropout();
    c.seqlens_q = {0, 17, 300, 1, 130};
    c.seqlens_k = {5, 400, 0, 64, 129};
    c.window_left = 70;
    c.softcap = 20;
    c.alibi = STROBE_ALIBI_PER_HEAD;
    cases.push_back(c);
  }
  // STROBE_DETERMINISM_ONE_OF: of so many problems one, and of each dtype other kinds, of which
  // there are four.
  const auto one_of = static_cast<size_t>(FromEnvironment("STROBE_DETERMINISM_ONE_OF", 1));
  std::vector<Case> some;
  for (size_t i = 0; i < cases.size(); ++i) {
    if ((i + i / 4) % one_of == 0) some.push_back(cases[i]);
  }
  return some;
}

struct Results {
  std::string forward, backward;
};

Results Solve(const Case& c, bool backward) {
  Fixture f(c);
  Results r;
  EXPECT_EQ(f.Forward(), "") << ToString(c);
  r.forward = Fixture::Bits(f.out) + f.LseBits();
  if (backward) {
    EXPECT_EQ(f.Backward(), "") << ToString(c);
    r.backward = Fixture::Bits(f.dq) + Fixture::Bits(f.dk) + Fixture::Bits(f.dv);
  }
  return r;
}

TEST(Determinism, EachRunRepeatsAtAFixedThreadCount) {
  for (Case c : Cases()) {
    for (const int32_t threads : {1, 2, 4, 7}) {
      c.threads = threads;
      const Results first = Solve(c, true);
      for (int n = 0; n < Repeats(); ++n) {
        const Results again = Solve(c, true);
        ASSERT_TRUE(first.forward == again.forward)
            << "forward, threads " << threads << ": " << ToString(c);
        ASSERT_TRUE(first.backward == again.backward)
            << "backward, threads " << threads << ": " << ToString(c);
      }
    }
  }
}

TEST(Determinism, ForwardDoesNotDependOnTheThreadCount) {
  for (Case c : Cases()) {
    c.threads = 1;
    const std::string one = Solve(c, false).forward;
    for (const int32_t threads : {2, 3, 5, 8, 64}) {
      c.threads = threads;
      ASSERT_TRUE(Solve(c, false).forward == one) << "threads " << threads << ": " << ToString(c);
    }
  }
}

// Where a head has a single tile of queries, threads take parts of it.
TEST(Determinism, PartsOfATileChangeNoBit) {
  for (const DType dtype : Types()) {
    for (int n = 0; n < (kSanitized ? 2 : 12); ++n) {
      Case c;
      c.seed = 40 + static_cast<uint64_t>(n);
      c.dtype = dtype;
      c.scale = std::nanf("");
      c.heads = c.heads_kv = n % 4 == 2 ? 2 : 1;
      c.head_dim = n % 3 ? 64 : 40;
      c.head_dim_v = n % 3 ? 24 : 64;
      c.seqlens_q = {n % 3 == 2 ? 25 + n % 8 : 34 + 5 * (n % 7)};
      c.seqlens_k = {kSanitized ? 200 : 1200 - 37 * n};
      c.causal = n % 3 == 1;
      if (n % 2) {  // few keys, of which some rows see so few that they are weighed in another way
        c.causal = true;
        c.head_dim = c.head_dim_v = 200;
        c.seqlens_k = {c.seqlens_q[0] + 16};
      }
      if (n % 3 == 0) {  // a tile's first query is no multiple of 32 then
        c.mask.there = c.mask.keep = true;
        c.mask.block_q = n % 2 ? 128 : 64;
      }
      if (n % 4 == 1) c.window_left = 90;
      if (n % 5 == 2) c.softcap = 20;
      if (n % 5 == 3) c.alibi = STROBE_ALIBI_PER_HEAD;
      if (n % 6 == 4) c.dropout_p = 0.3f;
      c.threads = 1;
      const std::string one = Solve(c, false).forward;
      for (const int32_t threads : {2, 4, 16}) {
        c.threads = threads;
        ASSERT_TRUE(Solve(c, false).forward == one) << "threads " << threads << ": " << ToString(c);
      }
    }
  }
}

TEST(Determinism, DeterministicBackwardDoesNotDependOnTheThreadCount) {
  for (Case c : Cases()) {
    c.deterministic = true;
    c.threads = 1;
    const std::string one = Solve(c, true).backward;
    for (const int32_t threads : {2, 3, 5, 8}) {
      c.threads = threads;
      for (int n = 0; n < (Repeats() + 1) / 2; ++n) {
        ASSERT_TRUE(Solve(c, true).backward == one) << "threads " << threads << ": " << ToString(c);
      }
    }
  }
}

/// out and lse of rows [first, first + count) of a sequence of `keys` queries and keys, by a kernel
/// of this name; empty where it takes no such problem. lse: [row][head].
struct SomeRows {
  static constexpr int64_t kHeads = 4, kHeadsKv = 2, kDim = 40;
  std::vector<float> out, lse;

  static SomeRows Solve(const std::string& kernel, const std::vector<float>& q,
                        const std::vector<float>& k, const std::vector<float>& v, int64_t first,
                        int64_t count, int32_t threads) {
    strobe_problem p;
    EXPECT_EQ(strobe_problem_init(&p, sizeof p), STROBE_OK);
    p.direction = STROBE_FORWARD, p.dtype = STROBE_FLOAT32, p.batch_invariant = 1, p.causal = 1;
    p.batch = 1, p.seqlen_q = count, p.seqlen_k = first + count;
    p.heads = kHeads, p.heads_kv = kHeadsKv, p.head_dim = kDim, p.threads = threads;
    p.window_left = 400;
    strobe_choice choice{};
    choice.struct_size = sizeof choice;
    for (int32_t i = 0;; ++i) {
      if (strobe_plan_choice(&p, i, &choice) != STROBE_OK) return {};
      if (choice.kernel == kernel) break;
    }
    strobe_plan plan;
    plan.struct_size = sizeof plan;
    EXPECT_EQ(strobe_plan_make_chosen(&p, &choice, &plan), STROBE_OK) << strobe_last_error();
    SomeRows rows;
    rows.out.resize(static_cast<size_t>(count * kHeads * kDim));
    std::vector<float> lse(static_cast<size_t>(count * kHeads));
    strobe_forward_args args{};
    args.struct_size = sizeof args;
    args.q = q.data() + first * kHeads * kDim, args.k = k.data(), args.v = v.data();
    args.out = rows.out.data(), args.lse = lse.data();
    EXPECT_EQ(strobe_forward(&plan, &args), STROBE_OK) << strobe_last_error();
    for (int64_t i = 0; i < count * kHeads; ++i)
      rows.lse.push_back(lse[static_cast<size_t>(i % kHeads * count + i / kHeads)]);
    return rows;
  }
  bool IsPartOf(const SomeRows& all, int64_t first) const {
    return std::equal(out.begin(), out.end(), all.out.begin() + first * kHeads * kDim) &&
           std::equal(lse.begin(), lse.end(), all.lse.begin() + first * kHeads);
  }
};

// Every instruction set that this machine has; tests/python/test_row_origins.py has all the ways,
// of the one that plans take.
TEST(Determinism, WithBatchInvariantARowDoesNotDependOnTheOthers) {
  constexpr int64_t kRows = 700;
  oracle::Rng rng(17);
  const auto random = [&](int64_t heads, double most) {
    std::vector<float> x(static_cast<size_t>(kRows * heads * SomeRows::kDim));
    for (float& value : x) value = static_cast<float>(rng.Uniform(-most, most));
    return x;
  };
  const auto q = random(SomeRows::kHeads, 3), k = random(SomeRows::kHeadsKv, 2),
             v = random(SomeRows::kHeadsKv, 1);
  int compared = 0;
  for (const char* const kernel : {"cpu_avx512", "cpu_avx2", "cpu_neon", "cpu_portable"}) {
    const SomeRows all = SomeRows::Solve(kernel, q, k, v, 0, kRows, 2);
    if (all.out.empty()) continue;
    for (const int64_t count : {1, 3, 8, 9, 25, 130}) {
      for (int64_t first = 0; first + count <= kRows; first += 97) {
        const auto threads = static_cast<int32_t>(1 + first % 5);
        EXPECT_TRUE(SomeRows::Solve(kernel, q, k, v, first, count, threads).IsPartOf(all, first))
            << kernel << ", " << count << " rows from " << first;
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 0);
}

// Four host threads, each with its own problems, some of which use several threads themselves.
TEST(Reentrancy, CallersDoNotDisturbEachOther) {
  std::vector<Case> cases = Cases();
  for (size_t n = 0; n < cases.size(); ++n) cases[n].threads = 1 + static_cast<int32_t>(n % 3);
  std::vector<Results> alone;
  for (const Case& c : cases) alone.push_back(Solve(c, true));
  std::vector<std::thread> callers;
  std::vector<std::string> wrong(4);
  for (size_t t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      for (size_t n = 0; n < 2 * cases.size(); ++n) {
        const size_t which = (n + t * 2) % cases.size();
        const Results r = Solve(cases[which], true);
        if (r.forward != alone[which].forward || r.backward != alone[which].backward) {
          wrong[t] = ToString(cases[which]);
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::string& w : wrong) EXPECT_EQ(w, "");
}

// One plan, shared: it is only read.
TEST(Reentrancy, OnePlanServesManyCallers) {
  Case c = Cases()[0];
  c.threads = 2;
  const Fixture shared(c);
  const strobe_problem problem = shared.MakeProblem(STROBE_FORWARD);
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  ASSERT_EQ(strobe_plan_make(&problem, &plan), STROBE_OK);
  const strobe_plan before = plan;
  std::vector<std::vector<float>> outs(4, std::vector<float>(700 * 64));
  std::vector<strobe_status> status(4, STROBE_INTERNAL_ERROR);
  std::vector<std::thread> callers;
  for (size_t t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      strobe_forward_args args = shared.ForwardArgs();
      args.out = outs[t].data();
      args.lse = nullptr;
      for (int n = 0; n < 5; ++n) status[t] = strobe_forward(&plan, &args);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (size_t t = 0; t < 4; ++t) {
    EXPECT_EQ(status[t], STROBE_OK);
    EXPECT_TRUE(outs[t] == outs[0]);
  }
  EXPECT_EQ(std::memcmp(&before, &plan, sizeof plan), 0);
}

}  // namespace
}  // namespace strobe_test
