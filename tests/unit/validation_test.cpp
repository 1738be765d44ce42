// Bad input: a status, a text that names argument, got and wanted, and nothing written.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "strobe/strobe.h"

namespace {

constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min(),
                  kMax64 = std::numeric_limits<int64_t>::max();
constexpr float kInf = std::numeric_limits<float>::infinity();

strobe_problem GoodProblem(strobe_direction direction = STROBE_BACKWARD) {
  strobe_problem p;
  EXPECT_EQ(strobe_problem_init(&p, sizeof p), STROBE_OK);
  p.direction = direction;
  p.batch = 2;
  p.seqlen_q = 6;
  p.seqlen_k = 7;
  p.heads = 4;
  p.heads_kv = 2;
  p.head_dim = 8;
  p.threads = 1;
  return p;
}

struct BadProblem {
  const char* what;
  std::function<void(strobe_problem&)> spoil;
  std::vector<const char*> words;  // that the text must hold: argument, got, wanted
};

const std::vector<BadProblem>& BadProblems() {
  using P = strobe_problem;
  static const std::vector<BadProblem> all = {
      {"struct_size", [](P& p) { p.struct_size = 8; }, {"struct_size", "8", "expected"}},
      {"direction", [](P& p) { p.direction = 2; }, {"direction", "2", "0 to 1"}},
      {"direction -1", [](P& p) { p.direction = -1; }, {"direction", "-1", "0 to 1"}},
      {"dtype",
       [](P& p) { p.dtype = 5; },
       {"dtype = 5 (int8), expected 0 to 4: int8 is for caches (kv_dtype)"}},
      {"dtype 9", [](P& p) { p.dtype = 9; }, {"dtype", "9", "0 to 4"}},
      {"dtype -1", [](P& p) { p.dtype = -1; }, {"dtype", "-1", "0 to 4"}},
      {"device", [](P& p) { p.device = 7; }, {"device", "7", "0 to 1"}},
      {"device_index", [](P& p) { p.device_index = 1; }, {"device_index", "1", "expected 0"}},
      {"device_index -1", [](P& p) { p.device_index = -1; }, {"device_index", "-1"}},
      {"batch 0", [](P& p) { p.batch = 0; }, {"batch", "0", "1 to"}},
      {"batch -1", [](P& p) { p.batch = -1; }, {"batch", "-1", "1 to"}},
      {"batch huge", [](P& p) { p.batch = kMax64; }, {"batch", "9223372036854775807"}},
      {"batch min", [](P& p) { p.batch = kMin64; }, {"batch", "-9223372036854775808"}},
      {"seqlen_q", [](P& p) { p.seqlen_q = -1; }, {"seqlen_q", "-1", "0 to"}},
      {"seqlen_q huge",
       [](P& p) { p.seqlen_q = int64_t{1} << 31; },
       {"seqlen_q", "2147483648", "2147483647"}},
      {"seqlen_k", [](P& p) { p.seqlen_k = -5; }, {"seqlen_k", "-5", "0 to"}},
      {"seqlen_k huge", [](P& p) { p.seqlen_k = kMax64; }, {"seqlen_k", "2147483647"}},
      {"heads 0", [](P& p) { p.heads = 0; }, {"heads", "0", "1 to"}},
      {"heads -4", [](P& p) { p.heads = -4; }, {"heads", "-4", "1 to"}},
      {"heads_kv -1", [](P& p) { p.heads_kv = -1; }, {"heads_kv", "-1", "1 to"}},
      {"heads_kv 3", [](P& p) { p.heads_kv = 3; }, {"heads", "4", "multiple of heads_kv = 3"}},
      {"heads_kv 8", [](P& p) { p.heads_kv = 8; }, {"heads", "4", "multiple of heads_kv = 8"}},
      {"batch * heads",
       [](P& p) { p.batch = 1 << 20, p.heads = p.heads_kv = 1 << 20; },
       {"batch * heads", "1048576", "2^31"}},
      {"head_dim 0", [](P& p) { p.head_dim = 0; }, {"head_dim", "0", "1 to 256"}},
      {"head_dim 257", [](P& p) { p.head_dim = 257; }, {"head_dim", "257", "1 to 256"}},
      {"head_dim min", [](P& p) { p.head_dim = kMin64; }, {"head_dim", "1 to 256"}},
      {"head_dim_v -1", [](P& p) { p.head_dim_v = -1; }, {"head_dim_v", "-1", "1 to 256"}},
      {"head_dim_v 257", [](P& p) { p.head_dim_v = 257; }, {"head_dim_v", "257", "1 to 256"}},
      {"varlen", [](P& p) { p.varlen = 2; }, {"varlen", "2", "0 to 1"}},
      {"causal", [](P& p) { p.causal = -1; }, {"causal", "-1", "0 to 1"}},
      {"total_q", [](P& p) { p.varlen = 1, p.total_q = -1; }, {"total_q", "-1", "0 to"}},
      {"total_k",
       [](P& p) { p.varlen = 1, p.total_q = 9, p.total_k = int64_t{1} << 40; },
       {"total_k", "1099511627776", "2147483647"}},
      {"window_left",
       [](P& p) { p.window_left = -2; },
       {"window_left = -2, expected -1 (no limit) or more, or window_signed = 1"}},
      {"window_right",
       [](P& p) { p.window_right = kMin64; },
       {"window_right = -9223372036854775808, expected -1 (no limit) or more"}},
      {"window_signed", [](P& p) { p.window_signed = 2; }, {"window_signed", "2", "0 to 1"}},
      {"a signed window that was left as it is",
       [](P& p) { p.window_signed = 1, p.attention_chunk = 2; },
       {"window_signed = 1 with window_left = -1 and window_right = -1, expected STROBE_NO_LIMIT"}},
      {"a window of no keys",
       [](P& p) { p.window_signed = 1, p.window_left = 3, p.window_right = -4; },
       {"window_left = 3 with window_right = -4, expected at least 4: no query would see a key"}},
      {"a causal window of no keys",
       [](P& p) {
         p.window_signed = 1, p.window_left = -1, p.window_right = STROBE_NO_LIMIT, p.causal = 1;
       },
       {"window_left = -1 with window_right = none and causal = 1, expected at "
        "least 0"}},
      {"a window far away",
       [](P& p) { p.window_signed = 1, p.window_left = kMin64, p.window_right = 5; },
       {"window_left = -9223372036854775808 with window_right = 5", "no query"}},
      {"signed window and chunks",
       [](P& p) {
         p.window_signed = 1, p.window_left = 9, p.window_right = -1, p.attention_chunk = 4;
       },
       {"window_right = -1 with attention_chunk = 4, expected at least 0"}},
      {"prefix and a signed window",
       [](P& p) {
         p.has_prefix = 1, p.window_signed = 1, p.window_left = -1,
         p.window_right = STROBE_NO_LIMIT;
       },
       {"window_left = -1 with has_prefix", "expected STROBE_NO_LIMIT"}},
      {"scale inf", [](P& p) { p.scale = kInf; }, {"scale", "inf", "finite"}},
      {"scale -inf", [](P& p) { p.scale = -kInf; }, {"scale", "-inf", "finite"}},
      {"softcap -1", [](P& p) { p.softcap = -1; }, {"softcap", "-1", "positive"}},
      {"softcap NaN", [](P& p) { p.softcap = NAN; }, {"softcap", "nan", "positive"}},
      {"softcap inf", [](P& p) { p.softcap = kInf; }, {"softcap", "inf", "finite"}},
      {"dropout_p 1", [](P& p) { p.dropout_p = 1; }, {"dropout_p", "1", "below 1"}},
      {"dropout_p -0.1", [](P& p) { p.dropout_p = -0.1f; }, {"dropout_p", "-0.1", "at least 0"}},
      {"dropout_p NaN", [](P& p) { p.dropout_p = NAN; }, {"dropout_p", "nan"}},
      {"dropout_first_key without dropout",
       [](P& p) { p.dropout_first_key = 8; },
       {"dropout_first_key = 8 with dropout_p = 0, expected 0"}},
      {"dropout_heads without dropout",
       [](P& p) { p.dropout_heads = 80; },
       {"dropout_heads = 80 with dropout_p = 0, expected 0"}},
      {"dropout_heads",
       [](P& p) { p.dropout_p = 0.5f, p.dropout_heads = 1; },
       {"dropout_heads = 1, expected at least heads = "}},
      {"dropout_first_head",
       [](P& p) { p.dropout_p = 0.5f, p.dropout_first_head = INT32_MAX; },
       {"dropout_first_head = 2147483647 before", "expected at most 2^31 - 1 together"}},
      {"alibi", [](P& p) { p.alibi = 3; }, {"alibi", "3", "0 to 2"}},
      {"deterministic", [](P& p) { p.deterministic = 2; }, {"deterministic", "2", "0 to 1"}},
      {"has_dlse", [](P& p) { p.has_dlse = 5; }, {"has_dlse", "5", "0 to 1"}},
      {"has_dlse forward",
       [](P& p) { p.direction = STROBE_FORWARD, p.has_dlse = 1; },
       {"has_dlse", "1", "backward"}},
      {"has_dlse and has_delta",
       [](P& p) { p.has_dlse = p.has_delta = 1; },
       {"has_dlse = 1 with has_delta = 1, expected 0"}},
      {"has_delta", [](P& p) { p.has_delta = 2; }, {"has_delta", "2", "0 to 1"}},
      {"has_sinks", [](P& p) { p.has_sinks = 2; }, {"has_sinks", "2", "0 to 1"}},
      {"sinks_outside_lse",
       [](P& p) { p.sinks_outside_lse = 1; },
       {"sinks_outside_lse = 1 with has_sinks = 0, expected has_sinks = 1"}},
      {"has_dsinks",
       [](P& p) { p.has_dsinks = 1; },
       {"has_dsinks = 1 with has_sinks = 0, expected has_sinks = 1"}},
      {"has_dsinks forward",
       [](P& p) { p.direction = STROBE_FORWARD, p.has_sinks = 1, p.has_dsinks = 1; },
       {"has_dsinks = 1 with direction forward, expected direction backward"}},
      {"has_delta forward",
       [](P& p) { p.direction = STROBE_FORWARD, p.has_delta = 1; },
       {"has_delta = 1 with direction forward, expected direction backward"}},
      {"has_dbias forward",
       [](P& p) { p.direction = STROBE_FORWARD, p.has_bias = p.has_dbias = 1; },
       {"has_dbias = 1 with direction forward, expected direction backward"}},
      {"has_dbias alone",
       [](P& p) { p.has_dbias = 1; },
       {"has_dbias = 1 with has_bias = 0, expected has_bias = 1"}},
      {"bias_dtype",
       [](P& p) { p.has_bias = 1, p.bias_dtype = STROBE_FLOAT8_E4M3; },
       {"bias_dtype = 3, expected -1 to 2"}},
      {"dbias_dtype",
       [](P& p) { p.has_bias = p.has_dbias = 1, p.dbias_dtype = STROBE_FLOAT16; },
       {"dbias_dtype = 2 (fp16), expected -1 (that of bias) or 0 (fp32)"}},
      {"bias_batch",
       [](P& p) { p.has_bias = 1, p.bias_batch = 7; },
       {"bias_batch = 7, expected 1 (shared) or", "(batch)"}},
      {"bias_heads",
       [](P& p) { p.has_bias = 1, p.bias_heads = -1; },
       {"bias_heads = -1, expected 1 (shared) or", "(heads)"}},
      {"bias_seqlen_q",
       [](P& p) { p.has_bias = 1, p.bias_seqlen_q = 3; },
       {"bias_seqlen_q = 3, expected 1 (shared) or", "(seqlen_q)"}},
      {"bias far apart",
       [](P& p) {
         p.has_bias = 1, p.bias = {0, INT64_MAX / 2, 0, 1};
       },
       {"bias.seqlen", "offsets pass 2^58"}},
      {"dbias that overlaps itself",
       [](P& p) {
         p.has_bias = p.has_dbias = 1, p.dbias = {0, 0, 0, 1};
       },
       {"dbias.", "must not overlap itself"}},
      {"accumulate", [](P& p) { p.accumulate = -1; }, {"accumulate", "-1", "0 to 1"}},
      {"accumulate forward",
       [](P& p) { p.direction = STROBE_FORWARD, p.accumulate = 1; },
       {"accumulate = 1 with direction forward, expected direction backward"}},
      {"grad_dtype",
       [](P& p) { p.grad_dtype = 7; },
       {"grad_dtype = 7", "expected -1 (that of q) or 0 (fp32)"}},
      {"grad_dtype narrower",
       [](P& p) { p.grad_dtype = STROBE_FLOAT16; },
       {"grad_dtype = 2 (fp16), expected -1 (that of q) or 0 (fp32)"}},
      {"grad_dtype forward",
       [](P& p) {
         p.direction = STROBE_FORWARD, p.dtype = STROBE_BFLOAT16, p.grad_dtype = STROBE_FLOAT32;
       },
       {"grad_dtype = 0 (fp32), expected -1 (that of q)"}},
      {"threads -1", [](P& p) { p.threads = -1; }, {"threads", "-1", "0 to"}},
      {"threads huge",
       [](P& p) { p.threads = std::numeric_limits<int32_t>::max(); },
       {"threads", "2147483647"}},
      {"batch_invariant",
       [](P& p) { p.batch_invariant = -1; },
       {"batch_invariant", "-1", "0 to 1"}},
      {"attention_chunk", [](P& p) { p.attention_chunk = -1; }, {"attention_chunk", "-1", "0 to"}},
      {"prefix and window",
       [](P& p) { p.has_prefix = 1, p.window_left = 3; },
       {"window_left = 3 with has_prefix", "expected -1"}},
      {"prefix and chunks",
       [](P& p) { p.has_prefix = 1, p.attention_chunk = 3; },
       {"attention_chunk = 3 with has_prefix", "expected 0"}},
      {"q.dim",
       [](P& p) {
         p.q = {192, 32, 8, 2};
       },
       {"q.dim", "2", "1 (last dimension contiguous)"}},
      {"k.dim 0",
       [](P& p) {
         p.k = {112, 16, 8, 0};
       },
       {"k.dim", "0", "1"}},
      {"v.dim -1",
       [](P& p) {
         p.v = {112, 16, 8, -1};
       },
       {"v.dim", "-1", "1"}},
      {"dout.dim",
       [](P& p) {
         p.dout = {192, 32, 8, 3};
       },
       {"dout.dim", "3", "1"}},
      {"varlen stride",
       [](P& p) {
         p.varlen = 1, p.total_q = 9, p.total_k = 9, p.q = {0, 32, 8, 4};
       },
       {"q.dim", "4", "1"}},
      {"out overlaps in rows",
       [](P& p) {
         p.direction = STROBE_FORWARD;
         p.out = {192, 0, 8, 1};
       },
       {"out.seqlen", "0", "overlap"}},
      {"out overlaps in heads",
       [](P& p) {
         p.direction = STROBE_FORWARD;
         p.out = {192, 32, 7, 1};
       },
       {"out.head", "7", "8", "overlap"}},
      {"dq overlaps in batch",
       [](P& p) {
         p.dq = {32, 32, 8, 1};
       },
       {"dq.", "32", "overlap"}},
      {"dk overlaps",
       [](P& p) {
         p.dk = {112, 8, 8, 1};
       },
       {"dk.", "8", "overlap"}},
      {"dv overlaps",
       [](P& p) {
         p.dv = {0, 16, 8, 1};
       },
       {"dv.batch", "0", "overlap"}},
      {"q stride huge",
       [](P& p) {
         p.q = {kMax64, 32, 8, 1};
       },
       {"q.batch", "9223372036854775807"}},
      {"q stride min",
       [](P& p) {
         p.q = {192, kMin64, 8, 1};
       },
       {"q.seqlen", "-9223372036854775808"}},
      {"k strides huge together",
       [](P& p) {
         p.k = {int64_t{1} << 57, int64_t{1} << 57, 8, 1};
       },
       {"k.", "144115188075855872"}},
      // Contiguous by default, but no machine can address the last element.
      {"tensor too large",
       [](P& p) {
         p.batch = 1, p.heads = p.heads_kv = std::numeric_limits<int32_t>::max();
         p.seqlen_q = p.seqlen_k = std::numeric_limits<int32_t>::max(), p.head_dim = 256;
       },
       {"2147483647"}},
  };
  return all;
}

void ExpectWords(const std::string& text, const std::vector<const char*>& words) {
  for (const char* word : words)
    EXPECT_NE(text.find(word), std::string::npos) << '"' << text << "\" lacks " << word;
}

TEST(Validation, EveryBadFieldIsRefusedByName) {
  for (const BadProblem& bad : BadProblems()) {
    SCOPED_TRACE(bad.what);
    strobe_problem p = GoodProblem();
    bad.spoil(p);
    strobe_plan plan;
    std::memset(&plan, 0x5A, sizeof plan);
    plan.struct_size = sizeof plan;
    const strobe_plan before = plan;
    EXPECT_EQ(strobe_plan_make(&p, &plan), STROBE_INVALID_ARGUMENT);
    ExpectWords(strobe_last_error(), bad.words);
    EXPECT_EQ(std::memcmp(&plan, &before, sizeof plan), 0) << "the plan was written";
    EXPECT_EQ(strobe_supports(&p), STROBE_INVALID_ARGUMENT);
    char text[2048];
    strobe_why(&p, text, sizeof text);
    ExpectWords(text, {"invalid"});
  }
}

TEST(Validation, TheGoodProblemsAreGood) {
  const std::function<void(strobe_problem&)> edits[] = {
      [](strobe_problem&) {},
      [](strobe_problem& p) { p.direction = STROBE_FORWARD; },
      [](strobe_problem& p) { p.seqlen_q = p.seqlen_k = 0; },
      [](strobe_problem& p) { p.head_dim = 1, p.head_dim_v = 256; },
      [](strobe_problem& p) { p.heads_kv = 0; },
      [](strobe_problem& p) { p.window_left = p.window_right = kMax64; },
      [](strobe_problem& p) { p.window_signed = 1, p.window_left = 8, p.window_right = -8; },
      [](strobe_problem& p) {
        p.window_signed = 1, p.window_left = STROBE_NO_LIMIT, p.window_right = kMin64;
      },
      [](strobe_problem& p) {
        p.window_signed = p.causal = p.has_prefix = 1;
        p.window_left = STROBE_NO_LIMIT, p.window_right = -1;
      },
      [](strobe_problem& p) { p.scale = -3; },
      [](strobe_problem& p) { p.scale = 0; },
      [](strobe_problem& p) { p.softcap = 5, p.dropout_p = 0.5f; },
      [](strobe_problem& p) { p.has_dlse = p.deterministic = p.causal = 1; },
      [](strobe_problem& p) {
        p.q = {0, 0, 0, 1}, p.k = p.q, p.v = p.q, p.dout = p.q;
      },
      [](strobe_problem& p) {
        p.q = {-192, -32, -8, 1}, p.dq = p.q;
      },
      // The stride of a dimension with one entry means nothing, not even for an output.
      [](strobe_problem& p) {
        p.batch = 1, p.dq = {0, 32, 8, 1}, p.dk = {kMin64, 16, 8, 1};
      },
      [](strobe_problem& p) {
        p.varlen = 1, p.total_q = 12, p.total_k = 3, p.dq = {0, 32, 8, 1};
      },
  };
  for (size_t n = 0; n < std::size(edits); ++n) {
    strobe_problem p = GoodProblem();
    edits[n](p);
    EXPECT_EQ(strobe_supports(&p), STROBE_OK) << "edit " << n << ": " << strobe_last_error();
  }
}

TEST(Validation, NullPointersAndSizesOfStructs) {
  strobe_problem p = GoodProblem();
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  EXPECT_EQ(strobe_problem_init(nullptr, sizeof p), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"problem", "NULL"});
  strobe_problem untouched;
  std::memset(&untouched, 0x5A, sizeof untouched);
  const strobe_problem before = untouched;
  EXPECT_EQ(strobe_problem_init(&untouched, 16), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"struct_size", "16", std::to_string(sizeof p).c_str()});
  EXPECT_EQ(std::memcmp(&untouched, &before, sizeof before), 0);

  EXPECT_EQ(strobe_plan_make(nullptr, &plan), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"problem", "NULL"});
  EXPECT_EQ(strobe_plan_make(&p, nullptr), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"plan", "NULL"});
  plan.struct_size = 4;
  EXPECT_EQ(strobe_plan_make(&p, &plan), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"plan.struct_size", "4"});
  plan.struct_size = sizeof plan;
  EXPECT_EQ(strobe_supports(nullptr), STROBE_INVALID_ARGUMENT);
  EXPECT_EQ(strobe_machine_info(nullptr), STROBE_INVALID_ARGUMENT);
  strobe_machine machine;
  machine.struct_size = 1;
  EXPECT_EQ(strobe_machine_info(&machine), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"machine.struct_size", "1"});
  EXPECT_EQ(strobe_cuda_device_info(0, nullptr), STROBE_INVALID_ARGUMENT);
  strobe_cuda_device device;
  device.struct_size = sizeof device;
  EXPECT_EQ(strobe_cuda_device_info(1 << 20, &device), STROBE_INVALID_ARGUMENT);
  EXPECT_EQ(strobe_cuda_device_info(-1, &device), STROBE_INVALID_ARGUMENT);

  EXPECT_EQ(strobe_forward(nullptr, nullptr), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"plan", "NULL"});
  EXPECT_EQ(strobe_backward(nullptr, nullptr), STROBE_INVALID_ARGUMENT);
  ASSERT_EQ(strobe_plan_make(&p, &plan), STROBE_OK);
  EXPECT_EQ(strobe_backward(&plan, nullptr), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"args", "NULL"});
}

