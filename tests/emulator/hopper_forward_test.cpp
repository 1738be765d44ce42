// The Hopper forward kernels on the CPU (run_time.h), planned by the CUDA back end for devices that
// are not there, against float64.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "cuda/host/row_table.h"
#include "emulated_launch.h"
#include "environment.h"
#include "fixture.h"
#include "hopper_case.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;

std::span<const strobe::cuda::Entry<strobe::cuda::ForwardRow>> Rows() {
  return strobe::cuda::row_table<strobe::cuda::ForwardRow>();
}

/// A case of problem_gen.h, with what these kernels decline left out, in a dtype and with head dims
/// of the rows that there are.
Case DrawCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    Case c = GenerateCase(seed + (again << 32));
    Rng rng(seed ^ again << 40 ^ 0xF0A4Du);
    const auto& row =
        Rows()[static_cast<size_t>(rng.Integer(0, static_cast<int64_t>(Rows().size()) - 1))]
            .row->config;
    c.dtype = row.dtype == STROBE_BFLOAT16 ? DType::kBFloat16 : DType::kFloat16;
    if (rng.Chance(0.5)) c.head_dim = rng.Integer(std::max(1, row.width - 63), row.width);
    if (rng.Chance(0.5)) c.head_dim_v = c.head_dim;
    c.head_dim_v = (c.head_dim_v + 7) / 8 * 8;  // of which TMA stores whole units
    if (std::max(c.head_dim, c.head_dim_v) > Rows().back().row->config.width) continue;
    c.dropout_p = 0;
    c.batch_invariant = rng.Chance(0.15);
    if (!MakeHopperCase(c)) continue;
    MakeAligned(c.out, c.head_dim_v, c.batch_invariant);
    return c;
  }
}

Fixture::ForwardLaunch InTheEmulator(WorkspaceHolds holds) {
  return [holds](const strobe_problem& p, const strobe_forward_args& args) {
    return LaunchInTheEmulator(90, p, args, holds);
  };
}

TEST(EmulatedHopperForward, RandomProblemsAgreeWithTheOracle) {
  // Both warpgroups write the same zeros to rows that are not in use (tile_rows.cuh).
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  const uint64_t first = FromEnvironment("STROBE_EMULATOR_SEED", 1);
  const uint64_t count = FromEnvironment("STROBE_EMULATOR_CASES", kHopperCases);
  int failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < 5; ++seed) {
    const Case c = DrawCase(seed);
    DrawHopper(seed);
    Fixture f(c);
    std::string wrong = f.Forward(InTheEmulator(HoldsOf(seed)), true);
    if (wrong.empty()) wrong = CompareForward(f);
    if (wrong.empty()) continue;
    ++failures;
    ADD_FAILURE() << "STROBE_EMULATOR_SEED=" << seed << " STROBE_EMULATOR_CASES=1: " << wrong
                  << "\n"
                  << ToString(c);
  }
}

}  // namespace
}  // namespace strobe_test
