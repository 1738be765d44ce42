// The table of options (core/options.def) against what is written out elsewhere: the C struct, its
// checks and its text, and the C++ wrapper. tests/python/test_options.py compares Python with it.
#include "core/options.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <strobe/strobe.hpp>
#include <type_traits>

namespace {

using strobe::Option;
using strobe::OptionKind;

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

std::string Why(const strobe_problem& p) {
  std::string text(4096, '\0');
  text.resize(strobe_why(&p, text.data(), text.size()));
  return text;
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

TEST(Options, Float8IsUnsupportedEverywhere) {
  for (const int32_t dtype : {STROBE_FLOAT8_E4M3, STROBE_FLOAT8_E5M2}) {
    for (const int32_t device : {STROBE_CPU, STROBE_CUDA}) {
      for (const int32_t direction : {STROBE_FORWARD, STROBE_BACKWARD}) {
        strobe_problem p = Small();
        p.dtype = dtype;
        p.device = device;
        p.direction = direction;
        const std::string wanted = "no kernel takes float8, expected fp32, bf16 or fp16";
        EXPECT_EQ(strobe_supports(&p), STROBE_UNSUPPORTED);
        EXPECT_NE(std::string(strobe_last_error()).find(wanted), std::string::npos)
            << strobe_last_error();
        EXPECT_EQ(Why(p).find("dtype = "), 0U) << Why(p);
        EXPECT_NE(Why(p).find(wanted), std::string::npos) << Why(p);
        char text[400];
        for (int32_t kernel = 0; strobe_kernel_name(kernel); ++kernel) {
          strobe_kernel_declines(kernel, &p, text, sizeof text);
          EXPECT_NE(std::string(text).find("float8"), std::string::npos) << text;
        }
        p.head_dim = 300;  // what is invalid is said first
        EXPECT_EQ(strobe_supports(&p), STROBE_INVALID_ARGUMENT);
      }
    }
  }
}

}  // namespace