TEST(Validation, TextsAreCutToTheirRoomAndAlwaysEnd) {
  strobe_problem p = GoodProblem();
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  ASSERT_EQ(strobe_plan_make(&p, &plan), STROBE_OK);
  char all[4096];
  const size_t length = strobe_plan_text(&plan, all, sizeof all);
  EXPECT_EQ(length, std::strlen(all));
  EXPECT_EQ(strobe_plan_text(&plan, nullptr, 0), length);
  for (const size_t room : {size_t{1}, size_t{2}, size_t{20}, length, length + 1}) {
    std::vector<char> text(room + 1, '#');
    EXPECT_EQ(strobe_plan_text(&plan, text.data(), room), length);
    EXPECT_EQ(std::strlen(text.data()), std::min(room - 1, length));
    EXPECT_EQ(std::strncmp(text.data(), all, room - 1), 0);
    EXPECT_EQ(text[room], '#');
    strobe_why(&p, text.data(), room);
    EXPECT_EQ(text[room], '#');
  }
  char nothing = '#';
  strobe_plan_text(&plan, &nothing, 0);
  EXPECT_EQ(nothing, '#');
  strobe_plan_text(nullptr, all, sizeof all);
  strobe_why(nullptr, all, sizeof all);
  ExpectWords(all, {"NULL"});
}

