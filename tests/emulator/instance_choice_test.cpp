// Which of the decode kernels the planner takes.
#include "cuda/host/instance_choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/host/cached_choice.h"
#include "cuda/host/features_of.h"
#include "cuda/host/fill_params.h"
#include "cuda/host/fill_plan.h"
#include "cuda/host/instance_table.h"
#include "emulated_device.h"

namespace strobe::cuda {
namespace {

constexpr int64_t kHopper = 227 << 10, kAmpere = 163 << 10, kAda = 99 << 10;

CachedConfig Chosen(const AttentionProblem& p, int64_t shared_bytes) {
  emulator::machine().forced_instance.clear();  // another test's
  DeviceProperties device;
  device.compute_capability = 80;
  device.multiprocessors = 20;
  device.shared_bytes = shared_bytes;
  const Entry<CachedInstance>* const entry =
      find_cached_instance(80, p, CachedFeatures::of(p), device, nullptr);
  EXPECT_NE(entry, nullptr);
  return entry->instance->config;
}

AttentionProblem Problem(int64_t seqlen_q, int64_t group, int64_t head_dim) {
  AttentionProblem p{};
  p.v_dtype = p.dtype = p.kv_dtype = STROBE_BFLOAT16;
  p.cache = STROBE_CACHE_PAGED;
  p.page_size = 16;
  p.batch = 64;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = 8192;
  p.heads_kv = 2;
  p.heads = 2 * group;
  p.head_dim = p.head_dim_v = head_dim;
  return p;
}

TEST(CachedInstanceChoice, TakesTheFewestRowsThatHoldASequences) {
  for (const int64_t head_dim : {40, 64, 96, 128}) {
    EXPECT_EQ(Chosen(Problem(1, 1, head_dim), kHopper).tile_q, 16);
    EXPECT_EQ(Chosen(Problem(4, 4, head_dim), kHopper).tile_q, 16);
    EXPECT_EQ(Chosen(Problem(17, 1, head_dim), kHopper).tile_q, 32);
    EXPECT_EQ(Chosen(Problem(8, 4, head_dim), kHopper).tile_q, 32);
    EXPECT_EQ(Chosen(Problem(3, 11, head_dim), kHopper).tile_q, 64);
    EXPECT_EQ(Chosen(Problem(16, 4, head_dim), kHopper).tile_q, 64);
    EXPECT_EQ(Chosen(Problem(1000, 4, head_dim), kHopper).tile_q, 64);
  }
  // Of what the device has room for.
  EXPECT_EQ(Chosen(Problem(16, 4, 128), kHopper).stages, 3);
  EXPECT_EQ(Chosen(Problem(16, 4, 128), kAmpere).stages, 2);
  EXPECT_EQ(Chosen(Problem(16, 4, 128), kAmpere).tile_q, 64);
  EXPECT_EQ(Chosen(Problem(16, 4, 128), kAda).tile_q, 16);
  EXPECT_EQ(Chosen(Problem(16, 4, 256), kHopper).width, 256);
}

TEST(CachedInstanceChoice, NamesOfBeforeAreUnderstood) {
  EXPECT_EQ(current_name("decode_sm80_bf16_64_16x32x3x4"), "cached_sm80_bf16_64_16x32x3x4");
  EXPECT_EQ(current_name("decode_sm90_"), "cached_sm90_");
  EXPECT_EQ(current_name("cached_sm90_fp16_"), "cached_sm90_fp16_");
  EXPECT_EQ(current_name("_64x64x"), "_64x64x");
  EXPECT_EQ(current_name(""), "");
}

TEST(CachedInstanceChoice, FewKeysAreReadByTwoTilesOf32Rows) {
  AttentionProblem p = Problem(16, 4, 128);
  p.batch = 8;  // 2^17 keys of both heads
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 32);
  p.seqlen_k += 1;
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 64);
  p = Problem(17, 4, 128);  // three tiles of 32 would be too many
  p.batch = 1;
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 64);
  // The batch does not choose where bits must not depend on it.
  p = Problem(16, 4, 128);
  p.batch = 1, p.batch_invariant = 1;
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 32);
}

