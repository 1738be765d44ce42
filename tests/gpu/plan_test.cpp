// Plans for devices that are not there: which kernel takes what, and why the others decline.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "cuda/host/fill_plan.h"
#include "cuda/host/instance.h"
#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "cuda/host/tensor_choice.h"
#include "plan_for.h"

namespace strobe::cuda {
namespace {

DeviceProperties device(int compute_capability) {
  DeviceProperties d;
  d.compute_capability = compute_capability;
  d.multiprocessors = compute_capability == 90 ? 132 : 108;
  d.shared_bytes = compute_capability == 90        ? 227 << 10
                   : compute_capability == 80      ? 163 << 10
                   : compute_capability == kTuring ? kTuringSharedBytes
                                                   : 99 << 10;  // 8.6, 8.9, 12.0
  d.memory_bytes = int64_t{40} << 30;
  return d;
}

AttentionProblem problem(int dtype, int64_t head_dim, int direction = STROBE_FORWARD) {
  AttentionProblem p;
  EXPECT_EQ(strobe_problem_init(&p, sizeof p), STROBE_OK);
  p.direction = direction;
  p.dtype = dtype;
  p.device = STROBE_CUDA;
  p.batch = 2, p.heads = 8, p.heads_kv = 2;
  p.seqlen_q = p.seqlen_k = 1000;
  p.head_dim = head_dim;
  return p;
}

TEST(CudaPlan, EveryHeadDimHasAForwardKernelOnEveryDevice) {
  for (const int cc : {80, 86, 89, 90, 100, 120}) {
    for (const int dtype : {STROBE_BFLOAT16, STROBE_FLOAT16}) {
      for (int64_t dim = 1; dim <= 256; ++dim) {
        Plan plan;
        const Status s = plan_for(problem(dtype, dim), device(cc), plan);
        ASSERT_TRUE(s.ok()) << "device " << cc << ", head_dim " << dim << "\n" << s.text();
        EXPECT_LE(plan.shared_bytes, device(cc).shared_bytes);
        EXPECT_GT(plan.tile_q, 0);
        EXPECT_GT(plan.tile_k, 0);
        EXPECT_EQ(plan.work_items, 2 * 8 * ((1000 + plan.block_q - 1) / plan.block_q));
        EXPECT_GE(plan.grid[0], 1);
        EXPECT_EQ(plan.block_threads % 32, 0);
      }
    }
  }
}

TEST(CudaPlan, TuringHasKernelsOfFloat16AsWideAsItsSharedMemory) {
  const std::pair<int, int64_t> widest[] = {{STROBE_FORWARD, 256}, {STROBE_BACKWARD, 192}};
  for (const auto& [direction, columns] : widest) {
    for (int64_t dim = 1; dim <= columns; ++dim) {
      Plan plan;
      const Status s = plan_for(problem(STROBE_FLOAT16, dim, direction), device(kTuring), plan);
      ASSERT_TRUE(s.ok()) << "head_dim " << dim << "\n" << s.text();
      EXPECT_STREQ(plan.kernel, "cuda_sm75");
      EXPECT_LE(plan.shared_bytes, kTuringSharedBytes);
    }
    Plan plan;
    const Status s = plan_for(problem(STROBE_BFLOAT16, 64, direction), device(kTuring), plan);
    EXPECT_NE(s.text().find("dtype = bf16, expected fp16"), std::string::npos) << s.text();
  }
  Plan plan;
  const Status s = plan_for(problem(STROBE_FLOAT16, 193, STROBE_BACKWARD), device(kTuring), plan);
  EXPECT_NE(s.text().find("head_dim = 193, expected at most 192"), std::string::npos) << s.text();
}

// A small row has no machine code of 9.0: there an earlier row, with room for its tiles, takes all
// that this one would.
template <typename Instance>
void ExpectSmallRowsToBeSpareOnHopper(bool tiles_matter) {
  const std::span<const Entry<Instance>> rows = instance_table<Instance>();
  int small = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].when != When::kSmall) continue;
    ++small;
    const auto& config = rows[i].instance->config;
    bool has_other = false;
    for (size_t j = 0; j < i; ++j) {
      const auto& other = rows[j].instance->config;
      has_other |= other.arch == config.arch && other.dtype == config.dtype &&
                   other.width == config.width && rows[j].when == When::kAny &&
                   (!tiles_matter || other.tile_q == config.tile_q) &&
                   rows[j].instance->computes.contains(rows[i].instance->computes) &&
                   rows[j].instance->shape.shared_bytes <= device(90).shared_bytes;
    }
    EXPECT_TRUE(has_other) << rows[i].name;
    EXPECT_LE(rows[i].instance->shape.shared_bytes, device(80).shared_bytes) << rows[i].name;
  }
  EXPECT_GT(small, 0);
}
TEST(CudaPlan, SmallRowsAreSpareOnHopper) {
  ExpectSmallRowsToBeSpareOnHopper<ForwardInstance>(false);
  ExpectSmallRowsToBeSpareOnHopper<BackwardInstance>(false);
  ExpectSmallRowsToBeSpareOnHopper<CachedInstance>(true);
}

TEST(CudaPlan, EveryHeadDimHasABackwardKernelOnEveryDevice) {
  for (const int cc : {80, 86, 89, 90, 100, 120}) {
    for (const int dtype : {STROBE_BFLOAT16, STROBE_FLOAT16}) {
      for (int64_t dim = 1; dim <= 256; ++dim) {
        for (const float dropout : {0.f, 0.1f}) {
          AttentionProblem p = problem(dtype, dim, STROBE_BACKWARD);
          p.dropout_p = dropout;
          Plan plan;
          const Status s = plan_for(p, device(cc), plan);
          ASSERT_TRUE(s.ok()) << "device " << cc << ", head_dim " << dim << "\n" << s.text();
          EXPECT_LE(plan.shared_bytes, device(cc).shared_bytes);
        }
      }
    }
  }
}

// The forward on Hopper through wgmma, where scores have no more than a scale and rows are whole
// 16-byte units; the backward there to head_dim 128; all others through mma.sync.
TEST(CudaPlan, MasksAsDataHaveTheirKernels) {
  for (const int cc : {80, 86, 90}) {
    for (const int64_t dim : {1, 64, 80, 128, 136, 256}) {
      AttentionProblem p = problem(STROBE_BFLOAT16, dim);
      p.mask.kind = STROBE_MASK_PACKED;
      p.mask.block_q = p.mask.block_k = 64;
      p.mask.batch = p.mask.heads = 1;
      for (const int64_t queries : {1000, 1}) {  // few queries are not divided either
        p.seqlen_q = queries;
        Plan plan;
        const Status s = plan_for(p, device(cc), plan);
        ASSERT_TRUE(s.ok()) << "device " << cc << ", head_dim " << dim << "\n" << s.text();
        const bool hopper = cc == 90 && dim % 8 == 0;
        EXPECT_STREQ(plan.kernel, hopper ? "cuda_sm90" : "cuda_sm80");
        std::string width = dim <= 64 ? "_64_" : dim <= 128 ? "_128_" : "_256_";
        if (hopper && dim == 80) width = "_96_";
        if (hopper && dim == 136) width = "_192_";
        EXPECT_NE(std::string(plan.instance_name).find(width), std::string::npos)
            << plan.instance_name;
        EXPECT_EQ(std::string(plan.instance_name).find("_mask") != std::string::npos, hopper);
        p.softcap = 5.f;
        Plan capped;
        EXPECT_TRUE(plan_for(p, device(cc), capped).ok());
        EXPECT_STREQ(capped.kernel, "cuda_sm80");
        p.softcap = 0.f;
        EXPECT_EQ(plan.work_items, 2 * 8 * ((queries + plan.block_q - 1) / plan.block_q));
      }
      p.direction = STROBE_BACKWARD;
      p.seqlen_q = 1000;
      for (const int deterministic : {0, 1}) {
        p.deterministic = deterministic;
        Plan plan;
        const Status s = plan_for(p, device(cc), plan);
        ASSERT_TRUE(s.ok()) << "device " << cc << ", head_dim " << dim << "\n" << s.text();
        // Hopper's kernels to 128, but for an order of tiles that have two lists.
        const bool on_hopper = cc == 90 && dim <= 128 && dim % 8 == 0 && !deterministic;
        EXPECT_STREQ(plan.kernel, on_hopper ? "cuda_sm90" : "cuda_sm80");
        EXPECT_NE(std::string(plan.instance_name).find("_mask"), std::string::npos)
            << plan.instance_name;
        EXPECT_EQ(remark_on(plan, device(cc)),
                  std::string("each tile goes through the mask's list") + (on_hopper ? "s" : "") +
                      " of its keys");
        p.has_bias = 1;
        p.bias_batch = p.bias_heads = p.bias_seqlen_q = 1;
        EXPECT_TRUE(plan_for(p, device(cc), plan).ok());
        EXPECT_STREQ(plan.kernel, "cuda_sm80");
        p.has_bias = 0;
      }
    }
  }
}

