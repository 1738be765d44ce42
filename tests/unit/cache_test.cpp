// Attention over a KV cache: the index maps of core/cache.h, the fixtures, and every CPU kernel of
// this machine, on random problems against float64.
//
//   STROBE_CACHE_CASES  how many random problems (default 2000; 300 under a sanitizer)
//   STROBE_CACHE_SEED   of the first; case n has seed + n
#include "core/cache.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cache_fixture.h"
#include "cache_plain.h"
#include "environment.h"
#include "gtest/gtest.h"
#include "kernels.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;
using strobe::CachedSequence;
using strobe::CachedSequences;
using strobe::Divider;
using strobe::KeyRows;

constexpr uint64_t kCases = kSanitized ? 300 : 2000;
constexpr int kMostFailuresShown = 10;

/// "" or what is wrong with the case.
std::string RunCase(const CacheCase& c, const CacheFixture::Launch& launch) {
  CacheFixture f(c);
  std::string wrong = f.Run(launch);
  return wrong.empty() ? f.Judge() : wrong;
}

TEST(Cache, DividerIsDivision) {
  Rng rng(1);
  std::vector<uint32_t> divisors;
  for (uint32_t d = 1; d <= 1100; ++d) divisors.push_back(d);
  for (int bit = 1; bit < 31; ++bit) {
    for (const int32_t beside : {-1, 0, 1}) {
      divisors.push_back((uint32_t{1} << bit) + static_cast<uint32_t>(beside));
    }
  }
  divisors.push_back(INT32_MAX);
  for (int n = 0; n < 2000; ++n) {
    divisors.push_back(static_cast<uint32_t>(rng.Integer(1, int64_t{1} << rng.Integer(1, 30))));
  }
  for (const uint32_t d : divisors) {
    const Divider divider = Divider::make(d);
    const auto check = [&](int64_t x) {
      if (x < 0 || x > INT32_MAX) return;
      ASSERT_EQ(divider.quotient(static_cast<int32_t>(x)), x / d) << x << " / " << d;
    };
    for (int n = 0; n < 40; ++n) {
      const int64_t multiple = rng.Integer(0, INT32_MAX) / d * d;
      for (const int64_t beside : {-1, 0, 1}) check(multiple + beside);
    }
    for (const int64_t x : {int64_t{0}, int64_t{1}, int64_t{INT32_MAX} / d * d - 1,
                            int64_t{INT32_MAX} - 1, int64_t{INT32_MAX}}) {
      check(x);
    }
  }
}

TEST(Cache, KeysAreWhereTheTableSays) {
  Rng rng(2);
  for (int n = 0; n < 400; ++n) {
    const int64_t size = rng.Integer(1, 20), columns = rng.Integer(1, 9), pool = rng.Integer(1, 6);
    std::vector<int32_t> pages;
    for (int64_t c = 0; c < columns; ++c) {
      pages.push_back(static_cast<int32_t>(rng.Integer(-1, pool)));
    }
    const int64_t first = rng.Integer(0, size * columns - 1), end = size * columns - first;
    const KeyRows keys{0, pages.data(), Divider::make(static_cast<uint32_t>(size)),
                       static_cast<int32_t>(pool), first};
    for (int64_t key = 0; key < end; ++key) {
      const int32_t page = pages[static_cast<size_t>((first + key) / size)];
      const KeyRows::Place place = keys.place(key);
      ASSERT_EQ(place.entry, page);
      ASSERT_EQ(place.row, (first + key) % size);
      ASSERT_EQ(place.there, page >= 0 && page < pool);
      ASSERT_EQ(place.offset(1000, 7), page * 1000 + (first + key) % size * 7);
      int64_t run = key + 1;
      while (run < end && (first + run) % size != 0) ++run;
      ASSERT_EQ(keys.run_end(key, end), run);
      ASSERT_EQ(keys.run_end(key, key + 1), key + 1);
    }
    const KeyRows plain{3, nullptr, Divider::make(1), 0, first};
    ASSERT_EQ(plain.place(5).entry, 3);
    ASSERT_EQ(plain.place(5).row, first + 5);
    ASSERT_EQ(plain.run_end(2, 9), 9);
  }
}