// Whatever is not a plan is refused in the same words by all that take one.
TEST(Validation, PlansThatNobodyMadeAreRefused) {
  strobe_problem refused = GoodProblem();
  refused.head_dim = 300;
  const auto expect_refused = [](const strobe_plan* plan, const char* word) {
    strobe_forward_args args = {};
    args.struct_size = sizeof args;
    EXPECT_EQ(strobe_forward(plan, &args), STROBE_INVALID_ARGUMENT);
    const std::string why = strobe_last_error();
    ExpectWords(why.c_str(), {"plan", word});
    char text[200];
    const size_t length = strobe_plan_text(plan, text, sizeof text);
    EXPECT_EQ(length, std::strlen(text));
    EXPECT_EQ(std::string(text), "invalid: " + why + "\n");
    EXPECT_EQ(strobe_last_error(), why);
    EXPECT_EQ(strobe_plan_text(plan, nullptr, 0), length);
  };
  expect_refused(nullptr, "NULL");
  for (const int fill : {0, 0x5A, 0xFF}) {
    strobe_plan plan;
    std::memset(static_cast<void*>(&plan), fill, sizeof plan);
    expect_refused(&plan, "struct_size");
    plan.struct_size = sizeof plan;
    EXPECT_EQ(strobe_plan_make(&refused, &plan), STROBE_INVALID_ARGUMENT);
    expect_refused(&plan, "strobe_plan_make");
    plan.kernel_index = 0;
    expect_refused(&plan, "strobe_plan_make");
  }
}