TEST(CudaPlan, ShortSequencesGetTheirOwnTiles) {
  const auto tile = [](int64_t head_dim, int64_t seqlen, bool causal, int64_t batch) {
    AttentionProblem p = problem(STROBE_BFLOAT16, head_dim);
    p.batch = batch, p.heads = p.heads_kv = 32;
    p.seqlen_q = p.seqlen_k = seqlen;
    p.causal = causal;
    Plan plan;
    EXPECT_TRUE(plan_for(p, device(90), plan).ok());
    return std::pair{plan.tile_q, plan.tile_k};
  };
  using Tile = std::pair<int64_t, int64_t>;
  EXPECT_EQ(tile(64, 512, true, 32), Tile(192, 128));
  EXPECT_EQ(tile(64, 4096, true, 4), Tile(192, 128));
  EXPECT_EQ(tile(64, 512, false, 32), Tile(192, 128));
  EXPECT_EQ(tile(64, 512, false, 1), Tile(128, 128));  // 128 tiles, 132 multiprocessors
  EXPECT_EQ(tile(64, 77, false, 32),
            Tile(128, 128));  // 128 rows of a tile, where 192 are the other
  EXPECT_EQ(tile(64, 192, false, 32), Tile(192, 128));
  EXPECT_EQ(tile(64, 256, true, 32), Tile(128, 128));  // 256 of 384
  EXPECT_EQ(tile(64, 257, true, 32), Tile(192, 128));  // 384 both ways
  EXPECT_EQ(tile(256, 512, false, 32), Tile(128, 64));
  EXPECT_EQ(tile(256, 8192, true, 2), Tile(128, 64));
  EXPECT_EQ(tile(256, 8192, false, 2), Tile(128, 80));
  EXPECT_EQ(tile(128, 512, false, 32), Tile(128, 128));
}

// With batch_invariant neither the batch's size nor, where lengths vary, the longest one chooses.
TEST(CudaPlan, BatchInvariantPlansIgnoreTheBatch) {
  for (const int direction : {STROBE_FORWARD, STROBE_BACKWARD}) {
    for (const int64_t dim : {64, 128, 256}) {
      for (const int cc : {80, 90}) {
        for (const bool varlen : {false, true}) {
          std::vector<std::pair<int64_t, int64_t>> tiles;
          for (const int64_t size : {1, 7, 300}) {
            AttentionProblem p = problem(STROBE_BFLOAT16, dim, direction);
            p.batch_invariant = 1;
            p.batch = size;
            p.varlen = varlen;
            p.seqlen_q = p.seqlen_k = varlen ? 64 * size : 512;
            if (varlen) p.total_q = p.total_k = p.batch * p.seqlen_q;
            Plan plan;
            const Status s = plan_for(p, device(cc), plan);
            ASSERT_TRUE(s.ok()) << s.text();
            tiles.emplace_back(plan.tile_q, plan.tile_k);
          }
          EXPECT_EQ(tiles[0], tiles[1]);
          EXPECT_EQ(tiles[0], tiles[2]);
        }
      }
    }
  }
}

TEST(CudaPlan, PlansAreTheSameForTheSameProblem) {
  Plan a, b;
  ASSERT_TRUE(plan_for(problem(STROBE_BFLOAT16, 128), device(80), a).ok());
  ASSERT_TRUE(plan_for(problem(STROBE_BFLOAT16, 128), device(80), b).ok());
  EXPECT_STREQ(a.kernel, "cuda_sm80");
  EXPECT_EQ(a.tile_q, b.tile_q);
  EXPECT_EQ(a.tile_k, b.tile_k);
  EXPECT_EQ(a.shared_bytes, b.shared_bytes);
  EXPECT_EQ(a.workspace_bytes, b.workspace_bytes);
}

// The Hopper forward draws no random numbers: with dropout it has to decline, in every shape.
AttentionProblem paged_problem(int dtype, int64_t head_dim) {
  AttentionProblem p = problem(dtype, head_dim);
  p.seqlen_q = 1, p.seqlen_k = 1024;
  p.cache = STROBE_CACHE_PAGED;
  p.pages = 500, p.page_size = 16, p.pages_per_sequence = 64;
  p.has_seqused_k = 1;
  return p;
}

TEST(CudaPlan, KeysInACacheHaveAKernelOnEveryDevice) {
  for (const int cc : {80, 86, 89, 90, 100, 120}) {
    for (const int dtype : {STROBE_BFLOAT16, STROBE_FLOAT16}) {
      for (int64_t dim = 1; dim <= 256; ++dim) {
        for (const int out : {STROBE_SAME_DTYPE, static_cast<int>(STROBE_FLOAT32)}) {
          AttentionProblem p = paged_problem(dtype, dim);
          p.out_dtype = out;
          Plan plan;
          const Status s = plan_for(p, device(cc), plan);
          ASSERT_TRUE(s.ok()) << "device " << cc << ", head_dim " << dim << "\n" << s.text();
          EXPECT_STREQ(plan.kernel, "cuda_sm80");
          EXPECT_LE(plan.shared_bytes, device(cc).shared_bytes);
          EXPECT_GE(plan.grid[0], 1);
          EXPECT_EQ(plan.work_items, int64_t{plan.grid[0]} * plan.grid[1]);
          EXPECT_GT(plan.workspace_bytes, 0U);
        }
      }
    }
  }
}

TEST(CudaPlan, NewKeysAndRotaryEmbeddingAreTaken) {
  for (const int64_t dim : {64, 80, 128, 136, 192, 256}) {
    AttentionProblem p = paged_problem(STROBE_BFLOAT16, dim);
    p.append = STROBE_APPEND_DENSE, p.seqlen_new = 1;
    p.rotary_dim = 64, p.rotary_rows = 2048;
    Plan plan;
    const Status s = plan_for(p, device(90), plan);
    ASSERT_TRUE(s.ok()) << s.text();
    EXPECT_STREQ(plan.kernel, "cuda_sm80");
  }
}

// A prompt, or a chunk of one, goes through tiles of queries on Hopper, and nowhere else.
TEST(CudaPlan, ManyQueriesOnPagesGoThroughTMA) {
  const auto kernel_of = [](const AttentionProblem& p, int cc) {
    Plan plan;
    const Status s = plan_for(p, device(cc), plan);
    EXPECT_TRUE(s.ok()) << s.text();
    EXPECT_GT(plan.workspace_bytes, 0U);
    return std::string(plan.kernel);
  };
  const auto prompt = [](int64_t head_dim) {
    AttentionProblem p = paged_problem(STROBE_BFLOAT16, head_dim);
    p.seqlen_q = 512, p.seqlen_k = 1000;
    return p;
  };
  for (const int64_t dim : {40, 64, 80, 128, 192, 256}) {
    EXPECT_EQ(kernel_of(prompt(dim), 90), "cuda_sm90") << dim;
    EXPECT_EQ(kernel_of(prompt(dim), 80), "cuda_sm80") << dim;
    AttentionProblem updates = prompt(dim);
    updates.append = STROBE_APPEND_DENSE, updates.seqlen_new = 512;
    updates.rotary_dim = 32, updates.rotary_rows = 2048;
    EXPECT_EQ(kernel_of(updates, 90), "cuda_sm90") << dim;
    AttentionProblem partial = prompt(dim);
    partial.out_dtype = STROBE_FLOAT32;
    EXPECT_EQ(kernel_of(partial, 90), "cuda_sm90") << dim;
  }
  const std::pair<const char*, void (*)(AttentionProblem&)> others[] = {
      {"few queries", [](AttentionProblem& p) { p.seqlen_q = 8; }},
      {"page_size = 12, expected a multiple of 8",
       [](AttentionProblem& p) { p.page_size = 12, p.pages_per_sequence = 90; }},
      {"leftpad with pages", [](AttentionProblem& p) { p.has_leftpad = 1; }},
      {"head_dim_v = 60", [](AttentionProblem& p) { p.head_dim_v = 60; }},
      // A prompt of so few tiles leaves most multiprocessors idle.
      {"few queries", [](AttentionProblem& p) {
         p.batch = 1, p.seqlen_q = 17, p.seqlen_k = 60000, p.pages_per_sequence = 4000;
       }}};
  for (const auto& [why, change] : others) {
    AttentionProblem p = prompt(128);
    change(p);
    EXPECT_EQ(kernel_of(p, 90), "cuda_sm80") << why;
    resolve_defaults(p);
    const std::string reason = choose_instance(90, p, device(90)).reason;
    EXPECT_NE(reason.find(why), std::string::npos) << reason;
  }
}

