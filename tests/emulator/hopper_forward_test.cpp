// The Hopper forward kernels on the CPU (run_time.h), planned by the CUDA back end for devices that
// are not there, against float64.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "cuda/common/params.h"
#include "cuda/hopper/scheduler.cuh"
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

/// A case with a mask as data, and the machine for it. What the kernels for masks compute nothing
/// of is left out.
Case DrawMasked(uint64_t seed) {
  DrawHopper(seed);
  Case c = DrawHopperCase(
      Instances(), seed,
      [](Case& drawn, Rng& rng) {
        drawn.head_dim_v = (drawn.head_dim_v + 7) / 8 * 8;
        drawn.DropDropout();
        drawn.softcap = 0;
        drawn.alibi = STROBE_ALIBI_NONE;
        if (drawn.scale <= 0) drawn.scale = 0.125f;
        drawn.batch_invariant = rng.Chance(0.15);
        // Lists of 64 queries each with blocks of their own: of a tile's two warpgroups each skips
        // some that the other computes.
        if (rng.Chance(0.4)) {
          drawn.mask.block_q = 64;
          drawn.mask.keep = drawn.mask.intervals = drawn.mask.partial = drawn.mask.bits = false;
          drawn.mask.full = true;
          drawn.mask.density = rng.Chance(0.5) ? 0.5 : 0.2;
        }
      },
      GenerateMaskedCase);
  MakeAligned(c.out, c.head_dim_v, c.batch_invariant);
  return c;
}

/// A case with a bias as its kernels take it.
Case DrawBiased(uint64_t seed) {
  DrawHopper(seed);
  Case c = DrawHopperCase(Instances(), seed, [](Case& drawn, Rng& rng) {
    drawn.head_dim_v = (drawn.head_dim_v + 7) / 8 * 8;
    drawn.DropDropout();
    DrawBiasForTma(drawn, rng);
    drawn.batch_invariant = rng.Chance(0.15);
  });
  MakeAligned(c.out, c.head_dim_v, c.batch_invariant);
  return c;
}

TEST(EmulatedHopperForward, BiasesAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  int by_tma = 0, all = 0;
  const auto launch = [&](WorkspaceHolds holds) {
    return [&, holds](const strobe_problem& p, const strobe_forward_args& args) {
      strobe_problem problem = p;
      problem.device = STROBE_CUDA;
      strobe::Plan plan{};
      ++all;
      const auto& device = strobe::emulator::machine().devices[0];
      if (strobe::cuda::plan_for(problem, device, plan).ok() &&
          std::string(plan.instance_name).find("forward_sm90_") == 0) {
        ++by_tma;
      }
      return LaunchInTheEmulator(90, p, args, holds);
    };
  };
  ExpectAgreement(Seeds::ByEnvironment(kHopperCases, 4000), DrawBiased, launch, IsCase);
  EXPECT_EQ(by_tma, all);
}

