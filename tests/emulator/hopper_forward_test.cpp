// The Hopper forward kernels on the CPU (run_time.h), planned by the CUDA back end for devices that
// are not there, against float64.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "environment.h"
#include "float_out.h"
#include "forward_agreement.h"
#include "hopper_case.h"

namespace strobe_test {
namespace {

using oracle::Rng;

std::span<const strobe::cuda::Entry<strobe::cuda::ForwardInstance>> Instances() {
  return strobe::cuda::instance_table<strobe::cuda::ForwardInstance>();
}

Case DrawCase(uint64_t seed) {
  Case c = DrawHopperCase(Instances(), seed, [](Case& drawn, Rng& rng) {
    drawn.head_dim_v = (drawn.head_dim_v + 7) / 8 * 8;  // of which TMA stores whole units
    drawn.DropDropout();
    drawn.batch_invariant = rng.Chance(0.15);
  });
  MakeAligned(c.out, c.head_dim_v, c.batch_invariant);
  return c;
}

Fixture::ForwardLaunch InTheEmulator(WorkspaceHolds holds) {
  return [holds](const strobe_problem& p, const strobe_forward_args& args) {
    return LaunchInTheEmulator(90, p, args, holds);
  };
}

Case Draw(uint64_t seed) {
  DrawHopper(seed);
  return DrawCase(seed);
}

TEST(EmulatedHopperForward, RandomProblemsAgreeWithTheOracle) {
  // Both warpgroups write the same zeros to rows that are not in use (tile_rows.cuh).
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  ExpectAgreement(FromEnvironment("STROBE_EMULATOR_SEED", 1),
                  FromEnvironment("STROBE_EMULATOR_CASES", kHopperCases), Draw, InTheEmulator,
                  IsCase);
}

TEST(EmulatedHopperForward, InfinitiesAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "cases have none there";
  ExpectAgreement(1000, kHopperCases / 3, Draw, InTheEmulator, HasInfinities);
}

// All rows in use or not: the kernel for float32 is another one than that for 16 bits then.
TEST(EmulatedHopperForward, Float32OutIsWhatIsRounded) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  int64_t unrounded = 0;
  for (uint64_t seed = 1; seed <= kHopperCases / 4; ++seed) {
    const Case c = DrawCase(seed);
    DrawHopper(seed);
    const std::string wrong =
        CompareFloatOut(c, InTheEmulator(WorkspaceHolds::kNumbers), &unrounded);
    EXPECT_EQ(wrong, "") << ToString(c);
  }
  EXPECT_GT(unrounded, 1000);
}

}  // namespace
}  // namespace strobe_test