// Of a cache: up to 16 rows of a sequence divide their keys, however many tiles there are; more do
// where tiles are few, unless tiles of 16 rows would read wide keys again and again.
TEST(CudaPlan, RowsOfASequenceChooseBetweenDividedKeysAndWholeTiles) {
  const auto kernel_of = [](int64_t batch, int64_t queries, int64_t keys, int64_t head_dim) {
    AttentionProblem p = paged_problem(STROBE_BFLOAT16, head_dim);
    p.batch = batch, p.heads = 32, p.heads_kv = 8;
    p.seqlen_q = queries, p.seqlen_k = keys;
    p.page_size = 64, p.pages_per_sequence = (keys + 63) / 64;
    p.pages = p.pages_per_sequence * batch;
    Plan plan;
    DeviceProperties of = device(90);
    of.multiprocessors = 132;
    EXPECT_TRUE(plan_for(p, of, plan).ok());
    return std::string(plan.kernel);
  };
  for (const int64_t head_dim : {64, 128, 256}) {
    EXPECT_EQ(kernel_of(128, 1, 2048, head_dim), "cuda_sm80") << head_dim;
    EXPECT_EQ(kernel_of(128, 4, 2048, head_dim), "cuda_sm80") << head_dim;
    EXPECT_EQ(kernel_of(128, 8, 2048, head_dim), "cuda_sm90") << head_dim;
    EXPECT_EQ(kernel_of(1, 8, 16384, head_dim), "cuda_sm80") << head_dim;
    EXPECT_EQ(kernel_of(1, 16, 16384, head_dim), "cuda_sm80") << head_dim;
  }
  EXPECT_EQ(kernel_of(4, 16, 4096, 128), "cuda_sm80");
  EXPECT_EQ(kernel_of(4, 16, 4096, 256), "cuda_sm90");
}

// One block of 64 keys is mma.sync's, where it is all that there is, tiles are few and rows narrow.
TEST(CudaPlan, KeysOfOneSmallBlockGoThroughMmaSync) {
  const auto kernel_of = [](int64_t keys, const auto& change) {
    AttentionProblem p = problem(STROBE_BFLOAT16, 64);
    p.batch = 8, p.seqlen_q = 1000, p.seqlen_k = keys;
    change(p);
    Plan plan;
    EXPECT_TRUE(plan_for(p, device(90), plan).ok());
    return std::string(plan.kernel);
  };
  const auto as_it_is = [](AttentionProblem&) {};
  for (const int64_t keys : {17, 64}) EXPECT_EQ(kernel_of(keys, as_it_is), "cuda_sm80");
  for (const int64_t keys : {16, 65}) EXPECT_EQ(kernel_of(keys, as_it_is), "cuda_sm90");
  EXPECT_EQ(kernel_of(64, [](auto& p) { p.batch_invariant = 1; }), "cuda_sm90");
  EXPECT_EQ(kernel_of(64, [](auto& p) { p.batch = 1000; }), "cuda_sm90");
  EXPECT_EQ(kernel_of(64, [](auto& p) { p.head_dim = p.head_dim_v = 80; }), "cuda_sm90");
  EXPECT_EQ(kernel_of(64, [](auto& p) { p.direction = STROBE_BACKWARD; }), "cuda_sm90");
}

// Prompts beside sequences that decode: each kind has its kernel, in one launch.
// Codes of a quantised cache are unpacked once where many tiles would each unpack them, if there is
// room; and where no kernel takes the codes.
TEST(CudaPlan, ManyQueriesUnpackAQuantisedCacheFirst) {
  AttentionProblem p = problem(STROBE_BFLOAT16, 128);
  p.cache = STROBE_CACHE_PAGED;
  p.page_size = 16;
  p.pages = 1000;
  p.pages_per_sequence = 63;
  p.kv_dtype = STROBE_INT8;
  p.kv_scale = STROBE_KV_SCALE_ROW;
  const auto name = [&](int cc) {
    Plan plan;
    const Status s = plan_for(p, device(cc), plan);
    return s.ok() ? std::string(plan.instance_name) : s.text();
  };
  const size_t unpacked = size_t{2} * 1000 * 2 * 128 * 2 * 2;
  for (const int cc : {80, 90}) {
    Plan plan;
    ASSERT_TRUE(plan_for(p, device(cc), plan).ok());
    EXPECT_EQ(std::string(plan.instance_name), cc == 90 ? "cached_sm90_bf16_128_128x128x2x8_plain"
                                                        : "cached_sm80_bf16_128_64x64x2x8_plain");
    EXPECT_GE(plan.workspace_bytes, unpacked);
  }
  p.seqlen_q = 16;  // 64 rows
  EXPECT_EQ(name(90), "cached_sm80_bf16_int8_128_16x32x3x8_plain");
  p.seqlen_q = 2;
  EXPECT_EQ(name(90), "cached_sm80_bf16_int8_128_8x32x2x4_plain");
  p.seqlen_q = 1000;
  p.batch_invariant = 1;
  EXPECT_EQ(name(90), "cached_sm80_bf16_int8_128_16x32x3x8_plain");
  p.batch_invariant = 0;
  // More than a sixteenth of the device's memory.
  p.seqlen_k = 3000000, p.pages_per_sequence = 200000;
  EXPECT_EQ(name(90), "cached_sm80_bf16_int8_128_16x32x3x8_plain");
  p.seqlen_k = 1000;
  p.seqlen_q = 1;
  p.head_dim = 192;
  EXPECT_EQ(name(90), "cached_sm80_bf16_192_16x16x2x4_plain");
  p.head_dim = 200;
  EXPECT_EQ(name(90), "cached_sm80_bf16_256_16x16x2x2_plain");
  p.head_dim = 64;
  p.dtype = STROBE_FLOAT16;
  EXPECT_EQ(name(kTuring), "cached_sm75_fp16_64_16x16x2x4_plain");
  // Of two dtypes always, also those of which one is q's.
  p.dtype = STROBE_BFLOAT16, p.head_dim = 128;
  for (const auto& [k, v] : {std::pair{STROBE_INT8, STROBE_Q4_0},
                             {STROBE_INT8, STROBE_BFLOAT16},
                             {STROBE_BFLOAT16, STROBE_INT8}}) {
    for (const int32_t invariant : {0, 1}) {
      p.kv_dtype = k, p.v_dtype = v, p.batch_invariant = invariant;
      EXPECT_TRUE(name(80).starts_with("cached_sm80_bf16_128_")) << name(80);
      Plan plan;
      ASSERT_TRUE(plan_for(p, device(80), plan).ok());
      EXPECT_GE(plan.workspace_bytes, unpacked);
    }
  }
}

TEST(CudaPlan, FewQueriesBesideManyHaveARowOfTheirOwn) {
  AttentionProblem p = paged_problem(STROBE_BFLOAT16, 128);
  p.heads = 32, p.heads_kv = 8;
  p.varlen = 1, p.batch = 32, p.seqlen_q = 481;
  p.total_q = 32 * 481;  // prompts alone
  Plan plan;
  ASSERT_TRUE(plan_for(p, device(90), plan).ok());
  EXPECT_STREQ(plan.kernel, "cuda_sm90");
  EXPECT_EQ(instance_for_few_queries(plan), nullptr);
  const size_t of_prompts = plan.workspace_bytes;
  p.total_q = 31 + 481;
  ASSERT_TRUE(plan_for(p, device(90), plan).ok());
  EXPECT_STREQ(plan.kernel, "cuda_sm90");
  ASSERT_NE(instance_for_few_queries(plan), nullptr);
  EXPECT_EQ(instance_for_few_queries(plan)->config.tile_q, 64);  // up to 16 queries of a group of 4
  EXPECT_GE(plan.workspace_bytes, of_prompts);
  ASSERT_TRUE(plan_for(p, device(80), plan).ok());
  EXPECT_STREQ(plan.kernel, "cuda_sm80");
  EXPECT_EQ(instance_for_few_queries(plan), nullptr);
  // With batch_invariant all rows have one kernel.
  p.batch_invariant = 1;
  const CachedInstance* one = nullptr;
  for (const auto& [longest, total] : {std::pair{481, 31 + 481}, {481, 32 * 481}, {16, 40}}) {
    p.seqlen_q = longest, p.total_q = total;
    ASSERT_TRUE(plan_for(p, device(90), plan).ok());
    EXPECT_STREQ(plan.kernel, "cuda_sm90");
    EXPECT_STREQ(plan.instance_name, "cached_sm90_bf16_128_128x128x2x8_invariant");
    EXPECT_EQ(instance_for_few_queries(plan), nullptr);
    if (one) {
      EXPECT_EQ(instance_of<CachedInstance>(plan, 90), one);
    }
    one = instance_of<CachedInstance>(plan, 90);
  }
}

