// The backward kernels through mma.sync on the CPU (run_time.h), planned by the CUDA back end for
// devices that are not there, against float64. Half of the problems have a mask as data.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 40; 8 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
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

constexpr uint64_t kCases = kUnderSanitizer ? 8 : 40;

std::span<const strobe::cuda::Entry<strobe::cuda::BackwardInstance>> Instances() {
  return strobe::cuda::instance_table<strobe::cuda::BackwardInstance>();
}

/// The architecture that the program has instances of: 8.0, or 7.5.
int Arch() { return Instances().front().instance->config.arch; }

/// Above that there are no kernels that compute these features.
int64_t WidestWith(strobe::cuda::Features features) {
  int64_t widest = 0;
  for (const auto& entry : Instances()) {
    if (entry.instance->computes.has(features))
      widest = std::max<int64_t>(widest, entry.instance->config.width);
  }
  return widest;
}
int64_t WidestWithMask() { return WidestWith(strobe::cuda::features::kMask); }

/// A case of problem_gen.h in a dtype and with head dims of the instances that there are.
Case DrawCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    const uint64_t drawn = seed + (again << 32);
    Case c = seed % 2 == 1 ? GenerateMaskedCase(drawn) : GenerateCase(drawn);
    Rng rng(seed ^ again << 40 ^ 0x80B4u);
    const auto& config = Instances()[static_cast<size_t>(rng.Integer(
                                         0, static_cast<int64_t>(Instances().size()) - 1))]
                             .instance->config;
    c.dtype = config.dtype == STROBE_BFLOAT16 ? DType::kBFloat16 : DType::kFloat16;
    // A dimension of an instance's own more often than the generator draws one.
    if (rng.Chance(0.5)) c.head_dim = rng.Integer(std::max(1, config.width - 63), config.width);
    if (rng.Chance(0.5)) c.head_dim_v = c.head_dim;
    if (std::max(c.head_dim, c.head_dim_v) > WidestWith(strobe::cuda::features::kBias))
      c = c.WithoutBias();
    c.deterministic = rng.Chance(0.4);
    c.batch_invariant = rng.Chance(0.15);
    if (kUnderTsan) c.special = Special::kNone;  // flags of NaN are set by several threads alike
    const int64_t widest = Instances().back().instance->config.width;
    const int64_t dim = std::max(c.head_dim, c.head_dim_v);
    if (dim > (c.mask.there ? WidestWithMask() : widest)) continue;
    if (Steps(c) <= 40) return c;  // a second
  }
}

/// Draws a device, an order of threads, and an instance now and then.
void DrawMachine(uint64_t seed, bool may_force = false) {
  DrawHopper(seed);
  Rng rng(seed ^ 0x80E111u);
  auto& machine = strobe::emulator::machine();
  machine.devices[0].compute_capability = Arch();
  const int64_t shared[] = {99 << 10, 163 << 10};
  machine.devices[0].shared_bytes = Arch() == 75 ? 64 << 10 : rng.Pick(shared);
  machine.forced_instance.clear();
  if (may_force && rng.Chance(0.4)) {
    machine.forced_instance = Instances()[static_cast<size_t>(rng.Integer(
                                              0, static_cast<int64_t>(Instances().size()) - 1))]
                                  .name;
  }
}