// The most negative number of bf16 hides no pair: a row that has it throughout sees all keys alike.
TEST(EmulatedHopperForward, LowestBiasesHideNoRow) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  int tried = 0;
  for (uint64_t seed = 5000; tried < 6; ++seed) {
    Case c = DrawBiased(seed);
    bool has_arrays = false;
    strobe::for_each_array(c, c.arrays,
                           [&](const auto&, bool has, const auto&) { has_arrays |= has; });
    const Layout& l = c.bias.layout;
    if (c.dtype != oracle::DType::kBFloat16 || c.varlen || has_arrays || c.has_sinks ||
        c.special != Special::kNone || l.broadcast[0] || l.broadcast[1] || l.broadcast[2])
      continue;
    ++tried;
    c.causal = false, c.window_signed = false, c.window_left = c.window_right = -1;
    c.attention_chunk = 0, c.bias.spoils = false;
    Fixture f(c);
    f.bias.ForEach([&](int64_t row, int64_t, int64_t, int64_t e) {
      if (row % 2 == 0) f.bias.Set(e, -0x1.fep127);
    });
    ASSERT_EQ(f.Forward(InTheEmulator(HoldsOf(seed)), true), "") << ToString(c);
    const oracle::Tensor lse = f.ReadLse(), v = f.v.Read(), out = f.out.Read();
    for (int64_t row = 0; row < lse.rows; ++row) {
      const int64_t b = row / c.seqlens_q[0], i = row % c.seqlens_q[0];
      const int64_t of_bias = (c.bias.one_batch ? 0 : b * f.bias.rows) + (c.bias.one_query ? 0 : i);
      for (int64_t head = 0; head < c.heads && of_bias % 2 == 0; ++head) {
        EXPECT_LT(lse.at(row, head)[0], -2e38) << row << ", " << ToString(c);
        EXPECT_TRUE(std::isfinite(lse.at(row, head)[0])) << row << ", " << ToString(c);
        double mean = 0, size = 0;
        for (int64_t key = 0; key < c.seqlens_k[0]; ++key) {
          const double x = v.at(b * c.seqlens_k[0] + key, head / (c.heads / c.heads_kv))[0];
          mean += x / static_cast<double>(c.seqlens_k[0]);
          size = std::max(size, std::fabs(x));
        }
        EXPECT_NEAR(out.at(row, head)[0], mean, 0.01 * size) << row << ", " << ToString(c);
      }
    }
  }
}

TEST(EmulatedHopperForward, RandomProblemsAgreeWithTheOracle) {
  // Both warpgroups write the same zeros to rows that are not in use (tile_rows.cuh).
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  ExpectAgreement(Seeds::ByEnvironment(kHopperCases), Draw, InTheEmulator, IsCase);
}

TEST(EmulatedHopperForward, InfinitiesAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "cases have none there";
  ExpectAgreement(Seeds{1000, kHopperCases / 3}, Draw, InTheEmulator, HasInfinities);
}

TEST(EmulatedHopperForward, MasksAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  ExpectAgreement(Seeds::ByEnvironment(kHopperCases, 2000), DrawMasked, InTheEmulator, IsCase);
}

// Lists of more entries, and of blocks further apart, than a warp looks at at a time.
TEST(EmulatedHopperForward, LongListsAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  const auto draw = [](uint64_t seed) {
    for (uint64_t again = seed << 8;; ++again) {
      Case c = DrawMasked(again);
      bool has_arrays = false;
      strobe::for_each_array(c, c.arrays,
                             [&](const auto&, bool has, const auto&) { has_arrays |= has; });
      if (c.varlen || has_arrays || c.mask.hostile) continue;
      Rng rng(seed);
      c.heads = c.heads_kv = 1;
      c.seqlens_q = {rng.Integer(1, 140)};
      c.seqlens_k = {rng.Integer(4100, 7000)};
      c.special = Special::kNone;
      return c;
    }
  };
  ExpectAgreement(Seeds{1, kHopperCases / 6}, draw, InTheEmulator, IsCase);
}

// Sequences of several chunks of keys, of which thread blocks share tiles.
Case DrawChunks(uint64_t seed) {
  DrawHopper(seed);
  for (uint64_t again = seed << 8;; ++again) {
    bool is_plain = false;
    Case c = DrawHopperCase(Instances(), again, [&](Case& drawn, Rng& rng) {
      drawn.head_dim_v = (drawn.head_dim_v + 7) / 8 * 8;
      drawn.DropDropout();
      if (rng.Chance(0.6)) {  // else what was drawn, which the general variant computes
        drawn.softcap = 0;
        drawn.alibi = STROBE_ALIBI_NONE;
        if (!(drawn.scale > 0)) drawn.scale = 0.125f;
      }
      drawn.batch_invariant = true;
      bool has_arrays = false;
      strobe::for_each_array(drawn, drawn.arrays,
                             [&](const auto&, bool has, const auto&) { has_arrays |= has; });
      is_plain = !drawn.varlen && !has_arrays;
      if (!is_plain) return;
      drawn.heads = drawn.heads_kv = 1;
      drawn.seqlens_q = {rng.Integer(1, 140)};
      drawn.seqlens_k = {rng.Integer(4100, 6000)};
    });
    MakeAligned(c.out, c.head_dim_v, true);
    if (is_plain) return c;
  }
}