// With batch_invariant the choice is the same in every batch.
TEST(CudaPlan, TheBatchDoesNotDecideWhereItMustNot) {
  for (const int64_t queries : {1, 16, 17, 32, 33, 64, 65, 128, 300}) {
    std::string kernels_of[2];
    for (const int64_t batch : {1, 64}) {
      AttentionProblem p = paged_problem(STROBE_BFLOAT16, 128);
      p.seqlen_q = queries, p.batch = batch, p.pages = 64 * batch, p.batch_invariant = 1;
      Plan plan;
      ASSERT_TRUE(plan_for(p, device(90), plan).ok());
      kernels_of[batch > 1] = plan.kernel;
    }
    EXPECT_EQ(kernels_of[0], kernels_of[1]) << queries << " queries";
  }
}

// Wide kernels need room for the turned queries: for each once, packed or dense.
TEST(CudaPlan, TurnedQueriesHaveTheSizeOfTheQueries) {
  for (const bool packed : {false, true}) {
    AttentionProblem p = paged_problem(STROBE_BFLOAT16, 252);
    p.batch = 8;
    p.varlen = packed;
    p.total_q = packed ? 40 : 0;
    Plan without, with;
    ASSERT_TRUE(plan_for(p, device(90), without).ok());
    p.rotary_dim = 64, p.rotary_rows = 2048;
    const Status s = plan_for(p, device(90), with);
    ASSERT_TRUE(s.ok()) << s.text();
    const int64_t rows = packed ? p.total_q : p.batch * p.seqlen_q;
    const auto queries = static_cast<size_t>(rows * p.heads * 256 * 2);
    EXPECT_GE(with.workspace_bytes, without.workspace_bytes + queries) << packed;
    EXPECT_LE(with.workspace_bytes, without.workspace_bytes + queries + 256) << packed;
  }
}

TEST(CudaPlan, FewQueriesOnManyKeysDivideThem) {
  AttentionProblem p = problem(STROBE_BFLOAT16, 128);
  p.batch = 1, p.seqlen_q = 1, p.seqlen_k = 8192, p.heads = 32, p.heads_kv = 8;
  Plan plan;
  ASSERT_TRUE(plan_for(p, device(90), plan).ok());
  EXPECT_STREQ(plan.kernel, "cuda_sm80");
  EXPECT_EQ(plan.tile_q, 16);
  for (const auto change :
       {+[](AttentionProblem& q) { q.seqlen_k = 512; },
        +[](AttentionProblem& q) { q.batch = 4, q.seqlen_k = 768; },
        +[](AttentionProblem& q) { q.batch = 64, q.heads_kv = q.heads; },
        +[](AttentionProblem& q) { q.window_left = 700, q.window_right = 0, q.batch = 4; }}) {
    AttentionProblem other = p;
    change(other);
    ASSERT_TRUE(plan_for(other, device(90), plan).ok());
    EXPECT_STREQ(plan.kernel, "cuda_sm90");
  }
  p.batch_invariant = 1;
  ASSERT_TRUE(plan_for(p, device(90), plan).ok());
  EXPECT_STREQ(plan.kernel, "cuda_sm90");
  ASSERT_TRUE(plan_for(p, device(80), plan).ok());
  EXPECT_NE(instance_of<CachedInstance>(plan, 80), nullptr);
  // Many heads wait for a multiprocessor, and each would read the keys of its group again.
  p.batch_invariant = 0;
  p.batch = 64, p.seqlen_k = 512;
  ASSERT_TRUE(plan_for(p, device(90), plan).ok());
  EXPECT_STREQ(plan.kernel, "cuda_sm80");
}

/// The plan's tile where keys are divided, and 0 where tiles are whole.
int64_t DividedRows(const AttentionProblem& p, const DeviceProperties& device) {
  Plan plan;
  const Status s = plan_for(p, device, plan);
  EXPECT_TRUE(s.ok()) << s.text();
  return entry_of<CachedInstance>(plan.instance) ? plan.tile_q : 0;
}

// Wherever whole tiles would be few, up to any number of queries, or would read the keys of a group
// again and again.
TEST(CudaPlan, KeysAreDividedWhereTilesAreFew) {
  struct Shape {
    int64_t batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim;
    int64_t hopper, ampere;  // rows of a tile; 0: whole tiles
  };
  constexpr Shape kShapes[] = {
      {1, 27, 40719, 6, 3, 64, 64, 64},     // 6 tiles of 128 queries, 132 or 108 multiprocessors
      {6, 54, 32691, 1, 1, 80, 64, 64},     //
      {1, 19, 5259, 16, 16, 112, 32, 64},   // at 163 KB there is no tile of 32 rows of this width
      {1, 63, 6282, 6, 3, 64, 32, 32},      // four tiles of 32 rows
      {1, 512, 8192, 1, 1, 128, 64, 64},    // a chunk of a prompt
      {27, 1, 223, 24, 3, 192, 16, 16},     // 648 tiles of one query each, of few keys
      {26, 5, 15369, 40, 5, 64, 64, 64},    // 40 rows share a key head
      {27, 11, 24045, 16, 2, 80, 64, 64},   // 88 rows do
      {5, 45, 6925, 32, 4, 256, 0, 0},      // 23 tiles of 16 rows would read the keys
      {6, 39, 5455, 20, 20, 128, 0, 64},    // 120 tiles
      {9, 3, 2902, 32, 32, 64, 0, 16},      // more tiles than multiprocessors, no group
      {4, 23, 255, 4, 2, 256, 0, 0},        // merging takes longer
      {4, 19, 6246, 6, 3, 192, 64, 64},     // 38 rows share a key head
      {2, 1, 20000, 16, 16, 256, 16, 16},   // 32 tiles of one query each, of many keys
      {28, 40, 3409, 1, 1, 80, 64, 64},     // a tile has thread blocks of its own
      {35, 57, 20000, 4, 4, 64, 64, 64},    // 140 tiles: eight multiprocessors have a second one
      {33, 57, 20000, 4, 4, 64, 0, 64},     // 132 tiles: each has one
      {21, 7, 2691, 24, 24, 72, 16, 0},     // rows that begin within a sector
      {21, 7, 2691, 24, 24, 80, 0, 0},      // rows that do not
      {1, 8000, 8000, 1, 1, 128, 0, 0},     // 63 tiles: mma.sync has half of wgmma's rate
      {2, 4096, 4096, 16, 16, 128, 0, 0}};  //
  for (const Shape& s : kShapes) {
    AttentionProblem p = problem(STROBE_BFLOAT16, s.head_dim);
    p.batch = s.batch, p.seqlen_q = s.seqlen_q, p.seqlen_k = s.seqlen_k;
    p.heads = s.heads, p.heads_kv = s.heads_kv;
    EXPECT_EQ(DividedRows(p, device(90)), s.hopper) << s.seqlen_q << " x " << s.seqlen_k;
    EXPECT_EQ(DividedRows(p, device(80)), s.ampere) << s.seqlen_q << " x " << s.seqlen_k;
  }
}

