// Hopper's float8 forward kernels on the CPU (run_time.h), planned by the CUDA back end for devices
// that are not there, against float64 of what the codes stand for.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "core/codes.h"
#include "cuda/host/instance_choice.h"
#include "emulated_launch.h"
#include "environment.h"
#include "fixture.h"
#include "forward_agreement.h"
#include "hopper_case.h"

namespace strobe_test {
namespace {

using oracle::Rng;
/// A case with its codes in place of its values.
class Float8Case {
 public:
  Float8Case(Fixture& f, Rng& rng, bool has_scales) : f_(f), has_scales_(has_scales) {
    const Case& c = f.c();
    one_scale_ = rng.Chance(0.3);
    const auto batch = static_cast<size_t>(c.batch()), heads = static_cast<size_t>(c.heads_kv);
    for (std::vector<float>* scales : {&q_scale_, &k_scale_, &v_scale_}) {
      scales->resize(batch * heads);
      for (float& s : *scales) {
        s = static_cast<float>(std::exp2(rng.Uniform(-7, -4)));
        if (rng.Chance(0.1)) s = -s;
        if (!has_scales) s = 1;
      }
      if (one_scale_) std::copy_n(scales->begin(), heads, scales->begin());
    }
    const std::vector<oracle::Sequence> sequences = Sequences(c);
    q = Code(f.q, q_scale_, c.heads / c.heads_kv, [&](const auto& s) { return s.q_begin; },
             [&](const auto& s) { return s.q_length; });
    k = Code(f.k, k_scale_, 1, [&](const auto& s) { return s.k_begin; },
             [&](const auto& s) { return s.k_length; });
    v = Code(f.v, v_scale_, 1, [&](const auto& s) { return s.k_begin; },
             [&](const auto& s) { return s.k_length; });
  }

  /// The problem and its arguments as float8 attention has them.
  void Change(strobe_problem& p, strobe_forward_args& a) const {
    const int32_t out = p.out_dtype == STROBE_FLOAT32 ? STROBE_FLOAT32 : p.dtype;
    p.dtype = STROBE_FLOAT8_E4M3;
    p.out_dtype = out;
    a.q = CodesOf(f_.q);
    a.k = CodesOf(f_.k);
    a.v = CodesOf(f_.v);
    if (!has_scales_) return;
    p.has_q_scale = 1;
    p.kv_scale = STROBE_KV_SCALE_BATCH_HEAD;
    a.q_scale = q_scale_.data();
    a.k_scale = k_scale_.data();
    a.v_scale = v_scale_.data();
    if (one_scale_) p.q_scale = p.k_scale = p.v_scale = {0, 0, 1, 0};
  }
  float& v_scale(int64_t at) { return v_scale_[static_cast<size_t>(at)]; }

  oracle::Tensor q, k, v;  // what the codes stand for

 private:
  template <typename Begin, typename Length>
  oracle::Tensor Code(const Strided& t, const std::vector<float>& scales, int64_t group,
                      const Begin& begin, const Length& length) {
    oracle::Tensor values(t.batch * t.rows, t.heads, t.dim);
    // What is nobody's is NaN.
    auto& codes = codes_[t.memory];
    codes.resize(static_cast<size_t>(t.memory->elements() + 64), 0x7F);
    const std::vector<oracle::Sequence> sequences = Sequences(f_.c());
    const auto heads = static_cast<int64_t>(f_.c().heads_kv);
    t.ForEach([&](int64_t row, int64_t head, int64_t d, int64_t e) {
      for (size_t b = 0; b < sequences.size(); ++b) {
        const int64_t at = row - begin(sequences[b]);
        if (at < 0 || at >= length(sequences[b])) continue;
        const float scale =
            scales[static_cast<size_t>((one_scale_ ? 0 : static_cast<int64_t>(b)) * heads +
                                       head / group)];
        const uint8_t code = strobe::e4m3_from_float(t.Get(e) / scale);
        codes[static_cast<size_t>(e) + Shift(codes)] = code;
        values.at(row, head)[d] = double{strobe::float_from_e4m3(code)} * double{scale};
      }
    });
    return values;
  }
  static size_t Shift(const std::vector<uint8_t>& codes) {
    return (16 - reinterpret_cast<uintptr_t>(codes.data()) % 16) % 16;
  }
  const void* CodesOf(const Strided& t) const {
    const auto& codes = codes_.at(t.memory);
    return codes.data() + Shift(codes) + t.origin;
  }