// What a GPU may find in the arrays: no number leads out of anything, and what is out of range is
// known to be.
TEST(Cache, NumbersLeadNowhereElse) {
  Rng rng(3);
  const auto hostile = [&](int64_t most) {
    const int64_t ends[] = {INT32_MIN, -1, 0, most, most + 1, INT32_MAX};
    return static_cast<int32_t>(rng.Chance(0.3) ? rng.Pick(ends) : rng.Integer(-2, most + 2));
  };
  int good = 0, bad = 0;
  for (int n = 0; n < 20000; ++n) {
    strobe_problem p;
    strobe_problem_init(&p, sizeof p);
    p.batch = 2;
    p.heads = 1;
    p.seqlen_q = rng.Integer(0, 4);
    p.head_dim = 8;
    p.causal = rng.Chance(0.5);
    p.has_seqused_k = 1;
    if (rng.Chance(0.5)) {
      p.cache = STROBE_CACHE_PAGED;
      p.pages = rng.Integer(0, 5);
      p.page_size = rng.Integer(1, 5);
      p.pages_per_sequence = rng.Integer(0, 5);
      p.seqlen_k = rng.Integer(0, p.page_size * p.pages_per_sequence);
    } else {
      p.cache = STROBE_CACHE_CONTIGUOUS;
      p.cache_batch = rng.Integer(2, 4);
      p.has_cache_batch_idx = rng.Chance(0.5);
      p.seqlen_k = rng.Integer(0, 25);
    }
    p.append = static_cast<int32_t>(rng.Integer(0, 2));
    if (p.append) {
      p.seqlen_new =
          rng.Integer(0, p.append == STROBE_APPEND_DENSE ? std::min<int64_t>(3, p.seqlen_k) : 3);
    }
    if (p.append == STROBE_APPEND_PACKED) p.total_new = rng.Integer(0, 6);
    p.has_leftpad = rng.Chance(0.5);
    if (rng.Chance(0.5)) {
      p.rotary_dim = 4;
      p.rotary_rows = rng.Integer(0, 30);
      p.has_rotary_position = rng.Chance(0.5);
    }
    ASSERT_TRUE(strobe::check_problem(p).ok()) << strobe::check_problem(p).text();
    strobe::resolve_defaults(p);
    int32_t used[2], pad[2], entry[2], position[2], starts[3] = {0, 0, 0};
    for (int b = 0; b < 2; ++b) {
      used[b] = hostile(p.seqlen_k);
      pad[b] = hostile(p.seqlen_k / 2);
      entry[b] = hostile(p.cache_batch);
      position[b] = hostile(p.rotary_rows);
      starts[b + 1] = hostile(p.total_new);
    }
    std::vector<int32_t> table(static_cast<size_t>(2 * p.pages_per_sequence) + 1, 7);
    strobe_forward_args a{};
    a.seqused_k = used;
    a.leftpad = pad;
    a.cache_batch_idx = entry;
    a.rotary_position = position;
    a.cu_seqlens_k_new = starts;
    a.block_table = table.data();
    const CachedSequences all = strobe::cached_sequences_of(p, a);
    for (int64_t b = 0; b < 2; ++b) {
      const CachedSequence s = all.sequence_of_all_heads(b);
      (s.in_range ? good : bad) += 1;
      ASSERT_EQ(s.rows_k, s.mask.seqlen_k);
      ASSERT_LE(s.keys.first + s.mask.seqlen_k, p.seqlen_k);
      ASSERT_LE(0, s.keys.first);
      ASSERT_LE(0, s.new_begin);
      ASSERT_LE(s.new_begin, s.mask.seqlen_k);
      const int64_t count = s.mask.seqlen_k - s.new_begin;
      ASSERT_LE(count, p.seqlen_new);
      if (p.append == STROBE_APPEND_PACKED) {
        ASSERT_LE(s.new_row + count, p.total_new);
      }
      if (p.cache == STROBE_CACHE_CONTIGUOUS) {
        ASSERT_LE(0, s.keys.entry);
        ASSERT_LT(s.keys.entry, p.cache_batch);
      }
      if (s.mask.seqlen_k > 0 && s.keys.pages) {
        const int64_t last = s.keys.first + s.mask.seqlen_k - 1;
        ASSERT_LT(s.keys.page_size.quotient(static_cast<int32_t>(last)), p.pages_per_sequence);
      }
      if (!s.in_range) {
        ASSERT_EQ(s.mask.seqlen_k, 0);
      } else if (p.rotary_dim) {
        for (int64_t i = 0; i < p.seqlen_q; ++i) {
          ASSERT_LE(0, all.query_rotation(s.rotary_start, i));
          ASSERT_LT(all.query_rotation(s.rotary_start, i), p.rotary_rows);
        }
        ASSERT_LE(count == 0 ? 0 : s.rotary_start + count, p.rotary_rows);
      }
    }
  }
  EXPECT_GT(good, 1000);
  EXPECT_GT(bad, 1000);
}