// A thread block that has some rows for each of its warps merges longer than a second kernel takes.
TEST(CudaPlan, ManyRowsAreMergedByAKernelOfTheirOwn) {
  struct Shape {
    int64_t batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim;
    bool apart;
  };
  constexpr Shape kShapes[] = {{1, 27, 40719, 6, 3, 64, true},     // 54 rows in a tile of 64
                               {1, 58, 2173, 1, 1, 256, true},     // 16 rows for two warps
                               {27, 1, 223, 24, 3, 256, true},     // 8 rows for two warps
                               {1, 1, 1024, 32, 8, 128, false},    // a row for some of the warps
                               {1, 1, 1024, 32, 32, 128, false},   //
                               {9, 2, 18620, 8, 1, 40, false},     // two rows for each
                               {26, 5, 15369, 40, 5, 64, false}};  // a tile is one thread block's
  const auto is_apart = [](AttentionProblem p) {
    resolve_defaults(p);
    const InstanceChoice choice = choose_instance(80, p, device(90));
    EXPECT_EQ(choice.reason, "") << to_string(p);
    return choice.grid.merges_apart;
  };
  for (const Shape& s : kShapes) {
    AttentionProblem p = problem(STROBE_BFLOAT16, s.head_dim);
    p.batch = s.batch, p.seqlen_q = s.seqlen_q, p.seqlen_k = s.seqlen_k;
    p.heads = s.heads, p.heads_kv = s.heads_kv;
    EXPECT_EQ(is_apart(p), s.apart) << s.seqlen_q << " x " << s.seqlen_k;
    // With batch_invariant nothing changes.
    p.batch_invariant = 1;
    EXPECT_FALSE(is_apart(p));
    p.batch_invariant = 0;
    // The lengths of a cache are known on the device alone: where they are short, few rows have
    // few pieces.
    const bool has_many_rows = s.seqlen_q * s.heads / s.heads_kv > 16;
    p.cache = STROBE_CACHE_CONTIGUOUS, p.cache_batch = s.batch;
    EXPECT_EQ(is_apart(p), s.apart && has_many_rows) << s.seqlen_q << " x " << s.seqlen_k;
    // What may update a cache merges itself, but for wide heads, which a kernel before updates.
    p.append = STROBE_APPEND_DENSE, p.seqlen_new = 1, p.has_seqused_k = 1;
    EXPECT_EQ(is_apart(p), s.apart && has_many_rows && s.head_dim > 128) << s.seqlen_q;
  }
  AttentionProblem p = problem(STROBE_FLOAT16, 64);
  p.varlen = 1, p.batch = 2, p.seqlen_q = 40, p.total_q = 60;
  p.seqlen_k = 20000, p.total_k = 21000, p.heads = p.heads_kv = 2;
  EXPECT_TRUE(is_apart(p));
}

TEST(CudaPlan, WhatIsFewTilesDependsOnTheDevice) {
  AttentionProblem p = problem(STROBE_BFLOAT16, 64);
  p.batch = 1, p.seqlen_q = 64, p.seqlen_k = 8192, p.heads = p.heads_kv = 16;
  DeviceProperties small = device(89);
  small.multiprocessors = 20;
  EXPECT_GT(DividedRows(p, device(90)), 0);
  EXPECT_EQ(DividedRows(p, small), 0);
  p.heads = p.heads_kv = 2;
  EXPECT_EQ(DividedRows(p, small), 16);  // its shared memory has room for no more
}

// Every option that the kernels compute goes the same way, and the others where they always went.
TEST(CudaPlan, OptionsOfDividedKeys) {
  AttentionProblem p = problem(STROBE_FLOAT16, 128);
  p.batch = 1, p.seqlen_q = 20, p.seqlen_k = 16384, p.heads = p.heads_kv = 4;
  void (*const taken[])(AttentionProblem&) = {
      [](AttentionProblem&) {},
      [](AttentionProblem& x) { x.causal = 1; },
      [](AttentionProblem& x) { x.window_left = 8000; },
      [](AttentionProblem& x) { x.softcap = 20.f; },
      [](AttentionProblem& x) { x.alibi = STROBE_ALIBI_PER_HEAD; },
      [](AttentionProblem& x) { x.has_prefix = 1, x.causal = 1; },
      [](AttentionProblem& x) { x.attention_chunk = 8192; },
      [](AttentionProblem& x) { x.has_seqused_q = x.has_seqused_k = 1; },
      [](AttentionProblem& x) { x.head_dim_v = 64; },
      [](AttentionProblem& x) { x.varlen = 1, x.total_q = 20, x.total_k = 16384; }};
  for (const auto& change : taken) {
    AttentionProblem other = p;
    change(other);
    for (const int cc : {80, 90}) EXPECT_GT(DividedRows(other, device(cc)), 0) << to_string(other);
  }
  void (*const others[])(AttentionProblem&) = {
      [](AttentionProblem& x) { x.dropout_p = 0.1f; },
      [](AttentionProblem& x) { x.window_left = 100, x.window_right = 0; },
      [](AttentionProblem& x) { x.attention_chunk = 128; },
      [](AttentionProblem& x) {
        x.varlen = x.has_seqused_k = 1, x.total_q = 20, x.total_k = 16384;
      }};
  for (const auto& change : others) {
    AttentionProblem other = p;
    change(other);
    for (const int cc : {80, 90}) EXPECT_EQ(DividedRows(other, device(cc)), 0) << to_string(other);
  }
}

TEST(CudaPlan, WithBatchInvariantAllKeysAreDividedAlike) {
  for (const int64_t dim : {64, 128, 256}) {
    const int64_t rows = dim > 128 ? 16 : dim > 64 ? 64 : 32;  // in 163 KB
    for (const int64_t queries : {1, 8, 40, 100, 300}) {
      for (const int64_t keys : {100, 600, 3000, 20000}) {
        AttentionProblem p = problem(STROBE_BFLOAT16, dim);
        p.batch_invariant = 1;
        p.seqlen_q = queries, p.seqlen_k = keys;
        p.batch = 1;
        EXPECT_EQ(DividedRows(p, device(80)), rows) << to_string(p);
        p.batch = 100;
        EXPECT_EQ(DividedRows(p, device(80)), rows) << to_string(p);
        // Where lengths vary, the longest must not decide, and whole tiles take them.
        p.varlen = 1, p.total_q = 100 * queries, p.total_k = 100 * keys;
        EXPECT_EQ(DividedRows(p, device(80)), 0) << to_string(p);
      }
    }
  }
}

TEST(CudaPlan, APlanSaysWhyItDividesKeys) {
  AttentionProblem p = problem(STROBE_BFLOAT16, 64);
  p.batch = 1, p.seqlen_q = 27, p.seqlen_k = 40719, p.heads = 6, p.heads_kv = 3;
  Plan plan;
  ASSERT_TRUE(plan_for(p, device(90), plan).ok());
  const std::string remark = remark_on(plan, device(90));
  EXPECT_EQ(remark.find("3 tiles, about 44 thread blocks for the keys of each, and a second kernel "
                        "that merges: "),
            0u)
      << remark;
  EXPECT_NE(remark.find(", where 6 tiles of one head and thread block each would take "),
            std::string::npos)
      << remark;
  p.seqlen_q = 40719;
  ASSERT_TRUE(plan_for(p, device(90), plan).ok());
  EXPECT_EQ(remark_on(plan, device(90)), "");
  ASSERT_TRUE(plan_for(paged_problem(STROBE_BFLOAT16, 64), device(90), plan).ok());
  EXPECT_EQ(remark_on(plan, device(90)), "");
}

TEST(CudaPlan, DropoutGoesToTheKernelsThatHaveIt) {
  for (const int direction : {STROBE_FORWARD, STROBE_BACKWARD}) {
    for (const int64_t dim : {64, 96, 128, 192, 256}) {
      AttentionProblem p = problem(STROBE_BFLOAT16, dim, direction);
      p.dropout_p = 0.1f;
      Plan plan;
      const Status s = plan_for(p, device(90), plan);
      ASSERT_TRUE(s.ok()) << s.text();
      EXPECT_STREQ(plan.kernel, direction == STROBE_FORWARD ? "cuda_sm80" : "cuda_sm90");
    }
  }
}

TEST(CudaPlan, ReasonsNameWhatWasWanted) {
  Plan plan;
  Status s = plan_for(problem(STROBE_FLOAT32, 64), device(80), plan);
  EXPECT_EQ(s.code(), STROBE_UNSUPPORTED);
  EXPECT_NE(s.text().find("fp32"), std::string::npos) << s.text();
  s = plan_for(problem(STROBE_BFLOAT16, 64), device(75), plan);
  EXPECT_EQ(s.code(), STROBE_UNSUPPORTED);
  EXPECT_NE(s.text().find("compute capability 7.5, expected 8.0"), std::string::npos) << s.text();
  AttentionProblem biased = problem(STROBE_FLOAT16, 192, STROBE_BACKWARD);
  biased.has_bias = 1;
  biased.bias_batch = biased.bias_heads = biased.bias_seqlen_q = 1;
  s = plan_for(biased, device(kTuring), plan);  // no room for larger tiles
  EXPECT_EQ(s.code(), STROBE_UNSUPPORTED);
  EXPECT_NE(s.text().find("bias, expected none for the backward pass above head_dim 128"),
            std::string::npos)
      << s.text();
}