TEST(Validation, EveryStatusHasItsName) {
  EXPECT_STREQ(strobe_status_name(STROBE_OK), "STROBE_OK");
  EXPECT_STREQ(strobe_status_name(STROBE_INVALID_ARGUMENT), "STROBE_INVALID_ARGUMENT");
  EXPECT_STREQ(strobe_status_name(STROBE_UNSUPPORTED), "STROBE_UNSUPPORTED");
  EXPECT_STREQ(strobe_status_name(STROBE_OUT_OF_MEMORY), "STROBE_OUT_OF_MEMORY");
  EXPECT_STREQ(strobe_status_name(STROBE_DEVICE_ERROR), "STROBE_DEVICE_ERROR");
  EXPECT_STREQ(strobe_status_name(STROBE_INTERNAL_ERROR), "STROBE_INTERNAL_ERROR");
  EXPECT_NE(strobe_status_name(static_cast<strobe_status>(99)), nullptr);
  EXPECT_EQ(strobe_version(), std::to_string(STROBE_VERSION_MAJOR) + "." +
                                  std::to_string(STROBE_VERSION_MINOR) + "." +
                                  std::to_string(STROBE_VERSION_PATCH));
}

TEST(Validation, ADeviceThatIsNotThereIsUnsupportedWithReasons) {
  strobe_machine machine;
  machine.struct_size = sizeof machine;
  ASSERT_EQ(strobe_machine_info(&machine), STROBE_OK);
  if (machine.cuda_devices > 0) GTEST_SKIP() << "this machine has a CUDA device";
  strobe_problem p = GoodProblem();
  p.device = STROBE_CUDA;
  p.dtype = STROBE_FLOAT16;
  EXPECT_EQ(strobe_supports(&p), STROBE_UNSUPPORTED);
  EXPECT_GT(std::strlen(strobe_last_error()), 20u);
  EXPECT_GT(strobe_why(&p, nullptr, 0), 20u);
}

