// The Hopper backward kernels on the CPU (run_time.h), planned by the CUDA back end for devices
// that are not there, against float64.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "fixture.h"
#include "hopper_case.h"
#include "masked_backward.h"
#include "random_cases.h"
#include "run_time.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;

std::span<const strobe::cuda::Entry<strobe::cuda::BackwardInstance>> Instances() {
  return strobe::cuda::instance_table<strobe::cuda::BackwardInstance>();
}

Case DrawCase(uint64_t seed) {
  return DrawHopperCase(Instances(), seed, [](Case& c, Rng& rng) {
    c.deterministic = rng.Chance(0.4);
    c.batch_invariant = rng.Chance(0.15);
  });
}

constexpr int64_t kWidestWithMask = 128;  // or with a bias

/// The same with a mask as data.
Case DrawMaskedCase(uint64_t seed) {
  return DrawHopperCase(
      Instances(), seed,
      [](Case& c, Rng& rng) {
        c.head_dim = std::min(c.head_dim, kWidestWithMask);
        c.head_dim_v = std::min(c.head_dim_v, kWidestWithMask);
        c.batch_invariant = rng.Chance(0.15);
        // An order is kept where no tile has two lists.
        const int tile_q = std::max(c.head_dim, c.head_dim_v) <= 64 ? 128 : 64;
        c.deterministic = rng.Chance(0.6) && c.mask.block_q >= tile_q && c.mask.block_k >= 128;
      },
      GenerateMaskedCase);
}

Fixture::BackwardLaunch InTheEmulator(WorkspaceHolds holds = WorkspaceHolds::kNumbers) {
  return [holds](const strobe_problem& p, const strobe_backward_args& args) {
    return LaunchInTheEmulator(90, p, args, holds);
  };
}

/// "" or what is wrong with the case.
std::string RunBackward(const Case& c, WorkspaceHolds holds = WorkspaceHolds::kNumbers,
                        const std::function<void(Fixture&)>& edit = {}) {
  Fixture f(c);
  if (edit) edit(f);
  std::string wrong = f.Forward();
  if (wrong.empty()) wrong = f.Backward(InTheEmulator(holds));
  return wrong.empty() ? CompareBackward(f) : wrong;
}

/// Whether no sequence has more keys than one work item: then the main kernel writes dQ itself.
bool HasOneBlockOfKeys(const Case& c) {
  const bool lengths_differ = c.varlen || c.has_seqused_k;
  return c.longest_k() <= 128 && !(c.batch_invariant && lengths_differ) &&
         std::max(c.head_dim, c.head_dim_v) <= 128;
}

TEST(EmulatedHopperBackward, RandomProblemsAgreeWithTheOracle) {
  const Seeds seeds = Seeds::ByEnvironment(kHopperCases);
  uint64_t with_one_block = 0;
  const int failures = ExpectNoneIsWrong(seeds, [&](uint64_t seed) {
    const Case c = DrawCase(seed);
    DrawHopper(seed);
    with_one_block += HasOneBlockOfKeys(c);
    return Verdict{RunBackward(c, HoldsOf(seed)), ToString(c)};
  });
  if (seeds.count >= kHopperCases && failures == 0) {
    EXPECT_GE(with_one_block, seeds.count / 5);
    EXPECT_LE(with_one_block, seeds.count - seeds.count / 5);
  }
}

TEST(EmulatedHopperBackward, RandomMasksAgreeWithTheOracle) {
  const Seeds seeds = Seeds::ByEnvironment(kHopperCases);
  uint64_t ordered = 0;
  const int failures = ExpectNoneIsWrong(seeds, [&](uint64_t seed) {
    const Case c = DrawMaskedCase(seed);
    DrawHopper(seed);
    ordered += c.deterministic;
    return Verdict{RunBackward(c, HoldsOf(seed)), ToString(c)};
  });
  if (seeds.count >= kHopperCases && failures == 0) {
    EXPECT_GE(ordered, seeds.count / 10);
    EXPECT_LE(ordered, seeds.count - seeds.count / 10);
  }
}