TEST(Cache, PlainPathAgreesWithTheOracle) {
  int failures = 0;
  for (uint64_t seed = 1; seed <= kCases / 4; ++seed) {
    const CacheCase c = GenerateCacheCase(seed);
    const std::string wrong = RunCase(c, PlainLaunch());
    if (!wrong.empty() && ++failures <= kMostFailuresShown) ADD_FAILURE() << ToString(c) << wrong;
  }
  EXPECT_EQ(failures, 0);
}

// The fixtures and the oracle see what a kernel could do wrong.
TEST(Cache, DefectsAreSeen) {
  for (int n = 1; n < static_cast<int>(CacheDefect::kCount); ++n) {
    int seen = 0;
    for (uint64_t seed = 1; seed <= 150 && seen < 3; ++seed) {
      seen += !RunCase(GenerateCacheCase(seed), PlainLaunch(static_cast<CacheDefect>(n))).empty();
    }
    EXPECT_GE(seen, 3) << "defect " << n;
  }
}

/// Runs cases by every kernel of this machine that takes them. draw(n): case n; how(n): how to have
/// it alone.
template <typename Draw, typename How>
void ExpectAgreement(uint64_t cases, const Draw& draw, const How& how) {
  const std::vector<CpuKernel> kernels = CpuKernels();
  std::vector<uint64_t> ran(kernels.size());
  int failures = 0;
  for (uint64_t n = 0; n < cases; ++n) {
    const CacheCase c = draw(n);
    strobe_problem p = CacheFixture(c).Problem();
    strobe::resolve_defaults(p);
    for (size_t i = 0; i < kernels.size(); ++i) {
      if (!kernels[i].Takes(p)) continue;
      ++ran[i];
      const std::string wrong =
          RunCase(c, ThroughTheLibrary([&](strobe_plan& plan) { kernels[i].Take(plan); }));
      if (!wrong.empty() && ++failures <= kMostFailuresShown) {
        ADD_FAILURE() << kernels[i].name << ", " << ToString(c) << wrong << "\n  alone: " << how(n);
      }
    }
  }
  bool taken = false;
  for (size_t i = 0; i < kernels.size(); ++i) {
    std::printf("%s: %llu of %llu cases\n", kernels[i].name.c_str(),
                static_cast<unsigned long long>(ran[i]), static_cast<unsigned long long>(cases));
    taken = taken || ran[i] > 0;
  }
  EXPECT_EQ(failures, 0);
  if (!taken) GTEST_SKIP() << "no kernel of this machine takes a KV cache";
}