// Launch arguments. All tensors are in one array of floats that must not change.
class LaunchValidation : public ::testing::Test {
 protected:
  static constexpr size_t kFloats = 2 * 7 * 4 * 8 + 1;
  static constexpr float kMark = 1234.5f;

  void Make(const strobe_problem& problem) {
    plan_.struct_size = sizeof plan_;
    ASSERT_EQ(strobe_plan_make(&problem, &plan_), STROBE_OK) << strobe_last_error();
    forward_.struct_size = sizeof forward_;
    backward_.struct_size = sizeof backward_;
    forward_.q = backward_.q = in_.data();
    forward_.k = backward_.k = in_.data();
    forward_.v = backward_.v = in_.data();
    forward_.out = out_.data();
    forward_.lse = lse_.data();
    backward_.out = in_.data();
    backward_.lse = in_.data();
    backward_.dout = in_.data();
    backward_.dq = out_.data();
    backward_.dk = dk_.data();
    backward_.dv = lse_.data();
    workspace_.resize(plan_.workspace_bytes + 128);
  }

  void ExpectRefused(strobe_status status, const std::vector<const char*>& words) {
    EXPECT_EQ(status, STROBE_INVALID_ARGUMENT);
    ExpectWords(strobe_last_error(), words);
    for (const auto* array : {&out_, &lse_, &dk_}) {
      for (const float x : *array) ASSERT_EQ(x, kMark) << "an output was written";
    }
    for (const char x : workspace_) ASSERT_EQ(x, 0) << "the workspace was written";
  }

  strobe_status Launch(const strobe_forward_args& a) { return strobe_forward(&plan_, &a); }
  strobe_status Launch(const strobe_backward_args& a) { return strobe_backward(&plan_, &a); }

  // What somebody gets wrong, and words of the message; an empty word: here it is not wrong.
  template <typename Args>
  struct Fault {
    std::function<void(Args&)> spoil;
    std::vector<const char*> words;
  };
  template <typename Args>
  void ExpectFaultsRefused(const Args& good, const std::vector<Fault<Args>>& faults) {
    for (const Fault<Args>& fault : faults) {
      if (fault.words[0][0] == '\0') continue;
      Args a = good;
      fault.spoil(a);
      ExpectRefused(Launch(a), fault.words);
    }
  }

  // The backward's arguments as they are; and where the problem has nothing of them from an offset
  // on, a caller's struct that ends there, whatever follows it.
  void ExpectServed(size_t older_size) {
    EXPECT_EQ(Launch(backward_), STROBE_OK) << strobe_last_error();
    Make(GoodProblem());
    strobe_backward_args older = backward_;
    std::memset(reinterpret_cast<char*>(&older) + older_size, 0x5a, sizeof older - older_size);
    older.struct_size = older_size;
    EXPECT_EQ(Launch(older), STROBE_OK) << strobe_last_error();
  }

  char* AlignedWorkspace() {
    return workspace_.data() + (64 - reinterpret_cast<uintptr_t>(workspace_.data()) % 64) % 64;
  }

  template <typename T>
  static T* Shifted(T* pointer, int bytes) {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) +
                                static_cast<uintptr_t>(bytes));
  }

  std::vector<float> in_ = std::vector<float>(kFloats, 0.5f);
  std::vector<float> out_ = std::vector<float>(kFloats, kMark), lse_ = out_, dk_ = out_;
  std::vector<char> workspace_;
  strobe_plan plan_{};
  strobe_forward_args forward_{};
  strobe_backward_args backward_{};
};

TEST_F(LaunchValidation, ForwardPointers) {
  Make(GoodProblem(STROBE_FORWARD));
  using A = strobe_forward_args;
  const std::vector<Fault<A>> faults = {
      {[](A& a) { a.struct_size = 3; }, {"args.struct_size", "3"}},
      {[](A& a) { a.q = nullptr; }, {"q", "NULL", "expected a pointer"}},
      {[](A& a) { a.k = nullptr; }, {"k", "NULL"}},
      {[](A& a) { a.v = nullptr; }, {"v", "NULL"}},
      {[](A& a) { a.out = nullptr; }, {"out", "NULL"}},
      {[](A& a) { a.q = Shifted(a.q, 2); }, {"q", "alignment to 4"}},
      {[](A& a) { a.k = Shifted(a.k, 1); }, {"k", "alignment to 4"}},
      {[](A& a) { a.v = Shifted(a.v, 3); }, {"v", "alignment to 4"}},
      {[](A& a) { a.out = Shifted(a.out, 1); }, {"out", "alignment to 4"}},
      {[](A& a) { a.lse = Shifted(a.lse, 2); }, {"lse", "alignment to 4"}},
      {[&](A& a) {
         a.workspace = AlignedWorkspace() + 4, a.workspace_bytes = plan_.workspace_bytes;
       },
       {"workspace", "alignment to 64"}},
      {[](A& a) { a.out = const_cast<void*>(a.q); },
       {"out shares memory with q, expected memory of its own"}},
      {[](A& a) { a.v = Shifted(a.out, 64); }, {"out shares memory with v"}},
      {[](A& a) { a.lse = static_cast<float*>(a.out); }, {"out shares memory with lse"}},
      {[&](A& a) {
         a.k = a.workspace = AlignedWorkspace(), a.workspace_bytes = plan_.workspace_bytes;
       },
       {plan_.workspace_bytes > 0 ? "workspace shares memory with k" : ""}},
  };
  ExpectFaultsRefused(forward_, faults);
  if (plan_.workspace_bytes > 0) {
    strobe_forward_args a = forward_;
    a.workspace = AlignedWorkspace();
    a.workspace_bytes = plan_.workspace_bytes - 1;
    ExpectRefused(strobe_forward(&plan_, &a), {"workspace_bytes", "expected at least"});
  }
}

TEST_F(LaunchValidation, GivenDelta) {
  strobe_problem p = GoodProblem();
  p.has_delta = 1;
  Make(p);
  backward_.delta = in_.data();
  backward_.out = nullptr;
  using A = strobe_backward_args;
  const std::vector<Fault<A>> faults = {
      {[](A& a) { a.delta = nullptr; }, {"delta = NULL"}},
      {[](A& a) { a.delta = Shifted(a.delta, 2); }, {"delta", "alignment to 4"}},
      {[](A& a) { a.delta = static_cast<float*>(a.dk); }, {"dk shares memory with delta"}},
      // A caller's struct that ends before delta.
      {[](A& a) { a.struct_size = offsetof(A, delta); }, {"delta = NULL"}},
  };
  ExpectFaultsRefused(backward_, faults);
  ExpectServed(offsetof(A, delta));
}

