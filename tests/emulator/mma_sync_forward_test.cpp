// The forward kernels through mma.sync on the CPU (run_time.h), planned by the CUDA back end for
// devices that are not there, against float64. Half of the problems have a bias, which on GPUs
// these kernels alone take.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "environment.h"
#include "fixture.h"
#include "hopper_case.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;

std::span<const strobe::cuda::Entry<strobe::cuda::ForwardInstance>> Instances() {
  return strobe::cuda::instance_table<strobe::cuda::ForwardInstance>();
}

/// A case of problem_gen.h in a dtype and with head dims of the instances that there are.
Case DrawCase(uint64_t seed, bool bias) {
  for (uint64_t again = 0;; ++again) {
    Case c = GenerateCase(seed + (again << 32));
    if (c.has_bias != bias) continue;
    Rng rng(seed ^ again << 40 ^ 0x80F4u);
    c.dtype = DType::kBFloat16;
    if (c.bias.same_dtype) c.bias.dtype = c.dtype;
    const int64_t widest = Instances().back().instance->config.width;
    if (rng.Chance(0.5)) c.head_dim = rng.Integer(1, widest);
    if (rng.Chance(0.5)) c.head_dim_v = c.head_dim;
    if (kUnderTsan) c.special = Special::kNone;  // flags of NaN are set by several threads alike
    if (std::max(c.head_dim, c.head_dim_v) <= widest && Steps(c) <= 60) return c;  // a second
  }
}

Fixture::ForwardLaunch InTheEmulator(WorkspaceHolds holds) {
  return [holds](const strobe_problem& p, const strobe_forward_args& args) {
    return LaunchInTheEmulator(80, p, args, holds);
  };
}

TEST(EmulatedMmaSyncForward, RandomProblemsAgreeWithTheOracle) {
  const uint64_t first = FromEnvironment("STROBE_EMULATOR_SEED", 1);
  const uint64_t count = FromEnvironment("STROBE_EMULATOR_CASES", kHopperCases);
  int failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < 5; ++seed) {
    const Case c = DrawCase(seed, seed % 2 == 1);
    DrawHopper(seed);
    auto& machine = strobe::emulator::machine();
    machine.devices[0].compute_capability = 80;
    machine.devices[0].shared_bytes = 163 << 10;
    machine.forced_instance = "forward_sm80_";  // few queries would go another way
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
