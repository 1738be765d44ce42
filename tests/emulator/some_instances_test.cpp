// Builds that have some of the instances: what one of them takes no back end may leave to another
// that this build has not. Plans alone.
//
//   STROBE_EMULATOR_CASES  how many random problems and builds (default 1000; 200 under a
//   sanitizer) STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include "some_instances.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/host/instance_choice.h"
#include "cuda/host/machine.h"
#include "emulated_device.h"
#include "environment.h"
#include "gpu/plan_for.h"
#include "problem_kinds.h"
#include "random_cases.h"

namespace strobe::cuda {
namespace {

using emulator::keep_instances;
using strobe_test::Verdict;

constexpr uint64_t kCases = strobe_test::kSanitized ? 200 : 1000;

DeviceProperties Device(int compute_capability) {
  DeviceProperties d;
  d.compute_capability = compute_capability;
  d.multiprocessors = 132;
  d.shared_bytes = compute_capability == 90        ? 227 << 10
                   : compute_capability == 80      ? 163 << 10
                   : compute_capability == kTuring ? kTuringSharedBytes
                                                   : 99 << 10;
  d.memory_bytes = int64_t{40} << 30;
  return d;
}

AttentionProblem Problem(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim) {
  AttentionProblem p;
  EXPECT_EQ(strobe_problem_init(&p, sizeof p), STROBE_OK);
  p.device = STROBE_CUDA;
  p.dtype = STROBE_BFLOAT16;
  p.batch = 2, p.heads = 8, p.heads_kv = 2;
  p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
  p.head_dim = head_dim;
  return p;
}

/// The instance of a problem's plan; without one, why there is none.
std::string InstanceOf(const AttentionProblem& p, const DeviceProperties& device) {
  Plan plan;
  const Status s = plan_for(p, device, plan);
  return s.ok() ? plan.instance_name : s.text();
}

class SomeInstances : public testing::Test {
 protected:
  void TearDown() override {
    keep_instances([](std::string_view) { return true; });
  }
  static void Keep(std::vector<std::string_view> parts) {
    keep_instances([=](std::string_view name) {
      return std::any_of(parts.begin(), parts.end(), [&](std::string_view part) {
        return name.find(part) != std::string_view::npos;
      });
    });
  }
};

TEST_F(SomeInstances, KeysOfOneBlockGoToHopperWhereThereIsNoOtherKernel) {
  AttentionProblem p = Problem(1000, 64, 64);
  p.heads_kv = 8;  // whole tiles
  EXPECT_EQ(InstanceOf(p, Device(90)), "forward_sm80_bf16_64_128x64x2x4_plain");
  Keep({"_sm90_"});
  EXPECT_EQ(InstanceOf(p, Device(90)), "forward_sm90_bf16_64_128x128x4x8_all_rows");
}

TEST_F(SomeInstances, FewQueriesOverACacheGoToHopperWhereThereIsNoOtherKernel) {
  AttentionProblem p = Problem(1, 1000, 64);
  p.cache = STROBE_CACHE_CONTIGUOUS;
  EXPECT_EQ(InstanceOf(p, Device(90)), "cached_sm80_bf16_64_16x32x3x8_plain");
  Keep({"_sm90_", "forward_", "backward_"});
  EXPECT_EQ(InstanceOf(p, Device(90)), "cached_sm90_bf16_64_128x128x4x8_plain");
  // Codes are unpacked for it.
  p.kv_dtype = p.v_dtype = STROBE_INT8;
  p.kv_scale = STROBE_KV_SCALE_TENSOR;
  EXPECT_EQ(InstanceOf(p, Device(90)), "cached_sm90_bf16_64_128x128x4x8_plain");
}

// When a row is chosen is a preference: where a build has no other, its kernels take what they can.
TEST_F(SomeInstances, ARowThatSuitsLessIsBetterThanNone) {
  AttentionProblem p = Problem(5000, 5000, 64);
  const std::string few_queries = "forward_sm90_bf16_64_128x128x4x8_plain";
  EXPECT_NE(InstanceOf(p, Device(90)), few_queries);
  Keep({few_queries});
  EXPECT_EQ(InstanceOf(p, Device(90)), few_queries);

  const std::string up_to_256 = "forward_sm80_bf16_64_128x64x2x4_plain";
  Keep({up_to_256, "forward_sm80_bf16_128_"});  // of another width there is one that suits
  EXPECT_TRUE(InstanceOf(p, Device(80)).starts_with("forward_sm80_bf16_128_"));
  Keep({up_to_256});
  EXPECT_EQ(InstanceOf(p, Device(80)), up_to_256);

  p.head_dim = 256;
  const std::string up_to_4096 = "forward_sm90_bf16_256_128x64x2x8_";
  EXPECT_FALSE(InstanceOf(p, Device(90)).starts_with(up_to_4096));
  Keep({up_to_4096});
  EXPECT_TRUE(InstanceOf(p, Device(90)).starts_with(up_to_4096));
  // Rows for some lengths have other blocks than those over a cache, and other bits: no preference.
  p.batch_invariant = 1;
  EXPECT_NE(InstanceOf(p, Device(90)).find("no kernel takes"), std::string::npos);

  Keep({""});
  p = Problem(1, 8192, 64);
  p.batch = 256;
  p.cache = STROBE_CACHE_PAGED;
  p.page_size = 16, p.pages = 1 << 17, p.pages_per_sequence = p.block_table_stride = 512;
  const std::string runs = "cached_sm80_bf16_64_16x32x3x8_plain";
  EXPECT_EQ(InstanceOf(p, Device(90)), "cached_sm80_bf16_64_16x32x3x4_plain");
  Keep({runs});
  EXPECT_EQ(InstanceOf(p, Device(90)), runs);
}

// So is dividing keys.
TEST_F(SomeInstances, KeysAreDividedWhereThereIsNoKernelForWholeTiles) {
  const AttentionProblem p = Problem(5000, 5000, 64);
  for (const int compute_capability : {80, 90}) {
    Keep({""});
    EXPECT_TRUE(InstanceOf(p, Device(compute_capability)).starts_with("forward_"));
    Keep({"cached_sm80_"});
    EXPECT_TRUE(InstanceOf(p, Device(compute_capability)).starts_with("cached_sm80_bf16_64_"));
  }
}

/// A random problem of a device; half of them have tensors that TMA can read.
AttentionProblem Draw(const strobe_test::ProblemKind& kind, uint64_t seed, int compute_capability,
                      oracle::Rng& rng) {
  AttentionProblem p = strobe_test::OfType(
      kind.draw(seed), compute_capability == kTuring ? STROBE_FLOAT16 : STROBE_BFLOAT16);
  p.device = STROBE_CUDA;
  if (rng.Chance(0.5)) {
    p.head_dim = round_up(p.head_dim, 16), p.head_dim_v = round_up(p.head_dim_v, 16);
    for (Strides* s : {&p.q, &p.k, &p.v, &p.out, &p.k_new, &p.v_new, &p.dout, &p.dq, &p.dk, &p.dv})
      *s = {};
  }
  // More tiles and keys than tests that run kernels have time for.
  if (!p.varlen && p.cache == STROBE_CACHE_NONE && !p.has_bias && rng.Chance(0.3)) {
    p.seqlen_q *= rng.Integer(1, 40), p.seqlen_k *= rng.Integer(1, 40);
    for (Strides* s : {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv}) *s = {};
  }
  return p;
}

TEST_F(SomeInstances, WhatOneOfThemTakesSomeBackEndTakes) {
  const std::vector<strobe_test::ProblemKind> kinds = strobe_test::ProblemKinds();
  const auto seeds = strobe_test::Seeds::ByEnvironment(kCases);
  int64_t taken = 0;
  strobe_test::ExpectNoneIsWrong(seeds, [&](uint64_t seed) -> Verdict {
    oracle::Rng rng(seed ^ 0x50E1u);
    constexpr int kDevices[] = {90, 90, 90, 80, 86, kTuring};
    DeviceProperties device = Device(rng.Pick(kDevices));
    constexpr int kMultiprocessors[] = {4, 40, 132};
    device.multiprocessors = rng.Pick(kMultiprocessors);
    AttentionProblem p = Draw(kinds[seed % kinds.size()], seed, device.compute_capability, rng);
    if (!check_problem(p).ok()) return {};
    resolve_defaults(p);
    // Rows of the table are left out with all of their variants, families of them, or any instance.
    constexpr double kShares[] = {0.05, 0.2, 0.5, 0.8, 1};
    const double of_families = rng.Pick(kShares), of_rows = rng.Pick(kShares);
    const double of_instances = rng.Pick(kShares);
    const uint64_t salt = rng.Next();
    const auto chance = [&](std::string_view text, double share) {
      return oracle::Rng(salt ^ std::hash<std::string_view>()(text)).Chance(share);
    };
    std::string kept;
    keep_instances([&](std::string_view name) {
      const size_t tiles = name.find('x');
      const bool keeps = chance(name.substr(0, name.find("_sm") + 5), of_families) &&
                         chance(name.substr(0, name.find('_', tiles)), of_rows) &&
                         chance(name, of_instances);
      if (keeps) kept += " " + std::string(name);
      return keeps;
    });
    std::string by_name;
    for (const int arch : {90, 80, kTuring}) {
      for (const std::string_view name : instances_to_choose(arch, p, device))
        by_name += " " + std::string(name);
    }
    Plan plan;
    const Status s = plan_for(p, device, plan);
    taken += s.ok();
    if (s.ok() || by_name.empty()) return {};
    return {"no back end takes what these take:" + by_name + "\n" + s.text(),
            "on compute capability " + std::to_string(device.compute_capability) + ", of" + kept};
  });
  if (seeds.count < 200) return;
  EXPECT_GT(taken, static_cast<int64_t>(seeds.count) / 20);
}

}  // namespace
}  // namespace strobe::cuda