TEST_F(LaunchValidation, Sinks) {
  strobe_problem p = GoodProblem();
  p.has_sinks = p.has_dsinks = 1;
  Make(p);
  float dsinks[4] = {};
  backward_.sinks = in_.data();
  backward_.dsinks = dsinks;
  using A = strobe_backward_args;
  const std::vector<Fault<A>> faults = {
      {[](A& a) { a.sinks = nullptr; }, {"sinks = NULL"}},
      {[](A& a) { a.dsinks = nullptr; }, {"dsinks = NULL"}},
      {[](A& a) { a.sinks = Shifted(a.sinks, 2); }, {"sinks", "alignment to 4"}},
      {[](A& a) { a.sinks = a.dsinks; }, {"dsinks shares memory with sinks"}},
      {[](A& a) { a.dsinks = static_cast<float*>(a.dk); }, {"shares memory with", "dsinks"}},
      // A caller's struct that ends before them.
      {[](A& a) { a.struct_size = offsetof(A, sinks); }, {"sinks = NULL"}},
  };
  ExpectFaultsRefused(backward_, faults);
  ExpectServed(offsetof(A, sinks));
}

TEST_F(LaunchValidation, Bias) {
  strobe_problem p = GoodProblem();
  p.has_bias = p.has_dbias = 1;
  p.bias_batch = p.bias_heads = 1;
  Make(p);
  std::vector<float> dbias(static_cast<size_t>(p.seqlen_q * p.seqlen_k));
  backward_.bias = in_.data();
  backward_.dbias = dbias.data();
  using A = strobe_backward_args;
  const std::vector<Fault<A>> faults = {
      {[](A& a) { a.bias = nullptr; }, {"bias = NULL"}},
      {[](A& a) { a.dbias = nullptr; }, {"dbias = NULL"}},
      {[](A& a) { a.bias = Shifted(static_cast<const float*>(a.bias), 2); },
       {"bias", "alignment to 4"}},
      {[](A& a) { a.dbias = a.dk; }, {"dk shares memory with dbias"}},
      {[](A& a) { a.bias = a.dbias; }, {"dbias shares memory with bias"}},
      // A caller's struct that ends before them.
      {[](A& a) { a.struct_size = offsetof(A, bias); }, {"bias = NULL"}},
  };
  ExpectFaultsRefused(backward_, faults);
  ExpectServed(offsetof(A, bias));
}

// Nobody looks at the strides of a tensor that the problem does not have: of any size, they are as
// if they were not there.
TEST_F(LaunchValidation, StridesOfAbsentTensorsMeanNothing) {
  const strobe_strides any = {kMin64, kMax64, -3, kMax64 / 2};
  for (const strobe_direction direction : {STROBE_FORWARD, STROBE_BACKWARD}) {
    for (const int32_t has_bias : {0, 1}) {
      strobe_problem p = GoodProblem(direction);
      p.has_bias = has_bias;
      Make(p);
      const strobe_problem resolved = plan_.problem;
      p.dbias = any;
      if (!has_bias) {
        p.bias = any;
        p.bias_batch = p.bias_heads = p.bias_seqlen_q = kMax64;
      }
      if (direction == STROBE_FORWARD) p.dout = p.dq = p.dk = p.dv = any;
      Make(p);
      EXPECT_EQ(std::memcmp(&resolved, &plan_.problem, sizeof resolved), 0);
      forward_.bias = backward_.bias = has_bias ? in_.data() : nullptr;
      EXPECT_EQ(direction == STROBE_FORWARD ? Launch(forward_) : Launch(backward_), STROBE_OK)
          << strobe_last_error();
    }
  }
}

TEST_F(LaunchValidation, GradientsHaveTheirOwnAlignment) {
  strobe_problem p = GoodProblem();
  p.dtype = STROBE_BFLOAT16;
  p.grad_dtype = STROBE_FLOAT32;
  Make(p);
  backward_.dq = Shifted(backward_.dq, 2);
  ExpectRefused(strobe_backward(&plan_, &backward_), {"dq", "alignment to 4"});
  p.grad_dtype = STROBE_SAME_DTYPE;
  Make(p);
  backward_.dq = Shifted(backward_.dq, 2);
  EXPECT_EQ(strobe_backward(&plan_, &backward_), STROBE_OK) << strobe_last_error();
}

TEST_F(LaunchValidation, BackwardPointers) {
  strobe_problem p = GoodProblem();
  p.has_dlse = 1;
  Make(p);
  backward_.dlse = in_.data();
  using A = strobe_backward_args;
  const std::vector<Fault<A>> faults = {
      {[](A& a) { a.struct_size = 0; }, {"args.struct_size", "0"}},
      {[](A& a) { a.q = nullptr; }, {"q", "NULL"}},
      {[](A& a) { a.k = nullptr; }, {"k", "NULL"}},
      {[](A& a) { a.v = nullptr; }, {"v", "NULL"}},
      {[](A& a) { a.out = nullptr; }, {"out", "NULL"}},
      {[](A& a) { a.lse = nullptr; }, {"lse", "NULL"}},
      {[](A& a) { a.dout = nullptr; }, {"dout", "NULL"}},
      {[](A& a) { a.dlse = nullptr; }, {"dlse", "NULL"}},
      {[](A& a) { a.dq = nullptr; }, {"dq", "NULL"}},
      {[](A& a) { a.dk = nullptr; }, {"dk", "NULL"}},
      {[](A& a) { a.dv = nullptr; }, {"dv", "NULL"}},
      {[](A& a) { a.lse = Shifted(a.lse, 1); }, {"lse", "alignment to 4"}},
      {[](A& a) { a.dout = Shifted(a.dout, 2); }, {"dout", "alignment to 4"}},
      {[](A& a) { a.dlse = Shifted(a.dlse, 2); }, {"dlse", "alignment to 4"}},
      {[](A& a) { a.dq = Shifted(a.dq, 2); }, {"dq", "alignment to 4"}},
      {[](A& a) { a.dk = Shifted(a.dk, 2); }, {"dk", "alignment to 4"}},
      {[](A& a) { a.dv = Shifted(a.dv, 2); }, {"dv", "alignment to 4"}},
      {[&](A& a) {
         a.workspace = AlignedWorkspace() + 32, a.workspace_bytes = plan_.workspace_bytes;
       },
       {"workspace", "alignment to 64"}},
      {[](A& a) { a.dq = a.dk; }, {"dq shares memory with dk, expected memory of its own"}},
      {[](A& a) { a.dk = Shifted(a.dv, 16); }, {"dk shares memory with dv"}},
      {[](A& a) { a.q = Shifted(a.dq, -4); }, {"dq shares memory with q"}},
      {[](A& a) { a.out = Shifted(a.dv, 4); }, {"dv shares memory with out"}},
      {[](A& a) { a.dlse = static_cast<float*>(a.dk); }, {"dk shares memory with dlse"}},
      {[&](A& a) {
         a.dv = a.workspace = AlignedWorkspace(), a.workspace_bytes = plan_.workspace_bytes;
       },
       {plan_.workspace_bytes > 0 ? "dv shares memory with workspace" : ""}},
  };
  ExpectFaultsRefused(backward_, faults);
  if (plan_.workspace_bytes > 0) {
    strobe_backward_args a = backward_;
    a.workspace = AlignedWorkspace();
    a.workspace_bytes = plan_.workspace_bytes - 1;
    ExpectRefused(strobe_backward(&plan_, &a), {"workspace_bytes", "expected at least"});
  }
}