/// The same with a bias as its kernels take it.
Case DrawBiasedCase(uint64_t seed) {
  return DrawHopperCase(Instances(), seed, [](Case& c, Rng& rng) {
    c.head_dim = std::min(c.head_dim, kWidestWithMask);
    c.head_dim_v = std::min(c.head_dim_v, kWidestWithMask);
    c.DropDropout();
    DrawBiasForTma(c, rng);
    c.has_dbias = rng.Chance(0.7);
    c.deterministic = false;
    c.batch_invariant = rng.Chance(0.15);
  });
}

TEST(EmulatedHopperBackward, BiasesAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  const Seeds seeds = Seeds::ByEnvironment(kHopperCases, 4000);
  uint64_t by_tma = 0;
  ExpectNoneIsWrong(seeds, [&](uint64_t seed) {
    const Case c = DrawBiasedCase(seed);
    DrawHopper(seed);
    Fixture f(c);
    std::string wrong = f.Forward();
    if (wrong.empty()) {
      wrong = f.Backward([&](const strobe_problem& p, const strobe_backward_args& args) {
        strobe_problem problem = p;
        problem.device = STROBE_CUDA;
        strobe::Plan plan{};
        const auto& device = strobe::emulator::machine().devices[0];
        if (strobe::cuda::plan_for(problem, device, plan).ok() &&
            std::string(plan.instance_name).find("backward_sm90_") == 0) {
          ++by_tma;
        }
        return LaunchInTheEmulator(90, p, args, HoldsOf(seed));
      });
    }
    return Verdict{wrong.empty() ? CompareBackward(f) : wrong, ToString(c)};
  });
  EXPECT_EQ(by_tma, seeds.count);
}

Case MakeCase(int64_t q, int64_t k, int64_t dim) {
  Case c;
  c.seed = 3;
  c.dtype =
      Instances()[0].instance->config.dtype == STROBE_BFLOAT16 ? DType::kBFloat16 : DType::kFloat16;
  c.heads = 4;
  c.heads_kv = 2;
  c.seqlens_q = {q};
  c.seqlens_k = {k};
  c.head_dim = c.head_dim_v = dim;
  c.scale = std::nanf("");
  return c;
}

/// The bits of dq, dk and dv, or of dk and dv alone.
std::string Bits(const Fixture& f, bool with_dq) {
  return (with_dq ? Fixture::Bits(f.dq) : "") + Fixture::Bits(f.dk) + Fixture::Bits(f.dv);
}

bool HasInstance(int64_t width) {
  return std::ranges::any_of(
      Instances(), [&](const auto& entry) { return entry.instance->config.width == width; });
}

// With an order of additions no bit of dQ depends on when who comes by, and without one none of dK
// and dV does.
TEST(EmulatedHopperBackward, OrderChangesNoBit) {
  for (const auto& [deterministic, keys] :
       {std::pair{true, 400}, std::pair{false, 400}, std::pair{true, 120}}) {
    for (const int64_t dim : {64, 128}) {
      Case c = MakeCase(300, keys, dim);
      c.deterministic = deterministic;
      c.causal = dim == 64;
      if (deterministic == (dim == 128)) c.dropout_p = 0.2f;
      Fixture f(c);
      ASSERT_EQ(f.Forward(), "");
      std::string first;
      for (uint64_t seed = 0; seed < (kUnderSanitizer ? 1 : 4); ++seed) {
        DrawHopper(seed);
        f.Poison(STROBE_BACKWARD);
        ASSERT_EQ(f.Backward(InTheEmulator(HoldsOf(seed))), "");
        if (seed == 0) first = Bits(f, deterministic);
        EXPECT_TRUE(Bits(f, deterministic) == first) << ToString(c) << ", seed " << seed;
      }
      EXPECT_EQ(CompareBackward(f), "") << ToString(c);
    }
  }
}

/// Adds a number to all values of k. A row's dS sums up to 0, so its dQ stays as it is, but becomes
/// a small difference of large sums, of which 16 bits show how the float32 were rounded.
void AddToKeys(const Fixture& f, double x) {
  f.k.ForEach(
      [&](int64_t, int64_t, int64_t, int64_t element) { f.k.Set(element, f.k.Get(element) + x); });
}