TEST(EmulatedHopperForward, ChunksOfKeysAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  ExpectAgreement(Seeds{1, kHopperCases / 6}, DrawChunks, InTheEmulator, IsCase);
}

TEST(EmulatedHopperForward, InfinitiesInChunksOfKeysAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "cases have none there";
  ExpectAgreement(Seeds{500, kHopperCases / 10}, DrawChunks, InTheEmulator, HasInfinities);
}

TEST(EmulatedHopperForward, InfinitiesUnderMasksAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "cases have none there";
  ExpectAgreement(Seeds{3000, kHopperCases / 3}, DrawMasked, InTheEmulator, HasInfinities);
}

// By the mask's own order each tile comes once, those that visit most first within a group; by
// words that are no order, tiles that there are.
TEST(EmulatedHopperForward, TilesComeInTheOrderOfAMask) {
  using strobe::cuda::MaskedTileOrder;
  constexpr int32_t kTiles = 9, kHeads = 40, kBatch = 2;
  strobe::cuda::ForwardParams p{};
  p.batch = kBatch, p.heads = p.heads_kv = kHeads, p.group = 1;
  p.seqlen_q = kTiles * 128 - 5, p.seqlen_k = 4096;
  p.head_dim = p.head_dim_v = 128;
  auto& l = p.mask_layout;
  l.block_q = 128, l.blocks_q = l.per_sequence_q = kTiles;
  l.lists = 32, l.order = 64;
  std::vector<int32_t> words(96);
  const int32_t order[kTiles] = {4, 0, 1, 2, 3, 8, 7, 6, 5};
  std::copy(std::begin(order), std::end(order), words.begin() + l.order);
  p.mask = words.data();
  words[7] = 90;
  for (const int32_t most : {20, 60}) {
    words[static_cast<size_t>(l.lists) + 2 * 4 + 1] = most;
    const auto made = MaskedTileOrder::make({}, p, 128);
    const bool uneven = made.is_uneven(p);
    EXPECT_EQ(uneven, most == 60);
    EXPECT_TRUE(made.by_visits(uneven));
    std::vector<int> seen(kTiles * kHeads * kBatch);
    // 2 MB of keys and values a head.
    const int32_t group = uneven ? 32 : 16;
    for (int32_t t = 0; t < kTiles * kHeads * kBatch; ++t) {
      const auto place = made.place(p, t, uneven);
      ++seen[static_cast<size_t>((place.batch * kHeads + place.head) * kTiles + place.begin / 128)];
      if (t < group * kTiles) {
        EXPECT_EQ(place.begin / 128, order[t / group]) << t;
      }
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), kTiles * kHeads * kBatch);
  }
  EXPECT_FALSE(MaskedTileOrder::make({}, p, 64).by_visits(true));
  std::fill(words.begin(), words.end(), -7);
  const auto strange = MaskedTileOrder::make({}, p, 128);
  EXPECT_EQ(strange.place(p, 3, strange.is_uneven(p)).begin, 0);
  std::fill(words.begin(), words.end(), INT32_MAX);
  EXPECT_EQ(strange.place(p, 3, false).begin, 128 * (kTiles - 1));
  p.seqlen_k = 1 << 20;  // longer than L2
  const auto large = MaskedTileOrder::make({}, p, 128);
  EXPECT_FALSE(large.by_visits(false));
  EXPECT_TRUE(large.by_visits(true));
}