// Through mma.sync on every device, but on Hopper through its own kernels, where TMA reads all
// tensors; backward up to head_dim 128.
TEST(CudaPlan, ABiasGoesThroughMmaSyncButOnHopper) {
  for (const int cc : {80, 86, 89, 90, 100, 120}) {
    for (const int dtype : {STROBE_BFLOAT16, STROBE_FLOAT16}) {
      for (const int64_t dim : {1, 64, 100, 128, 129, 256}) {
        for (const int direction : {STROBE_FORWARD, STROBE_BACKWARD}) {
          SCOPED_TRACE(testing::Message() << "device " << cc << ", head_dim " << dim
                                          << (direction == STROBE_FORWARD ? " forward" : ""));
          AttentionProblem p = problem(dtype, dim, direction);
          p.has_bias = 1;
          p.bias_batch = 1;
          Plan plan;
          const Status s = plan_for(p, device(cc), plan);
          ASSERT_TRUE(s.ok()) << s.text();
          const bool fits = direction == STROBE_FORWARD || dim <= 128;
          const bool by_tma = cc == 90 && dim % 8 == 0 && fits;
          EXPECT_STREQ(plan.kernel, by_tma ? "cuda_sm90" : "cuda_sm80");
          EXPECT_NE(to_string(plan.problem).find(", bias of all sequences"), std::string::npos)
              << to_string(plan.problem);
          if (direction == STROBE_FORWARD) continue;
          // The gradient takes no workspace.
          const size_t without = plan.workspace_bytes;
          p.has_dbias = 1;
          ASSERT_TRUE(plan_for(p, device(cc), plan).ok());
          EXPECT_STREQ(plan.kernel, by_tma ? "cuda_sm90" : "cuda_sm80");
          EXPECT_EQ(plan.workspace_bytes, without);
          EXPECT_NE(to_string(plan.problem).find(", dbias"), std::string::npos)
              << to_string(plan.problem);
        }
      }
    }
  }
}

// What Hopper's kernels do not read of a bias, and what they do not compute beside one.
TEST(CudaPlan, HopperDeclinesSomeBiases) {
  const auto reason = [](const std::function<void(AttentionProblem&)>& change) {
    AttentionProblem p = problem(STROBE_BFLOAT16, 64);
    p.seqlen_k = 1024;
    p.has_bias = 1;
    change(p);
    Plan plan;
    EXPECT_TRUE(plan_for(p, device(90), plan).ok());
    AttentionProblem resolved = p;
    resolve_defaults(resolved);
    return choose_instance(90, resolved, device(90)).reason;
  };
  EXPECT_EQ(reason([](AttentionProblem&) {}), "");
  EXPECT_EQ(reason([](AttentionProblem& p) { p.scale = -1; }), "");
  EXPECT_EQ(reason([](AttentionProblem& p) { p.bias_dtype = STROBE_FLOAT32; }),
            "bias_dtype = fp32, expected that of q, bf16");
  EXPECT_EQ(reason([](AttentionProblem& p) { p.seqlen_k = 1023; }),
            "bias.seqlen = 1023 elements, expected a multiple of 8 that is not negative (TMA "
            "reads 16-byte units)");
  EXPECT_EQ(reason([](AttentionProblem& p) {
              p.bias = {0, 0, 0, 2};
            }),
            "bias.dim = 2 elements, expected 1 (TMA reads 16-byte units)");
  EXPECT_EQ(reason([](AttentionProblem& p) { p.softcap = 20; }),
            "bias beside softcap > 0 for the forward pass, expected one of them");
  // Its rows take their own maxima of every block, so that their bits are their own.
  EXPECT_EQ(reason([](AttentionProblem& p) { p.batch_invariant = 1; }), "");
  const auto backward = [&](const std::function<void(AttentionProblem&)>& change) {
    return reason([&](AttentionProblem& p) {
      p.direction = STROBE_BACKWARD;
      change(p);
    });
  };
  const auto beside = [](const char* option) {
    return std::string("bias beside ") + option + " for the backward pass, expected one of them";
  };
  EXPECT_EQ(backward([](AttentionProblem&) {}), "");
  EXPECT_EQ(backward([](AttentionProblem& p) { p.seqlen_k = 64; }), "");
  EXPECT_EQ(backward([](AttentionProblem& p) { p.deterministic = 1; }), beside("deterministic"));
  EXPECT_EQ(backward([](AttentionProblem& p) { p.softcap = 20; }), beside("softcap > 0"));
  EXPECT_EQ(backward([](AttentionProblem& p) { p.dropout_p = 0.1f; }), beside("dropout_p > 0"));
  EXPECT_EQ(backward([](AttentionProblem& p) { p.head_dim = p.head_dim_v = 192; }),
            "bias, expected none for the backward pass above head_dim 128");
  EXPECT_EQ(backward([](AttentionProblem& p) { p.bias_dtype = STROBE_FLOAT32; }),
            "bias_dtype = fp32, expected that of q, bf16");
}

TEST(CudaPlan, SequencesTooLongFor32BitsAreDeclined) {
  AttentionProblem p = problem(STROBE_BFLOAT16, 8);
  p.batch = p.heads = p.heads_kv = 1;
  p.seqlen_k = (int64_t{1} << 30) - 1024;
  Plan plan;
  EXPECT_TRUE(plan_for(p, device(90), plan).ok());
  ++p.seqlen_k;
  const Status s = plan_for(p, device(90), plan);
  EXPECT_EQ(s.code(), STROBE_UNSUPPORTED);
  EXPECT_NE(s.text().find("seqlen_k = 1073740801, expected at most 1073740800"), std::string::npos)
      << s.text();
}

TEST(CudaPlan, HoppersBackwardTakesPlainProblems) {
  for (const int64_t dim : {40, 64, 80, 128, 136, 192, 256}) {
    Plan plan;
    AttentionProblem p = problem(STROBE_BFLOAT16, dim, STROBE_BACKWARD);
    ASSERT_TRUE(plan_for(p, device(90), plan).ok());
    EXPECT_STREQ(plan.kernel, "cuda_sm90") << dim;
  }
}

// And all others: no option is left to mma.sync.
TEST(CudaPlan, HoppersBackwardTakesEveryOption) {
  void (*const changes[])(AttentionProblem&) = {
      [](AttentionProblem&) {},
      [](AttentionProblem& p) { p.softcap = 20.f; },
      [](AttentionProblem& p) { p.alibi = STROBE_ALIBI_PER_HEAD; },
      [](AttentionProblem& p) { p.dropout_p = 0.1f; },
      [](AttentionProblem& p) { p.deterministic = 1; },
      [](AttentionProblem& p) { p.deterministic = 1, p.softcap = 20.f, p.dropout_p = 0.1f; },
  };
  for (const int64_t dim : {64, 96, 128, 136, 192, 256}) {
    for (const auto& change : changes) {
      AttentionProblem p = problem(STROBE_BFLOAT16, dim, STROBE_BACKWARD);
      change(p);
      Plan plan;
      const Status s = plan_for(p, device(90), plan);
      ASSERT_TRUE(s.ok()) << s.text();
      EXPECT_STREQ(plan.kernel, "cuda_sm90") << dim;
      EXPECT_EQ(choose_instance(90, plan.problem, device(90)).reason, "") << dim;
      EXPECT_EQ(choose_instance(80, plan.problem, device(90)).reason, "") << dim;
    }
  }
}

TEST(CudaPlan, WorkspaceOfTheBackwardGrowsNoFasterThanTheSequence) {
  for (const int cc : {80, 90}) {
    for (const int64_t dim : {64, 96, 128, 192, 256}) {
      for (const int32_t deterministic : {0, 1}) {
        for (const bool varlen : {false, true}) {
          AttentionProblem p = problem(STROBE_BFLOAT16, dim, STROBE_BACKWARD);
          p.deterministic = deterministic;
          p.varlen = varlen;
          size_t before = 0;
          for (int64_t seqlen = 1024; seqlen <= 1 << 20; seqlen *= 2) {
            p.seqlen_q = p.seqlen_k = seqlen;
            if (varlen) p.total_q = p.total_k = p.batch * seqlen;
            Plan plan;
            const Status s = plan_for(p, device(cc), plan);
            ASSERT_TRUE(s.ok()) << s.text();
            if (before > 0) {
              EXPECT_LE(plan.workspace_bytes, 2 * before + (1u << 20))
                  << "device " << cc << ", head_dim " << dim << ", deterministic " << deterministic
                  << ", varlen " << varlen << ", seqlen " << seqlen;
            }
            before = plan.workspace_bytes;
          }
          // dQ, and dK and dV of each query head, as floats, and as much again.
          const int64_t values = p.batch * p.seqlen_q * 3 * p.heads * dim;
          EXPECT_LE(before, static_cast<size_t>(2 * values) * sizeof(float)) << cc << " " << dim;
        }
      }
    }
  }
}