// Without a cache the estimate of launch_time.cpp decides, for any number of rows.
TEST(CachedInstanceChoice, RowsOfWholeTensorsAreDividedByTheTimeThatTheyTake) {
  AttentionProblem p = Problem(126, 1, 64);
  p.cache = STROBE_CACHE_NONE;
  p.batch = 1, p.seqlen_k = 4096;  // merging counts
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 32);
  p.seqlen_k = 8192;  // two tiles have five thread blocks each, four would share ten
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 64);
  p.batch = 64;  // reading counts
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 64);
  p.batch_invariant = 1;
  const int rows = Chosen(p, kHopper).tile_q;
  p.batch = 1;
  EXPECT_EQ(Chosen(p, kHopper).tile_q, rows);
  p = Problem(8, 4, 128);
  p.cache = STROBE_CACHE_NONE;
  EXPECT_EQ(Chosen(p, kHopper).tile_q, 32);
  EXPECT_EQ(Chosen(p, kAda).tile_q, 16);
}

TEST(CachedInstanceChoice, ThereMayBeNothingToDivide) {
  for (const int64_t batch : {0, 1}) {
    for (const int64_t seqlen_q : {0, 40}) {
      for (const int64_t seqlen_k : {0, 8192}) {
        AttentionProblem p = Problem(seqlen_q, 1, 64);
        p.cache = STROBE_CACHE_NONE;
        p.batch = batch, p.seqlen_k = seqlen_k;
        EXPECT_LE(Chosen(p, kHopper).tile_q, 64) << batch << " x " << seqlen_q << ", " << seqlen_k;
      }
    }
  }
}

TEST(CachedInstanceChoice, TheNumberOfRowsDoesNotCountWithBatchInvariant) {
  AttentionProblem few = Problem(1, 4, 128), many = Problem(1000, 4, 128);
  EXPECT_NE(Chosen(few, kHopper).tile_q, Chosen(many, kHopper).tile_q);
  few.batch_invariant = many.batch_invariant = 1;
  for (const int32_t varlen : {0, 1}) {
    few.varlen = varlen;
    EXPECT_EQ(Chosen(few, kHopper).tile_q, Chosen(many, kHopper).tile_q);
    EXPECT_EQ(Chosen(few, kHopper).tile_q, 32);
  }
}

// A plan says what rows get for the flag, and what it costs.
TEST(CachedInstanceChoice, APlanSaysWhatBatchInvariantCosts) {
  DeviceProperties device;
  device.compute_capability = 80;
  device.multiprocessors = 20;
  device.shared_bytes = kHopper;
  AttentionProblem p = Problem(8, 4, 128);
  p.batch = 4;
  const auto remark = [&] {
    const CachedFeatures asked = CachedFeatures::of(p);
    Plan plan{};
    plan.problem = p;
    plan.instance = number_of(find_cached_instance(80, p, asked, device, nullptr));
    return remark_on(plan, device);
  };
  EXPECT_EQ(remark(), "");
  p.batch_invariant = 1;
  EXPECT_EQ(remark(),
            "all rows of a sequence get the same bits here, whatever they are computed with; keys "
            "have chunks of 512, and tiles 32 rows, prompts' too, which take several times as long "
            "as without");
  p.direction = STROBE_BACKWARD;
  EXPECT_EQ(remark(), "");
  p.direction = STROBE_FORWARD, p.dropout_p = 0.5f;
  EXPECT_EQ(remark(),
            "a row's bits depend on no other sequence, but a prompt's row may have others than it "
            "has decoded");
}

TEST(CachedInstanceChoice, SmallPagesOfShortLaunchesAreReadByMoreWarps) {
  AttentionProblem p = Problem(1, 4, 128);
  p.batch = 16, p.seqlen_k = 4096;
  EXPECT_EQ(Chosen(p, kHopper).warps, 8);
  p.batch = 256, p.seqlen_k = 8192;
  EXPECT_EQ(Chosen(p, kHopper).warps, 4);
  p.page_size = 64;
  EXPECT_EQ(Chosen(p, kHopper).warps, 8);
  // The batch does not choose where bits must not depend on it.
  p.page_size = 16, p.batch_invariant = 1;
  const int warps = Chosen(p, kHopper).warps;
  p.batch = 1, p.seqlen_k = 128;
  EXPECT_EQ(Chosen(p, kHopper).warps, warps);
}