// The same of wide heads, whose items a pair of thread blocks takes: of three panels of dQ the
// middle one is now one block's, now the other's. Groups of heads, of which a part's go with an
// item; a V that is narrower than K; packed sequences, one of them without keys.
TEST(EmulatedHopperBackward, OrderChangesNoBitOfWideHeads) {
  for (const auto& [dim, dim_v] : {std::pair{192, 192}, std::pair{192, 128}, std::pair{256, 256}}) {
    if (!HasInstance(dim)) continue;
    for (const auto& [packed, causal] :
         {std::pair{false, false}, std::pair{false, true}, std::pair{true, true}}) {
      Case c = MakeCase(150, 300, dim);
      c.head_dim_v = dim_v;
      c.deterministic = true;
      c.causal = causal;
      if (packed) c.varlen = true, c.seqlens_q = {150, 70, 64}, c.seqlens_k = {300, 0, 257};
      if (causal != packed) c.dropout_p = 0.2f;
      c.batch_invariant = packed;
      Fixture f(c);
      AddToKeys(f, 16);
      ASSERT_EQ(f.Forward(), "");
      std::string first;
      for (uint64_t seed = 0; seed < (kUnderSanitizer ? 1 : 3); ++seed) {
        DrawHopper(seed);
        // Three pairs at a time, or one after the other: then the first one does everything.
        strobe::emulator::machine().devices[0].multiprocessors = 6;
        strobe::emulator::settings().blocks_at_once = seed % 2 ? 1 : 6;
        f.Poison(STROBE_BACKWARD);
        ASSERT_EQ(f.Backward(InTheEmulator(HoldsOf(seed))), "") << ToString(c);
        if (seed == 0) first = Bits(f, true);
        EXPECT_TRUE(Bits(f, true) == first) << ToString(c) << ", seed " << seed;
      }
      EXPECT_EQ(CompareBackward(f), "") << ToString(c);
    }
  }
}

// The order is that of the blocks of keys that a list has, whichever the rule leaves of them.
TEST(EmulatedHopperBackward, OrderUnderAMaskChangesNoBit) {
  for (const bool deterministic : {true, false}) {
    for (const auto& [dim, block_q, block_k] :
         {std::tuple{64, 128, 128}, std::tuple{64, 256, 256}, std::tuple{128, 64, 128},
          std::tuple{128, 128, 256}}) {
      Case c = MakeCase(300, 700, dim);
      c.heads = 2, c.heads_kv = 1;
      c.deterministic = deterministic;
      c.grad_float32 = true;  // 16 bits would hide most orders
      c.window_left = 400;    // some lists begin before what the rule shows
      if (block_k == 256) c.dropout_p = 0.2f;
      c.mask = MakeMask(block_q, block_k);
      if (block_q == 64) {
        c.varlen = true;
        c.seqlens_q = {170, 0, 230};
        c.seqlens_k = {500, 30, 300};
      }
      Fixture f(c);
      ASSERT_EQ(f.Forward(), "");
      std::string first;
      for (uint64_t seed = 0; seed < (kUnderSanitizer ? 1 : 8); ++seed) {
        DrawHopper(seed);
        f.Poison(STROBE_BACKWARD);
        ASSERT_EQ(f.Backward(InTheEmulator(HoldsOf(seed))), "");
        if (seed == 0) first = Bits(f, deterministic);
        EXPECT_TRUE(Bits(f, deterministic) == first) << ToString(c) << ", seed " << seed;
      }
      EXPECT_EQ(CompareBackward(f), "") << ToString(c);
    }
  }
}

// A mask with room for a part of what it needs, in blocks of a tile, and of half a tile.
TEST(EmulatedHopperBackward, RowsThatAMaskHasNoRoomForAreNaN) {
  if (kUnderTsan) GTEST_SKIP() << "flags of NaN are set by several threads alike";
  int64_t lost = 0, kept = 0;
  for (const int64_t dim : {64, 128}) {
    for (const int32_t block : {64, 128}) {
      Case c = MakeCase(500, 140, dim);
      c.heads = 2;
      c.accumulate = dim == 128;
      c.softcap = block == 64 ? 20.f : 0.f;
      c.mask = MakeMask(block, block);
      Fixture all(c), part(c);
      DrawHopper(static_cast<uint64_t>(dim));
      // One block of keys of a head after the other: without an order bits are the same so.
      strobe::emulator::machine().devices[0].multiprocessors = 1;
      EXPECT_EQ(CompareRowsWithLessRoom(all, part, 90, lost, kept), "") << ToString(c);
    }
  }
  EXPECT_GT(lost, 0);
  EXPECT_GT(kept, 0);
}