// Its kernel for wide heads draws work items in 32 bits.
TEST(CudaPlan, HoppersWideBackwardHasAMostOfItems) {
  for (const bool many : {false, true}) {
    AttentionProblem p = problem(STROBE_BFLOAT16, 256, STROBE_BACKWARD);
    p.varlen = 1;
    p.batch = many ? 1 << 20 : 1 << 10;
    p.total_q = p.total_k = p.seqlen_q = p.seqlen_k = 1 << 20;
    p.heads = p.heads_kv = 16;
    Plan plan;
    const Status s = plan_for(p, device(90), plan);
    ASSERT_TRUE(s.ok()) << s.text();
    EXPECT_STREQ(plan.kernel, many ? "cuda_sm80" : "cuda_sm90");
  }
}

// Pointers that TMA cannot read, which only a launch knows of, go to mma.sync with the workspace of
// this plan.
TEST(CudaPlan, HoppersBackwardHasTheWorkspaceOfMmaSyncToo) {
  for (const int64_t seqlen : {1, 64, 1000}) {
    AttentionProblem p = problem(STROBE_BFLOAT16, 64, STROBE_BACKWARD);
    p.seqlen_q = p.seqlen_k = seqlen;
    for (const int deterministic : {0, 1}) {
      p.deterministic = deterministic;
      Plan hopper, other;
      ASSERT_TRUE(plan_for(p, device(90), hopper).ok());
      EXPECT_STREQ(hopper.kernel, "cuda_sm90");
      ASSERT_TRUE(plan_for(p, device(80), other).ok());
      EXPECT_STREQ(other.kernel, "cuda_sm80");
      EXPECT_GE(hopper.workspace_bytes, other.workspace_bytes);
    }
  }
}

// Hopper's kernel writes dQ itself where no sequence has a second block of keys: it needs no sum.
TEST(CudaPlan, HoppersBackwardHasNoSumOfOneAddition) {
  const auto bytes_of = [](const AttentionProblem& p) {
    Plan plan;
    const Status s = plan_for(p, device(90), plan);
    EXPECT_TRUE(s.ok()) << s.text();
    const BackwardInstance* const row = instance_of<BackwardInstance>(plan, 90);
    EXPECT_NE(row, nullptr);
    return row ? workspace_of<BackwardInstance>(plan.problem, *row, nullptr) : 0;
  };
  AttentionProblem p = problem(STROBE_BFLOAT16, 64, STROBE_BACKWARD);
  p.heads_kv = p.heads, p.batch = 40;  // items enough: groups have no parts
  const auto sum = static_cast<size_t>(p.batch * p.heads * p.seqlen_q * 64) * sizeof(float);
  for (const bool varlen : {false, true}) {
    p.varlen = varlen;
    if (varlen) p.total_q = p.batch * p.seqlen_q, p.total_k = p.batch * 64;
    p.seqlen_k = 129;
    EXPECT_GT(bytes_of(p), sum);
    p.seqlen_k = 128;
    const size_t without = bytes_of(p);
    EXPECT_LT(without, sum / 4);
    p.deterministic = 1;
    EXPECT_EQ(bytes_of(p), without);
    // The longest of other sequences is not to count.
    p.batch_invariant = 1;
    EXPECT_EQ(bytes_of(p) > sum, varlen);
    p.deterministic = p.batch_invariant = 0;
  }
}

// A bound of the lengths may be anything; what is planned goes by the rows that there are.
TEST(CudaPlan, AHugeBoundOfPackedSequencesCostsNothing) {
  for (const int direction : {STROBE_FORWARD, STROBE_BACKWARD}) {
    for (const int64_t dim : {64, 128, 256}) {
      for (const int cc : {80, 90}) {
        for (const bool causal : {false, true}) {
          Plan plans[2];
          for (const int huge : {0, 1}) {
            AttentionProblem p = problem(STROBE_BFLOAT16, dim, direction);
            p.varlen = 1;
            p.causal = causal;
            p.total_q = p.total_k = 64;
            p.seqlen_q = p.seqlen_k = huge ? INT32_MAX : 64;
            const Status s = plan_for(p, device(cc), plans[huge]);
            ASSERT_TRUE(s.ok()) << s.text();
          }
          EXPECT_STREQ(plans[0].kernel, plans[1].kernel);
          EXPECT_EQ(plans[0].workspace_bytes, plans[1].workspace_bytes);
          EXPECT_EQ(plans[0].work_items, plans[1].work_items);
          EXPECT_EQ(plans[0].grid[0], plans[1].grid[0]);
          EXPECT_EQ(plans[0].grid[1], plans[1].grid[1]);
          EXPECT_EQ(plans[0].tile_q, plans[1].tile_q);
          EXPECT_EQ(plans[0].tile_k, plans[1].tile_k);
        }
      }
    }
  }
}

// Pointers that TMA cannot read send a launch to mma.sync, with the workspace of the same plan.
TEST(CudaPlan, APlanForTmaHasARowForUnalignedPointers) {
  for (const int dtype : {STROBE_BFLOAT16, STROBE_FLOAT16}) {
    for (const int64_t dim : {8, 64, 96, 128, 192, 256}) {
      Plan plan;
      ASSERT_TRUE(plan_for(problem(dtype, dim), device(90), plan).ok());
      ASSERT_STREQ(plan.kernel, "cuda_sm90");
      const ForwardInstance* const row = instance_for_unaligned<ForwardInstance>(plan);
      ASSERT_NE(row, nullptr);
      EXPECT_EQ(row->config.arch, 80);
      EXPECT_EQ(row->config.dtype, dtype);
      EXPECT_GE(row->config.width, dim);
      EXPECT_GE(plan.workspace_bytes, workspace_of<ForwardInstance>(plan.problem, *row, nullptr));
      // The kernels of mma.sync have a general one for them, with the same tiles.
      ASSERT_TRUE(plan_for(problem(dtype, dim), device(80), plan).ok());
      const ForwardInstance* const general = instance_for_unaligned<ForwardInstance>(plan);
      ASSERT_NE(general, nullptr);
      EXPECT_TRUE(general->computes.has(features::kAnyRows));
      EXPECT_EQ(general->config.tile_q, plan.tile_q);
      EXPECT_EQ(general->config.tile_k, plan.tile_k);
    }
  }
}

