// Random problems against the oracle where walks are lists: the kernels of this program are built
// with STROBE_RANDOM_WALKS and leave out random blocks (core/random_blocks.h), whose places are
// other numbers than the blocks' own, and the oracle hides the same pairs. Forward and backward,
// deterministic ones too.
//
//   STROBE_RANDOM_CASES, STROBE_RANDOM_SEED, STROBE_CPU_ISA  as in property/random_test.cpp
#include <cstdint>
#include <cstdlib>
#include <string>

#include "core/random_blocks.h"
#include "environment.h"
#include "gtest/gtest.h"
#include "problem_gen.h"
#include "runner.h"

namespace strobe_test {
namespace {

class RandomWalks : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string problem;
    if (!ForcedIsaAvailable(&problem)) {
      GTEST_SKIP() << "this machine or build lacks the instruction set "
                   << std::getenv("STROBE_CPU_ISA");
    }
    ASSERT_EQ(problem, "");
  }
  void TearDown() override { strobe::strobe_random_blocks = {}; }
};

// blocks: for the kernels, as those of the case are for the oracle.
std::string RunWith(const Case& c, const strobe::RandomBlocks& blocks) {
  strobe::strobe_random_blocks = blocks;
  return RunCase(c);
}

TEST_F(RandomWalks, AgreeWithTheOracle) {
  const uint64_t cases = FromEnvironment("STROBE_RANDOM_CASES", 250);
  const uint64_t seed = FromEnvironment("STROBE_RANDOM_SEED", 1);
  int failures = 0;
  for (uint64_t n = 0; n < cases; ++n) {
    const Case c = GenerateBlocksCase(seed + n);
    const std::string errors = RunWith(c, c.random_blocks);
    if (errors.empty()) continue;
    if (++failures <= 10) {
      ADD_FAILURE() << ToString(c) << "\n"
                    << errors << "  alone: STROBE_RANDOM_SEED=" << c.seed
                    << " STROBE_RANDOM_CASES=1";
    }
  }
  EXPECT_EQ(failures, 0);
}

// The bits of all outputs of a deterministic problem.
std::string Bits(Case c, int32_t threads) {
  strobe::strobe_random_blocks = c.random_blocks;
  c.threads = threads;
  Fixture f(c);
  EXPECT_EQ(f.Forward(), "");
  EXPECT_EQ(f.Backward(), "");
  return Fixture::Bits(f.out) + Fixture::Bits(f.dq) + Fixture::Bits(f.dk) + Fixture::Bits(f.dv);
}

TEST_F(RandomWalks, DeterministicGradientsDoNotDependOnTheThreads) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Case c = GenerateBlocksCase(seed);
    c.deterministic = true;
    SCOPED_TRACE(ToString(c));
    const std::string one = Bits(c, 1);
    EXPECT_TRUE(Bits(c, 3) == one);
    EXPECT_TRUE(Bits(c, 4) == one);
  }
}

// Items with as many keys as they may have, of which some in the middle are left out: what an item
// computes together has gaps then.
TEST_F(RandomWalks, ItemsMayHaveGaps) {
  int items = 0;
  for (uint64_t seed = 4; items < 12; ++seed) {
    const auto hides = [&](int64_t key_block) {
      const strobe::RandomBlocks blocks{seed};
      return blocks.hides(0, 0, 0, key_block * blocks.keys);
    };
    if (hides(0) || !hides(1) || hides(2)) continue;
    ++items;
    Case c;
    c.seed = c.random_blocks.seed = seed;
    c.dtype = items % 3 ? oracle::DType::kBFloat16 : oracle::DType::kFloat32;
    c.seqlens_q = {150};
    c.seqlens_k = {500};
    c.head_dim = c.head_dim_v = 32;
    c.causal = items % 2;
    c.arrays.q_position = {400};
    c.has_q_position = true;
    EXPECT_EQ(RunWith(c, c.random_blocks), "") << ToString(c);
  }
}

// Whether this test sees the lists at all: with others than the oracle's, most results are wrong.
TEST_F(RandomWalks, OtherListsAreWrong) {
  int wrong = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Case c = GenerateBlocksCase(seed);
    c.special = Special::kNone;
    strobe::RandomBlocks others = c.random_blocks;
    others.seed += 4;
    wrong += !RunWith(c, others).empty();
  }
  EXPECT_GT(wrong, 10);
}

}  // namespace
}  // namespace strobe_test