// A mask whose words are anything: the launch ends, and reads and writes nothing outside. (In a
// deterministic launch items may wait for a turn that never comes.)
TEST(EmulatedHopperBackward, WordsThatAreNoMaskLeadNowhere) {
  if (kUnderTsan) GTEST_SKIP() << "flags of NaN are set by several threads alike";
  int masks = 0, ordered = 0;
  for (uint64_t seed = 1; seed <= kHopperCases; ++seed) {
    const Case c = DrawMaskedCase(seed);
    ordered += c.deterministic;
    DrawHopper(seed);
    Fixture f(c);
    ASSERT_EQ(f.Forward(), "");
    EXPECT_EQ(f.Backward(WithHostileMask(90, seed, masks)), "") << ToString(c);
  }
  EXPECT_GT(masks, 0);
  EXPECT_GT(ordered, 0);
}

// A block of keys that all queries see, beside others that few do, comes first of all heads
// (MaskedItems); in a deterministic launch it does not.
TEST(EmulatedHopperBackward, MasksWithOneLongListAgreeWithTheOracle) {
  if (kUnderSanitizer) GTEST_SKIP() << "random problems are enough there";
  for (const int64_t dim : {64, 128}) {
    for (const bool deterministic : {false, true}) {
      Case c = MakeCase(900, 900, dim);
      c.heads = 4;
      c.heads_kv = 2;
      c.deterministic = deterministic;
      c.mask.there = c.mask.keep = c.mask.global = true;
      c.mask.block_q = c.mask.block_k = 128;
      for (c.seed = 1; c.seed <= 2; ++c.seed) {
        DrawHopper(c.seed);
        EXPECT_EQ(RunBackward(c), "") << ToString(c);
      }
    }
  }
}

// The sums of dQ are 32 MB together, of short heads: items set them to zero, which all that add to
// them wait for.
TEST(EmulatedHopperBackward, SumsThatItemsSetToZeroAgreeWithTheOracle) {
  if (kUnderSanitizer) GTEST_SKIP() << "takes minutes";
  Case c = MakeCase(2, 140, 8);
  c.varlen = true;
  c.seqlens_q.assign(64, 2);
  c.seqlens_k.assign(64, 7);
  for (size_t b = 0; b < 64; b += 2)
    c.seqlens_k[b] = 140;  // whose second block waits for the first
  c.heads = 16;
  c.heads_kv = 4;
  DrawHopper(2);  // in this order, who does not wait for zeros comes before them
  strobe::emulator::machine().devices[0].multiprocessors = 4;
  strobe::emulator::settings().blocks_at_once = 4;
  EXPECT_EQ(RunBackward(c), "");
}

// With one block of keys a sequence, nobody comes by some tiles of dQ, which are zero all the same:
// those that see no key, and all of a sequence without keys. Parts of a group have heads of their
// own; rows that are not in use belong to nobody; dQ has strides of any kind.
TEST(EmulatedHopperBackward, DqOfOneBlockOfKeysIsWrittenOnce) {
  if (kUnderSanitizer) GTEST_SKIP() << "random problems are enough there";
  for (const int64_t dim : {64, 90}) {
    for (const int64_t keys : {77, 128}) {
      for (const bool varlen : {false, true}) {
        for (const bool general : {false, true}) {
          Case c = MakeCase(300, keys, dim);
          c.varlen = varlen;
          c.causal = true;  // the first 300 - keys rows see none
          c.seqlens_q.assign(3, 300);
          c.seqlens_k.assign(3, keys);
          if (varlen) c.seqlens_q = {300, 30, 129}, c.seqlens_k = {keys, 0, keys};
          c.arrays.seqused_q = {290, 7, 129};
          c.arrays.seqused_k = {static_cast<int32_t>(keys), 0, static_cast<int32_t>(keys)};
          c.has_seqused_q = c.has_seqused_k = true;
          if (general) c.softcap = 20.f, c.dropout_p = 0.2f;
          c.dq.shift = dim == 90 ? 1 : 0;
          c.dq.defaulted = !general;
          for (Layout* layout : {&c.q, &c.k, &c.v, &c.dout}) MakeAligned(*layout, dim, false);
          DrawHopper(static_cast<uint64_t>(dim + keys));
          EXPECT_EQ(RunBackward(c, HoldsOf(static_cast<uint64_t>(keys))), "") << ToString(c);
        }
      }
    }
  }
}

