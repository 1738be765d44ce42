// With batch_invariant the Hopper forward kernels, for tensors and for keys in a cache, give a row
// the same bits whatever it is computed with, in the emulator (run_time.h). It adds products one
// after the other, so it shows which products are added to what in which order, and not how tensor
// cores round sixteen of them: tests/python/test_row_origins.py on a GPU does.
//   STROBE_EMULATOR_CASES  a sixtieth of it by the usual number of ways to compute rows (60;
//                          under a sanitizer 30)
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cuda/host/fill_plan.h"
#include "cuda/host/instance_choice.h"
#include "emulated_launch.h"
#include "environment.h"
#include "hopper_case.h"
#include "one_sequence.h"

namespace strobe_test {
namespace {

using oracle::Rng;

/// Of a usual number of ways those that the environment asks for, and two at least.
int Ways(uint64_t usual) {
  const uint64_t cases = FromEnvironment("STROBE_EMULATOR_CASES", kUnderSanitizer ? 30 : 60);
  return static_cast<int>(std::max<uint64_t>(2, usual * cases / 60));
}

/// A sequence with these options and some ways to compute its rows.
void ExpectSameBits(const OneSequence::Options& options, int ways) {
  using Way = OneSequence::Way;
  auto& device = strobe::emulator::machine().devices[0];
  OneSequence s(options);
  Rng rng(options.seed + 1000);
  DrawHopper(options.seed);
  device.multiprocessors = 3;
  const OneSequence::Rows all = s.Solve({.count = s.rows(), .keys = s.keys()});
  const int64_t pages[] = {8, 16, 48, 64, 256};
  for (int n = 0; n < ways; ++n) {
    const int64_t most[] = {1, 1, 8, 33, s.rows()};
    Way way;
    way.count = std::min(rng.Pick(most), s.rows());
    way.first = rng.Integer(0, s.rows() - way.count);
    way.keys = rng.Integer(s.KeysTo(way.first + way.count), s.keys());
    const uint64_t kind = (options.seed + static_cast<uint64_t>(n)) % 4;
    way.page = kind == 0 ? Way::kDense : kind == 1 ? Way::kPacked : kind == 2 ? 0 : rng.Pick(pages);
    way.before = rng.Integer(0, 2);
    DrawHopper(options.seed + static_cast<uint64_t>(n));
    EXPECT_TRUE(s.Solve(way) == all.Part(way.first, way.count))
        << "seed " << options.seed << ", dim " << options.dim << ", causal " << options.causal
        << ", window " << options.window << ", scale " << options.scale << ", softcap "
        << options.softcap << ", slopes " << options.slopes << ", rows " << way.first << " + "
        << way.count << ", keys " << way.keys << ", page " << way.page << ", before " << way.before;
  }
}

/// Scores that the general variant computes.
void DrawScores(Rng& rng, OneSequence::Options& o) {
  const int64_t kind = rng.Integer(0, 3);
  if (kind <= 1) o.softcap = 5;
  if (kind == 1 || kind == 2) o.slopes = true;
  if (kind == 3) o.scale = -0.1f;
}

class EmulatedRowOrigins : public testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(, EmulatedRowOrigins, testing::Values(64, 96, 128, 192, 256),
                         [](const auto& dim) { return std::to_string(dim.param); });

TEST_P(EmulatedRowOrigins, ARowHasTheSameBitsWhateverItIsPartOf) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  strobe::emulator::machine().forced_instance.clear();
  const int64_t dim = GetParam();
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    Rng rng(seed * 1000 + static_cast<uint64_t>(dim));
    OneSequence::Options o;
    o.seed = seed, o.arch = 90;
    o.dim = rng.Chance(0.7) ? dim : dim - 8;
    o.causal = rng.Chance(0.75);
    if (rng.Chance(0.3)) o.window = rng.Integer(1, 400);
    // Scores of hundreds, of which the largest come late: weights against the first maxima would be
    // infinite.
    if (seed % 2 == 0) o.scale = 4;
    if (rng.Chance(0.4)) DrawScores(rng, o);
    o.rows = rng.Integer(1, 300), o.keys = o.rows + rng.Integer(0, 900);
    const int64_t groups[] = {1, 1, 2, 4, 3};
    o.heads_kv = rng.Integer(1, 2), o.heads = o.heads_kv * rng.Pick(groups);
    ExpectSameBits(o, Ways(8));
  }
}