/// The end of the name of the decode instance for a problem.
std::string Variant(const AttentionProblem& p, const CachedFeatures& asked, int64_t head_dim) {
  emulator::machine().forced_instance.clear();
  DeviceProperties device;
  device.compute_capability = 80;
  device.multiprocessors = 20;
  device.shared_bytes = kHopper;
  std::string reason;
  const Entry<CachedInstance>* const entry = find_cached_instance(80, p, asked, device, &reason);
  if (!entry) return reason;
  EXPECT_GE(entry->instance->config.width, head_dim);
  const std::string name = entry->name;
  size_t at = 0;  // after the tiles, the last part that begins with a digit
  for (size_t i = 1; i < name.size(); ++i) {
    if (name[i - 1] == '_' && name[i] >= '0' && name[i] <= '9') at = i;
  }
  return name.substr(name.find('_', at) + 1);
}

TEST(CachedInstanceChoice, TheInstanceComputesWhatIsAskedAndNoMore) {
  const struct {
    const char *narrow, *wide;  // up to width 128, where the main kernel updates the cache; beyond
    void (*change)(AttentionProblem&);
  } cases[] = {
      {"plain", "plain", [](AttentionProblem&) {}},
      {"general", "general", [](AttentionProblem& p) { p.softcap = 20.f; }},
      {"general", "general", [](AttentionProblem& p) { p.alibi = STROBE_ALIBI_PER_HEAD; }},
      {"general", "general", [](AttentionProblem& p) { p.scale = -1.f; }},
      {"general", "general", [](AttentionProblem& p) { p.attention_chunk = 64; }},
      {"plain_new", "plain", [](AttentionProblem& p) { p.append = 1, p.seqlen_new = 1; }},
      {"plain", "plain", [](AttentionProblem& p) { p.append = 1, p.seqlen_new = 0; }},
      {"plain_new", "plain", [](AttentionProblem& p) { p.rotary_dim = 32; }},
      {"general_new", "general", [](AttentionProblem& p) { p.rotary_dim = 32, p.softcap = 1.f; }},
      {"elements_new", "elements", [](AttentionProblem& p) { p.k.seqlen += 4; }},
      {"elements_new", "elements", [](AttentionProblem& p) { p.q.head += 4; }},
      // Rotated queries lie in the workspace, in whole units.
      {"elements_new", "plain", [](AttentionProblem& p) { p.q.head += 4, p.rotary_dim = 32; }},
      // New keys are read by the kernel that appends them.
      {"elements_new", "plain",
       [](AttentionProblem& p) { p.append = 1, p.seqlen_new = 1, p.k_new.head += 1; }},
      {"elements_new", "elements",
       [](AttentionProblem& p) { p.append = 1, p.seqlen_new = 1, p.v.head += 1; }},
  };
  for (const int64_t head_dim : {64, 128, 256}) {
    for (const auto& c : cases) {
      AttentionProblem p = Problem(1, 4, head_dim);
      p.scale = 1.f;
      for (Strides* s : {&p.q, &p.k, &p.v, &p.out, &p.k_new, &p.v_new}) {
        *s = {4096 * head_dim, 16 * head_dim, head_dim, 1};
      }
      c.change(p);
      const std::string wanted = head_dim > 128 ? c.wide : c.narrow;
      EXPECT_EQ(Variant(p, CachedFeatures::of(p), head_dim), wanted) << head_dim;
      // Addresses that are known to a launch alone take the place of strides.
      EXPECT_EQ(Variant(p, CachedFeatures::of(p).unaligned(), head_dim),
                head_dim > 128 ? "elements" : "elements_new");
    }
  }
}

