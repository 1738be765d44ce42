// Bad input of a problem over a KV cache, and of a merge: a status, and a text that names argument,
// got and wanted. Launch arguments are held against the checks themselves, which no kernel sees
// before they passed.
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.h"
#include "gtest/gtest.h"
#include "strobe/strobe.h"

namespace {

constexpr int64_t kHuge = int64_t{1} << 40;

strobe_problem Contiguous() {
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.batch = 2;
  p.seqlen_q = 3;
  p.seqlen_k = 20;
  p.heads = 4;
  p.heads_kv = 2;
  p.head_dim = 8;
  p.cache = STROBE_CACHE_CONTIGUOUS;
  p.has_seqused_k = 1;
  return p;
}

strobe_problem Paged() {
  strobe_problem p = Contiguous();
  p.cache = STROBE_CACHE_PAGED;
  p.pages = 9;
  p.page_size = 5;
  p.pages_per_sequence = 4;
  return p;
}

// Paged, with all that a launch may carry.
strobe_problem Full() {
  strobe_problem p = Paged();
  p.append = STROBE_APPEND_PACKED;
  p.seqlen_new = 4;
  p.total_new = 5;
  p.has_leftpad = p.has_rotary_position = 1;
  p.rotary_dim = 4;
  p.rotary_rows = 30;
  p.causal = 1;
  return p;
}

struct BadProblem {
  strobe_problem from;
  std::function<void(strobe_problem&)> spoil;
  const char* text;
  strobe_status status = STROBE_INVALID_ARGUMENT;
};

TEST(CacheValidation, BadProblemsAreRefusedByName) {
  using P = strobe_problem;
  strobe_problem none = Contiguous();
  none.cache = STROBE_CACHE_NONE;
  strobe_problem appends = Contiguous();
  appends.append = STROBE_APPEND_DENSE;
  appends.seqlen_new = 1;
  strobe_problem quantised = Contiguous();
  quantised.kv_dtype = STROBE_INT8;
  quantised.kv_scale = STROBE_KV_SCALE_ROW;
  strobe_problem mixed = quantised;  // int8 with fp32
  mixed.v_dtype = STROBE_FLOAT32;
  strobe_problem quantised_appends = quantised;
  quantised_appends.append = STROBE_APPEND_DENSE;
  quantised_appends.seqlen_new = 1;
  const BadProblem all[] = {
      {none, [](P& p) { p.cache = 3; }, "cache = 3, expected 0 to 2"},
      {none, [](P& p) { p.append = -1; }, "append = -1, expected 0 to 2"},
      {none, [](P& p) { p.append = 1; }, "append = 1 with cache = 0 (none), expected 0"},
      {none, [](P& p) { p.cache_batch = 1; }, "cache_batch = 1 with cache = 0 (none), expected 0"},
      {none, [](P& p) { p.pages = 1; }, "pages = 1 with cache = 0 (none), expected 0"},
      {none, [](P& p) { p.page_size = 1; }, "page_size = 1 with cache = 0"},
      {none, [](P& p) { p.pages_per_sequence = 1; }, "pages_per_sequence = 1 with cache = 0"},
      {none, [](P& p) { p.block_table_stride = 1; }, "block_table_stride = 1 with cache = 0"},
      {none, [](P& p) { p.rotary_dim = 2; }, "rotary_dim = 2 with cache = 0"},
      {none, [](P& p) { p.has_leftpad = 1; }, "has_leftpad = 1 with cache = 0"},
      {none, [](P& p) { p.has_cache_batch_idx = 1; }, "has_cache_batch_idx = 1 with cache = 0"},
      {none, [](P& p) { p.seqlen_new = 1; }, "seqlen_new = 1 with append = 0 (none), expected 0"},
      {none, [](P& p) { p.v_new.dim = 1; }, "v_new has strides with append = 0 (none)"},
      {none, [](P& p) { p.kv_dtype = 8; }, "kv_dtype = 8, expected -1 to 7"},
      {none, [](P& p) { p.v_dtype = -2; }, "v_dtype = -2, expected -1 to 7"},
      {none, [](P& p) { p.v_dtype = (int64_t{1} << 32) + STROBE_INT8; },
       "v_dtype = 4294967301, expected -1 to 7"},
      {none, [](P& p) { p.v_dtype = STROBE_Q4_0, p.head_dim = 32; },
       "v_dtype = 7 (q4_0) with cache = 0 (none): no kernel takes quantised keys and values but in "
       "a cache",
       STROBE_UNSUPPORTED},
      {Contiguous(), [](P& p) { p.v_dtype = STROBE_BFLOAT16; },
       "v_dtype = 1 (bf16): no kernel takes a dtype other than q's, which is fp32, int8, float8, "
       "q8_0 and q4_0",
       STROBE_UNSUPPORTED},
      {Contiguous(), [](P& p) { p.v_dtype = STROBE_Q4_0; },
       "head_dim = 8 with v_dtype = 7 (q4_0), expected a multiple of 32"},
      {Contiguous(),
       [](P& p) { p.kv_dtype = STROBE_Q8_0, p.head_dim = 40, p.v_dtype = STROBE_FLOAT32; },
       "head_dim = 40 with kv_dtype = 6 (q8_0), expected a multiple of 32"},
      {Contiguous(), [](P& p) { p.v_dtype = STROBE_Q8_0, p.head_dim_v = 40; },
       "head_dim_v = 40 with v_dtype = 6 (q8_0), expected a multiple of 32"},
      {Contiguous(), [](P& p) { p.v_dtype = STROBE_INT8; },
       "kv_scale = 0 (none) with v_dtype = 5 (int8), expected 1 (tensor), 2 (head) or 3 (row)"},
      {Contiguous(),
       [](P& p) {
         p.kv_dtype = STROBE_Q8_0, p.v_dtype = STROBE_Q4_0, p.head_dim = 32;
         p.kv_scale = STROBE_KV_SCALE_ROW;
       },
       "kv_scale = 3 with kv_dtype = 6 (q8_0), expected 0 (none)"},
      {mixed,
       [](P& p) {
         p.v_scale = {8, 2, 1, 0};
       },
       "v_scale has strides with v_dtype = 0 (fp32), expected 0: it has no scales"},
      {none, [](P& p) { p.kv_dtype = STROBE_Q8_0, p.head_dim = 32; },
       "kv_dtype = 6 (q8_0) with cache = 0 (none): no kernel takes quantised keys and values but "
       "in a cache",
       STROBE_UNSUPPORTED},
      {Contiguous(), [](P& p) { p.kv_dtype = STROBE_FLOAT16; },
       "kv_dtype = 2 (fp16): no kernel takes a dtype other than q's, which is fp32, int8, float8, "
       "q8_0 and q4_0",
       STROBE_UNSUPPORTED},
      {Contiguous(), [](P& p) { p.kv_dtype = STROBE_FLOAT8_E5M2; },
       "kv_scale = 0 (none) with kv_dtype = 4 (float8 e5m2), expected 1 (tensor)"},
      {Contiguous(), [](P& p) { p.kv_dtype = STROBE_Q4_0; },
       "head_dim = 8 with kv_dtype = 7 (q4_0), expected a multiple of 32"},
      {Contiguous(), [](P& p) { p.kv_dtype = STROBE_Q8_0, p.head_dim = 32, p.head_dim_v = 40; },
       "head_dim_v = 40 with kv_dtype = 6 (q8_0), expected a multiple of 32"},
      {Contiguous(), [](P& p) { p.kv_dtype = STROBE_INT8; },
       "kv_scale = 0 (none) with kv_dtype = 5 (int8), expected 1 (tensor), 2 (head) or 3 (row)"},
      {Contiguous(), [](P& p) { p.kv_dtype = STROBE_FLOAT8_E4M3; },
       "kv_scale = 0 (none) with kv_dtype = 3 (float8 e4m3), expected 1 (tensor)"},
      {Contiguous(), [](P& p) { p.kv_scale = 5; }, "kv_scale = 5, expected 0 to 4"},
      {Contiguous(), [](P& p) { p.kv_scale = STROBE_KV_SCALE_ROW; },
       "kv_scale = 3 with kv_dtype = -1 (that of q), expected 0 (none)"},
      {Contiguous(),
       [](P& p) { p.kv_dtype = STROBE_Q8_0, p.head_dim = 32, p.kv_scale = STROBE_KV_SCALE_ROW; },
       "kv_scale = 3 with kv_dtype = 6 (q8_0), expected 0 (none)"},
      {Contiguous(), [](P& p) { p.kv_scale_dtype = STROBE_FLOAT16; },
       "kv_scale_dtype = 2, expected 0 (fp32) without a kv_scale"},
      {quantised, [](P& p) { p.kv_scale_dtype = STROBE_BFLOAT16; },
       "kv_scale_dtype = 1, expected 0 (fp32) or 2 (fp16)"},
      {quantised,
       [](P& p) {
         p.kv_scale = STROBE_KV_SCALE_HEAD, p.k_scale = {0, 2, 1, 0};
       },
       "k_scale.seqlen = 2 elements with kv_scale = 2, expected 0"},
      {quantised,
       [](P& p) {
         p.kv_scale = STROBE_KV_SCALE_TENSOR, p.v_scale = {0, 0, 1, 0};
       },
       "v_scale.head = 1 elements with kv_scale = 1, expected 0"},
      {quantised_appends,
       [](P& p) {
         p.v_scale = {40, 0, 1, 0};
       },
       "v_scale.seqlen = 0 elements, expected at least 1 (an output must not overlap itself)"},
      {none, [](P& p) { p.out_dtype = STROBE_FLOAT16; }, "out_dtype = 2 (fp16), expected -1"},
      {none, [](P& p) { p.kv_dtype = STROBE_FLOAT16; },
       "kv_dtype = 2 (fp16): no kernel takes a dtype other than q's, which is fp32",
       STROBE_UNSUPPORTED},
      {Contiguous(), [](P& p) { p.direction = STROBE_BACKWARD; },
       "cache = 1 with direction backward, expected direction forward"},
      {Contiguous(), [](P& p) { p.dropout_p = 0.5f; },
       "dropout_p = 0.5 with cache = 1, expected 0"},
      {Contiguous(), [](P& p) { p.pages = 3; },
       "pages = 3 with cache = 1 (contiguous), expected 0"},
      {Contiguous(), [](P& p) { p.cache_batch = -1; }, "cache_batch = -1, expected 0 to"},
      {Contiguous(), [](P& p) { p.cache_batch = 1; },
       "cache_batch = 1, expected at least batch = 2 (or has_cache_batch_idx = 1)"},
      {Contiguous(),
       [](P& p) {
         p.k = {1000, 16, 8, 2};
       },
       "k.dim = 2 elements, expected 1"},
      {Contiguous(), [](P& p) { p.seqlen_q = -1; }, "seqlen_q = -1"},
      {appends, [](P& p) { p.has_seqused_k = 0; },
       "append = 1 with has_seqused_k = 0, expected has_seqused_k = 1"},
      {appends, [](P& p) { p.seqlen_new = -1; }, "seqlen_new = -1, expected 0 to"},
      {appends, [](P& p) { p.total_new = 4; }, "total_new = 4 with append = 1 (dense), expected 0"},
      {appends,
       [](P& p) {
         p.k_new = {16, 8, 8, 2};
       },
       "k_new.dim = 2 elements, expected 1"},
      {appends,
       [](P& p) {
         p.k = {320, 0, 8, 1};
       },
       "k.seqlen = 0 elements, expected at least 8 (an output must not overlap itself)"},
      {Paged(), [](P& p) { p.cache_batch = 2; },
       "cache_batch = 2 with cache = 2 (paged), expected 0"},
      {Paged(), [](P& p) { p.has_cache_batch_idx = 1; },
       "has_cache_batch_idx = 1 with cache = 2 (paged), expected 0"},
      {Paged(), [](P& p) { p.pages = -1; }, "pages = -1, expected 0 to 2147483647"},
      {Paged(), [](P& p) { p.page_size = 0; }, "page_size = 0, expected 1 to 2147483647"},
      {Paged(), [](P& p) { p.pages_per_sequence = kHuge; }, "pages_per_sequence = 1099511627776"},
      {Paged(), [](P& p) { p.block_table_stride = 3; }, "block_table_stride = 3, expected 4 to"},
      {Paged(), [](P& p) { p.seqlen_k = 21; },
       "seqlen_k = 21, expected at most pages_per_sequence * page_size = 4 * 5"},
      {Full(), [](P& p) { p.total_new = -2; }, "total_new = -2, expected 0 to"},
      {Full(), [](P& p) { p.rotary_dim = 5; }, "rotary_dim = 5, expected an even number"},
      {Full(), [](P& p) { p.rotary_dim = 10; }, "rotary_dim = 10, expected 0 to 8"},
      {Full(), [](P& p) { p.rotary_dim = 0; }, "rotary_rows = 30 with rotary_dim = 0 (none)"},
      {Full(), [](P& p) { p.rotary_rows = -1; }, "rotary_rows = -1, expected 0 to"},
      {Full(), [](P& p) { p.rotary_interleaved = 2; }, "rotary_interleaved = 2, expected 0 to 1"},
      {Paged(), [](P& p) { p.has_rotary_position = 1; },
       "has_rotary_position = 1 with rotary_dim = 0 (none), expected 0"},
  };
  for (const strobe_problem& good :
       {Contiguous(), appends, Paged(), Full(), quantised, quantised_appends}) {
    EXPECT_TRUE(strobe::check_problem(good).ok()) << strobe::check_problem(good).text();
  }
  for (const BadProblem& bad : all) {
    strobe_problem p = bad.from;
    bad.spoil(p);
    EXPECT_EQ(strobe_supports(&p), bad.status) << bad.text;
    EXPECT_EQ(std::string(strobe_last_error()).find(bad.text), 0U)
        << "got: " << strobe_last_error() << "\nwanted: " << bad.text;
  }
}

// Arguments of a launch of Full(): sequence 0 has rows 2 to 11 and 3 new ones, sequence 1 has rows
// 0 to 4 and 2 new ones.
struct Launch {
  strobe_problem p = Full();
  float out[2048] = {}, k[2048] = {}, v[2048] = {}, data[2048] = {};
  int32_t used[2] = {12, 5}, pad[2] = {2, 0}, starts[3] = {0, 3, 5}, position[2] = {4, 26};
  int32_t table[8] = {3, 1, 4, -1, 0, 8, -9, 1 << 30};
  strobe_forward_args a{};

