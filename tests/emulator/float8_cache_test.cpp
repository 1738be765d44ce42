// Float8 queries over a cache on the CPU (run_time.h), planned by the CUDA back end for devices
// that are not there, against float64 over what the codes stand for: as bf16 queries by the decode
// kernels for codes, and over unpacked codes by those for float caches and by Hopper's.
//
//   STROBE_EMULATOR_CASES, STROBE_EMULATOR_SEED   as in decode_test.cpp
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cache_fixture.h"
#include "cuda/host/instance_choice.h"
#include "cuda/host/launch.h"
#include "emulated_launch.h"
#include "environment.h"
#include "gpu/plan_for.h"
#include "hopper_case.h"
#include "odd_scales.h"
#include "prompt_case.h"
#include "random_cases.h"
#include "run_time.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Form;
using oracle::Rng;

constexpr uint64_t kCases = kSanitized ? 24 : 240;

/// Weights are bf16, and so is what is held against; out is of any dtype.
void DrawOut(CacheCase& c, Rng& rng) {
  const DType dtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  c.dtype = DType::kBFloat16;
  c.out_dtype = rng.Pick(dtypes);
}

/// Every sixth under a mask as data, every fourth with a bias.
CacheCase DrawCase(uint64_t seed) {
  const bool masked = seed % 6 == 5;
  CacheCase c = GenerateFloat8CacheCase(seed, masked);
  Rng rng(seed ^ 0xF8CA5Eu);
  DrawOut(c, rng);
  if (seed % 4 == 3) c = WithBias(c);
  if (masked || c.has_bias) c.batch_invariant = false;  // a plan declines both
  return c;
}

strobe::cuda::InstanceChoice Chosen(const CacheFixture& f) {
  strobe_problem p = f.Problem();
  p.device = STROBE_CUDA;
  strobe::resolve_defaults(p);
  return strobe::cuda::choose_instance(80, p, strobe::emulator::machine().devices[0]);
}

/// codes: what the kernels for codes take goes there, also where the planner would unpack.
void DrawMachine(uint64_t seed, bool codes) {
  Rng rng(seed ^ 0xE111u);
  strobe::cuda::Machine& machine = DrawSmallDevice(rng);
  machine.forced_instance = codes ? "cached_sm80_bf16_e4m3_" : "";
  strobe::emulator::settings() = {};
  strobe::emulator::settings().seed = seed;
  strobe::emulator::settings().blocks_at_once = rng.Chance(0.5) ? 1 : 3;
}

using Change = std::function<void(CacheFixture&)>;
Verdict RunCase(const CacheCase& c, uint64_t seed, const Change& change = {}) {
  DrawMachine(seed, seed % 2 == 0);
  CacheFixture f(c);
  if (change) change(f);
  std::string wrong = f.Run(ThroughTheEmulator(static_cast<WorkspaceHolds>(seed % 4)));
  if (wrong.empty()) wrong = f.Judge();
  const std::string name = Chosen(f).name ? Chosen(f).name : "none";
  strobe::emulator::machine().forced_instance.clear();
  return {wrong, name + ": " + ToString(c)};
}

TEST(EmulatedFloat8Cache, RandomProblemsAgreeWithTheOracle) {
  int of_codes = 0;
  ExpectNoneIsWrong(Seeds::ByEnvironment(kCases), [&](uint64_t seed) {
    const Verdict verdict = RunCase(DrawCase(seed), seed);
    of_codes += verdict.problem.find("_e4m3_") != std::string::npos;
    return verdict;
  });
  EXPECT_GT(of_codes, 0);
}

TEST(EmulatedFloat8Cache, ScalesMayBeAnything) {
  ExpectNoneIsWrong(Seeds{20000, kCases / 2}, [&](uint64_t seed) {
    CacheCase c = DrawCase(seed);
    c.with_q_scale = true;
    c.scale_kind = STROBE_KV_SCALE_BATCH_HEAD;
    c.hostile = false;
    return RunCase(c, seed, [&](CacheFixture& f) {
      Rng rng(seed ^ 0xED17u);
      MakeScalesOdd(f, rng);
    });
  });
}

