// The plan: a pure function of the problem, complete, printable, and frugal.
#include <omp.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "strobe/strobe.h"

namespace {

strobe_problem MakeProblem(strobe_direction direction, int64_t seqlen, int64_t heads = 1,
                           int64_t head_dim = 64) {
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.direction = direction;
  p.batch = 1;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.heads = heads;
  p.head_dim = head_dim;
  return p;
}

strobe_plan MakePlan(const strobe_problem& p) {
  strobe_plan plan;
  std::memset(&plan, 0, sizeof plan);
  plan.struct_size = sizeof plan;
  EXPECT_EQ(strobe_plan_make(&p, &plan), STROBE_OK) << strobe_last_error();
  return plan;
}

std::string Text(const strobe_plan& plan) {
  std::string text(strobe_plan_text(&plan, nullptr, 0) + 1, '\0');
  strobe_plan_text(&plan, text.data(), text.size());
  text.pop_back();
  return text;
}

constexpr strobe_direction kDirections[] = {STROBE_FORWARD, STROBE_BACKWARD};
constexpr strobe_dtype kTypes[] = {STROBE_FLOAT32, STROBE_BFLOAT16, STROBE_FLOAT16};

TEST(Plan, IsTheSameEveryTime) {
  for (const strobe_direction direction : kDirections) {
    for (const strobe_dtype dtype : kTypes) {
      strobe_problem p = MakeProblem(direction, 777, 4, 72);
      p.dtype = dtype;
      p.causal = 1;
      p.threads = 3;
      const strobe_plan plan = MakePlan(p);
      for (int n = 0; n < 3; ++n) {
        const strobe_plan again = MakePlan(p);
        EXPECT_EQ(std::memcmp(&plan, &again, sizeof plan), 0);
      }
      strobe_plan elsewhere;
      std::thread([&] { elsewhere = MakePlan(p); }).join();
      EXPECT_EQ(std::memcmp(&plan, &elsewhere, sizeof plan), 0);
      EXPECT_EQ(Text(plan), Text(elsewhere));
      // A resolved problem plans to the same.
      const strobe_plan of_resolved = MakePlan(plan.problem);
      EXPECT_EQ(std::memcmp(&plan, &of_resolved, sizeof plan), 0);
    }
  }
}

TEST(Plan, ResolvesEveryDefault) {
  strobe_problem p = MakeProblem(STROBE_BACKWARD, 10, 6, 48);
  p.batch = 2;
  p.seqlen_k = 20;
  const strobe_plan plan = MakePlan(p);
  EXPECT_EQ(plan.struct_size, sizeof plan);
  EXPECT_EQ(plan.problem.heads_kv, 6);
  EXPECT_EQ(plan.problem.head_dim_v, 48);
  EXPECT_FLOAT_EQ(plan.problem.scale, 1 / std::sqrt(48.0f));
  const auto expect = [](const strobe_strides& s, int64_t rows, int64_t heads, int64_t dim) {
    EXPECT_EQ(s.dim, 1);
    EXPECT_EQ(s.head, dim);
    EXPECT_EQ(s.seqlen, heads * dim);
    EXPECT_EQ(s.batch, rows * heads * dim);
  };
  for (const strobe_strides* s :
       {&plan.problem.q, &plan.problem.out, &plan.problem.dout, &plan.problem.dq}) {
    expect(*s, 10, 6, 48);
  }
  for (const strobe_strides* s :
       {&plan.problem.k, &plan.problem.v, &plan.problem.dk, &plan.problem.dv}) {
    expect(*s, 20, 6, 48);
  }
  p.heads_kv = 3;
  p.head_dim_v = 16;
  p.scale = 0.5f;
  p.q = {1000, 1, 10, 1};
  p.dq = {100000, 48, 5000, 1};
  const strobe_plan given = MakePlan(p);
  EXPECT_EQ(given.problem.heads_kv, 3);
  EXPECT_EQ(given.problem.head_dim_v, 16);
  EXPECT_EQ(given.problem.scale, 0.5f);
  EXPECT_EQ(given.problem.q.seqlen, 1);
  expect(given.problem.v, 20, 3, 16);
}

TEST(Plan, SaysWhatItWillDo) {
  for (const strobe_direction direction : kDirections) {
    strobe_problem p = MakeProblem(direction, 1000, 2);
    p.threads = 2;
    p.causal = 1;
    const strobe_plan plan = MakePlan(p);
    ASSERT_NE(plan.kernel, nullptr);
    EXPECT_STREQ(plan.kernel, strobe_kernel_name(plan.kernel_index));
    // Compiled kernels have names and numbers of their own on CUDA alone.
    EXPECT_EQ(plan.instance_name, nullptr);
    EXPECT_EQ(plan.instance, 0);
    EXPECT_EQ(strobe_kernel_unavailable(plan.kernel_index), nullptr);
    EXPECT_GT(plan.tile_q, 0);
    EXPECT_GT(plan.tile_k, 0);
    EXPECT_GE(plan.work_items, 1);
    EXPECT_EQ(plan.threads, 2);
    const std::string text = Text(plan);
    const std::string wanted[] = {plan.kernel,
                                  std::to_string(plan.tile_q),
                                  std::to_string(plan.tile_k),
                                  std::to_string(plan.workspace_bytes),
                                  std::to_string(plan.work_items),
                                  direction == STROBE_FORWARD ? "forward" : "backward",
                                  "1000",
                                  "64",
                                  "causal",
                                  "fp32"};
    for (const std::string& word : wanted) {
      EXPECT_NE(text.find(word), std::string::npos) << text << "lacks " << word;
    }
  }
}

TEST(Plan, SaysWhatABiasIs) {
  for (const strobe_dtype dtype : kTypes) {
    strobe_problem p = MakeProblem(STROBE_BACKWARD, 100, 4);
    p.dtype = dtype;
    p.batch = 2;
    p.has_bias = 1;
    p.bias_batch = p.bias_seqlen_q = 1;
    p.bias_dtype = STROBE_FLOAT16;
    const std::string without_dbias = Text(MakePlan(p));
    p.has_dbias = 1;
    const strobe_plan plan = MakePlan(p);
    // AMX makes no gradient of a bias.
    EXPECT_STRNE(plan.kernel, "cpu_amx");
    EXPECT_EQ(plan.problem.bias_dtype, STROBE_FLOAT16);
    EXPECT_EQ(plan.problem.dbias_dtype, STROBE_FLOAT16);
    EXPECT_EQ(plan.problem.bias_heads, 4);
    for (const strobe_strides& s : {plan.problem.bias, plan.problem.dbias}) {
      EXPECT_EQ(s.batch, 0);
      EXPECT_EQ(s.seqlen, 0);
      EXPECT_EQ(s.head, 100);
      EXPECT_EQ(s.dim, 1);
    }
    const std::string text = Text(plan), type = dtype == STROBE_FLOAT16 ? "" : " fp16";
    EXPECT_NE(text.find(", bias" + type + " of all sequences of all queries,"), std::string::npos)
        << text;
    EXPECT_NE(text.find(", dbias"), std::string::npos) << text;
    EXPECT_EQ(without_dbias.find("dbias"), std::string::npos) << without_dbias;
    p.has_bias = p.has_dbias = 0;
    EXPECT_EQ(Text(MakePlan(p)).find("bias"), std::string::npos) << Text(MakePlan(p));
  }
}

// A thread holds a tile of a bias and a piece of its gradient, and nobody more of them.
TEST(Plan, ABiasTakesNoMemory) {
  for (const strobe_direction direction : kDirections) {
    strobe_problem p = MakeProblem(direction, 1000, 4);
    p.threads = 1;
    const size_t without = MakePlan(p).workspace_bytes;
    p.has_bias = 1;
    const size_t with_bias = MakePlan(p).workspace_bytes;
    EXPECT_LE(with_bias, without + (64 << 10));
    if (direction == STROBE_FORWARD) continue;
    p.has_dbias = 1;
    EXPECT_LE(MakePlan(p).workspace_bytes, with_bias + (32 << 10));
  }
}

TEST(Plan, WhyNamesEveryKernelOfTheDevice) {
  const strobe_problem p = MakeProblem(STROBE_FORWARD, 100);
  std::string text(strobe_why(&p, nullptr, 0) + 1, '\0');
  strobe_why(&p, text.data(), text.size());
  int32_t kernels = 0;
  for (; strobe_kernel_name(kernels); ++kernels) {
    const std::string name = strobe_kernel_name(kernels);
    if (name.rfind("cpu", 0) != 0) continue;
    EXPECT_NE(text.find(name), std::string::npos) << text << "lacks " << name;
  }
  EXPECT_GT(kernels, 0);
  EXPECT_EQ(strobe_kernel_name(kernels), nullptr);
  EXPECT_EQ(strobe_kernel_name(-1), nullptr);
  EXPECT_NE(text.find("takes it"), std::string::npos) << text;
}

TEST(Plan, CutsASingleTileOfQueriesForItsThreads) {
  strobe_problem p = MakeProblem(STROBE_FORWARD, 2000);
  p.dtype = STROBE_FLOAT32;
  struct {
    int64_t queries;
    int32_t threads, items;
  } const cases[] = {{53, 1, 1}, {53, 2, 2}, {53, 3, 2}, {53, 8, 4}, {28, 2, 2}, {28, 8, 2}};
  for (const auto& c : cases) {
    p.seqlen_q = c.queries;
    p.threads = c.threads;
    const strobe_plan plan = MakePlan(p);
    EXPECT_EQ(plan.threads, c.items) << c.queries << " queries, threads " << c.threads;
    EXPECT_EQ(plan.work_items, c.items) << c.queries << " queries, threads " << c.threads;
  }
  p.heads = p.heads_kv = 8;  // tiles enough
  EXPECT_EQ(MakePlan(p).work_items, 8);
}

TEST(Plan, UsesTheThreadsThatItIsGiven) {
  for (const strobe_direction direction : kDirections) {
    strobe_problem p = MakeProblem(direction, 8192);  // one head: the sequence itself must be split
    for (const int32_t threads : {1, 2, 3, 5, 8, 16}) {
      p.threads = threads;
      const strobe_plan plan = MakePlan(p);
      EXPECT_EQ(plan.threads, threads);
      EXPECT_GE(plan.work_items, threads);
    }
    p.threads = 0;
    omp_set_num_threads(3);
    EXPECT_EQ(MakePlan(p).threads, 3);
    omp_set_num_threads(1);
    EXPECT_EQ(MakePlan(p).threads, 1);
    // Never more than there is to do, nor than asked for.
    strobe_problem tiny = MakeProblem(direction, 1);
    tiny.threads = 64;
    EXPECT_LE(MakePlan(tiny).threads, 64);
    EXPECT_GE(MakePlan(tiny).threads, 1);
  }
}

TEST(Plan, WorkspaceGrowsNoFasterThanTheSequence) {
  for (const strobe_direction direction : kDirections) {
    for (const strobe_dtype dtype : kTypes) {
      for (const int32_t threads : {1, 4, 16}) {
        for (const int32_t deterministic : {0, 1}) {
          strobe_problem p = MakeProblem(direction, 1024);
          p.dtype = dtype;
          p.threads = threads;
          p.deterministic = deterministic;
          size_t before = MakePlan(p).workspace_bytes;
          while (p.seqlen_q < 1 << 20) {
            p.seqlen_q = p.seqlen_k = p.seqlen_q * 2;
            const size_t now = MakePlan(p).workspace_bytes;
            EXPECT_LE(now, 2 * before + (1u << 20))
                << "direction " << direction << ", dtype " << dtype << ", threads " << threads
                << ", seqlen " << p.seqlen_q << ": " << before << " then " << now;
            if (p.seqlen_q == 131072 && threads <= 4) {
              EXPECT_LT(now, 64u << 20);
            }
            before = now;
          }
        }
      }
    }
  }
}

// The lengths of a batch that is packed end to end are known at the launch; the plan has a bound.
TEST(Plan, ABoundFarAboveTheLengthsCostsNothing) {
  for (const strobe_direction direction : kDirections) {
    for (const int64_t batch : {1, 3, 1000}) {
      strobe_problem p = MakeProblem(direction, 64, 2);
      p.varlen = 1;
      p.batch = batch;
      p.total_q = p.total_k = batch * 64;
      p.threads = 2;
      const strobe_plan close = MakePlan(p);
      p.seqlen_q = p.seqlen_k = INT32_MAX;
      const strobe_plan far = MakePlan(p);
      // A bound above the total says nothing; with packed blocks each sequence may have one more.
      EXPECT_LE(far.work_items, 8 * close.work_items + 8) << Text(far);
      EXPECT_LE(far.workspace_bytes, 2 * close.workspace_bytes + (4u << 20)) << Text(far);
    }
  }
}

TEST(Plan, ALaunchWithABoundFarAboveTheLengthsTakesNoTime) {
  constexpr int64_t kHeads = 2, kDim = 64;
  for (const std::vector<int32_t>& cu :
       {std::vector<int32_t>{0, 64}, std::vector<int32_t>{0, 0, 1, 400, 401, 401, 600}}) {
    const int64_t total = cu.back();
    std::vector<float> x(static_cast<size_t>(total * kHeads * kDim));
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7919 % 1000) * 1e-3f - 0.5f;
    std::vector<float> lse(static_cast<size_t>(total * kHeads)), out(x), dq(x), dk(x), dv(x);
    std::vector<float> first;
    for (const int64_t bound : {int64_t{400}, int64_t{INT32_MAX}}) {
      for (const int32_t threads : {1, 3}) {
        const auto start = std::chrono::steady_clock::now();
        strobe_problem p = MakeProblem(STROBE_FORWARD, bound, kHeads, kDim);
        p.varlen = p.causal = p.deterministic = p.batch_invariant = 1;
        p.batch = static_cast<int64_t>(cu.size()) - 1;
        p.total_q = p.total_k = total;
        p.threads = threads;
        const strobe_plan forward = MakePlan(p);
        p.direction = STROBE_BACKWARD;
        const strobe_plan backward = MakePlan(p);
        strobe_forward_args f{};
        f.struct_size = sizeof f;
        f.q = f.k = f.v = x.data();
        f.out = out.data();
        f.lse = lse.data();
        f.cu_seqlens_q = f.cu_seqlens_k = cu.data();
        ASSERT_EQ(strobe_forward(&forward, &f), STROBE_OK) << strobe_last_error();
        strobe_backward_args b{};
        b.struct_size = sizeof b;
        b.q = b.k = b.v = b.dout = x.data();
        b.out = out.data();
        b.lse = lse.data();
        b.dq = dq.data();
        b.dk = dk.data();
        b.dv = dv.data();
        b.cu_seqlens_q = b.cu_seqlens_k = cu.data();
        ASSERT_EQ(strobe_backward(&backward, &b), STROBE_OK) << strobe_last_error();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        EXPECT_LT(took.count(), 60.0);  // work in proportion to the bound would take hours
        // batch_invariant: nor do the bits depend on the bound.
        std::vector<float> all(out);
        for (const auto* more : {&dq, &dk, &dv}) all.insert(all.end(), more->begin(), more->end());
        if (first.empty()) first = all;
        EXPECT_TRUE(all == first) << "bound " << bound << ", threads " << threads;
      }
    }
  }
}

