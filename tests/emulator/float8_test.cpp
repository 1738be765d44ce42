// Float8 attention through mma.sync on the CPU (run_time.h), planned by the CUDA back end for a
// device that is not there, against float64 over what the codes stand for.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "forward_agreement.h"
#include "hopper_case.h"
#include "odd_scales.h"
#include "random_cases.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;

/// A case with a head dim of one of the instances. Products are of fp16, and weights too: out in
/// float32 is held against those, not against float32's.
Case DrawCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    Case c = GenerateFloat8Case(seed + (again << 32)).WithoutBias();
    Rng rng(seed ^ again << 40 ^ 0xF80Au);
    c.dtype = rng.Chance(0.5) ? DType::kBFloat16 : DType::kFloat16;
    const int64_t widths[] = {64, 128, 256};
    const int64_t width = rng.Pick(widths);
    if (rng.Chance(0.5)) c.head_dim = rng.Integer(std::max<int64_t>(1, width - 63), width);
    if (rng.Chance(0.5)) c.head_dim_v = c.head_dim;
    if (rng.Chance(0.4)) {
      c.head_dim = (c.head_dim + 7) / 8 * 8, c.head_dim_v = (c.head_dim_v + 7) / 8 * 8;
    }
    if (Steps(c) <= 100) return c;
  }
}

Case Draw(uint64_t seed) {
  DrawHopper(seed);
  auto& machine = strobe::emulator::machine();
  machine.devices[0].compute_capability = 80;
  machine.devices[0].shared_bytes = 99 << 10;
  machine.forced_instance = "forward_sm80";
  return DrawCase(seed);
}

Fixture::ForwardLaunch InTheEmulator(WorkspaceHolds holds) {
  return [holds](const strobe_problem& p, const strobe_forward_args& args) {
    return LaunchInTheEmulator(80, p, args, holds);
  };
}

TEST(EmulatedFloat8, RandomProblemsAgreeWithTheOracle) {
  ExpectAgreement(Seeds::ByEnvironment(kHopperCases), Draw, InTheEmulator, IsCase);
  strobe::emulator::machine().forced_instance.clear();
}

TEST(EmulatedFloat8, InfinitiesAgreeWithTheOracle) {
  ExpectAgreement(Seeds{1000, kHopperCases / 3}, Draw, InTheEmulator, HasInfinities);
  strobe::emulator::machine().forced_instance.clear();
}

TEST(EmulatedFloat8, ScalesMayBeAnything) {
  const auto draw = [](uint64_t seed) {
    Case c = Draw(seed);
    GiveScales(c);
    return c;
  };
  ExpectAgreement(Seeds{2000, kHopperCases}, draw, InTheEmulator, IsCase,
                  [](const Fixture& f, uint64_t seed) {
                    Rng rng(seed ^ 0xED17u);
                    MakeScalesOdd(f, rng);
                  });
  strobe::emulator::machine().forced_instance.clear();
}

// What these kernels do not take is declined with its reason.
TEST(EmulatedFloat8, WhatIsDeclinedSaysWhy) {
  Case c = DrawCase(3);
  Draw(3);
  auto& machine = strobe::emulator::machine();
  machine.forced_instance.clear();
  strobe_problem p = Fixture(c).MakeProblem(STROBE_FORWARD);
  strobe::resolve_defaults(p);
  EXPECT_EQ(strobe::cuda::choose_instance(80, p, machine.devices[0]).reason, "");
  strobe_problem biased = p;
  biased.has_bias = 1;
  EXPECT_NE(strobe::cuda::choose_instance(80, biased, machine.devices[0]).reason.find("bias"),
            std::string::npos);
  machine.devices[0].compute_capability = 75;
  EXPECT_EQ(strobe::cuda::choose_instance(75, p, machine.devices[0]).reason,
            "dtype = float8 e4m3, expected fp16 (float8 queries have kernels from 8.0 on)");
}

}  // namespace
}  // namespace strobe_test