TEST(Cache, EveryKernelAgreesWithTheOracle) {
  const uint64_t seed = FromEnvironment("STROBE_CACHE_SEED", 1);
  // Every other cache is quantised. Some of these are read by float8 queries, and of some keys and
  // values have different dtypes.
  ExpectAgreement(
      FromEnvironment("STROBE_CACHE_CASES", kCases),
      [&](uint64_t n) {
        if (n % 16 == 11) return GenerateMixedCacheCase(seed + n);
        CacheCase c = n % 4 == 1   ? GenerateFloat8CacheCase(seed + n)
                      : n % 2 == 1 ? GenerateQuantisedCase(seed + n)
                                   : GenerateCacheCase(seed + n);
        if (c.form == oracle::Form::kE4m3 && !c.float8 && n % 8 == 3) c.form = oracle::Form::kE5m2;
        return c;
      },
      [&](uint64_t n) {
        return "STROBE_CACHE_SEED=" + std::to_string(seed + n - n % 2) + " STROBE_CACHE_CASES=2";
      });
}

// Values that are infinite in one dimension each. A weight that float32 holds makes the result
// infinite there, a weight of 0 NaN, one below float32's least normal number either of them, and
// what is hidden does nothing: in whole tensors and caches, of floats and of e5m2, for float8
// queries too, and whether queries are decoded or are a prompt.
TEST(Cache, InfinitiesAreThoseOfWholeTensors) {
  const struct {
    const char* name;
    int32_t dtype, kv_dtype;
    DType q, kv;
    bool cached;
  } forms[] = {
      {"float32", STROBE_FLOAT32, STROBE_SAME_DTYPE, DType::kFloat32, DType::kFloat32, false},
      {"bf16", STROBE_BFLOAT16, STROBE_SAME_DTYPE, DType::kBFloat16, DType::kBFloat16, false},
      {"bf16 cache", STROBE_BFLOAT16, STROBE_SAME_DTYPE, DType::kBFloat16, DType::kBFloat16, true},
      {"e5m2 cache", STROBE_BFLOAT16, STROBE_FLOAT8_E5M2, DType::kBFloat16, DType::kE5m2, true},
      {"float8", STROBE_FLOAT8_E4M3, STROBE_FLOAT8_E5M2, DType::kE4m3, DType::kE5m2, false},
      {"float8 cache", STROBE_FLOAT8_E4M3, STROBE_FLOAT8_E5M2, DType::kE4m3, DType::kE5m2, true},
  };
  constexpr int64_t kKeys = 8, kDim = 8;
  const double inf = HUGE_VAL, nan = std::nan("");
  // Key 0 is hidden by the window, and two score 0, whose weights are about 1/2.
  const double scores[kKeys] = {0, 0, -48, -96, -192, -inf, -48, 0};
  const struct {
    int64_t key, dim;
    double value;
  } odd[] = {{0, 0, inf}, {2, 1, inf}, {3, 2, -inf}, {4, 3, inf},
             {5, 4, inf}, {6, 5, nan}, {2, 6, inf},  {7, 6, -inf}};
  const double wanted[kDim] = {1, inf, -inf, nan, nan, nan, nan, 1};
  constexpr int64_t kFaint = 2;  // may be NaN

  const auto stored = [](DType dtype, const std::vector<double>& values) {
    const int64_t size = oracle::ElementSize(dtype);
    std::vector<char> bytes(values.size() * static_cast<size_t>(size));
    for (size_t n = 0; n < values.size(); ++n) {
      // Store gives e5m2's largest number for what passes it.
      if (dtype == DType::kE5m2 && std::isinf(values[n])) {
        bytes[n] = static_cast<char>(values[n] > 0 ? 0x7C : 0xFC);
      } else {
        oracle::Store(dtype, bytes.data(), static_cast<int64_t>(n), static_cast<float>(values[n]));
      }
    }
    return bytes;
  };
  std::vector<double> k_values(kKeys * kDim, 0.0), v_values(kKeys * kDim, 1.0);
  for (int64_t j = 0; j < kKeys; ++j) k_values[static_cast<size_t>(j * kDim)] = scores[j];
  for (const auto& at : odd) v_values[static_cast<size_t>(at.key * kDim + at.dim)] = at.value;
  for (const auto& form : forms) {
    const std::vector<char> k = stored(form.kv, k_values), v = stored(form.kv, v_values);
    for (const int64_t queries : {int64_t{1}, int64_t{3}, int64_t{40}}) {
      std::vector<double> q_values(static_cast<size_t>(queries * kDim), 0.0);
      for (int64_t i = 0; i < queries; ++i) q_values[static_cast<size_t>(i * kDim)] = 1;
      const std::vector<char> q = stored(form.q, q_values);
      std::vector<float> out(static_cast<size_t>(queries * kDim));
      const float one = 1;
      strobe_problem p;
      strobe_problem_init(&p, sizeof p);
      p.dtype = form.dtype;
      p.kv_dtype = form.kv_dtype;
      if (form.dtype == STROBE_BFLOAT16 && form.kv_dtype != STROBE_SAME_DTYPE) {
        p.kv_scale = STROBE_KV_SCALE_TENSOR;
        p.kv_scale_dtype = STROBE_FLOAT32;
      }
      p.out_dtype = STROBE_FLOAT32;
      p.batch = p.heads = p.heads_kv = 1;
      p.seqlen_q = queries;
      p.seqlen_k = kKeys;
      p.head_dim = p.head_dim_v = kDim;
      p.scale = 1;
      p.window_left = kKeys - 2;
      if (form.cached) {
        p.cache = STROBE_CACHE_CONTIGUOUS;
        p.cache_batch = 1;
      }
      for (const CpuKernel& kernel : CpuKernels()) {
        strobe_problem resolved = p;
        strobe::resolve_defaults(resolved);
        if (!kernel.Takes(resolved)) continue;
        strobe_forward_args a{};
        a.struct_size = sizeof a;
        a.q = q.data();
        a.k = k.data();
        a.v = v.data();
        a.out = out.data();
        if (p.kv_scale) a.k_scale = a.v_scale = &one;
        ASSERT_EQ(ThroughTheLibrary([&](strobe_plan& plan) { kernel.Take(plan); })(p, a), STROBE_OK)
            << strobe_last_error();
        for (int64_t d = 0; d < kDim; ++d) {
          const float got = out[static_cast<size_t>((queries - 1) * kDim + d)];
          const double is = wanted[d];
          const bool right = std::isnan(is)   ? std::isnan(got)
                             : std::isinf(is) ? got == is || (d == kFaint && std::isnan(got))
                                              : std::fabs(got - is) < 1e-3;
          EXPECT_TRUE(right) << form.name << ", " << kernel.name << ", " << queries
                             << " queries: out[" << d << "] = " << got << ", expected " << is;
        }
      }
    }
  }
}

