// The CUDA kernels on the CPU (run_time.h) where walks are lists: built with STROBE_RANDOM_WALKS,
// they leave out random blocks (core/random_blocks.h), mostly others for each query head, whose
// places are other numbers than the blocks' own, and the oracle hides the same pairs. The
// backward's out and lse are those of the CPU's kernels, with the same lists.
//
//   STROBE_EMULATOR_CASES  how many random problems of each kind (default 8; 64 over a cache)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "cache_fixture.h"
#include "core/random_blocks.h"
#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "fixture.h"
#include "hopper_case.h"
#include "prompt_case.h"
#include "random_cases.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::Rng;

constexpr uint64_t kCases = 8;  // of a kind of kernels

// Multiples of the tiles of all kernels here, and of the CPU's.
constexpr strobe::RandomBlocks kBlocks{0, 384, 384};
// A span of the decode kernels goes through the blocks of all its queries and heads, and its rows
// look at each tile of keys, of up to 64: a block may be less than a span and a unit of its keys.
constexpr strobe::RandomBlocks kDecodeBlocks{0, 2, 128};
// Of Hopper's kernel for prompts over a cache.
constexpr strobe::RandomBlocks kPromptBlocks{0, 128, 128};

class EmulatedWalks : public ::testing::Test {
 protected:
  void TearDown() override {
    strobe::strobe_random_blocks = {};
    strobe::emulator::machine().forced_instance.clear();
  }
};

template <typename Instance>
Case DrawCase(uint64_t seed, int64_t widest, const strobe::RandomBlocks& blocks = kBlocks) {
  return DrawHopperCase(
      strobe::cuda::instance_table<Instance>(), seed,
      [&](Case& c, Rng& rng) {
        if (std::max(c.head_dim, c.head_dim_v) > widest || rng.Chance(0.5)) {
          const int64_t least = widest > 128 ? 129 : 8;
          c.head_dim = c.head_dim_v = rng.Integer(least / 8, widest / 8) * 8;
        }
        c.head_dim_v = (c.head_dim_v + 7) / 8 * 8;  // of which TMA stores whole units
        c.heads = c.heads_kv = std::min<int64_t>(c.heads, 3);
        if (rng.Chance(0.5)) c.heads_kv = 1;
        c.random_blocks.by_head = rng.Chance(0.8);
        c.batch_invariant = rng.Chance(0.15);
        c.deterministic = rng.Chance(0.4);
      },
      [&](uint64_t of) { return GenerateBlocksCase(of, blocks); });
}

std::string Forward(const Case& c, int arch, const strobe::RandomBlocks& blocks) {
  strobe::strobe_random_blocks = blocks;
  Fixture f(c);
  std::string wrong = f.Forward(
      [&](const strobe_problem& p, const strobe_forward_args& args) {
        return LaunchInTheEmulator(arch, p, args, HoldsOf(c.seed));
      },
      true);
  return wrong.empty() ? CompareForward(f) : wrong;
}

Fixture::BackwardLaunch BackwardOf(int arch, WorkspaceHolds holds) {
  return [arch, holds](const strobe_problem& p, const strobe_backward_args& args) {
    return LaunchInTheEmulator(arch, p, args, holds);
  };
}

std::string Backward(const Case& c, int arch, const strobe::RandomBlocks& blocks) {
  strobe::strobe_random_blocks = c.random_blocks;
  Fixture f(c);
  std::string wrong = f.Forward();
  strobe::strobe_random_blocks = blocks;
  if (wrong.empty()) wrong = f.Backward(BackwardOf(arch, HoldsOf(c.seed)));
  return wrong.empty() ? CompareBackward(f) : wrong;
}

// The kinds of kernels: the architecture, and the widest head dimension.
struct Kind {
  const char* name;
  int arch;
  int64_t widest;
};
constexpr Kind kForward[] = {{"Hopper", 90, 64}, {"mma.sync", 80, 64}};
constexpr Kind kBackward[] = {{"Hopper", 90, 64}, {"Hopper, wide", 90, 192}, {"mma.sync", 80, 64}};

void DrawMachine(uint64_t seed, const Kind& kind) {
  DrawHopper(seed);
  auto& device = strobe::emulator::machine().devices[0];
  device.compute_capability = kind.arch;
  if (kind.arch == 80) device.shared_bytes = 163 << 10;
}

Case DrawBackward(uint64_t seed, const Kind& kind) {
  Case c = DrawCase<strobe::cuda::BackwardInstance>(seed, kind.widest);
  DrawMachine(seed, kind);
  return c;
}

Case DrawForward(uint64_t seed, const Kind& kind) {
  Case c = DrawCase<strobe::cuda::ForwardInstance>(seed, kind.widest);
  c.DropDropout();
  MakeAligned(c.out, c.head_dim_v, c.batch_invariant);
  DrawMachine(seed, kind);
  // Few queries would go to the kernels that divide keys.
  strobe::emulator::machine().forced_instance = kind.arch == 80 ? "forward_sm80_" : "forward_sm90_";
  return c;
}