// Sequences of several chunks of keys (key_chunks.h): thread blocks share those of a tile where
// there are few tiles, and else a tile goes through all of them. Of 48 heads of one key head that
// is so without a cache; over one they are three tiles.
TEST_P(EmulatedRowOrigins, ChunksOfKeysChangeNoBit) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  strobe::emulator::machine().forced_instance.clear();
  const int64_t dim = GetParam();
  const int64_t chunk = dim == 192 ? 2112 : dim == 256 ? 2080 : 2048;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    if (kUnderSanitizer && seed != 1 && seed != 5) continue;
    Rng rng(seed * 2000 + static_cast<uint64_t>(dim));
    OneSequence::Options o;
    o.seed = seed, o.arch = 90, o.dim = dim;
    o.causal = seed != 2;
    if (seed == 3) o.window = rng.Integer(1900, 2300);
    if (seed == 2) o.scale = 4;
    const bool many_heads = seed == 4 || seed == 5;
    if (seed == 5 || seed == 6) DrawScores(rng, o);
    o.rows = many_heads ? 10 : rng.Integer(100, 200);
    // Of the last chunk one block, or two.
    o.keys =
        chunk * (seed == 3 ? 3 : 2) + (seed == 5 ? rng.Integer(130, 150) : rng.Integer(20, 75));
    o.heads_kv = 1, o.heads = many_heads ? 48 : seed == 1 ? 2 : 1;
    ExpectSameBits(o, Ways(many_heads ? 4 : 6));
  }
}

// All rows get kernels with blocks of the same number of keys, whatever they are part of.
TEST(EmulatedRowOriginsPlan, BlocksAreThoseOfAnyOrigin) {
  using strobe::cuda::plan_for;
  DrawHopper(1);
  strobe::emulator::machine().forced_instance.clear();
  const auto& device = strobe::emulator::machine().devices[0];
  for (const int64_t dim : {8, 64, 96, 128, 192, 256}) {
    for (const float softcap : {0.f, 20.f}) {
      int64_t keys_of_block = 0;
      for (const bool cached : {false, true}) {
        for (const int64_t queries : {1, 8, 64, 300, 8192}) {
          for (const int64_t keys : {100, 1000, 20000}) {
            for (const bool varlen : {false, true}) {
              strobe_problem p;
              ASSERT_EQ(strobe_problem_init(&p, sizeof p), STROBE_OK);
              p.device = STROBE_CUDA, p.dtype = STROBE_BFLOAT16, p.batch_invariant = 1;
              p.batch = 3, p.heads = 8, p.heads_kv = 2, p.head_dim = dim, p.softcap = softcap;
              p.seqlen_q = queries, p.seqlen_k = keys, p.varlen = varlen;
              if (varlen) p.total_q = 3 * queries;
              if (varlen && !cached) p.total_k = 3 * keys;
              if (cached) {
                p.cache = STROBE_CACHE_PAGED, p.page_size = 16, p.has_seqused_k = 1;
                p.pages_per_sequence = (keys + 15) / 16, p.pages = 4 * p.pages_per_sequence;
              }
              strobe::Plan plan{};
              const strobe::Status s = plan_for(p, device, plan);
              ASSERT_TRUE(s.ok()) << s.text();
              EXPECT_STREQ(plan.kernel, "cuda_sm90");
              EXPECT_EQ(strobe::cuda::instance_for_few_queries(plan), nullptr);
              EXPECT_NE(
                  std::string(plan.instance_name).find(softcap > 0 ? "_general" : "_invariant"),
                  std::string::npos)
                  << plan.instance_name;
              if (keys_of_block == 0) keys_of_block = plan.tile_k;
              EXPECT_EQ(plan.tile_k, keys_of_block) << plan.instance_name;
              const std::string remark = strobe::cuda::remark_on(plan, device);
              EXPECT_TRUE(
                  remark.starts_with("all rows of a sequence get the same bits here, "
                                     "whatever they are computed with; keys have chunks of "))
                  << remark;
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace strobe_test