TEST_F(LaunchValidation, SlopesAndPlansOfTheWrongKind) {
  strobe_problem p = GoodProblem(STROBE_FORWARD);
  p.alibi = STROBE_ALIBI_PER_HEAD;
  Make(p);
  ExpectRefused(strobe_forward(&plan_, &forward_), {"alibi_slopes", "NULL"});
  ExpectRefused(strobe_backward(&plan_, &backward_), {"direction", "backward"});
  forward_.alibi_slopes = in_.data();
  strobe_plan forged = plan_;
  forged.kernel_index = 1000;
  ExpectRefused(strobe_forward(&forged, &forward_), {"plan"});
  forged.kernel_index = -1;
  ExpectRefused(strobe_forward(&forged, &forward_), {"plan"});
  forged = plan_;
  forged.kernel = "cpu_imagined";
  ExpectRefused(strobe_forward(&forged, &forward_), {"plan"});
  forged = plan_;
  forged.struct_size = 1;
  ExpectRefused(strobe_forward(&forged, &forward_), {"plan.struct_size", "1"});
}

TEST_F(LaunchValidation, CumulativeLengths) {
  strobe_problem p = GoodProblem(STROBE_FORWARD);
  p.varlen = 1;
  p.total_q = 10;
  p.total_k = 11;
  Make(p);
  const int32_t good_q[] = {0, 4, 10}, good_k[] = {0, 5, 11};
  struct {
    int32_t q[3], k[3];
    std::vector<const char*> words;
  } const bad[] = {
      {{1, 4, 10}, {0, 5, 11}, {"cu_seqlens_q[0]", "1", "expected 0"}},
      {{0, 4, 3}, {0, 5, 11}, {"cu_seqlens_q[2]", "3", "4", "not to decrease"}},
      {{0, -1, 3}, {0, 5, 11}, {"cu_seqlens_q[1]", "-1", "not to decrease"}},
      {{0, 7, 10}, {0, 5, 11}, {"cu_seqlens_q", "sequence 0", "7", "seqlen_q = 6"}},
      {{0, 6, 12}, {0, 5, 11}, {"cu_seqlens_q[2]", "12", "total_q = 10"}},
      {{0, 4, 10}, {-3, 5, 11}, {"cu_seqlens_k[0]", "-3", "expected 0"}},
      {{0, 4, 10}, {0, 6, 5}, {"cu_seqlens_k[2]", "5", "6", "not to decrease"}},
      {{0, 4, 10}, {0, 2, 10}, {"cu_seqlens_k", "sequence 1", "8", "seqlen_k = 7"}},
      {{0, 4, 10}, {0, 7, 14}, {"cu_seqlens_k[2]", "14", "total_k = 11"}},
      {{0, 4, 10}, {0, 2000000000, -2000000000}, {"cu_seqlens_k"}},
  };
  for (const auto& b : bad) {
    forward_.cu_seqlens_q = b.q;
    forward_.cu_seqlens_k = b.k;
    ExpectRefused(strobe_forward(&plan_, &forward_), b.words);
  }
  forward_.cu_seqlens_q = nullptr;
  forward_.cu_seqlens_k = good_k;
  ExpectRefused(strobe_forward(&plan_, &forward_), {"cu_seqlens_q", "NULL"});
  forward_.cu_seqlens_q = good_q;
  forward_.cu_seqlens_k = nullptr;
  ExpectRefused(strobe_forward(&plan_, &forward_), {"cu_seqlens_k", "NULL"});
  forward_.cu_seqlens_k = good_k;
  EXPECT_EQ(strobe_forward(&plan_, &forward_), STROBE_OK) << strobe_last_error();
}

// On a device the values are the caller's promise; here they are looked at before a kernel is. A
// plan is forged, as these checks do not depend on a kernel that obeys.
TEST_F(LaunchValidation, NumbersOfEachSequence) {
  strobe_problem p = GoodProblem(STROBE_FORWARD);
  Make(p);
  strobe_problem& made = plan_.problem;
  made.has_seqused_q = made.has_seqused_k = made.has_q_position = made.has_prefix = 1;
  const int32_t good[] = {2, 3}, low[] = {1, -1}, high[] = {8, 0}, far[] = {0, (1 << 30) + 1};
  using A = strobe_forward_args;
  struct {
    std::function<void(A&)> spoil;
    std::vector<const char*> words;
  } const bad[] = {
      {[](A& a) { a.seqused_q = nullptr; }, {"seqused_q = NULL", "expected a pointer"}},
      {[](A& a) { a.seqused_k = nullptr; }, {"seqused_k = NULL"}},
      {[](A& a) { a.q_position = nullptr; }, {"q_position = NULL"}},
      {[](A& a) { a.prefix = nullptr; }, {"prefix = NULL"}},
      {[&](A& a) { a.seqused_q = low; }, {"seqused_q[1] = -1, expected 0 to 6"}},
      {[&](A& a) { a.seqused_q = high; }, {"seqused_q[0] = 8, expected 0 to 6"}},
      {[&](A& a) { a.seqused_k = high; }, {"seqused_k[0] = 8, expected 0 to 7"}},
      {[&](A& a) { a.q_position = far; }, {"q_position[1] = 1073741825, expected -1073741824 to"}},
      {[&](A& a) { a.prefix = low; }, {"prefix[1] = -1, expected 0 to 7"}},
      {[&](A& a) { a.prefix = Shifted(good, 2); }, {"prefix", "alignment to 4"}},
  };
  for (const auto& b : bad) {
    strobe_forward_args a = forward_;
    a.seqused_q = a.seqused_k = a.q_position = a.prefix = good;
    b.spoil(a);
    ExpectRefused(strobe_forward(&plan_, &a), b.words);
  }
}