// Keys in a cache under a mask as data: kernels of their own through mma.sync, which take nothing
// else, in tiles of 16 and of 64 rows.
TEST(CudaPlan, MasksAsDataOverACacheHaveKernelsOfTheirOwn) {
  emulator::machine().forced_instance.clear();
  DeviceProperties device;
  device.compute_capability = 90;
  device.multiprocessors = 132;
  device.shared_bytes = kHopper;
  const auto problem = [](int64_t queries, int64_t head_dim) {
    AttentionProblem p = Problem(queries, 4, head_dim);
    p.mask.kind = STROBE_MASK_PACKED;
    p.mask.block_q = p.mask.block_k = 64;
    p.mask.batch = p.mask.heads = 1;
    resolve_defaults(p);
    return p;
  };
  const struct {
    int64_t queries, head_dim;
    const char* name;
  } wanted[] = {{1, 64, "cached_sm80_bf16_64_16x32x3x4_mask"},
                {100, 64, "cached_sm80_bf16_64_64x64x4x8_mask"},
                {1, 128, "cached_sm80_bf16_128_16x16x3x4_mask"},
                {100, 128, "cached_sm80_bf16_128_64x64x3x8_mask"},
                {100, 256, "cached_sm80_bf16_256_16x16x2x2_mask"}};
  for (const auto& w : wanted) {
    AttentionProblem p = problem(w.queries, w.head_dim);
    EXPECT_STREQ(choose_instance(80, p, device).name, w.name);
    p.mask = {};
    EXPECT_EQ(std::string(choose_instance(80, p, device).name).find("mask"), std::string::npos);
    p.has_bias = 1;
    EXPECT_STREQ(choose_instance(80, p, device).name, w.name);
    p.batch_invariant = 1;
    EXPECT_TRUE(std::string(choose_instance(80, p, device).reason)
                    .starts_with("batch_invariant with a bias over a cache"));
  }
  const char* const declined = "mask, expected none for keys in a cache";
  EXPECT_EQ(choose_instance(90, problem(1, 64), device).reason, declined);
  AttentionProblem quantised = problem(1, 64);
  quantised.kv_dtype = STROBE_INT8;
  quantised.v_dtype = STROBE_INT8;
  EXPECT_STREQ(choose_instance(80, quantised, device).name, wanted[0].name);  // unpacked first
  quantised.mask = {};
  quantised.has_bias = 1;
  EXPECT_STREQ(choose_instance(80, quantised, device).name, wanted[0].name);
  // Keys and values of two dtypes are unpacked without a mask too.
  for (const int32_t v_dtype : {STROBE_Q4_0, STROBE_BFLOAT16}) {
    AttentionProblem mixed = Problem(1, 4, 64);
    mixed.kv_dtype = STROBE_INT8, mixed.v_dtype = v_dtype;
    const InstanceChoice choice = choose_instance(80, mixed, device);
    EXPECT_TRUE(std::string(choice.name).starts_with("cached_sm80_bf16_64_")) << choice.name;
    AttentionProblem floats = mixed;
    floats.kv_dtype = floats.v_dtype = STROBE_BFLOAT16;
    EXPECT_GT(choice.workspace_bytes, choose_instance(80, floats, device).workspace_bytes);
  }
  // On devices with little shared memory there are fewer stages.
  device.compute_capability = 86;
  device.shared_bytes = 99 << 10;
  EXPECT_STREQ(choose_instance(80, problem(1, 128), device).name,
               "cached_sm80_bf16_128_16x16x2x4_mask");
}

// Few queries without a cache, whose keys would be divided: lists are a head's own, of which the
// kernels that divide keys know nothing.
TEST(CudaPlan, MasksAsDataGoToNoKernelThatDividesKeys) {
  emulator::machine().forced_instance = "cached_sm80_";
  AttentionProblem p = Problem(1, 4, 64);
  p.cache = STROBE_CACHE_NONE;
  p.batch = 1;
  DeviceProperties device;
  device.compute_capability = 80;
  device.multiprocessors = 132;
  device.shared_bytes = kAmpere;
  EXPECT_EQ(std::string(choose_instance(80, p, device).name).substr(0, 12), "cached_sm80_");
  CachedUpdateParams params{};
  fill_params(p, ForwardArgs{}, params);
  EXPECT_TRUE(params.sequences_alike);

  p.mask.kind = STROBE_MASK_PACKED;
  p.mask.block_q = p.mask.block_k = 64;
  p.mask.batch = p.mask.heads = 1;
  // (This program has no kernels for whole tiles of 8.0.)
  EXPECT_EQ(choose_instance(80, p, device).reason,
            "this build has no bf16 forward kernel of this kind");
  params = {};
  fill_params(p, ForwardArgs{}, params);
  EXPECT_FALSE(params.sequences_alike);
  emulator::machine().forced_instance.clear();
}