// Large and small ones: q's and k's whose product is as usual, and v's near the ends of out's type.
TEST(EmulatedFloat8Cache, ScalesMayBeLargeAndSmall) {
  ExpectNoneIsWrong(Seeds{30000, kCases / 4}, [&](uint64_t seed) {
    CacheCase c = DrawCase(seed);
    c.with_q_scale = true;
    c.scale_kind = STROBE_KV_SCALE_BATCH_HEAD;
    c.hostile = false;
    c.out_dtype = seed % 3 ? DType::kBFloat16 : DType::kFloat32;
    return RunCase(c, seed, [&](CacheFixture& f) {
      Rng rng(seed ^ 0x1A56Eu);
      const double up = std::ldexp(1.0, static_cast<int>(rng.Integer(-40, 40)));
      const double of_v = std::ldexp(1.0, static_cast<int>(rng.Integer(-60, 60)));
      for (const auto& [t, by] :
           {std::pair{&f.q_scale, up}, {&f.k_scale, 1 / up}, {&f.v_scale, of_v}}) {
        t->ForEach([&](int64_t, int64_t, int64_t, int64_t e) {
          t->Set(e, rng.Uniform(0.7, 1.4) / 16 * by);
        });
      }
    });
  });
}

TEST(EmulatedFloat8Cache, RandomPromptsOnHopperAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  ExpectNoneIsWrong(Seeds{1, kHopperCases}, [&](uint64_t seed) {
    const CacheCase c = DrawPromptCase(seed, true, [&](uint64_t draw) {
      CacheCase drawn = GenerateFloat8CacheCase(draw);
      Rng rng(draw ^ 0xF8CA5Eu);
      DrawOut(drawn, rng);
      return drawn;
    });
    DrawHopper(seed);
    strobe::emulator::machine().forced_instance = "cached_sm90_bf16_64";
    CacheFixture f(c);
    std::string wrong = f.Run(ThroughTheEmulator(HoldsOf(seed), 90));
    if (wrong.empty() && !f.unpacks_first()) wrong = "the plan says otherwise";
    if (wrong.empty()) wrong = f.Judge();
    return Verdict{wrong, ToString(c)};
  });
  strobe::emulator::machine().forced_instance.clear();
}

// Numbers that lead out of the cache make a sequence NaN, and are neither read nor written by.
TEST(EmulatedFloat8Cache, LengthsOutOfRangeGiveNaN) {
  int tried = 0;
  for (uint64_t seed = 9000; tried < 8; ++seed) {
    const CacheCase c = DrawCase(seed);
    if (!c.with_lengths || c.mask.there || c.sequences[0].used_queries == 0) continue;
    ++tried;
    DrawMachine(seed, seed % 2 == 0);
    CacheFixture f(c);
    f.used_k[0] = seed % 2 ? -1 : static_cast<int32_t>(c.most_rows) + 1;
    strobe_forward_args args = f.Args();
    ASSERT_EQ(ThroughTheEmulator()(f.Problem(), args), STROBE_OK) << ToString(c);
    f.out.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
      if (row < c.sequences[0].used_queries) {
        EXPECT_TRUE(std::isnan(f.out.Get(e))) << "seed " << seed << "\n" << ToString(c);
      }
    });
    EXPECT_EQ(f.out.memory->CheckZones("out"), "");
  }
  strobe::emulator::machine().forced_instance.clear();
}

// A captured launch has the codes and scales that are there when it is replayed.
TEST(EmulatedFloat8Cache, ReplaysReadCodesAndScalesAnew) {
  for (uint64_t seed = 400, tried = 0; tried < 6; ++seed) {
    CacheCase c = DrawCase(seed);
    if (c.mask.there || c.queries() == 0) continue;
    c.with_q_scale = true;
    c.scale_kind = STROBE_KV_SCALE_BATCH_HEAD;
    c.hostile = false;
    ++tried;
    DrawMachine(seed, seed % 2 == 0);
    CacheFixture f(c);
    strobe_problem p = f.Problem();
    p.device = STROBE_CUDA;
    strobe::Plan plan{};
    ASSERT_TRUE(strobe::cuda::plan_for(p, strobe::emulator::machine().devices[0], plan).ok());
    std::vector<std::byte> memory(plan.workspace_bytes + strobe::kWorkspaceAlignment);
    std::function<cudaError_t()> replay;
    const std::string wrong =
        f.Run([&](const strobe_problem&, strobe_forward_args& args) -> CacheFixture::Launched {
          auto at = reinterpret_cast<uintptr_t>(memory.data());
          at = (at + strobe::kWorkspaceAlignment - 1) / strobe::kWorkspaceAlignment *
               strobe::kWorkspaceAlignment;
          args.workspace = reinterpret_cast<void*>(at);
          args.workspace_bytes = plan.workspace_bytes;
          const auto turn = [&] {  // signs, and back
            for (const Strided* const t : {&f.q_scale, &f.k_scale, &f.v_scale, &f.q}) {
              t->ForEach([&](int64_t, int64_t, int64_t, int64_t e) {
                t->Set(e, -static_cast<double>(t->Get(e)));
              });
            }
          };
          turn();
          replay = strobe::emulator::capture(
              [&] { EXPECT_TRUE(strobe::cuda::launch(80, plan, args).ok()); });
          turn();
          if (replay() != cudaSuccess) return STROBE_INTERNAL_ERROR;
          return {STROBE_OK, plan.unpacks_first != 0};
        });
    EXPECT_EQ(wrong.empty() ? f.Judge() : wrong, "") << ToString(c);
  }
  strobe::emulator::machine().forced_instance.clear();
}