// What is not finite reaches those alone who see it.
TEST(EmulatedHopperBackward, MaskedInfinitiesReachNobody) {
  if (kUnderTsan) GTEST_SKIP() << "flags of NaN are set by several threads alike";
  for (const int64_t dim : {64, 128}) {
    for (const auto& [x, behind] : {std::pair{HUGE_VAL, 0}, std::pair{std::nan(""), 0},
                                    std::pair{HUGE_VAL, 20}, std::pair{std::nan(""), 20}}) {
      // Keys of two work items, or of one.
      Case c = MakeCase(90, 140 - behind, dim);
      c.heads = 2;
      c.causal = true;
      if (std::isnan(x) == (dim == 64)) c.softcap = 20.f, c.dropout_p = 0.3f;
      DrawHopper(static_cast<uint64_t>(dim));
      EXPECT_EQ(RunBackward(c, WorkspaceHolds::kNaN,
                            [&](Fixture& f) {
                              f.v.Set(f.v.Index(0, 120 - behind, 0, 3), x);
                              f.k.Set(f.k.Index(0, 131 - behind, 1, 5), x);
                            }),
                "")
          << ToString(c);
    }
  }
}

// Float32 gradients, gradients that are added to what is there, and delta from the caller, each
// with one block of keys and with two; where something is not finite that a masked pair touches,
// too.
TEST(EmulatedHopperBackward, GradientsOfEveryKind) {
  if (kUnderTsan) GTEST_SKIP() << "flags of NaN are set by several threads alike";
  for (int kind = 1; kind < 8; ++kind) {
    for (const int64_t keys : {100, 200}) {
      for (const double x : {0.5, HUGE_VAL}) {
        Case c = MakeCase(90, keys, 64);
        c.grad_float32 = kind & 1, c.accumulate = kind & 2, c.has_delta = kind & 4;
        c.causal = true;
        c.deterministic = kind % 3 == 0;
        DrawHopper(static_cast<uint64_t>(kind));
        EXPECT_EQ(RunBackward(c, HoldsOf(static_cast<uint64_t>(kind)),
                              [&](Fixture& f) {
                                f.v.Set(f.v.Index(0, keys - 5, 0, 3), x);
                                f.k.Set(f.k.Index(0, keys - 9, 1, 5), x);
                              }),
                  "")
            << ToString(c);
      }
    }
  }
}

// Which problems with a mask as data go to Hopper's kernels, and why others do not.
TEST(EmulatedHopperBackward, MasksThatAreLeftToMmaSync) {
  strobe::cuda::DeviceProperties device;
  device.compute_capability = 90;
  device.multiprocessors = 132;
  device.shared_bytes = strobe::emulator::kMostShared;
  strobe::emulator::machine().forced_instance.clear();
  const auto choose = [&](int64_t dim, int32_t block_q, int32_t block_k, auto... change) {
    strobe::AttentionProblem p{};
    p.direction = STROBE_BACKWARD;
    p.v_dtype = p.dtype = p.kv_dtype = p.grad_dtype = p.out_dtype = STROBE_BFLOAT16;
    p.batch = 1;
    p.heads = p.heads_kv = 2;
    p.seqlen_q = p.seqlen_k = 512;
    p.head_dim = p.head_dim_v = dim;
    p.scale = 1;
    p.window_left = p.window_right = -1;
    for (strobe::Strides* const s : {&p.q, &p.k, &p.v, &p.dout})
      *s = {512 * 2 * dim, 2 * dim, dim, 1};
    p.mask.kind = STROBE_MASK_PACKED;
    p.mask.batch = p.mask.heads = 1;
    p.mask.block_q = block_q, p.mask.block_k = block_k;
    (change(p), ...);
    const strobe::cuda::InstanceChoice choice = strobe::cuda::choose_instance(90, p, device);
    return choice.reason.empty() ? std::string(choice.name) : choice.reason;
  };
  const auto ordered = [](strobe::AttentionProblem& p) { p.deterministic = true; };
  const auto capped = [](strobe::AttentionProblem& p) { p.softcap = 20; };
  const auto biased = [](strobe::AttentionProblem& p) { p.has_bias = true; };
  const std::string of_64 = "backward_sm90_bf16_64_128x128x2x8_",
                    of_128 = "backward_sm90_bf16_128_64x128x2x8_";
  for (const int32_t block : {64, 128, 256}) {
    EXPECT_EQ(choose(64, block, block), of_64 + "mask");
    EXPECT_EQ(choose(128, block, block), of_128 + "mask");
  }
  EXPECT_EQ(choose(64, 128, 128, ordered), of_64 + "mask");
  EXPECT_EQ(choose(128, 64, 128, ordered), of_128 + "mask");
  EXPECT_EQ(choose(64, 256, 256, ordered, capped), of_64 + "mask_general");
  EXPECT_EQ(choose(64, 64, 128, ordered),
            "deterministic with a mask in blocks of 64 x 128, expected at least 128 x 128");
  EXPECT_EQ(choose(128, 128, 64, ordered),
            "deterministic with a mask in blocks of 128 x 64, expected at least 64 x 128");
  EXPECT_EQ(choose(64, 128, 128, biased),
            "mask beside bias for the backward pass, expected one of them");
  EXPECT_EQ(choose(192, 128, 128), "mask, expected none for the backward pass above head_dim 128");
}