TEST_F(EmulatedWalks, ForwardsAgreeWithTheOracle) {
  for (const Kind& kind : kForward) {
    SCOPED_TRACE(kind.name);
    ExpectNoneIsWrong(Seeds::ByEnvironment(kCases), [&](uint64_t seed) {
      const Case c = DrawForward(seed, kind);
      return Verdict{Forward(c, kind.arch, c.random_blocks), ToString(c)};
    });
    strobe::emulator::machine().forced_instance.clear();
  }
}

TEST_F(EmulatedWalks, BackwardsAgreeWithTheOracle) {
  for (const Kind& kind : kBackward) {
    SCOPED_TRACE(kind.name);
    ExpectNoneIsWrong(Seeds::ByEnvironment(kCases), [&](uint64_t seed) {
      const Case c = DrawBackward(seed, kind);
      return Verdict{Backward(c, kind.arch, c.random_blocks), ToString(c)};
    });
  }
}

// Few queries, whose keys several thread blocks share.
TEST_F(EmulatedWalks, DecodingAgreesWithTheOracle) {
  ExpectNoneIsWrong(Seeds::ByEnvironment(64), [](uint64_t seed) {
    Case c = DrawCase<strobe::cuda::ForwardInstance>(seed, 64, kDecodeBlocks);
    const int64_t batch = c.batch();
    Rng rng(seed ^ 0xDEC0DEu);
    for (int64_t b = 0; b < batch; ++b) {
      c.seqlens_q[static_cast<size_t>(b)] = c.varlen ? rng.Integer(0, 4) : 3;
      c.seqlens_k[static_cast<size_t>(b)] = c.varlen ? rng.Integer(0, 4000) : 2000;
    }
    c.has_seqused_q = c.has_seqused_k = c.has_q_position = false;
    c.arrays = {};
    c.packing = Packing::kSeparate;  // q and k have other lengths now
    c.has_prefix = c.batch_invariant = false;
    c.heads_kv = rng.Integer(1, 2);
    c.heads = c.heads_kv * rng.Integer(1, 4);
    c.DropDropout();
    DrawHopper(seed);
    strobe::emulator::machine().devices[0].compute_capability = 80;
    strobe::emulator::machine().forced_instance = "cached_sm80_";
    return Verdict{Forward(c, 80, c.random_blocks), ToString(c)};
  });
}

// Prompts over a cache, whose tiles hold several heads where these have one walk, and beside them
// sequences with few queries.
TEST_F(EmulatedWalks, PromptsAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  ExpectNoneIsWrong(Seeds::ByEnvironment(64), [](uint64_t seed) {
    CacheCase c = DrawPromptCase(seed);
    Rng rng(seed ^ 0xB10C5u);
    c.random_blocks = kPromptBlocks;
    c.random_blocks.seed = rng.Next() | 4;  // not 0
    c.random_blocks.by_head = rng.Chance(0.8);
    DrawHopper(seed);
    strobe::emulator::machine().forced_instance = "cached_sm90_bf16_64";
    strobe::strobe_random_blocks = c.random_blocks;
    CacheFixture f(c);
    std::string wrong = f.Run(ThroughTheEmulator(HoldsOf(seed), 90));
    return Verdict{wrong.empty() ? f.Judge() : wrong, ToString(c)};
  });
}

// The order of additions to dQ is that of the lists, whoever comes first.
TEST_F(EmulatedWalks, OrderChangesNoBit) {
  for (const Kind& kind : kBackward) {
    for (uint64_t seed = 100; seed < 104; ++seed) {
      Case c = DrawBackward(seed, kind);
      c.deterministic = true;
      SCOPED_TRACE(std::string(kind.name) + ": " + ToString(c));
      strobe::strobe_random_blocks = c.random_blocks;
      Fixture f(c);
      ASSERT_EQ(f.Forward(), "");
      std::string first;
      for (uint64_t order = 0; order < 3; ++order) {
        strobe::emulator::settings().seed = order;
        f.Poison(STROBE_BACKWARD);
        ASSERT_EQ(f.Backward(BackwardOf(kind.arch, HoldsOf(order))), "");
        const std::string bits = Fixture::Bits(f.dq) + Fixture::Bits(f.dk) + Fixture::Bits(f.dv);
        if (order == 0) first = bits;
        EXPECT_TRUE(bits == first) << "order " << order;
      }
    }
  }
}

// Whether these tests see the lists at all: with others than the oracle's most results are wrong.
TEST_F(EmulatedWalks, OtherListsAreWrong) {
  int wrong = 0;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    Case c =
        seed % 2 ? DrawForward(seed, kForward[0]) : DrawBackward(seed, kBackward[seed / 2 % 3]);
    c.special = Special::kNone;
    strobe::RandomBlocks others = c.random_blocks;
    others.seed += 4;
    wrong +=
        !(seed % 2 ? Forward(c, 90, others) : Backward(c, kBackward[seed / 2 % 3].arch, others))
             .empty();
  }
  EXPECT_GT(wrong, 2);
}

}  // namespace
}  // namespace strobe_test