  Launch() {
    strobe::resolve_defaults(p);
    a.struct_size = sizeof a;
    a.q = a.k_new = a.v_new = a.rotary_cos = a.rotary_sin = data;
    a.k = k;
    a.v = v;
    a.out = out;
    a.seqused_k = used;
    a.leftpad = pad;
    a.cu_seqlens_k_new = starts;
    a.rotary_position = position;
    a.block_table = table;
  }
  std::string Text() const {
    const strobe::Status status = strobe::check_args(p, 0, a);
    return status.ok() ? strobe::check_numbers(p, a).text() : status.text();
  }
};

TEST(CacheValidation, BadArgumentsAreRefusedByName) {
  using L = Launch;
  ASSERT_EQ(Launch().Text(), "");
  const struct {
    std::function<void(Launch&)> spoil;
    const char* text;
  } all[] = {
      {[](L& l) { l.a.block_table = nullptr; }, "block_table = NULL, expected a pointer"},
      {[](L& l) { l.a.leftpad = nullptr; }, "leftpad = NULL, expected a pointer"},
      {[](L& l) { l.a.seqused_k = nullptr; }, "seqused_k = NULL, expected a pointer"},
      {[](L& l) { l.a.k_new = nullptr; }, "k_new = NULL, expected a pointer"},
      {[](L& l) { l.a.v_new = nullptr; }, "v_new = NULL, expected a pointer"},
      {[](L& l) { l.a.cu_seqlens_k_new = nullptr; }, "cu_seqlens_k_new = NULL, expected a pointer"},
      {[](L& l) { l.a.rotary_cos = nullptr; }, "rotary_cos = NULL, expected a pointer"},
      {[](L& l) { l.a.rotary_sin = nullptr; }, "rotary_sin = NULL, expected a pointer"},
      {[](L& l) { l.a.rotary_position = nullptr; }, "rotary_position = NULL, expected a pointer"},
      {[](L& l) { l.a.k = reinterpret_cast<char*>(l.k) + 1; }, "k = "},
      {[](L& l) { l.used[1] = -1; }, "seqused_k[1] = -1, expected 0 to 20"},
      {[](L& l) { l.used[0] = 18; },
       "seqused_k[0] = 18, expected 0 to 17 (seqlen_k less the sequence's new keys)"},
      {[](L& l) { l.pad[0] = 13; }, "leftpad[0] = 13, expected 0 to 12 (the sequence's seqused_k)"},
      {[](L& l) { l.pad[1] = -1; }, "leftpad[1] = -1, expected 0 to 5"},
      {[](L& l) { l.table[2] = 9; }, "block_table[0][2] = 9, expected 0 to 8"},
      {[](L& l) { l.table[5] = -1; }, "block_table[1][1] = -1, expected 0 to 8"},
      {[](L& l) { l.starts[0] = 1; }, "cu_seqlens_k_new[0] = 1, expected 0"},
      {[](L& l) { l.starts[2] = 6; }, "cu_seqlens_k_new[2] = 6, expected at most total_new = 5"},
      {[](L& l) { l.starts[1] = 0; },
       "cu_seqlens_k_new: sequence 1 has length 5, expected at most seqlen_new = 4"},
      {[](L& l) { l.starts[1] = 4, l.starts[2] = 3; },
       "cu_seqlens_k_new[2] = 3 after 4, expected not to decrease"},
      {[](L& l) { l.position[1] = 28; },
       "rotary_position[1] = 28, expected positions from 0 to rotary_rows - 1 = 29"},
      {[](L& l) { l.position[0] = -1; }, "rotary_position[0] = -1"},
      {[](L& l) {
         l.p.has_rotary_position = 0, l.p.rotary_rows = 12, l.a.rotary_position = nullptr;
       },
       "rotary_rows = 12, expected more: sequence 0 has queries or new keys past position 11"},
  };
  for (const auto& bad : all) {
    Launch l;
    bad.spoil(l);
    EXPECT_EQ(l.Text().find(bad.text), 0U) << "got: " << l.Text() << "\nwanted: " << bad.text;
  }
  Launch contiguous;
  contiguous.a = {};
  contiguous.a.struct_size = sizeof contiguous.a;
  contiguous.a.q = contiguous.data;
  contiguous.a.k = contiguous.k;
  contiguous.a.v = contiguous.v;
  contiguous.a.out = contiguous.out;
  contiguous.a.seqused_k = contiguous.used;
  contiguous.p = Contiguous();
  contiguous.p.has_cache_batch_idx = 1;
  contiguous.p.cache_batch = 3;
  strobe::resolve_defaults(contiguous.p);
  EXPECT_EQ(contiguous.Text(), "cache_batch_idx = NULL, expected a pointer");
  int32_t entries[2] = {2, 3};
  contiguous.a.cache_batch_idx = entries;
  EXPECT_EQ(contiguous.Text(), "cache_batch_idx[1] = 3, expected 0 to 2");
}

TEST(CacheValidation, ScalesAreRefusedByName) {
  const auto launch = [](const std::function<void(Launch&)>& spoil) {
    static float scales[400];
    Launch l;
    l.p = Full();
    l.p.kv_dtype = STROBE_INT8;
    l.p.kv_scale = STROBE_KV_SCALE_ROW;
    strobe::resolve_defaults(l.p);
    l.a.k_scale = scales;
    l.a.v_scale = scales + 200;
    spoil(l);
    return l.Text();
  };
  EXPECT_EQ(launch([](Launch&) {}), "");
  EXPECT_EQ(launch([](Launch& l) { l.a.k = reinterpret_cast<char*>(l.k) + 1; }), "");
  EXPECT_EQ(launch([](Launch& l) { l.a.k_scale = nullptr; }), "k_scale = NULL, expected a pointer");
  EXPECT_EQ(launch([](Launch& l) { l.a.v_scale = nullptr; }), "v_scale = NULL, expected a pointer");
  EXPECT_EQ(launch([](Launch& l) {
              l.a.v_scale = reinterpret_cast<const char*>(l.a.v_scale) + 2;
            }).find("v_scale = 0x"),
            0U);
  // Outputs, as the cache is.
  EXPECT_EQ(launch([](Launch& l) {
              l.a.v_scale = l.a.k_scale;
            }).find("k_scale shares memory with v_scale, expected memory of its own"),
            0U);
  EXPECT_EQ(
      launch([](Launch& l) { l.p.kv_dtype = STROBE_FLOAT32, l.p.kv_scale = STROBE_KV_SCALE_NONE; }),
      "k_scale is given with kv_scale = 0 (none), expected NULL");
  EXPECT_EQ(launch([](Launch& l) { l.p.v_dtype = STROBE_FLOAT32; }),
            "v_scale is given with a dtype that has no scales (kv_scale is the other tensor's), "
            "expected NULL");
  EXPECT_EQ(launch([](Launch& l) { l.p.v_dtype = STROBE_FLOAT32, l.a.v_scale = nullptr; }), "");
}

// Columns of the table in which the sequence has no key may hold anything.
TEST(CacheValidation, PagesWithoutKeysAreNotLookedAt) {
  Launch l;
  l.used[0] = 10;
  l.starts[1] = 1;  // rows 2 to 10: pages 0, 1 and 2
  EXPECT_EQ(l.Text(), "");
  l.table[2] = 77;
  EXPECT_EQ(l.Text(), "block_table[0][2] = 77, expected 0 to 8");
  const int64_t pages = std::exchange(l.p.pages, 0);
  EXPECT_EQ(l.Text(), "block_table[0][0] = " + std::to_string(l.table[0]) +
                          ", but pages = 0: the pool has no pages");
  l.p.pages = pages;
  l.used[0] = 9;
  EXPECT_EQ(l.Text(), "");
  l.pad[0] = 5;
  l.table[0] = -5;
  EXPECT_EQ(l.Text(), "");
}

TEST(CacheValidation, EveryKernelSaysWhyItDeclinesOrTakesIt) {
  const strobe_problem p = Full();
  char text[400];
  for (int32_t kernel = 0; strobe_kernel_name(kernel); ++kernel) {
    if (std::string(strobe_kernel_name(kernel)).find("cpu") != 0) continue;
    strobe_kernel_declines(kernel, &p, text, sizeof text);
    if (text[0]) {
      EXPECT_NE(std::string(text).find("expected"), std::string::npos) << text;
    }
  }
}

TEST(CacheValidation, TheTextSaysTheCache) {
  strobe_problem p = Full();
  p.out_dtype = STROBE_FLOAT32;
  p.dtype = STROBE_BFLOAT16;
  const std::string text = strobe::to_string(p);
  for (const char* words :
       {"out fp32", "cache of 9 pages of 5, at most 4 a sequence", "append 4 at most, total 5",
        "rotary 4 in halves of 30 positions", "seqused_k", "leftpad", "rotary_position"}) {
    EXPECT_NE(text.find(words), std::string::npos) << text;
  }
  EXPECT_NE(strobe::to_string(Contiguous()).find("cache of 2 entries"), std::string::npos);
}

// A launch that half describes what it wants would compute something else: what the problem does
// not ask for is refused, not ignored.
TEST(CacheValidation, WhatTheProblemDoesNotAskForIsRefused) {
  using L = Launch;
  const struct {
    std::function<void(Launch&)> spoil;
    const char* text;
  } all[] = {
      {[](L& l) { l.p.append = STROBE_APPEND_NONE; },
       "k_new is given with append = 0 (none), expected NULL, or append and seqlen_new in the "
       "problem"},
      {[](L& l) { l.p.append = STROBE_APPEND_NONE, l.a.k_new = nullptr; },
       "v_new is given with append = 0 (none), expected NULL, or append and seqlen_new in the "
       "problem"},
      {[](L& l) { l.p.append = STROBE_APPEND_NONE, l.a.k_new = l.a.v_new = nullptr; },
       "cu_seqlens_k_new is given with append = 0 (none), expected NULL"},
      {[](L& l) { l.p.append = STROBE_APPEND_DENSE; },
       "cu_seqlens_k_new is given with append = 1 (dense), expected NULL"},
      {[](L& l) { l.p.append = STROBE_APPEND_DENSE, l.p.seqlen_new = 0; },
       "k_new is given with seqlen_new = 0, expected NULL"},
      {[](L& l) { l.p.append = STROBE_APPEND_DENSE, l.p.seqlen_new = 0, l.a.k_new = nullptr; },
       "v_new is given with seqlen_new = 0, expected NULL"},
      {[](L& l) { l.p.cache = STROBE_CACHE_CONTIGUOUS; },
       "block_table is given with cache = 1 (contiguous), expected NULL"},
      {[](L& l) { l.p.rotary_dim = 0; },
       "rotary_cos is given with rotary_dim = 0 (none), expected NULL"},
      {[](L& l) { l.p.has_rotary_position = 0; },
       "rotary_position is given with has_rotary_position = 0, expected NULL"},
      {[](L& l) { l.p.has_leftpad = 0; }, "leftpad is given with has_leftpad = 0, expected NULL"},
      {[](L& l) { l.p.has_seqused_k = 0; },
       "seqused_k is given with has_seqused_k = 0, expected NULL"},
      {[](L& l) { l.a.cache_batch_idx = l.used; },
       "cache_batch_idx is given with has_cache_batch_idx = 0, expected NULL"},
      {[](L& l) { l.p.varlen = 1, l.a.cu_seqlens_q = l.starts, l.a.cu_seqlens_k = l.starts; },
       "cu_seqlens_k is given with a cache (lengths of its keys are in seqused_k), expected NULL"},
  };
  for (const auto& bad : all) {
    Launch l;
    bad.spoil(l);
    EXPECT_EQ(l.Text().find(bad.text), 0U) << "got: " << l.Text() << "\nwanted: " << bad.text;
  }
  // Nothing to append is no mistake. Packed, the pointers may stay what they are for other steps.
  Launch none;
  none.p.append = STROBE_APPEND_DENSE;
  none.p.seqlen_new = none.p.total_new = 0;
  none.a.k_new = none.a.v_new = none.a.cu_seqlens_k_new = nullptr;
  EXPECT_EQ(none.Text(), "");
  Launch packed;
  packed.p.total_new = packed.p.seqlen_new = 0;
  packed.starts[1] = packed.starts[2] = 0;
  EXPECT_EQ(packed.Text(), "");
}

TEST(CacheValidation, AForgottenLengthIsNamed) {
  strobe_problem p = Contiguous();
  p.append = STROBE_APPEND_DENSE;
  p.seqlen_new = 1;
  p.seqlen_k = 0;
  EXPECT_EQ(strobe::check_problem(p).text(),
            "seqlen_new = 1, expected 0 to seqlen_k = 0 (the most rows that a sequence may reach, "
            "new ones included)");
}

}  // namespace
