// The table of options (core/options.def) against what is written out elsewhere: the C struct, its
// checks and its text, and the C++ wrapper. tests/python/test_options.py compares Python with it.
#include "core/options.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <strobe/strobe.hpp>
#include <type_traits>

namespace {

using strobe::Option;
using strobe::OptionKind;
using P = strobe_problem;

strobe_problem Small() {
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.direction = STROBE_BACKWARD;  // takes every option
  p.batch = p.heads = 2;
  p.seqlen_q = p.seqlen_k = p.head_dim = 8;
  return p;
}

// A problem that the option can be set in.
strobe_problem SmallFor(const Option& option) {
  strobe_problem p = Small();
  p.has_bias = option.field == std::string("has_dbias");
  const strobe_forward_args args = {};
  strobe::for_each_cache_array(p, args, [&](const char* name, const char*, int32_t, const auto&) {
    if (option.field != std::string("has_") + name) return;
    p.direction = STROBE_FORWARD;
    p.cache = STROBE_CACHE_CONTIGUOUS;
    p.rotary_dim = p.rotary_rows = 8;
  });
  const std::string field = option.field;
  p.dropout_p = field.rfind("dropout_", 0) == 0 && field != "dropout_p" ? 0.5F : 0;
  p.has_sinks = field == "sinks_outside_lse" || field == "has_dsinks";
  return p;
}

// A value of the option's other than the default.
double Other(const Option& option) { return option.kind == OptionKind::kReal ? 0.5 : 1; }

template <typename T>
void Set(T& field, double value) {
  field = static_cast<T>(value);
}

// The field of that name.
template <typename P>
double Get(P& problem, const char* name) {
  double found = -1234;
  strobe::for_each_option(problem, [&](const Option& option, const auto& field) {
    if (std::strcmp(option.field, name) == 0) found = static_cast<double>(field);
  });
  return found;
}

TEST(Options, DefaultsOfBothStructsAreTheTables) {
  const strobe_problem c = Small();
  const strobe::Problem wrapper;
  const strobe::Options options;
  const auto check = [](const Option& option, auto field) {
    const double got = static_cast<double>(field);
    EXPECT_TRUE(got == option.otherwise || (std::isnan(got) && std::isnan(option.otherwise)))
        << option.field << " = " << got << ", the table has " << option.otherwise;
  };
  strobe::for_each_option(c, check);
  strobe::for_each_option(wrapper, check);
  strobe::for_each_option(options, check);
}

TEST(Options, EachOfTheWrapperArrives) {
  const strobe::Problem untouched;
  strobe::for_each_option(untouched, [](const Option& option, auto) {
    strobe::Problem p;
    strobe::for_each_option(p, [&](const Option& other, auto& field) {
      if (std::strcmp(other.field, option.field) == 0) Set(field, Other(option));
    });
    const strobe_problem c = p.c(), before = strobe::Problem{}.c();
    strobe::for_each_option(c, [&](const Option& other, auto got) {
      const bool set = std::strcmp(other.field, option.field) == 0;
      const double wanted = set ? Other(option) : Get(before, other.field);
      const double value = static_cast<double>(got);
      EXPECT_TRUE(value == wanted || (std::isnan(value) && std::isnan(wanted)))
          << other.field << " = " << value << " with " << option.field << " set";
    });
  });
}

TEST(Options, EachArrayOfTheWrapperArrives) {
  const auto check = []<typename Args>(Args args) {
    static const int32_t numbers[8] = {};
    strobe::Problem p;
    int n = 0;
    strobe::for_each_array(
        p, args, [&](const auto&, bool&, const int32_t*& array) { array = numbers + ++n; });
    n = 0;
    auto c = args.c();
    strobe::for_each_array(p, c, [&](const auto& row, bool, const int32_t* array) {
      EXPECT_EQ(array, numbers + ++n) << row.name;
    });
  };
  check(strobe::ForwardArgs{});
  check(strobe::BackwardArgs{});
}

TEST(Options, EachArrayOfACacheArrives) {
  static const int32_t numbers[8] = {};
  strobe::Problem p;
  strobe::ForwardArgs args;
  int n = 0;
  strobe::for_each_cache_array(
      p, args,
      [&](const char*, const char*, bool&, const int32_t*& array) { array = numbers + ++n; });
  n = 0;
  strobe_forward_args c = args.c();
  strobe::for_each_cache_array(p, c,
                               [&](const char* name, const char*, bool, const int32_t* array) {
                                 EXPECT_EQ(array, numbers + ++n) << name;
                               });
  EXPECT_EQ(n, 3);
}

TEST(Options, WhatIsOutOfRangeIsRefusedByName) {
  const strobe_problem good = Small();
  ASSERT_EQ(strobe_supports(&good), STROBE_OK) << strobe_last_error();
  strobe::for_each_option(good, [&](const Option& option, auto) {
    strobe_problem bad = good;
    strobe::for_each_option(bad, [&](const Option& other, auto& field) {
      if (std::strcmp(other.field, option.field) != 0) return;
      if constexpr (std::is_integral_v<std::remove_reference_t<decltype(field)>>) {
        Set(field, static_cast<double>(option.least) - 1);
      } else {
        field = std::isinf(option.real_least) ? HUGE_VALF : -1;
      }
    });
    EXPECT_EQ(strobe_supports(&bad), STROBE_INVALID_ARGUMENT) << option.field;
    EXPECT_EQ(std::string(strobe_last_error()).find(std::string(option.field) + " = "), 0U)
        << strobe_last_error();
  });
}

TEST(Options, WhatIsSaidIsInTheText) {
  const strobe_problem good = Small();
  strobe::for_each_option(good, [&](const Option& option, auto) {
    if (!option.said) return;
    strobe_problem p = SmallFor(option);
    p.device = STROBE_CUDA;
    p.dtype = STROBE_FLOAT32;  // which no kernel for GPUs takes: the text has the problem
    if (option.field == std::string("has_q_scale")) {  // nor do they sequences so long
      p.direction = STROBE_FORWARD;
      p.dtype = STROBE_FLOAT8_E4M3;
      p.seqlen_q = INT32_MAX;
    }
    EXPECT_EQ(strobe_supports(&p), STROBE_UNSUPPORTED);
    const std::string word = std::string(", ") + option.said;
    EXPECT_EQ(std::string(strobe_last_error()).find(word), std::string::npos) << option.field;
    strobe::for_each_option(p, [&](const Option& other, auto& field) {
      if (std::strcmp(other.field, option.field) == 0) Set(field, Other(option));
    });
    EXPECT_EQ(strobe_supports(&p), STROBE_UNSUPPORTED);
    EXPECT_NE(std::string(strobe_last_error()).find(word), std::string::npos)
        << option.field << ": " << strobe_last_error();
  });
}

TEST(Options, OfFloat8NoKernelTakesIsRefusedByName) {
  const struct {
    std::function<void(P&)> ask;
    const char* text;
    strobe_status status = STROBE_UNSUPPORTED;
  } all[] = {
      {[](P& p) { p.dtype = STROBE_FLOAT8_E5M2; },
       "dtype = 4 (float8 e5m2): no kernel takes queries of it, expected float8 e4m3 (k and v may "
       "be e5m2: kv_dtype), fp32, bf16 or fp16"},
      {[](P& p) { p.direction = STROBE_BACKWARD; },
       "direction backward with dtype = 3 (float8 e4m3): no kernel computes gradients from float8, "
       "expected bf16, fp16 or fp32"},
      {[](P& p) { p.kv_dtype = STROBE_BFLOAT16; },
       "kv_dtype = 1 (bf16) with dtype = 3 (float8 e4m3): beside float8 queries k and v are float8 "
       "e4m3 or e5m2"},
      {[](P& p) { p.kv_dtype = STROBE_INT8; }, "kv_dtype = 5 (int8) with dtype = 3 (float8 e4m3)"},
      {[](P& p) { p.v_dtype = STROBE_FLOAT8_E5M2; },
       "v_dtype = 4 (float8 e5m2) with dtype = 3 (float8 e4m3): beside float8 queries k and v have "
       "one dtype, expected -1 (that of k)"},
      {[](P& p) { p.cache = STROBE_CACHE_CONTIGUOUS, p.rotary_dim = 2; },
       "rotary_dim = 2 with dtype = 3 (float8 e4m3): codes that are rotated would have to be "
       "quantised anew, expected 0: rotate before quantising"},
      {[](P& p) { p.head_dim = 300; }, "head_dim = 300", STROBE_INVALID_ARGUMENT},
      {[](P& p) { p.out_dtype = STROBE_FLOAT8_E4M3; },
       "out_dtype = 3 (float8 e4m3) with dtype = 3 (float8 e4m3), expected -1 (bf16), 0 (fp32), 1 "
       "(bf16) or 2 (fp16)",
       STROBE_INVALID_ARGUMENT},
      {[](P& p) { p.out_dtype = -2; }, "out_dtype = -2, expected -1 to 2", STROBE_INVALID_ARGUMENT},
      {[](P& p) { p.kv_scale = STROBE_KV_SCALE_HEAD; },
       "kv_scale = 2 with dtype = 3 (float8 e4m3), expected 0 (none) or 4 (of batch and head)",
       STROBE_INVALID_ARGUMENT},
      {[](P& p) { p.kv_scale = 4, p.kv_scale_dtype = STROBE_FLOAT16; },
       "kv_scale_dtype = 2 with dtype = 3 (float8 e4m3), expected 0 (fp32)",
       STROBE_INVALID_ARGUMENT},
      {[](P& p) { p.kv_scale = 4, p.k_scale.seqlen = 1; },
       "k_scale.seqlen = 1 elements with kv_scale = 4, expected 0", STROBE_INVALID_ARGUMENT},
      {[](P& p) { p.has_q_scale = 1, p.q_scale.seqlen = 1; },
       "q_scale.seqlen = 1 elements with kv_scale = 4, expected 0", STROBE_INVALID_ARGUMENT},
      {[](P& p) { p.has_q_scale = 2; }, "has_q_scale = 2, expected 0 to 1",
       STROBE_INVALID_ARGUMENT},
      {[](P& p) { p.dtype = STROBE_BFLOAT16, p.has_q_scale = 1; },
       "has_q_scale = 1 with dtype = 1 (bf16), expected 0 (queries of float8 e4m3 alone have "
       "scales)",
       STROBE_INVALID_ARGUMENT},
      {[](P& p) { p.dtype = STROBE_BFLOAT16, p.kv_scale = 4; },
       "kv_scale = 4 (of batch and head) with dtype = 1 (bf16), expected dtype 3 (float8 e4m3), or "
       "kv_scale 1 (tensor), 2 (head) or 3 (row)",
       STROBE_INVALID_ARGUMENT}};
  for (const auto& x : all) {
    strobe_problem p = Small();
    p.direction = STROBE_FORWARD;
    p.dtype = STROBE_FLOAT8_E4M3;
    EXPECT_EQ(strobe_supports(&p), STROBE_OK) << strobe_last_error();
    x.ask(p);
    EXPECT_EQ(strobe_supports(&p), x.status) << x.text;
    EXPECT_EQ(std::string(strobe_last_error()).find(x.text), 0U)
        << "got: " << strobe_last_error() << "\nwanted: " << x.text;
  }
}

// What a launch must have, and what it must not have.
TEST(Options, ScalesOfFloat8GoWithTheProblem) {
  const uint8_t codes[64] = {};
  const float scale[4] = {1, 1, 1, 1};
  float out[64];
  const auto launch = [&](const std::function<void(P&)>& ask,
                          const std::function<void(strobe_forward_args&)>& give) {
    P p = Small();
    p.direction = STROBE_FORWARD;
    p.dtype = STROBE_FLOAT8_E4M3;
    p.out_dtype = STROBE_FLOAT32;
    p.batch = p.seqlen_q = p.seqlen_k = p.heads = 2, p.heads_kv = 1, p.head_dim = 4;
    ask(p);
    strobe_plan plan;
    plan.struct_size = sizeof plan;
    if (strobe_plan_make(&p, &plan) != STROBE_OK) return std::string(strobe_last_error());
    strobe_forward_args a{};
    a.struct_size = sizeof a;
    a.q = a.k = a.v = codes;
    a.out = out;
    give(a);
    return strobe_forward(&plan, &a) == STROBE_OK ? "" : std::string(strobe_last_error());
  };
  const auto scaled = [](P& p) { p.has_q_scale = 1, p.kv_scale = STROBE_KV_SCALE_BATCH_HEAD; };
  const auto give = [&](strobe_forward_args& a) {
    a.q_scale = scale, a.k_scale = a.v_scale = scale;
  };
  EXPECT_EQ(launch([](P&) {}, [](strobe_forward_args&) {}), "");
  EXPECT_EQ(launch(scaled, give), "");
  EXPECT_EQ(launch(scaled, [&](strobe_forward_args& a) { give(a), a.q_scale = nullptr; }),
            "q_scale = NULL, expected a pointer");
  EXPECT_EQ(launch(scaled, [&](strobe_forward_args& a) { give(a), a.v_scale = nullptr; }),
            "v_scale = NULL, expected a pointer");
  EXPECT_EQ(launch([](P&) {}, [&](strobe_forward_args& a) { a.q_scale = scale; }),
            "q_scale is given with has_q_scale = 0, expected NULL");
  EXPECT_EQ(launch([](P&) {}, [&](strobe_forward_args& a) { a.k_scale = scale; }),
            "k_scale is given with kv_scale = 0 (none), expected NULL");
  EXPECT_NE(launch(scaled, [&](strobe_forward_args& a) { give(a), a.q_scale = out; }), "");
  // One of 2^60 sequences has no other.
  EXPECT_EQ(launch(
                [&](P& p) {
                  scaled(p), p.batch = 1, p.q_scale = {int64_t{1} << 60, 0, 1, 1};
                },
                give),
            "");
}

}  // namespace