TEST(EmulatedHopperBackward, SequencesOfNoneAndOne) {
  for (const bool biased : {false, true}) {
    for (const int64_t q : {0, 1}) {
      for (const int64_t k : {0, 1, 128}) {
        Case c = MakeCase(q, k, 40);
        c.has_bias = c.has_dbias = biased;
        c.bias.same_dtype = true;
        for (Layout* const layout : {&c.bias.layout, &c.bias.gradient})
          std::swap(layout->order[1], layout->order[2]);  // [batch, heads, queries, keys]
        if (k == 1) MakeAligned(c.bias.layout, k, false);
        DrawHopper(static_cast<uint64_t>(2 * q + k));
        EXPECT_EQ(RunBackward(c), "") << ToString(c);
      }
    }
  }
}

// A finite bias, however large, hides nothing: the pair that it lifts has the row's whole weight.
TEST(EmulatedHopperBackward, LargestBiasesTakeTheWholeWeight) {
  if (kUnderTsan) GTEST_SKIP() << "flags of NaN are set by several threads alike";
  Case c = MakeCase(70, 136, 64);
  if (c.dtype != DType::kBFloat16) GTEST_SKIP() << "fp16 ends at 65504";
  c.heads = c.heads_kv = 1;
  c.has_bias = c.has_dbias = true;
  c.bias.same_dtype = true;
  for (const double large : {1e30, 0x1.fep127}) {
    DrawHopper(1);
    Fixture f(c);
    for (const int64_t query : {3, 69}) {
      for (int64_t other = 0; other < 70; ++other)  // nobody else sees its key
        f.bias.Set(f.bias.Index(0, other, 0, query + 4), other == query ? large : -HUGE_VAL);
    }
    ASSERT_EQ(f.Forward(), "");
    ASSERT_EQ(f.Backward(InTheEmulator()), "");
    const oracle::Tensor dv = f.dv.Read(), dout = f.dout.Read();
    for (const int64_t query : {3, 69}) {
      for (int64_t d = 0; d < 64; ++d)
        EXPECT_EQ(dv.at(query + 4, 0)[d], dout.at(query, 0)[d]) << large << ", " << query;
    }
  }
}

// An instance that is asked for takes what it can, and leaves the rest to another one.
TEST(EmulatedHopperBackward, RowsAskedForLeaveWhatTheyCannotDo) {
  for (const auto& entry : Instances()) {
    Case c = MakeCase(60, 70, 64);
    c.dtype = entry.instance->config.dtype == STROBE_BFLOAT16 ? DType::kBFloat16 : DType::kFloat16;
    c.deterministic = true;
    DrawHopper(1);
    strobe::emulator::machine().forced_instance = entry.name;
    EXPECT_EQ(RunBackward(c), "") << entry.name;
  }
  strobe::emulator::machine().forced_instance.clear();
}