// A plan names the one kernel that runs.
TEST(CudaPlan, TheInstanceIsTheOneThatComputesWhatIsAskedAndNoMore) {
  struct Asks {
    const char* instance;  // how its name ends
    int direction, cc;
    int64_t head_dim;
    void (*change)(AttentionProblem&);
  };
  constexpr int kF = STROBE_FORWARD, kB = STROBE_BACKWARD;
  const Asks cases[] = {
      {"forward_sm80_bf16_128_128x64x2x4_plain", kF, 80, 128, [](AttentionProblem&) {}},
      {"x2x4_general", kF, 80, 128, [](AttentionProblem& p) { p.softcap = 20.f; }},
      {"x2x4_general", kF, 80, 128, [](AttentionProblem& p) { p.alibi = STROBE_ALIBI_PER_HEAD; }},
      {"x2x4_general", kF, 80, 128, [](AttentionProblem& p) { p.dropout_p = 0.1f; }},
      {"x2x4_general", kF, 80, 128, [](AttentionProblem& p) { p.scale = -1.f; }},
      {"x2x4_general", kF, 80, 125, [](AttentionProblem&) {}},
      {"x2x4_plain", kF, 80, 128, [](AttentionProblem& p) { p.has_seqused_k = 1; }},
      {"x2x8_all_rows", kF, 90, 128, [](AttentionProblem&) {}},
      {"x2x8_plain", kF, 90, 128, [](AttentionProblem& p) { p.has_seqused_q = 1; }},
      {"x2x8_plain", kF, 90, 128, [](AttentionProblem& p) { p.has_seqused_k = 1; }},
      {"x2x8_plain", kF, 90, 128, [](AttentionProblem& p) { p.has_q_position = 1; }},
      {"x2x8_plain", kF, 90, 128, [](AttentionProblem& p) { p.has_prefix = 1, p.causal = 1; }},
      {"x2x8_plain", kF, 90, 128,
       [](AttentionProblem& p) { p.attention_chunk = 64, p.causal = 1; }},
      // The shortest kernel rounds always.
      {"forward_sm90_bf16_128_128x128x2x8_plain", kF, 90, 128,
       [](AttentionProblem& p) { p.out_dtype = STROBE_FLOAT32; }},
      {"x2x8_general", kF, 90, 128,
       [](AttentionProblem& p) { p.out_dtype = STROBE_FLOAT32, p.softcap = 20.f; }},
      {"forward_sm80_bf16_128_128x64x2x4_plain", kF, 80, 128,
       [](AttentionProblem& p) { p.out_dtype = STROBE_FLOAT32; }},
      {"x2x4_general", kF, 80, 125, [](AttentionProblem& p) { p.out_dtype = STROBE_FLOAT32; }},
      {"x2x8_general", kF, 90, 128, [](AttentionProblem& p) { p.softcap = 20.f; }},
      {"x2x8_general", kF, 90, 128, [](AttentionProblem& p) { p.scale = 0.f; }},
      {"x2x8_invariant", kF, 90, 128, [](AttentionProblem& p) { p.batch_invariant = 1; }},
      {"x2x8_general", kF, 90, 128,
       [](AttentionProblem& p) { p.batch_invariant = 1, p.softcap = 20.f; }},
      {"128x80x2x8_invariant", kF, 90, 256, [](AttentionProblem& p) { p.batch_invariant = 1; }},
      {"sm80_bf16_128_128x64x2x4_general", kF, 90, 128,
       [](AttentionProblem& p) { p.dropout_p = 0.1f; }},
      {"backward_sm80_bf16_128_64x128x2x8_plain", kB, 80, 128, [](AttentionProblem&) {}},
      {"_64x128x2x8_ordered", kB, 80, 128, [](AttentionProblem& p) { p.deterministic = 1; }},
      // The row before has no registers for it.
      {"_64x64x2x8_general", kB, 80, 128, [](AttentionProblem& p) { p.dropout_p = 0.1f; }},
      {"_64x128x2x8_plain", kB, 80, 128, [](AttentionProblem& p) { p.scale = -1.f; }},
      {"_64x128x2x8_plain", kB, 90, 128, [](AttentionProblem&) {}},
      {"x8_general", kB, 90, 128,
       [](AttentionProblem& p) { p.alibi = STROBE_ALIBI_PER_BATCH_HEAD; }},
      {"x8_ordered", kB, 90, 128, [](AttentionProblem& p) { p.deterministic = 1; }},
      {"x8_ordered_general", kB, 90, 128,
       [](AttentionProblem& p) { p.deterministic = 1, p.softcap = 1.f; }},
      {"x8_stores_dq", kB, 90, 128, [](AttentionProblem& p) { p.seqlen_k = 128; }},
      {"x8_stores_dq", kB, 90, 128,
       [](AttentionProblem& p) { p.seqlen_k = 128, p.deterministic = 1; }},
      {"x8_stores_dq_general", kB, 90, 64,
       [](AttentionProblem& p) { p.seqlen_k = 128, p.dropout_p = 0.1f; }},
      {"x8_plain", kB, 90, 128,
       [](AttentionProblem& p) { p.seqlen_k = 128, p.has_seqused_k = p.batch_invariant = 1; }},
      {"backward_sm90_bf16_192_64x128x2x12_plain", kB, 90, 192, [](AttentionProblem&) {}},
      {"x2x12_v128_plain", kB, 90, 192, [](AttentionProblem& p) { p.head_dim_v = 128; }},
      {"x2x12_plain", kB, 90, 192, [](AttentionProblem& p) { p.head_dim_v = 136; }},
      {"x2x12_plain", kB, 90, 128, [](AttentionProblem& p) { p.head_dim_v = 192; }},
      {"x2x12_v128_general", kB, 90, 192,
       [](AttentionProblem& p) { p.head_dim_v = 64, p.dropout_p = 0.1f; }},
  };
  for (const Asks& c : cases) {
    AttentionProblem p = problem(STROBE_BFLOAT16, c.head_dim, c.direction);
    c.change(p);
    Plan plan;
    const Status s = plan_for(p, device(c.cc), plan);
    ASSERT_TRUE(s.ok()) << s.text();
    EXPECT_TRUE(std::string_view(plan.instance_name).ends_with(c.instance))
        << plan.instance_name << ", expected ..." << c.instance;
    const auto kind = plan.problem.direction == STROBE_FORWARD
                          ? entry_of<ForwardInstance>(plan.instance) != nullptr
                          : entry_of<BackwardInstance>(plan.instance) != nullptr;
    EXPECT_TRUE(kind) << plan.instance_name;
  }
}

// Of a quantised cache; of others, and in the backward pass, there is none.
int kv_dtype_of(const ForwardConfig& c) { return c.kv_dtype; }
int kv_dtype_of(const BackwardConfig&) { return -1; }

// Of a row, each instance computes what none before it does: else none would ever be taken.
template <typename Instance>
void ExpectEachVariantToBeOfUse() {
  const auto same_tiles = [](const auto& a, const auto& b) {
    return a.arch == b.arch && a.dtype == b.dtype && a.width == b.width && a.width_v == b.width_v &&
           a.tile_q == b.tile_q && a.tile_k == b.tile_k && a.stages == b.stages &&
           a.warps == b.warps && kv_dtype_of(a) == kv_dtype_of(b);
  };
  const std::span<const Entry<Instance>> rows = instance_table<Instance>();
  EXPECT_FALSE(rows.empty());
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(entry_of<Instance>(number_of(&rows[i])), &rows[i]);
    for (size_t j = 0; j < i; ++j) {
      const Instance &one = *rows[i].instance, &before = *rows[j].instance;
      if (!same_tiles(one.config, before.config)) continue;
      EXPECT_FALSE(before.computes.contains(one.computes)) << rows[i].name << " " << rows[j].name;
    }
  }
}
TEST(CudaPlan, EachVariantIsOfUse) {
  ExpectEachVariantToBeOfUse<ForwardInstance>();
  ExpectEachVariantToBeOfUse<BackwardInstance>();
  ExpectEachVariantToBeOfUse<CachedInstance>();
}

TEST(CudaPlan, NumbersOfInstancesSayOfWhichTable) {
  EXPECT_EQ(entry_of<ForwardInstance>(0), nullptr);
  EXPECT_EQ(entry_of<CachedInstance>(0), nullptr);
  const auto last = number_of(&instance_table<ForwardInstance>().back());
  EXPECT_EQ(entry_of<ForwardInstance>(last + 1), nullptr);
  EXPECT_EQ(entry_of<BackwardInstance>(last + 1), &instance_table<BackwardInstance>().front());
  EXPECT_EQ(entry_of<BackwardInstance>(last), nullptr);
  EXPECT_EQ(entry_of<CachedInstance>(INT32_MAX), nullptr);
  EXPECT_EQ(entry_of<CachedInstance>(INT32_MIN), nullptr);
  // A plan of which somebody has changed the number is of no use.
  Plan plan;
  ASSERT_TRUE(plan_for(problem(STROBE_BFLOAT16, 64), device(80), plan).ok());
  ASSERT_NE(instance_of<ForwardInstance>(plan, 80), nullptr);
  EXPECT_EQ(instance_of<ForwardInstance>(plan, 90), nullptr);
  plan.instance = last + 1;
  EXPECT_EQ(instance_of<ForwardInstance>(plan, 80), nullptr);
}

template <int64_t kBytes, typename Params>
void take(Arena& arena, const AttentionProblem&, Params& params) {
  params.workspace = arena.take<char>(kBytes);
}

TEST(CudaPlan, TheWorkspaceServesEitherRow) {
  const ForwardInstance small{{}, {}, {}, take<64, ForwardParams>, nullptr};
  const ForwardInstance large{{}, {}, {}, take<4096, ForwardParams>, nullptr};
  const AttentionProblem p = problem(STROBE_BFLOAT16, 64);
  EXPECT_EQ(workspace_of<ForwardInstance>(p, small, nullptr), 64u);
  EXPECT_EQ(workspace_of<ForwardInstance>(p, small, &large), 4096u);
  EXPECT_EQ(workspace_of<ForwardInstance>(p, large, &small), 4096u);
  const BackwardInstance few{{}, {}, {}, take<128, BackwardParams>, nullptr};
  const BackwardInstance many{{}, {}, {}, take<8192, BackwardParams>, nullptr};
  EXPECT_EQ(workspace_of<BackwardInstance>(p, few, &many), 8192u);
  EXPECT_EQ(workspace_of<BackwardInstance>(p, many, &few), 8192u);
}

TEST(CudaPlan, InvalidProblemsStayInvalid) {
  Plan plan;
  AttentionProblem p = problem(STROBE_BFLOAT16, 64);
  p.heads_kv = 3;
  EXPECT_EQ(plan_for(p, device(80), plan).code(), STROBE_INVALID_ARGUMENT);
}

TEST(CudaMachine, WithoutADeviceThereIsAReason) {
  // Never fails, never prints; with a GPU the reason is empty.
  EXPECT_EQ(devices().empty(), no_devices_reason()[0] != '\0') << no_devices_reason();
  for (const Kernel& kernel : kernels()) {
    EXPECT_EQ(kernel.device, STROBE_CUDA);
    if (devices().empty()) {
      EXPECT_STREQ(kernel.unavailable(), no_devices_reason());
    }
  }
}

}  // namespace
}  // namespace strobe::cuda
