// Problems for the tests of Hopper's kernels for caches in the emulator.
#ifndef STROBE_TESTS_EMULATOR_PROMPT_CASE_H_
#define STROBE_TESTS_EMULATOR_PROMPT_CASE_H_

#include <algorithm>
#include <cstdint>
#include <functional>

#include "cache_case.h"
#include "cuda/host/instance.h"
#include "hopper_case.h"

namespace strobe_test {

inline constexpr int64_t kPromptWidth = 64;

/// Rounds a tensor's place up to 16-byte units, which TMA reads. What stands for the stride of a
/// dimension with one entry may stay odd.
inline void MakeUnits(Spacing& s, int64_t dim) {
  for (int64_t* const x : {&s.shift, &s.pad_batch, &s.pad_row, &s.pad_head}) *x = (*x + 7) / 8 * 8;
  s.pad_head += (8 - dim % 8) % 8;
}

/// A case that `generate` draws and that Hopper's instance takes. Half of them have sequences with
/// many queries beside some with few, which are another kernel's. New keys may lie anywhere in
/// memory. quantised: of a quantised cache, wherever its rows lie.
inline CacheCase DrawPromptCase(uint64_t seed, bool quantised,
                                const std::function<CacheCase(uint64_t)>& generate) {
  for (uint64_t again = 0;; ++again) {
    CacheCase c = generate(seed + (again << 32));
    oracle::Rng rng(seed ^ again << 40 ^ 0xCAC4E90u);
    if (c.dtype != oracle::DType::kBFloat16 || std::max(c.head_dim, c.head_dim_v) > kPromptWidth)
      continue;
    if (c.layout == CacheLayout::kDescending) c.layout = CacheLayout::kHeadsFirst;
    c.head_dim_v = (c.head_dim_v + 7) / 8 * 8;  // of which TMA stores whole units
    if (quantised) c.head_dim = (c.head_dim + 7) / 8 * 8;
    if (c.layout == CacheLayout::kInterleaved && c.head_dim != c.head_dim_v) continue;
    if (!quantised && c.paged && (c.rows % 8 != 0 || c.with_leftpad)) continue;
    // A stride of 0, where there are no rows, is nothing for TMA.
    if (c.rows == 0 || c.most_rows == 0 || c.longest_queries() == 0 || c.queries() * c.heads > 2000)
      continue;
    const int64_t few = strobe::cuda::few_queries(c.heads / c.heads_kv);
    const bool mixed = c.longest_queries() > few && (c.varlen || c.with_used_q);
    if (!mixed && rng.Chance(0.5)) continue;
    MakeUnits(c.q, c.head_dim);
    MakeUnits(c.out, c.head_dim_v);
    if (quantised) {
      c.batch_invariant = false;
      return c;
    }
    MakeUnits(c.k, c.head_dim);
    MakeUnits(c.v, c.head_dim_v);
    if (c.batch_invariant)  // a batch of one goes where a larger one goes
      for (Spacing* const s : {&c.q, &c.k, &c.v, &c.out}) s->odd_stride = 0;
    return c;
  }
}

/// The same of cache_case.h; in every third of the quantised ones keys and values have different
/// dtypes.
inline CacheCase DrawPromptCase(uint64_t seed, bool quantised = false) {
  return DrawPromptCase(seed, quantised, [&](uint64_t draw) {
    if (!quantised) return GenerateCacheCase(draw);
    return seed % 3 == 0 ? GenerateMixedCacheCase(draw) : GenerateQuantisedCase(draw);
  });
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_PROMPT_CASE_H_