// Which kernels take it, what the plan says, and what is declined with its reason.
TEST(EmulatedFloat8Cache, PlansSayWhatIsDone) {
  auto& machine = strobe::emulator::machine();
  machine.forced_instance.clear();
  auto& device = machine.devices[0];
  device.compute_capability = 90;
  device.multiprocessors = 132;
  device.shared_bytes = 227 << 10;
  device.memory_bytes = int64_t{80} << 30;
  const auto problem = [](int32_t kv_dtype, int64_t queries, int64_t dim) {
    strobe_problem p;
    strobe_problem_init(&p, sizeof p);
    p.dtype = STROBE_FLOAT8_E4M3, p.kv_dtype = kv_dtype, p.device = STROBE_CUDA;
    p.kv_scale = STROBE_KV_SCALE_BATCH_HEAD, p.has_q_scale = 1;
    p.batch = 2, p.seqlen_q = queries, p.seqlen_k = 1024, p.heads = 8, p.heads_kv = 2;
    p.head_dim = dim, p.cache = STROBE_CACHE_PAGED, p.page_size = 16, p.pages = 200;
    p.pages_per_sequence = 64;
    return p;
  };
  const auto plan_of = [&](const strobe_problem& p, strobe::Plan& plan) {
    const strobe::Status s = strobe::cuda::plan_for(p, device, plan);
    return s.ok() ? std::string(plan.kernel) + " " + plan.instance_name : s.text();
  };
  strobe::Plan plan{};
  EXPECT_EQ(plan_of(problem(STROBE_FLOAT8_E4M3, 1, 128), plan),
            "cuda_sm80 cached_sm80_bf16_e4m3_128_8x32x2x4_plain");
  EXPECT_EQ(strobe::cuda::remark_on(plan, device),
            "queries of float8 e4m3 are written as bf16 in the workspace first");
  EXPECT_EQ(plan_of(problem(STROBE_FLOAT8_E5M2, 1, 64), plan).find("cuda_sm80 cached_sm80_bf16_64"),
            0);
  EXPECT_EQ(strobe::cuda::remark_on(plan, device),
            "queries of float8 e4m3 are written as bf16 in the workspace first; codes of float8 "
            "e5m2 are unpacked to bf16 in the workspace first");
  EXPECT_EQ(plan_of(problem(STROBE_FLOAT8_E4M3, 512, 64), plan).find("cuda_sm90 cached_sm90_bf16"),
            0);
  const auto reason = [&](int arch, strobe_problem p) {
    strobe::resolve_defaults(p);
    return strobe::cuda::choose_instance(arch, p, device).reason;
  };
  strobe_problem biased = problem(STROBE_FLOAT8_E4M3, 1, 64);
  biased.has_bias = 1;
  EXPECT_EQ(plan_of(biased, plan), "cuda_sm80 cached_sm80_bf16_64_16x32x3x4_mask");
  EXPECT_TRUE(plan.unpacks_first);
  EXPECT_NE(reason(90, problem(STROBE_FLOAT8_E4M3, 1, 64)).find("few queries"), std::string::npos)
      << reason(90, problem(STROBE_FLOAT8_E4M3, 1, 64));
  device.compute_capability = 75;
  EXPECT_EQ(reason(75, problem(STROBE_FLOAT8_E4M3, 1, 64)),
            "dtype = float8 e4m3, expected fp16 (float8 queries have kernels from 8.0 on)");
  device.compute_capability = 80;
}

}  // namespace
}  // namespace strobe_test