TEST(Plan, TakesProblemsWithNothingInThem) {
  for (const strobe_direction direction : kDirections) {
    for (const int64_t q : {0, 5}) {
      for (const int64_t k : {0, 5}) {
        strobe_problem p = MakeProblem(direction, q);
        p.seqlen_k = k;
        const strobe_plan plan = MakePlan(p);
        EXPECT_GE(plan.threads, 1);
        EXPECT_FALSE(Text(plan).empty());
        p.varlen = 1;
        p.batch = 3;
        p.total_q = q;
        p.total_k = k;
        MakePlan(p);
      }
    }
  }
}

TEST(Plan, FollowsTheForcedInstructionSet) {
  strobe_machine machine;
  machine.struct_size = sizeof machine;
  ASSERT_EQ(strobe_machine_info(&machine), STROBE_OK);
  const std::string all = std::string(" ") + machine.cpu_isas + " ";
  EXPECT_NE(all.find(" portable "), std::string::npos) << all;
  const char* const forced = std::getenv("STROBE_CPU_ISA");
  if (!forced || !*forced) {  // the widest
    EXPECT_EQ(all.find(machine.cpu_isa), 1u) << all;
    return;
  }
  if (all.find(" " + std::string(forced) + " ") == std::string::npos)
    GTEST_SKIP() << "no " << forced << " here";
  EXPECT_STREQ(machine.cpu_isa, forced);
  strobe_problem p = MakeProblem(STROBE_FORWARD, 100);
  p.dtype = STROBE_BFLOAT16;  // what AMX takes
  EXPECT_EQ(std::string(MakePlan(p).kernel), std::string("cpu_") + forced);
}

}  // namespace
