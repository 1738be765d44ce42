// The forward kernels through mma.sync on the CPU (run_time.h), planned by the CUDA back end for
// devices that are not there, against float64. Half of the problems have a bias, and half a mask as
// data, which on GPUs these kernels alone take.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "float_out.h"
#include "forward_agreement.h"
#include "forward_masks.h"
#include "hopper_case.h"
#include "random_cases.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;

std::span<const strobe::cuda::Entry<strobe::cuda::ForwardInstance>> Instances() {
  return strobe::cuda::instance_table<strobe::cuda::ForwardInstance>();
}

/// The architecture that the program has instances of: 8.0, or 7.5.
int Arch() { return Instances().front().instance->config.arch; }

const strobe::cuda::Entry<strobe::cuda::ForwardInstance>& Pick(Rng& rng) {
  return Instances()[static_cast<size_t>(
      rng.Integer(0, static_cast<int64_t>(Instances().size()) - 1))];
}

/// A case of problem_gen.h in a dtype and with head dims of the instances that there are.
Case DrawCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    const uint64_t drawn = seed + (again << 32);
    Case c = seed / 2 % 2 == 1 ? GenerateMaskedCase(drawn) : GenerateCase(drawn);
    if (c.has_bias != (seed % 2 == 1)) continue;
    Rng rng(seed ^ again << 40 ^ 0x80F4u);
    const auto& config = Pick(rng).instance->config;
    c.dtype = config.dtype == STROBE_BFLOAT16 ? DType::kBFloat16 : DType::kFloat16;
    // A dimension of an instance's own more often than the generator draws one, and rows of whole
    // 16-byte units, which the plain kernel takes.
    if (rng.Chance(0.5)) c.head_dim = rng.Integer(std::max(1, config.width - 63), config.width);
    if (rng.Chance(0.5)) c.head_dim_v = c.head_dim;
    if (rng.Chance(0.6)) {
      c.head_dim = (c.head_dim + 7) / 8 * 8, c.head_dim_v = (c.head_dim_v + 7) / 8 * 8;
      MakeAligned(c.out, c.head_dim_v, c.batch_invariant);
      if (!MakeHopperCase(c)) continue;
      c.DropDropout();
      c.softcap = 0, c.alibi = STROBE_ALIBI_NONE;
    }
    const int64_t widest = Instances().back().instance->config.width;
    if (std::max(c.head_dim, c.head_dim_v) <= widest && Steps(c) <= 100) return c;
  }
}

/// Draws a device, an order of threads, and an instance now and then. (Where no instance is forced,
/// few queries would go to the kernels that divide keys.)
void DrawMachine(uint64_t seed) {
  DrawHopper(seed);
  Rng rng(seed ^ 0x80F111u);
  auto& machine = strobe::emulator::machine();
  machine.devices[0].compute_capability = Arch();
  machine.devices[0].shared_bytes = Arch() == 75 ? 64 << 10 : 163 << 10;
  machine.forced_instance =
      rng.Chance(0.4) ? Pick(rng).name : "forward_sm" + std::to_string(Arch());
}

Fixture::ForwardLaunch InTheEmulator(WorkspaceHolds holds) {
  return [holds](const strobe_problem& p, const strobe_forward_args& args) {
    return LaunchInTheEmulator(Arch(), p, args, holds);
  };
}

Case Draw(uint64_t seed) {
  DrawMachine(seed);
  return DrawCase(seed);
}

TEST(EmulatedMmaSyncForward, RandomProblemsAgreeWithTheOracle) {
  ExpectAgreement(Seeds::ByEnvironment(kHopperCases), Draw, InTheEmulator, IsCase);
  strobe::emulator::machine().forced_instance.clear();
}

// V's are left out of the products and come in afterwards: with weights that are 0 as well, since
// the scores of the same key may be infinite too.
TEST(EmulatedMmaSyncForward, InfinitiesAgreeWithTheOracle) {
  ExpectAgreement(Seeds{1000, kHopperCases}, Draw, InTheEmulator, HasInfinities);
  strobe::emulator::machine().forced_instance.clear();
}

// What a bias kernel reads has to be there, whoever asks for the kernel.
TEST(EmulatedMmaSyncForward, AKernelWithABiasTakesNoProblemWithoutOne) {
  using strobe::cuda::features::kBias;
  Case c = DrawCase(4);  // without one, and without a mask as data
  auto& machine = strobe::emulator::machine();
  DrawMachine(4);
  strobe_problem p = Fixture(c).MakeProblem(STROBE_FORWARD);
  strobe::resolve_defaults(p);
  int asked = 0;
  for (const auto& entry : Instances()) {
    if (!entry.instance->computes.has(kBias)) continue;
    ++asked;
    machine.forced_instance = entry.name;
    const auto choice = strobe::cuda::choose_instance(Arch(), p, machine.devices[0]);
    EXPECT_EQ(choice.reason, "") << entry.name;
    EXPECT_NE(choice.name, entry.name);
  }
  EXPECT_GT(asked, 0);
  machine.forced_instance.clear();
}

TEST(EmulatedMmaSyncForward, RowsThatAMaskHasNoRoomForAreNaN) {
  ExpectRowsWithoutRoomAreNaN(Arch(), 2, kHopperCases, 4, Draw);
  strobe::emulator::machine().forced_instance.clear();
}

TEST(EmulatedMmaSyncForward, WordsThatAreNoMaskLeadNowhere) {
  ExpectHostileMasksLeadNowhere(Arch(), 2, 2 * kHopperCases, 4, Draw);
  ExpectHostileMasksLeadNowhere(Arch(), 3, 2 * kHopperCases, 4, Draw);
  strobe::emulator::machine().forced_instance.clear();
}

TEST(EmulatedMmaSyncForward, Float32OutIsWhatIsRounded) {
  int64_t unrounded = 0;
  for (uint64_t seed = 1; seed <= kHopperCases / 4; ++seed) {
    const Case c = DrawCase(seed);
    DrawMachine(seed);
    const std::string wrong =
        CompareFloatOut(c, InTheEmulator(WorkspaceHolds::kNumbers), &unrounded);
    EXPECT_EQ(wrong, "") << ToString(c);
  }
  EXPECT_GT(unrounded, 1000);
  strobe::emulator::machine().forced_instance.clear();
}

}  // namespace
}  // namespace strobe_test
