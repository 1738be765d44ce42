// What compute capability 7.5 computes of what 8.0 does: random problems of every kind, planned for
// a device of each. All but wide heads, for which 64 KB of shared memory have no room, and float8.
//
//   STROBE_EMULATOR_CASES  how many problems of each kind (default 60; 10 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; problem n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "cuda/host/fill_plan.h"
#include "cuda/host/machine.h"
#include "environment.h"
#include "problem_kinds.h"
#include "random_cases.h"

namespace strobe_test {
namespace {

constexpr uint64_t kCases = kSanitized ? 10 : 60;

/// Why the kernels of an architecture decline a problem; "" where they take it. made: receives the
/// plan.
std::string Reason(int arch, const strobe_problem& given, strobe::Plan* made = nullptr) {
  strobe_problem p = OfType(given, arch == 80 ? STROBE_BFLOAT16 : STROBE_FLOAT16);
  p.device = STROBE_CUDA;
  if (const strobe::Status s = strobe::check_problem(p); !s.ok()) return s.text();
  strobe::Plan plan{};
  plan.struct_size = sizeof plan;
  plan.problem = p;
  strobe::resolve_defaults(plan.problem);
  strobe::cuda::DeviceProperties device;
  device.compute_capability = arch;
  device.multiprocessors = 40;
  device.shared_bytes = arch == 80 ? 163 << 10 : strobe::cuda::kTuringSharedBytes;
  device.memory_bytes = int64_t{16} << 30;
  std::string reason = strobe::cuda::plan_on(arch, plan, device);
  if (made) *made = plan;
  return reason;
}

/// What 7.5 declines of a problem.
struct Limits {
  int64_t widest;           // head dim that it has kernels for
  const char* wider;        // what the reason begins with above that
  const char* always = "";  // of all such problems
};

Limits LimitsOf(std::string_view kind, const strobe_problem& p) {
  if (kind.find("float8") != std::string_view::npos) {
    return {256, "", "dtype = float8 e4m3, expected fp16"};
  }
  if (kind.starts_with("forward")) return {256, ""};
  if (kind.starts_with("backward")) {
    if (std::max(p.head_dim, p.head_dim_v) > 192) return {192, "head_dim = "};
    return {p.has_bias ? 128 : 192, p.has_dbias ? "dbias, expected none" : "bias, expected none"};
  }
  return {128, "max(head_dim, head_dim_v) = "};
}

TEST(TuringPlan, TakesAllThatNewerDevicesDoButWideHeadsAndFloat8) {
  const Seeds seeds = Seeds::ByEnvironment(kCases);
  for (const ProblemKind& kind : ProblemKinds()) {
    int64_t tried = 0;
    for (uint64_t seed = seeds.first; seed < seeds.first + seeds.count; ++seed) {
      const strobe_problem p = kind.draw(seed);
      if (!Reason(80, p).empty()) continue;  // float32; or what neither takes
      ++tried;
      const Limits limits = LimitsOf(kind.name, p);
      const bool wide = std::max(p.head_dim, p.head_dim_v) > limits.widest;
      const std::string wanted = *limits.always ? limits.always : wide ? limits.wider : "";
      const std::string reason = Reason(strobe::cuda::kTuring, p);
      EXPECT_TRUE(wanted.empty() ? reason.empty() : reason.starts_with(wanted))
          << kind.name << ", seed " << seed << ": \"" << reason << "\", expected \"" << wanted
          << "\"\n"
          << strobe::to_string(p);
    }
    EXPECT_GT(tried, static_cast<int64_t>(seeds.count) / 4) << kind.name;
  }
}

// Masks as data: whole tensors both ways, and keys in a cache.
TEST(TuringPlan, MasksAsDataHaveAnInstanceOfEachWidthAndTile) {
  const auto name = [](int direction, int64_t dim, int64_t queries, bool cache) -> std::string {
    strobe_problem p;
    EXPECT_EQ(strobe_problem_init(&p, sizeof p), STROBE_OK);
    p.direction = direction;
    p.batch = 2, p.heads = p.heads_kv = 2;
    p.seqlen_q = queries, p.seqlen_k = 1000;
    p.head_dim = dim;
    p.dtype = STROBE_FLOAT16;
    p.mask.kind = STROBE_MASK_PACKED;
    p.mask.block_q = p.mask.block_k = 64;
    p.mask.batch = p.mask.heads = 1;
    if (cache) p.cache = STROBE_CACHE_CONTIGUOUS;
    strobe::Plan plan{};
    EXPECT_EQ(Reason(strobe::cuda::kTuring, p, &plan), "");
    EXPECT_LE(plan.shared_bytes, strobe::cuda::kTuringSharedBytes);
    return plan.instance_name ? plan.instance_name : "";
  };
  EXPECT_EQ(name(STROBE_FORWARD, 256, 1000, false), "forward_sm75_fp16_256_32x16x2x2_bias");
  EXPECT_EQ(name(STROBE_BACKWARD, 64, 1000, false), "backward_sm75_fp16_64_64x64x1x8_mask");
  EXPECT_EQ(name(STROBE_BACKWARD, 128, 1000, false), "backward_sm75_fp16_128_32x32x1x4_mask");
  EXPECT_EQ(name(STROBE_BACKWARD, 192, 1000, false), "backward_sm75_fp16_192_32x32x1x4_mask_alone");
  EXPECT_EQ(name(STROBE_FORWARD, 64, 1, true), "cached_sm75_fp16_64_16x16x2x4_mask");
  EXPECT_EQ(name(STROBE_FORWARD, 128, 1, true), "cached_sm75_fp16_128_16x16x2x2_mask");
  EXPECT_EQ(name(STROBE_FORWARD, 64, 100, true), "cached_sm75_fp16_64_32x32x2x4_mask");
  EXPECT_EQ(name(STROBE_FORWARD, 128, 100, true), "cached_sm75_fp16_128_32x32x2x2_mask");
}

}  // namespace
}  // namespace strobe_test