Fixture::BackwardLaunch InTheEmulator(WorkspaceHolds holds = WorkspaceHolds::kNumbers) {
  return [holds](const strobe_problem& p, const strobe_backward_args& args) {
    return LaunchInTheEmulator(Arch(), p, args, holds);
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

TEST(EmulatedMmaSyncBackward, RandomProblemsAgreeWithTheOracle) {
  ExpectNoneIsWrong(Seeds::ByEnvironment(kCases), [&](uint64_t seed) {
    const Case c = DrawCase(seed);
    DrawMachine(seed, true);
    return Verdict{RunBackward(c, HoldsOf(seed)), ToString(c)};
  });
  strobe::emulator::machine().forced_instance.clear();
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

// With an order of additions no bit of dQ depends on when who comes by, and without one none of dK
// and dV does. With a causal mask, packed sequences, and what only the general kernel has.
TEST(EmulatedMmaSyncBackward, OrderChangesNoBit) {
  for (const bool deterministic : {true, false}) {
    for (const int64_t dim : {64, 128}) {
      for (const bool general : {false, true}) {
        Case c = MakeCase(130, 300, dim);
        c.heads = c.heads_kv = 1 + (dim == 64);
        c.deterministic = deterministic;
        c.grad_float32 = true;  // 16 bits would hide most orders
        c.causal = general == (dim == 64);
        if (general) c.dropout_p = 0.2f, c.softcap = 20.f;
        if (deterministic == general) {
          c.varlen = true;
          c.seqlens_q = {70, 0, 100};
          c.seqlens_k = {400, 30, 300};
        }
        Fixture f(c);
        ASSERT_EQ(f.Forward(), "");
        std::string first;
        for (uint64_t seed = 0; seed < (kUnderSanitizer ? 1 : 5); ++seed) {
          DrawMachine(seed);
          strobe::emulator::machine().devices[0].shared_bytes = 163 << 10;  // one instance's bits
          f.Poison(STROBE_BACKWARD);
          ASSERT_EQ(f.Backward(InTheEmulator(HoldsOf(seed))), "");
          if (seed == 0) first = Bits(f, deterministic);
          EXPECT_TRUE(Bits(f, deterministic) == first) << ToString(c) << ", seed " << seed;
        }
        EXPECT_EQ(CompareBackward(f), "") << ToString(c);
      }
    }
  }
}

// The order is that of the blocks of keys that a list has, whichever the rule leaves of them.
TEST(EmulatedMmaSyncBackward, OrderUnderAMaskChangesNoBit) {
  for (const bool deterministic : {true, false}) {
    for (const int32_t block : {64, 128, 256}) {
      Case c = MakeCase(200, 530, std::min<int64_t>(block == 128 ? 128 : 64, WidestWithMask()));
      c.heads = 2, c.heads_kv = 1;
      c.deterministic = deterministic;
      c.grad_float32 = true;  // 16 bits would hide most orders
      c.window_left = 400;    // some lists begin before what the rule shows
      c.mask = MakeMask(block == 256 ? 64 : block, block);
      if (block == 64) {
        c.varlen = true;
        c.seqlens_q = {70, 0, 130};
        c.seqlens_k = {400, 30, 300};
      }
      Fixture f(c);
      ASSERT_EQ(f.Forward(), "");
      std::string first;
      for (uint64_t seed = 0; seed < (kUnderSanitizer ? 1 : 16); ++seed) {
        DrawMachine(seed);
        auto& device = strobe::emulator::machine().devices[0];
        device.shared_bytes = 163 << 10;  // one instance's bits
        device.multiprocessors = 1 + static_cast<int>(seed % 8);
        f.Poison(STROBE_BACKWARD);
        ASSERT_EQ(f.Backward(InTheEmulator(HoldsOf(seed))), "");
        if (seed == 0) first = Bits(f, deterministic);
        EXPECT_TRUE(Bits(f, deterministic) == first) << ToString(c) << ", seed " << seed;
      }
      EXPECT_EQ(CompareBackward(f), "") << ToString(c);
    }
  }
}

// A mask with room for a part of what it needs: dQ of the queries whose lists are not there is NaN,
// and has the bits otherwise that it has with room for all.
TEST(EmulatedMmaSyncBackward, RowsThatAMaskHasNoRoomForAreNaN) {
  int64_t lost = 0, kept = 0;
  for (const int64_t dim : {64, 128}) {
    if (dim > WidestWithMask()) continue;
    Case c = MakeCase(300, 200, dim);
    c.heads = 2;
    c.deterministic = true;
    c.accumulate = dim == 128;
    c.mask = MakeMask(64, 64);
    Fixture all(c), part(c);
    DrawMachine(static_cast<uint64_t>(dim));
    strobe::emulator::machine().devices[0].shared_bytes = 163 << 10;
    const std::string wrong = CompareRowsWithLessRoom(all, part, Arch(), lost, kept);
    EXPECT_EQ(wrong, "") << ToString(c);
  }
  EXPECT_GT(lost, 0);
  EXPECT_GT(kept, 0);
}

// A mask whose words are anything: the launch ends, and reads and writes nothing outside. (In a
// deterministic launch items may wait for a turn that never comes.)
TEST(EmulatedMmaSyncBackward, WordsThatAreNoMaskLeadNowhere) {
  int masks = 0;
  for (uint64_t seed = 1; seed <= 2 * kCases; seed += 2) {
    Case c = DrawCase(seed);
    c.deterministic = seed % 4 == 1;
    DrawMachine(seed, true);
    Fixture f(c);
    ASSERT_EQ(f.Forward(), "");
    EXPECT_EQ(f.Backward(WithHostileMask(Arch(), seed, masks)), "") << ToString(c);
  }
  EXPECT_GT(masks, 0);
  strobe::emulator::machine().forced_instance.clear();
}

// What is not finite reaches those alone who see it.
TEST(EmulatedMmaSyncBackward, MaskedInfinitiesReachNobody) {
  if (kUnderTsan) GTEST_SKIP() << "flags of NaN are set by several threads alike";
  for (const int64_t dim : {64, 128}) {
    for (const double x : {HUGE_VAL, std::nan("")}) {
      Case c = MakeCase(90, 140, dim);
      c.heads = 2;
      c.causal = true;
      if (std::isnan(x) == (dim == 64)) c.softcap = 20.f, c.dropout_p = 0.3f;
      DrawMachine(static_cast<uint64_t>(dim));
      EXPECT_EQ(RunBackward(c, WorkspaceHolds::kNaN,
                            [&](Fixture& f) {
                              f.v.Set(f.v.Index(0, 120, 0, 3), x);
                              f.k.Set(f.k.Index(0, 131, 1, 5), x);
                            }),
                "")
          << ToString(c);
    }
  }
}

// Float32 gradients, gradients that are added to what is there, and delta from the caller, each
// with and without several parts of a group; where nothing is finite that a masked pair touches,
// too.
TEST(EmulatedMmaSyncBackward, GradientsOfEveryKind) {
  for (int kind = 1; kind < 8; ++kind) {
    for (const int64_t keys : {100, 200}) {
      Case c = MakeCase(90, keys, kind % 2 ? 64 : 50);
      c.grad_float32 = kind & 1, c.accumulate = kind & 2, c.has_delta = kind & 4;
      c.causal = true;
      c.varlen = keys == 100;
      if (c.varlen) c.seqlens_q = {90, 0, 33}, c.seqlens_k = {keys, 20, 0}, c.past_q = c.past_k = 5;
      c.deterministic = kind % 3 == 0;
      DrawMachine(static_cast<uint64_t>(kind));
      EXPECT_EQ(RunBackward(c, HoldsOf(static_cast<uint64_t>(kind))), "") << ToString(c);
      c.varlen = false;
      c.seqlens_q = {90}, c.seqlens_k = {keys};
      c.past_q = c.past_k = 0;
      if (kUnderTsan) continue;
      EXPECT_EQ(RunBackward(c, WorkspaceHolds::kNaN,
                            [&](Fixture& f) {
                              f.v.Set(f.v.Index(0, keys - 5, 0, 3), HUGE_VAL);
                              f.k.Set(f.k.Index(0, keys - 9, 1, 5), HUGE_VAL);
                            }),
                "")
          << ToString(c);
    }
  }
}

// A row whose keys a bias hides sees none: what dout holds there counts for nothing, and the sink's
// gradient has of it the gradient of lse alone.
TEST(EmulatedMmaSyncBackward, RowsThatABiasHidesHaveNoGradient) {
  if (kUnderTsan) GTEST_SKIP() << "flags of NaN are set by several threads alike";
  for (const bool outside : {false, true}) {
    for (const double x : {HUGE_VAL, std::nan("")}) {
      Case c = MakeCase(90, 140, 64);
      c.heads = 2;
      c.has_bias = c.has_dbias = true;
      c.bias.one_head = outside;
      for (Layout* const layout : {&c.bias.layout, &c.bias.gradient})
        std::swap(layout->order[1], layout->order[2]);  // [batch, heads, queries, keys]
      c.has_sinks = c.has_dsinks = c.has_dlse = true;
      c.sinks_outside_lse = outside;
      DrawMachine(outside);
      EXPECT_EQ(RunBackward(c, WorkspaceHolds::kNaN,
                            [&](Fixture& f) {
                              for (int64_t head = 0; head < f.bias.heads; ++head) {
                                for (int64_t key = 0; key < f.bias.dim; ++key)
                                  f.bias.Set(f.bias.Index(0, 70, head, key), -HUGE_VAL);
                              }
                              f.dout.Set(f.dout.Index(0, 70, 1, 3), x);
                            }),
                "")
          << ToString(c);
    }
  }
}

TEST(EmulatedMmaSyncBackward, SequencesOfNoneAndOne) {
  for (const int64_t q : {0, 1}) {
    for (const int64_t k : {0, 1}) {
      Case c = MakeCase(q, k, 40);
      DrawMachine(static_cast<uint64_t>(2 * q + k));
      EXPECT_EQ(RunBackward(c), "") << ToString(c);
    }
  }
}

// Each wait at an mbarrier guards something: where it is left out, some order of threads and copies
// gives other bits, or the launch fails.
TEST(EmulatedMmaSyncBackward, EachWaitThatIsLeftOutShows) {
  if (kUnderSanitizer) GTEST_SKIP() << "which a sanitizer ends the program for";
  if (Arch() == 75) GTEST_SKIP() << "tiles with one stage have other mbarriers";
  // The mbarriers by their numbers, as BackwardBarriers::init initialises them, with two stages of
  // a step. Long items, or short ones: then the next item's keys come early. (Without record_full a
  // thread follows pointers that are none. v_empty never shows: whoever loads V has loaded K, for
  // which it waited longer.)
  const struct {
    const char* name;
    int64_t queries;
    int mbarrier;
  } waits[] = {{"v_full", 200, 0},         {"ds_full", 200, 2},        {"ds_empty", 200, 3},
               {"k_full", 200, 9},         {"k_empty", 60, 10},        {"q_full", 200, 11},
               {"q_empty", 200, 12},       {"dout_full", 200, 13},     {"dout_empty", 200, 14},
               {"exchange_full", 200, 21}, {"exchange_empty", 200, 25}};
  for (const auto& wait : waits) {
    Case c = MakeCase(wait.queries, 520, 64);
    c.heads = c.heads_kv = 1;
    c.deterministic = true;
    Fixture f(c);
    ASSERT_EQ(f.Forward(), "");
    const auto run = [&](uint64_t seed, int skipped) {
      DrawMachine(seed);
      // It has one item after the other.
      strobe::emulator::machine().devices[0].multiprocessors = 1;
      strobe::emulator::machine().devices[0].shared_bytes = 163 << 10;
      strobe::emulator::settings().skipped_mbarrier = skipped;
      strobe::emulator::settings().unwritten = kNumberByte;
      f.Poison(STROBE_BACKWARD);
      const std::string wrong = f.Backward(InTheEmulator());
      return wrong.empty() ? Bits(f, true) : wrong;
    };
    const std::string right = run(0, -1);
    bool seen = false;
    for (uint64_t seed = 0; seed < 80 && !seen; ++seed) seen = run(seed, wait.mbarrier) != right;
    EXPECT_TRUE(seen) << wait.name;
  }
  strobe::emulator::settings() = {};
}

}  // namespace
}  // namespace strobe_test