// Whoever gives an array and forgets to say so would get the answer to another question.
TEST_F(LaunchValidation, WhatTheProblemDoesNotAskForIsRefused) {
  const int32_t numbers[] = {0, 3, 6};
  const float slopes[] = {1, 1, 1, 1};
  float dsinks[4] = {};
  const struct {
    const char *name, *without;
    std::function<void(strobe_forward_args&)> forward;
    std::function<void(strobe_backward_args&)> backward;
  } all[] = {
#define STROBE_GIVEN(name, value, without)                                             \
  {                                                                                    \
#name, without, [&](auto& a) { a.name = value; }, [&](auto& a) { a.name = value; } \
  }
#define STROBE_FORWARD_GIVEN(name, value, without)            \
  {                                                           \
#name, without, [&](auto& a) { a.name = value; }, nullptr \
  }
#define STROBE_BACKWARD_GIVEN(name, value, without)           \
  {                                                           \
#name, without, nullptr, [&](auto& a) { a.name = value; } \
  }
      STROBE_GIVEN(seqused_q, numbers, "has_seqused_q = 0"),
      STROBE_GIVEN(seqused_k, numbers, "has_seqused_k = 0"),
      STROBE_GIVEN(q_position, numbers, "has_q_position = 0"),
      STROBE_GIVEN(prefix, numbers, "has_prefix = 0"),
      STROBE_GIVEN(cu_seqlens_q, numbers, "varlen = 0"),
      STROBE_GIVEN(cu_seqlens_k, numbers, "varlen = 0"),
      STROBE_GIVEN(alibi_slopes, slopes, "alibi = 0 (none)"),
      STROBE_GIVEN(sinks, slopes, "has_sinks = 0"),
      STROBE_FORWARD_GIVEN(block_table, numbers, "cache = 0 (none)"),
      STROBE_FORWARD_GIVEN(k_new, in_.data(), "append = 0 (none)"),
      STROBE_FORWARD_GIVEN(rotary_cos, in_.data(), "rotary_dim = 0 (none)"),
      STROBE_FORWARD_GIVEN(leftpad, numbers, "has_leftpad = 0"),
      STROBE_GIVEN(bias, in_.data(), "has_bias = 0"),
      STROBE_BACKWARD_GIVEN(dbias, out_.data(), "has_dbias = 0"),
      STROBE_BACKWARD_GIVEN(dlse, in_.data(), "has_dlse = 0"),
      STROBE_BACKWARD_GIVEN(delta, in_.data(), "has_delta = 0"),
      STROBE_BACKWARD_GIVEN(dsinks, dsinks, "has_dsinks = 0"),
#undef STROBE_GIVEN
#undef STROBE_FORWARD_GIVEN
#undef STROBE_BACKWARD_GIVEN
  };
  for (const auto& given : all) {
    const std::string text =
        std::string(given.name) + " is given with " + given.without + ", expected NULL";
    if (given.forward) {
      Make(GoodProblem(STROBE_FORWARD));
      strobe_forward_args a = forward_;
      given.forward(a);
      ExpectRefused(strobe_forward(&plan_, &a), {text.c_str()});
    }
    if (given.backward) {
      Make(GoodProblem(STROBE_BACKWARD));
      strobe_backward_args a = backward_;
      given.backward(a);
      ExpectRefused(strobe_backward(&plan_, &a), {text.c_str()});
    }
  }
}

TEST(Validation, DropoutMaskChecksItsArguments) {
  uint8_t mask[4] = {9, 9, 9, 9};
  EXPECT_EQ(strobe_dropout_mask(0, 1, 2, 2, 0.5f, 0, 0, mask), STROBE_INVALID_ARGUMENT);
  EXPECT_EQ(strobe_dropout_mask(1, 0, 2, 2, 0.5f, 0, 0, mask), STROBE_INVALID_ARGUMENT);
  EXPECT_EQ(strobe_dropout_mask(1, 1, -2, 2, 0.5f, 0, 0, mask), STROBE_INVALID_ARGUMENT);
  EXPECT_EQ(strobe_dropout_mask(1, 1, 2, 2, 1.0f, 0, 0, mask), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"dropout_p", "1"});
  EXPECT_EQ(strobe_dropout_mask(1, 1, 2, 2, 0.5f, 0, 0, nullptr), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"mask", "NULL"});
  // 2^93 bytes, 0 of them when counted in 64 bits; and more bytes than any memory has.
  constexpr int64_t kMost = 0x7fffffff;
  for (const int64_t seqlen_k : {kMost, int64_t{1}}) {
    EXPECT_EQ(strobe_dropout_mask(1 << 15, 1 << 15, kMost, seqlen_k, 0.5f, 0, 0, mask),
              STROBE_INVALID_ARGUMENT);
    ExpectWords(strobe_last_error(),
                {"batch * heads * seqlen_q * seqlen_k = 32768 * 32768 * 2147483647 * ", "2^58"});
  }
  const auto part = [&](int64_t first, int64_t count, uint8_t* to) {
    return strobe_dropout_mask_part(1, 1, 2, 2, 0.5f, 0, 0, first, count, to);
  };
  EXPECT_EQ(part(5, 0, mask), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"first = 5, expected 0 to 4"});
  EXPECT_EQ(part(-1, 1, mask), STROBE_INVALID_ARGUMENT);
  EXPECT_EQ(part(3, 2, mask), STROBE_INVALID_ARGUMENT);
  ExpectWords(strobe_last_error(), {"count = 2, expected 0 to 1"});
  EXPECT_EQ(part(1, INT64_MAX, mask), STROBE_INVALID_ARGUMENT);
  EXPECT_EQ(part(1, -1, mask), STROBE_INVALID_ARGUMENT);
  EXPECT_EQ(part(1, 1, nullptr), STROBE_INVALID_ARGUMENT);
  for (const uint8_t x : mask) EXPECT_EQ(x, 9);
  EXPECT_EQ(part(4, 0, nullptr), STROBE_OK);
  EXPECT_EQ(strobe_dropout_mask(1, 1, 0, 2, 0.5f, 0, 0, nullptr), STROBE_OK);
}

TEST(Validation, TheErrorTextIsTheThreadsOwn) {
  strobe_problem p = GoodProblem();
  p.head_dim = 999;
  EXPECT_EQ(strobe_supports(&p), STROBE_INVALID_ARGUMENT);
  const std::string here = strobe_last_error();
  std::string there = "not run";
  std::thread([&] { there = strobe_last_error(); }).join();
  EXPECT_EQ(there, "");
  EXPECT_EQ(here, strobe_last_error());
}

}  // namespace