TEST(Cache, MasksAgreeWithTheOracle) {
  const uint64_t seed = FromEnvironment("STROBE_CACHE_SEED", 1);
  ExpectAgreement(
      FromEnvironment("STROBE_CACHE_CASES", kCases / 10),
      [&](uint64_t n) { return GenerateMaskedCacheCase(seed + n); },
      [&](uint64_t n) {
        return "STROBE_CACHE_SEED=" + std::to_string(seed + n) + " STROBE_CACHE_CASES=1";
      });
}

// Over caches of every kind: floats, quantised ones, keys and values that differ.
TEST(Cache, BiasesAgreeWithTheOracle) {
  const uint64_t seed = FromEnvironment("STROBE_CACHE_SEED", 1);
  const auto draw = [&](uint64_t n) {
    switch ((seed + n) % 4) {
      case 0:
        return WithBias(GenerateQuantisedCase(seed + n));
      case 1:
        return WithBias(GenerateMixedCacheCase(seed + n));
      case 2:
        return WithBias(GenerateCacheCase(seed + n));
      default:
        return WithBias(GenerateMaskedCacheCase(seed + n));
    }
  };
  ExpectAgreement(FromEnvironment("STROBE_CACHE_CASES", kCases / 10), draw, [&](uint64_t n) {
    return "STROBE_CACHE_SEED=" + std::to_string(seed + n) + " STROBE_CACHE_CASES=1";
  });
}

}  // namespace
}  // namespace strobe_test