// Each instance that there is to choose is the one that a plan with this choice has; of a row there
// is one; and what is no choice is refused by name.
TEST(CudaPlan, EveryChoiceIsTaken) {
  emulator::machine().forced_instance.clear();
  DeviceProperties device;
  device.multiprocessors = 132;
  device.shared_bytes = kHopper;
  for (const int arch : {80, 90}) {
    device.compute_capability = arch;
    for (const int64_t seqlen_q : {1, 300}) {
      for (const bool cache : {true, false}) {
        Plan ruled{};
        ruled.problem = Problem(seqlen_q, 4, 64);
        AttentionProblem& p = ruled.problem;
        if (!cache) p.cache = STROBE_CACHE_NONE, p.page_size = 0;
        p.scale = 1.f;
        p.window_left = p.window_right = -1;
        p.out_dtype = p.dtype;
        // A plan of the rules may be another architecture's.
        const std::vector<std::string_view> names = instances_to_choose(80, p, device);
        EXPECT_GE(names.size(), 3U) << seqlen_q << cache;
        for (const std::string_view name : names) {
          Plan chosen{};
          chosen.problem = p;
          const Choice choice{"cuda_sm80", name};
          EXPECT_EQ(plan_on(80, chosen, device, &choice), "") << name;
          EXPECT_EQ(chosen.instance_name, name);
        }
        if (!plan_on(80, ruled, device).empty()) continue;
        const std::vector<Choice> choices = choices_on(80, "cuda_sm80", p, device);
        ASSERT_EQ(choices.size(), names.size());
        EXPECT_NE(std::find(names.begin(), names.end(), ruled.instance_name), names.end());
        Plan refused{};
        refused.problem = p;
        const Choice none{"cuda_sm80", "cached_sm80_bf16_64_1x1x1x1"};
        EXPECT_NE(
            plan_on(80, refused, device, &none).find("choice.instance = cached_sm80_bf16_64_1"),
            std::string::npos);
        emulator::machine().forced_instance = "cached_sm80_";
        EXPECT_EQ(plan_on(80, refused, device, &choices.front()),
                  "choice.instance beside STROBE_CUDA_ROW, expected one of them");
        emulator::machine().forced_instance.clear();
      }
    }
  }
}

TEST(Features, AreWhatAProblemAsksFor) {
  using namespace features;
  AttentionProblem p{};
  p.dtype = p.out_dtype = p.grad_dtype = STROBE_BFLOAT16;
  p.direction = STROBE_BACKWARD;
  p.scale = 1.f;
  p.seqlen_k = 128;
  EXPECT_EQ(features_of(p, 128), kNothing);
  EXPECT_EQ(features_of(p, 64), kSumsDq);
  p.batch_invariant = 1;
  EXPECT_EQ(features_of(p, 128), kNothing);
  p.varlen = 1;  // another one may be longer
  EXPECT_EQ(features_of(p, 128), kSumsDq);
  p.varlen = p.batch_invariant = 0;
  p.deterministic = 1;
  EXPECT_EQ(features_of(p, 128), kOrder);
  p.softcap = 1.f, p.dropout_p = 0.5f;
  EXPECT_EQ(features_of(p, 128), kOrder | kSoftcap | kDropout);
  p.direction = STROBE_FORWARD;  // which adds nothing up; rows without elements have no end
  EXPECT_EQ(features_of(p, 64), kSoftcap | kDropout);
  p.head_dim = 20;
  EXPECT_EQ(features_of(p, 64), kSoftcap | kDropout | kAnyRows);
  p.head_dim = 24, p.q.batch = 4;
  EXPECT_EQ(features_of(p, 64), kSoftcap | kDropout | kAnyRows);
  p.varlen = 1;  // packed: its stride from sequence to sequence is not used
  EXPECT_EQ(features_of(p, 64), kSoftcap | kDropout);
  p.has_prefix = 1;
  EXPECT_TRUE(features_of(p, 64).contains(kUsedRows));
  EXPECT_FALSE(features_of(p, 64).contains(kSequences));
  EXPECT_TRUE(features_of(p, 64).has(kSequences));
}

}  // namespace
}  // namespace strobe::cuda