  Fixture& f_;
  const bool has_scales_;
  bool one_scale_;
  std::vector<float> q_scale_, k_scale_, v_scale_;
  std::map<const Guarded*, std::vector<uint8_t>> codes_;
};

Case DrawCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    Case c = GenerateCase(seed + (again << 32)).WithoutBias();
    Rng rng(seed ^ again << 40 ^ 0xF8F8u);
    c.dtype = rng.Chance(0.5) ? oracle::DType::kBFloat16 : oracle::DType::kFloat16;
    c.DropDropout();
    c.softcap = 0;
    c.alibi = STROBE_ALIBI_NONE;
    if (c.scale <= 0) c.scale = 0.125f;
    if (c.special == Special::kInfinity) continue;
    const int64_t widths[] = {64, 96, 128, 192};
    const int64_t width = rng.Pick(widths);
    if (rng.Chance(0.7)) c.head_dim = rng.Integer(width - 31, width);
    if (rng.Chance(0.7)) c.head_dim_v = c.head_dim;
    c.head_dim_v = (c.head_dim_v + 7) / 8 * 8;
    if (c.packing != Packing::kSeparate) {
      c.head_dim = (c.head_dim + 15) / 16 * 16;
      c.head_dim_v = (c.head_dim_v + 15) / 16 * 16;
    }
    c.batch_invariant = rng.Chance(0.15);
    if (std::max(c.head_dim, c.head_dim_v) > 192 || !MakeHopperCase(c)) continue;
    for (Layout* layout : {&c.q, &c.k}) MakeAligned(*layout, c.head_dim, c.batch_invariant, 16);
    MakeAligned(c.v, c.head_dim_v, c.batch_invariant, 16);
    MakeAligned(c.out, c.head_dim_v, c.batch_invariant);
    return c;
  }
}

oracle::Tensor Absolute(oracle::Tensor t) {
  for (double& x : t.data) x = std::fabs(x);
  return t;
}

/// What is wrong with out and lse of the rows in use; "": nothing. Weights of float8 are off by a
/// 16th of theirs at most, or where they are below 2^-14 of a row's largest by 2^-18 of that.
std::string Compare(const Fixture& f, const Float8Case& codes) {
  const Case& c = f.c();
  const oracle::Problem p = f.OracleProblem();
  const auto wanted = oracle::Forward(p, codes.q, codes.k, codes.v);
  const auto sizes = oracle::Forward(p, codes.q, codes.k, Absolute(codes.v));
  const oracle::Tensor out = f.out.Read(), lse = f.ReadLse();
  double most_v = 0;
  for (const double x : codes.v.data)
    if (x == x) most_v = std::max(most_v, std::fabs(x));
  const double rounding = c.out_dtype() == oracle::DType::kFloat32    ? 0x1p-20
                          : c.out_dtype() == oracle::DType::kBFloat16 ? 0x1p-8
                                                                      : 0x1p-10;
  for (const oracle::Sequence& s : Sequences(c)) {
    for (int64_t row = s.q_begin; row < s.q_begin + s.q_length; ++row) {
      for (int64_t head = 0; head < c.heads; ++head) {
        const double size = *wanted.size.at(row, head);
        const double of_scores = 0x1p-19 * size + 0x1p-18;  // of float32 sums of products
        const double x = *lse.at(row, head), y = *wanted.lse.at(row, head);
        const bool same = x == y || (x != x && y != y) || std::fabs(x - y) <= of_scores;
        if (!same) {
          return "lse of row " + std::to_string(row) + ", head " + std::to_string(head) + " is " +
                 std::to_string(x) + ", expected " + std::to_string(y);
        }
        for (int64_t d = 0; d < c.head_dim_v; ++d) {
          const double got = out.at(row, head)[d], right = wanted.out.at(row, head)[d];
          if (got != got && right != right) continue;
          const double keys = static_cast<double>(s.k_length);
          const double allowed = (0x1p-4 + 2 * of_scores) * sizes.out.at(row, head)[d] +
                                 0x1p-18 * keys * most_v + rounding * std::fabs(right) + 0x1p-24;
          if (!(std::fabs(got - right) <= allowed)) {
            return "out of row " + std::to_string(row) + ", head " + std::to_string(head) +
                   ", column " + std::to_string(d) + " is " + std::to_string(got) +
                   ", expected " + std::to_string(right) + " within " + std::to_string(allowed);
          }
        }
      }
    }
  }
  return "";
}

std::string RunCase(const Case& c, uint64_t seed) {
  Fixture f(c);
  Rng rng(seed ^ 0x5CA1E5u);
  const Float8Case codes(f, rng, rng.Chance(0.8));
  const std::string wrong = f.Forward(
      [&](strobe_problem p, strobe_forward_args a) {
        codes.Change(p, a);
        return LaunchInTheEmulator(90, p, a, HoldsOf(seed));
      },
      true);
  return wrong.empty() ? Compare(f, codes) : wrong;
}

TEST(EmulatedHopperFloat8, RandomProblemsAgreeWithTheOracle) {
  const uint64_t first = FromEnvironment("STROBE_EMULATOR_SEED", 1);
  const uint64_t count = FromEnvironment("STROBE_EMULATOR_CASES", kHopperCases);
  int failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < 5; ++seed) {
    DrawHopper(seed);
    const Case c = DrawCase(seed);
    const std::string wrong = RunCase(c, seed);
    if (wrong.empty()) continue;
    ++failures;
    ADD_FAILURE() << "STROBE_EMULATOR_SEED=" << seed << " STROBE_EMULATOR_CASES=1: " << wrong
                  << "\n"
                  << ToString(c);
  }
}

}  // namespace
}  // namespace strobe_test
