// The forward kernels through mma.sync on the CPU (run_time.h), planned by the CUDA back end for
// devices that are not there, against float64. Half of the problems have a bias, and half a mask as
// data, which on GPUs these kernels alone take.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "environment.h"
#include "float_out.h"
#include "forward_agreement.h"
#include "hopper_case.h"
#include "hostile_mask.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;

std::span<const strobe::cuda::Entry<strobe::cuda::ForwardInstance>> Instances() {
  return strobe::cuda::instance_table<strobe::cuda::ForwardInstance>();
}

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
  machine.devices[0].compute_capability = 80;
  machine.devices[0].shared_bytes = 163 << 10;
  machine.forced_instance = rng.Chance(0.4) ? Pick(rng).name : "forward_sm80_";
}

Fixture::ForwardLaunch InTheEmulator(WorkspaceHolds holds) {
  return [holds](const strobe_problem& p, const strobe_forward_args& args) {
    return LaunchInTheEmulator(80, p, args, holds);
  };
}

Case Draw(uint64_t seed) {
  DrawMachine(seed);
  return DrawCase(seed);
}

TEST(EmulatedMmaSyncForward, RandomProblemsAgreeWithTheOracle) {
  ExpectAgreement(FromEnvironment("STROBE_EMULATOR_SEED", 1),
                  FromEnvironment("STROBE_EMULATOR_CASES", kHopperCases), Draw, InTheEmulator,
                  IsCase);
  strobe::emulator::machine().forced_instance.clear();
}

// V's are left out of the products and come in afterwards: with weights that are 0 as well, since
// the scores of the same key may be infinite too.
TEST(EmulatedMmaSyncForward, InfinitiesAgreeWithTheOracle) {
  ExpectAgreement(1000, kHopperCases, Draw, InTheEmulator, HasInfinities);
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
    const auto choice = strobe::cuda::choose_instance(80, p, machine.devices[0]);
    EXPECT_EQ(choice.reason, "") << entry.name;
    EXPECT_NE(choice.name, entry.name);
  }
  EXPECT_GT(asked, 0);
  machine.forced_instance.clear();
}

// A mask with room for half of what it needs: rows of the lists that it lacks are NaN, and the
// others have the bits that they have with room for all.
TEST(EmulatedMmaSyncForward, RowsThatAMaskHasNoRoomForAreNaN) {
  struct alignas(64) Line {
    int32_t words[16];
  };
  int64_t lost = 0, kept = 0;
  for (uint64_t seed = 2; seed <= kHopperCases; seed += 4) {
    Case c = DrawCase(seed);
    c.special = Special::kNone;
    DrawMachine(seed);
    Fixture all(c), part(c);
    const strobe_problem whole = all.MakeProblem(STROBE_FORWARD);
    if (whole.varlen || whole.has_seqused_q) continue;
    ASSERT_EQ(all.Forward(InTheEmulator(WorkspaceHolds::kNaN), true), "") << ToString(c);
    std::vector<Line> packed;
    const auto launch = [&](strobe_problem p, strobe_forward_args a) -> std::string {
      const int32_t needed = static_cast<const int32_t*>(a.mask)[7];
      p.mask.capacity = p.mask.partial_capacity = std::max(1, needed / 2);
      size_t bytes = 0;
      EXPECT_EQ(strobe_mask_bytes(&p, &bytes), STROBE_OK);
      packed.resize(bytes / sizeof(Line) + 1);
      strobe_mask_args args = part.mask().Args();
      args.packed = packed.data();
      args.packed_bytes = bytes;
      if (strobe_mask_pack(&p, &args) != STROBE_OK) return strobe_last_error();
      a.mask = packed.data();
      return LaunchInTheEmulator(80, p, a, WorkspaceHolds::kNaN);
    };
    ASSERT_EQ(part.Forward(launch, true), "") << ToString(c);
    const strobe_mask& m = whole.mask;
    const int32_t* const lists = packed[2].words;
    const oracle::Tensor out[] = {all.out.Read(), part.out.Read()};
    const oracle::Tensor lse[] = {all.ReadLse(), part.ReadLse()};
    const int64_t blocks = (whole.seqlen_q + m.block_q - 1) / m.block_q;
    for (int64_t row = 0; row < lse[0].rows; ++row) {
      for (int64_t head = 0; head < c.heads; ++head) {
        const int64_t sequence = m.batch == 1 ? 0 : row / whole.seqlen_q;
        const int64_t plane = sequence * m.heads + (m.heads == 1 ? 0 : head);
        const bool is_lost = lists[2 * (plane * blocks + row % whole.seqlen_q / m.block_q) + 1] < 0;
        (is_lost ? lost : kept) += 1;
        const double x[] = {lse[0].at(row, head)[0], lse[1].at(row, head)[0]};
        ASSERT_TRUE(is_lost ? std::isnan(x[1]) : x[0] == x[1]) << row << ", " << ToString(c);
        for (int64_t d = 0; d < out[0].dim; ++d) {
          const double y[] = {out[0].at(row, head)[d], out[1].at(row, head)[d]};
          ASSERT_TRUE(is_lost ? std::isnan(y[1]) : y[0] == y[1]) << row << ", " << ToString(c);
        }
      }
    }
  }
  EXPECT_GT(lost, 100);
  EXPECT_GT(kept, 100);
  strobe::emulator::machine().forced_instance.clear();
}

// A mask whose words are anything: the launch ends, and reads and writes nothing outside.
TEST(EmulatedMmaSyncForward, WordsThatAreNoMaskLeadNowhere) {
  int masks = 0;
  for (uint64_t seed = 2; seed <= 2 * kHopperCases; ++seed) {
    if (seed / 2 % 2 == 0) continue;
    const Case c = DrawCase(seed);
    DrawMachine(seed);
    Fixture f(c);
    const auto launch = [&](const strobe_problem& p, strobe_forward_args a) -> std::string {
      size_t bytes = 0;
      EXPECT_EQ(strobe_mask_bytes(&p, &bytes), STROBE_OK);
      const FencedWords fenced(bytes / 4);
      std::memcpy(fenced.words().data(), a.mask, bytes);
      MakeHostile(fenced.words(), seed);
      a.mask = fenced.words().data();
      ++masks;
      return LaunchInTheEmulator(80, p, a, WorkspaceHolds::kNaN);
    };
    EXPECT_EQ(f.Forward(launch, true), "") << ToString(c);
  }
  EXPECT_GT(masks, 0);
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
