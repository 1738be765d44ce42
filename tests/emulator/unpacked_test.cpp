// Quantised caches that are unpacked first, on the CPU (run_time.h): many queries, or wide heads,
// by the kernels for float caches of mma.sync and of Hopper, against float64 over what the codes
// stand for.
//
//   STROBE_EMULATOR_CASES, STROBE_EMULATOR_SEED   as in decode_test.cpp
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "cache_fixture.h"
#include "cuda/host/instance_choice.h"
#include "emulated_launch.h"
#include "environment.h"
#include "hopper_case.h"
#include "random_cases.h"
#include "run_time.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;

constexpr uint64_t kCases = kSanitized ? 12 : 120;

bool IsEmulated(DType dtype) {
  return (dtype == DType::kBFloat16 && STROBE_EMULATES_cached_bf16) ||
         (dtype == DType::kFloat16 && STROBE_EMULATES_cached_fp16);
}

/// A case of the quantised ones, every fourth of them under a mask as data; of every fourth keys
/// and values have different dtypes; every third has a bias.
CacheCase DrawCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    const uint64_t draw = seed + (again << 32);
    CacheCase c =
        seed % 4 == 1 ? GenerateMixedCacheCase(draw) : GenerateQuantisedCase(draw, seed % 4 == 3);
    if (seed % 3 == 2) c = WithBias(c);
    if (c.mask.there || c.has_bias) c.batch_invariant = false;  // a plan declines both
    if (IsEmulated(c.dtype)) return c;
  }
}

// Those that the planner unpacks by itself go as it plans them, the others to kernels for float
// caches because these are asked for.
TEST(EmulatedUnpacked, RandomProblemsAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "the kernels that attend run so in EmulatedDecode";
  ExpectNoneIsWrong(Seeds::ByEnvironment(kCases), [&](uint64_t seed) {
    const CacheCase c = DrawCase(seed);
    auto& device = strobe::emulator::machine().devices[0];
    Rng rng(seed ^ 0x0ACEu);
    device.compute_capability = 80;
    device.multiprocessors = static_cast<int>(rng.Integer(1, 7));
    device.shared_bytes = 163 << 10;
    strobe::emulator::settings().seed = seed;
    CacheFixture f(c);
    strobe_problem p = f.Problem();
    p.device = STROBE_CUDA;
    strobe::Plan plan{};
    strobe::emulator::machine().forced_instance.clear();
    if (!strobe::cuda::plan_for(p, device, plan).ok() || !plan.unpacks_first) {
      strobe::emulator::machine().forced_instance =
          std::string("cached_sm80_") + (c.dtype == DType::kBFloat16 ? "bf16_" : "fp16_") +
          (std::max(c.head_dim, c.head_dim_v) > 128 ? "256" : "128") + "_";
    }
    std::string wrong = f.Run(ThroughTheEmulator(static_cast<WorkspaceHolds>(seed % 3)));
    if (wrong.empty() && !f.unpacks_first()) wrong = "the plan does not unpack first";
    if (wrong.empty()) wrong = f.Judge();
    return Verdict{wrong, ToString(c)};
  });
  strobe::emulator::machine().forced_instance.clear();
}

// A sequence whose entry of the cache is none gets NaN.
TEST(EmulatedUnpacked, EntriesOutOfRangeGiveNaN) {
  int tried = 0;
  for (uint64_t seed = 9000; tried < 6; ++seed) {
    const CacheCase c = DrawCase(seed);
    if (c.paged || !c.with_entries || c.mask.there || c.sequences[0].used_queries == 0 ||
        c.sequences[0].used + c.sequences[0].added == 0)
      continue;
    ++tried;
    auto& device = strobe::emulator::machine().devices[0];
    device.compute_capability = 80;
    device.multiprocessors = 3;
    device.shared_bytes = 163 << 10;
    strobe::emulator::settings().seed = seed;
    strobe::emulator::machine().forced_instance =
        std::string("cached_sm80_") + (c.dtype == DType::kBFloat16 ? "bf16_" : "fp16_") +
        (std::max(c.head_dim, c.head_dim_v) > 128 ? "256" : "128") + "_";
    CacheFixture f(c);
    f.entries[0] = seed % 2 ? -1 : static_cast<int32_t>(c.entries);
    strobe_forward_args args = f.Args();
    ASSERT_EQ(ThroughTheEmulator(WorkspaceHolds::kZeros)(f.Problem(), args), STROBE_OK)
        << ToString(c);
    int finite = 0;
    f.out.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
      if (row < c.sequences[0].used_queries && !std::isnan(f.out.Get(e))) ++finite;
    });
    EXPECT_EQ(finite, 0) << "seed " << seed << "\n" << ToString(c);
  }
  strobe::emulator::machine().forced_instance.clear();
}

}  // namespace
}  // namespace strobe_test
