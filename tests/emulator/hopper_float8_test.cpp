// Hopper's float8 forward kernels on the CPU (run_time.h), planned by the CUDA back end for devices
// that are not there, against float64 of what the codes stand for.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "cuda/host/instance_choice.h"
#include "emulated_launch.h"
#include "fixture.h"
#include "float_out.h"
#include "forward_agreement.h"
#include "hopper_case.h"
#include "odd_scales.h"
#include "random_cases.h"

namespace strobe_test {
namespace {

using oracle::Rng;

/// Whether a case asks for what the kernel of width 256 computes.
bool IsPlainAtWidth256(const Case& c) {
  return !c.out_float32 && c.attention_chunk == 0 && !c.has_seqused_q && !c.has_seqused_k &&
         !c.has_q_position && !c.has_prefix;
}

/// A float8 case that Hopper's kernels take. float_out: also with out in float32.
Case DrawCase(uint64_t seed, bool float_out = false) {
  for (uint64_t again = 0;; ++again) {
    Case c = GenerateFloat8Case(seed + (again << 32)).WithoutBias();
    Rng rng(seed ^ again << 40 ^ 0xF8F8u);
    c.DropDropout();
    c.float8_case.e5m2 = false;
    c.softcap = 0;
    c.alibi = STROBE_ALIBI_NONE;
    if (c.scale <= 0) c.scale = 0.125f;
    // e4m3 has no infinity.
    if (c.special == Special::kInfinity) c.special = Special::kNone;
    if (c.dtype == oracle::DType::kFloat32) c.out_float32 = true;
    const int64_t widths[] = {64, 96, 128, 192, 256};
    const int64_t width = rng.Pick(widths);
    if (rng.Chance(0.7)) c.head_dim = rng.Integer(width - 31, width);
    if (rng.Chance(0.7)) c.head_dim_v = c.head_dim;
    c.head_dim_v = (c.head_dim_v + 7) / 8 * 8;  // of which TMA stores whole units
    c.batch_invariant = rng.Chance(0.15);
    const int64_t dim = std::max(c.head_dim, c.head_dim_v);
    if (dim > 256 || !MakeHopperCase(c)) continue;
    if (dim > 192 && (float_out || !IsPlainAtWidth256(c))) continue;
    if (c.head_dim % 16 || c.head_dim_v % 16) c.packing = Packing::kSeparate;
    for (Layout* layout : {&c.q, &c.k}) MakeAligned(*layout, c.head_dim, c.batch_invariant, 16);
    MakeAligned(c.v, c.head_dim_v, c.batch_invariant, 16);
    MakeAligned(c.out, c.head_dim_v, c.batch_invariant);
    return c;
  }
}

Fixture::ForwardLaunch InTheEmulator(WorkspaceHolds holds) {
  return [holds](const strobe_problem& p, const strobe_forward_args& args) {
    return LaunchInTheEmulator(90, p, args, holds);
  };
}

oracle::Tensor Absolute(oracle::Tensor t) {
  for (double& x : t.data) x = std::fabs(x);
  return t;
}

std::string Place(const char* what, int64_t row, int64_t head) {
  return std::string(what) + " of row " + std::to_string(row) + ", head " + std::to_string(head);
}

/// What is wrong with out and lse of the rows in use; "": nothing. Weights of float8 are off by a
/// 16th of theirs at most, or where they are below 2^-14 of a row's largest by 2^-18 of that.
std::string Compare(const Fixture& f) {
  const Case& c = f.c();
  const oracle::Problem p = f.OracleProblem();
  const oracle::Tensor q = f.Values(f.q), k = f.Values(f.k), v = f.Values(f.v);
  const auto wanted = oracle::Forward(p, q, k, v), sizes = oracle::Forward(p, q, k, Absolute(v));
  const oracle::Tensor out = f.out.Read(), lse = f.ReadLse();
  double most_v = 0;
  for (const double x : v.data)
    if (x == x) most_v = std::max(most_v, std::fabs(x));
  const double rounding = c.out_dtype() == oracle::DType::kFloat32    ? 0x1p-20
                          : c.out_dtype() == oracle::DType::kBFloat16 ? 0x1p-8
                                                                      : 0x1p-10;
  for (const oracle::Sequence& s : Sequences(c)) {
    for (int64_t row = s.q_begin; row < s.q_begin + s.q_length; ++row) {
      for (int64_t head = 0; head < c.heads; ++head) {
        // Of float32 sums of products.
        const double of_scores = 0x1p-19 * *wanted.size.at(row, head) + 0x1p-18;
        const double x = *lse.at(row, head), y = *wanted.lse.at(row, head);
        if (!(x == y || (x != x && y != y) || std::fabs(x - y) <= of_scores))
          return Place("lse", row, head) + ": " + std::to_string(x) + ", expected " +
                 std::to_string(y);
        for (int64_t d = 0; d < c.head_dim_v; ++d) {
          const double got = out.at(row, head)[d], right = wanted.out.at(row, head)[d];
          if (got != got && right != right) continue;
          const double allowed = (0x1p-4 + 2 * of_scores) * sizes.out.at(row, head)[d] +
                                 0x1p-18 * static_cast<double>(s.k_length) * most_v +
                                 rounding * std::fabs(right) + 0x1p-24;
          if (!(std::fabs(got - right) <= allowed)) {
            return Place("out", row, head) + ", column " + std::to_string(d) + ": " +
                   std::to_string(got) + ", expected " + std::to_string(right) + " within " +
                   std::to_string(allowed);
          }
        }
      }
    }
  }
  return "";
}

/// Runs cases of the seeds. change(case, rng): before it is laid out; edit(fixture, rng): before it
/// is run.
void ExpectFloat8Agreement(const Seeds& seeds, const std::function<void(Case&, Rng&)>& change,
                           const std::function<void(Fixture&, Rng&)>& edit) {
  ExpectNoneIsWrong(seeds, [&](uint64_t seed) {
    DrawHopper(seed);
    Case c = DrawCase(seed);
    Rng rng(seed ^ 0xED17u);
    if (change) change(c, rng);
    Fixture f(c);
    if (edit) edit(f, rng);
    std::string wrong = f.Forward(InTheEmulator(HoldsOf(seed)), true);
    if (wrong.empty()) wrong = Compare(f);
    return Verdict{wrong, ToString(c)};
  });
}

TEST(EmulatedHopperFloat8, RandomProblemsAgreeWithTheOracle) {
  ExpectFloat8Agreement(Seeds::ByEnvironment(kHopperCases), {}, {});
}

// Negative ones, by which the smallest product is the largest score; 0, by which all scores are
// alike; and what is not finite, which makes rows NaN that see a key, and those alone.
TEST(EmulatedHopperFloat8, ScalesMayBeAnything) {
  ExpectFloat8Agreement(
      Seeds{1, kHopperCases}, [](Case& c, Rng&) { GiveScales(c); },
      [](Fixture& f, Rng& rng) { MakeScalesOdd(f, rng); });
}

// Scores so large that a fused product less a reference is too inexact: rows are computed again.
TEST(EmulatedHopperFloat8, LargeScoresAgreeWithTheOracle) {
  const auto change = [](Case& c, Rng& rng) {
    c.special = Special::kNone;
    c.scale = static_cast<float>(std::exp2(rng.Uniform(4, 16)));
  };
  ExpectFloat8Agreement(Seeds{1, kHopperCases / 3}, change, {});
}

// Weights that are all alike are exact in float8, and then so is the mean of V but for its sum in
// float32: each key and each column is where it belongs.
TEST(EmulatedHopperFloat8, EqualWeightsGiveTheMeanOfValues) {
  for (uint64_t seed = 1; seed <= kHopperCases / 3; ++seed) {
    DrawHopper(seed);
    Case c = DrawCase(seed, true);
    c.special = Special::kNone;
    c.out_float32 = true;
    c.has_sinks = c.sinks_outside_lse = 0;
    Fixture f(c);
    f.k.ForEach([&](int64_t, int64_t, int64_t, int64_t e) { f.k.Set(e, 0); });
    ASSERT_EQ(f.Forward(InTheEmulator(HoldsOf(seed)), true), "") << ToString(c);
    const auto wanted =
        oracle::Forward(f.OracleProblem(), f.Values(f.q), f.Values(f.k), f.Values(f.v));
    const oracle::Tensor out = f.out.Read();
    for (const oracle::Sequence& s : Sequences(c)) {
      for (int64_t row = s.q_begin; row < s.q_begin + s.q_length; ++row) {
        for (int64_t head = 0; head < c.heads; ++head) {
          for (int64_t d = 0; d < c.head_dim_v; ++d) {
            ASSERT_NEAR(out.at(row, head)[d], wanted.out.at(row, head)[d], 2e-5 * c.size_v)
                << Place("out", row, head) << "\n"
                << ToString(c);
          }
        }
      }
    }
  }
}

// The error of long rows: that of weights in float8 beside that of q, k and v in float8.
TEST(EmulatedHopperFloat8, WeightsCostLittleAccuracy) {
  DrawHopper(1);
  Case c;
  c.float8 = true;
  c.dtype = oracle::DType::kBFloat16;
  c.out_float32 = true;
  c.has_q_scale = c.float8_case.scaled = true;
  c.heads = c.heads_kv = 2;
  c.head_dim = c.head_dim_v = 128;
  c.seqlens_q = {128};
  c.seqlens_k = {kUnderSanitizer ? 1024 : 8192};
  c.scale = 1 / std::sqrt(128.f);
  Fixture f(c);
  // Values of which the codes are the nearest; the fixture's own are codes already.
  Rng rng(7);
  const auto draw = [&](const Strided& t, const Strided& scales) {
    oracle::Tensor values(t.batch * t.rows, t.heads, t.dim);
    t.ForEach([&](int64_t row, int64_t head, int64_t d, int64_t e) {
      const double by = double{scales.Get(scales.Index(0, 0, head, 0))}, x = rng.Normal();
      values.at(row, head)[d] = x;
      t.Set(e, x / by);
    });
    return values;
  };
  const oracle::Tensor q = draw(f.q, f.q_scale), k = draw(f.k, f.k_scale), v = draw(f.v, f.v_scale);
  ASSERT_EQ(f.Forward(InTheEmulator(WorkspaceHolds::kNumbers), true), "");
  const oracle::Problem p = f.OracleProblem();
  const oracle::Tensor exact = oracle::Forward(p, q, k, v).out;
  const oracle::Tensor of_codes =
      oracle::Forward(p, f.Values(f.q), f.Values(f.k), f.Values(f.v)).out;
  const oracle::Tensor out = f.out.Read();
  const auto rms = [&](const oracle::Tensor& x) {
    double sum = 0;
    for (size_t i = 0; i < x.data.size(); ++i)
      sum += (x.data[i] - exact.data[i]) * (x.data[i] - exact.data[i]);
    return std::sqrt(sum);
  };
  const double ratio = rms(out) / rms(of_codes);
  RecordProperty("ratio", std::to_string(ratio));
  std::printf("ratio %.4f\n", ratio);
  EXPECT_LT(ratio, 1.16);
  EXPECT_GT(ratio, 1.0);
}

TEST(EmulatedHopperFloat8, Float32OutIsWhatIsRounded) {
  int64_t unrounded = 0;
  for (uint64_t seed = 1; seed <= kHopperCases / 4; ++seed) {
    Case c = DrawCase(seed, true);
    if (c.dtype == oracle::DType::kFloat32) continue;
    DrawHopper(seed);
    const std::string wrong =
        CompareFloatOut(c, InTheEmulator(WorkspaceHolds::kNumbers), &unrounded);
    EXPECT_EQ(wrong, "") << ToString(c);
  }
  EXPECT_GT(unrounded, 1000);
}

// What the kernels take, and why they leave the rest.
TEST(EmulatedHopperFloat8, WhatIsDeclinedIsNamed) {
  DrawHopper(1);
  const strobe::cuda::DeviceProperties device = strobe::emulator::machine().devices[0];
  const auto choose = [&](const std::function<void(strobe_problem&)>& change) {
    strobe_problem p{};
    strobe_problem_init(&p, sizeof p);
    p.dtype = STROBE_FLOAT8_E4M3;
    p.batch = 2, p.heads = p.heads_kv = 4;
    p.seqlen_q = p.seqlen_k = 1024;
    p.head_dim = p.head_dim_v = 128;
    change(p);
    strobe::resolve_defaults(p);
    return strobe::cuda::choose_instance(90, p, device);
  };
  const auto reason = [&](const std::function<void(strobe_problem&)>& change) {
    return choose(change).reason;
  };
  EXPECT_STREQ(choose([](auto&) {}).name, "forward_sm90_e4m3_128_128x128x2x8_all_rows");
  EXPECT_STREQ(choose([](auto& p) { p.out_dtype = STROBE_FLOAT16; }).name,
               "forward_sm90_e4m3_128_128x128x2x8_all_rows");
  EXPECT_STREQ(choose([](auto& p) { p.out_dtype = STROBE_FLOAT32; }).name,
               "forward_sm90_e4m3_128_128x128x2x8_plain");
  EXPECT_STREQ(choose([](auto& p) { p.head_dim = p.head_dim_v = 64; }).name,
               "forward_sm90_e4m3_64_128x128x4x8_all_rows");
  EXPECT_NE(reason([](auto& p) { p.softcap = 10; }).find("softcap > 0"), std::string::npos);
  EXPECT_STREQ(choose([](auto& p) { p.head_dim = p.head_dim_v = 256; }).name,
               "forward_sm90_e4m3_256_128x64x2x8_all_rows");
  EXPECT_NE(reason([](auto& p) {
              p.head_dim = p.head_dim_v = 256;
              p.out_dtype = STROBE_FLOAT32;
            }).find("out_dtype = fp32"),
            std::string::npos);
  EXPECT_NE(reason([](auto& p) { p.kv_dtype = STROBE_FLOAT8_E5M2; }).find("e5m2"),
            std::string::npos);
  EXPECT_NE(reason([](auto& p) { p.head_dim = 72; }).find("multiple of 16"), std::string::npos);
}

}  // namespace
}  // namespace strobe_test