// With a bias that sequences share each tile comes once, and for one sequence after the other.
TEST(EmulatedHopperForward, TilesThatShareABiasComeSideBySide) {
  using strobe::cuda::BiasTileOrder;
  constexpr int32_t kTiles = 5, kHeads = 12, kBatch = 3, kAll = kTiles * kHeads * kBatch;
  strobe::cuda::ForwardParams p{};
  p.batch = kBatch, p.heads = kHeads, p.heads_kv = 4, p.group = 3;
  p.seqlen_q = kTiles * 128 - 5, p.seqlen_k = 1 << 17;  // a head's keys are longer than L2
  p.head_dim = p.head_dim_v = 128;
  p.bias.row_stride = p.seqlen_k;
  for (const int shared : {0, 1, 2, 3}) {  // bit 0: by sequences, bit 1: by heads
    p.bias.batch_stride = shared & 1 ? 0 : 8;
    p.bias.head_stride = shared & 2 ? 0 : 8;
    const strobe::cuda::TileOrder tiles{
        strobe::cuda::StaticOrder::make(p, 128), {}, false, 0, nullptr, {}};
    const auto made = BiasTileOrder::make(tiles, p, 128);
    EXPECT_EQ(made.tiles.items, kAll);
    std::vector<int> seen(kAll);
    for (int32_t t = 0; t < kAll; ++t) {
      const auto item = made.tiles.item(t);
      const auto place = made.at({item.batch, item.head, item.tile * 128});
      ++seen[static_cast<size_t>((place.batch * kHeads + place.head) * kTiles + place.begin / 128)];
      if (shared & 1) {
        EXPECT_EQ(place.batch, t % kBatch) << t;
      }
      const int32_t sharers = (shared & 1 ? kBatch : 1) * (shared & 2 ? kHeads : 1);
      if (shared != 0) {
        EXPECT_EQ(place.begin / 128, kTiles - 1 - t / sharers % kTiles) << t;
      }
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), kAll);
  }
}

// A mask goes to the kernels for masks, whatever the lengths; what they do not compute is declined;
// and they take nothing else, whoever asks for them, since they go through lists.
TEST(EmulatedHopperForward, MasksHaveTheirKernels) {
  using strobe::cuda::choose_instance;
  DrawHopper(1);
  auto& machine = strobe::emulator::machine();
  const strobe::cuda::DeviceProperties device = machine.devices[0];
  const auto choose = [&](int64_t head_dim, int64_t queries, float softcap, bool masked) {
    strobe_problem p{};
    strobe_problem_init(&p, sizeof p);
    p.dtype = STROBE_BFLOAT16;
    p.batch = 2, p.heads = p.heads_kv = 4;
    p.seqlen_q = queries, p.seqlen_k = 8192;
    p.head_dim = p.head_dim_v = head_dim;
    p.softcap = softcap;
    if (masked) {
      p.mask.kind = STROBE_MASK_PACKED;
      p.mask.block_q = p.mask.block_k = 128;
      p.mask.batch = p.mask.heads = 1;
    }
    strobe::resolve_defaults(p);
    return choose_instance(90, p, device);
  };
  for (const int64_t queries : {1, 128, 8192}) {
    EXPECT_EQ(choose(64, queries, 0, true).name, "forward_sm90_bf16_64_128x128x4x8_mask");
    EXPECT_EQ(choose(128, queries, 0, true).name, "forward_sm90_bf16_128_128x128x2x8_mask");
  }
  EXPECT_EQ(choose(64, 8192, 10, true).reason,
            "mask beside softcap > 0 for the forward pass, expected one of them");
  machine.forced_instance = "_mask";
  EXPECT_EQ(choose(64, 8192, 0, false).name, "forward_sm90_bf16_64_192x128x4x12_all_rows");
  machine.forced_instance.clear();
}

TEST(EmulatedHopperForward, RowsThatAMaskHasNoRoomForAreNaN) {
  ExpectRowsWithoutRoomAreNaN(90, 1, kHopperCases / 2, 1, DrawMasked);
}

TEST(EmulatedHopperForward, WordsThatAreNoMaskLeadNowhere) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  ExpectHostileMasksLeadNowhere(90, 1, kHopperCases, 1, DrawMasked);
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