// Each wait at an mbarrier guards something: where it is left out, some order of threads and copies
// gives other bits, or the launch fails.
TEST(EmulatedHopperBackward, EachWaitThatIsLeftOutShows) {
  if (kUnderSanitizer) GTEST_SKIP() << "which a sanitizer ends the program for";
  // The mbarriers by their numbers, as backward_kernel initialises them. Long items, or of one step
  // each: then the next item's keys come early. V has one stage at width 128, in the general
  // kernel, which takes dropout, and beside a bias. Under a mask as data also those that tell of
  // steps. Of the kernel for wide heads those that keep the order of additions, with two pairs of
  // thread blocks.
  const struct {
    const char* name;
    int64_t dim, queries;
    int mbarrier;
    float dropout_p = 0;
    int multiprocessors = 1;
    bool masked = false, biased = false;
  } waits[] = {{"k.full", 64, 520, 4},
               {"k.empty", 64, 100, 5},
               {"v.full", 64, 520, 8},
               {"v.empty", 128, 60, 9},
               {"q.full", 64, 520, 12},
               {"q.empty", 64, 520, 13},
               {"dout.full", 64, 520, 16},
               {"dout.empty", 64, 520, 17},
               {"ds.full", 64, 520, 20},
               {"ds.empty", 64, 520, 21},
               {"general k.full", 64, 520, 4, 0.2f},
               {"general k.empty", 64, 100, 5, 0.2f},
               {"general v.full", 64, 520, 8, 0.2f},
               {"general v.empty", 64, 60, 9, 0.2f},
               {"general q.full", 64, 520, 10, 0.2f},
               {"general q.empty", 64, 520, 11, 0.2f},
               {"general dout.full", 64, 520, 14, 0.2f},
               {"general dout.empty", 64, 520, 15, 0.2f},
               {"general ds.full", 64, 520, 18, 0.2f},
               {"general ds.empty", 64, 520, 19, 0.2f},
               {"mask q.full", 64, 520, 12, 0, 1, true},
               {"mask q.empty", 64, 520, 13, 0, 1, true},
               {"mask found", 64, 1000, 26, 0, 1, true},
               {"mask known", 64, 60, 28, 0, 1, true},
               {"bias.full", 64, 520, 22, 0, 1, false, true},
               {"bias.empty", 64, 520, 23, 0, 1, false, true},
               {"bias.full of two panels", 128, 520, 22, 0, 1, false, true},
               {"bias.empty of two panels", 128, 520, 23, 0, 1, false, true},
               {"wide added.full", 192, 260, 33, 0, 4},
               {"wide added.empty", 192, 260, 34, 0, 4}};
  for (const auto& wait : waits) {
    if (!HasInstance((wait.dim + 63) / 64 * 64)) continue;
    Case c = MakeCase(wait.queries, 520, wait.dim);
    c.heads = c.heads_kv = 1;
    c.deterministic = !wait.biased;
    c.dropout_p = wait.dropout_p;
    if (wait.masked) c.mask = MakeMask(128, 128);
    c.has_bias = wait.biased, c.bias.same_dtype = true;
    Fixture f(c);
    ASSERT_EQ(f.Forward(), "");
    const auto run = [&](uint64_t seed, int skipped) {
      DrawHopper(seed);
      // It has one item after the other.
      strobe::emulator::machine().devices[0].multiprocessors = wait.multiprocessors;
      if (wait.multiprocessors > 1)
        strobe::emulator::settings().blocks_at_once = wait.multiprocessors;
      strobe::emulator::settings().skipped_mbarrier = skipped;
      strobe::emulator::settings().unwritten = kNumberByte;
      f.Poison(STROBE_BACKWARD);
      const std::string wrong = f.Backward(InTheEmulator());
      return wrong.empty() ? Bits(f, true) : wrong;
    };
    const std::string right = run(0, -1);
    bool seen = false;
    for (uint64_t seed = 0; seed < 20 && !seen; ++seed) seen = run(seed, wait.mbarrier) != right;
    EXPECT_TRUE(seen) << wait.name;
  }
  strobe::emulator::settings() = {};
}

}  // namespace
}  // namespace strobe_test
