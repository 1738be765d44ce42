// Prompts over a KV cache on the CPU (run_time.h): Hopper's instances for caches, with the kernel
// that appends and rotates before them and the decode kernels for the sequences that have few
// queries after them, planned by the CUDA back end for devices that are not there, against float64.
//
//   STROBE_EMULATOR_CASES  how many random problems (default 60; 12 under a sanitizer)
//   STROBE_EMULATOR_SEED   of the first; case n has seed + n
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "cache_fixture.h"
#include "cuda/host/instance_choice.h"
#include "cuda/host/instance_table.h"
#include "emulated_launch.h"
#include "environment.h"
#include "hopper_case.h"
#include "runner.h"

namespace strobe_test {
namespace {

using oracle::DType;
using oracle::Rng;

constexpr int64_t kWidth = 64;

/// Rounds a tensor's place up to 16-byte units, which TMA reads. What stands for the stride of a
/// dimension with one entry may stay odd.
void MakeUnits(Spacing& s, int64_t dim) {
  for (int64_t* const x : {&s.shift, &s.pad_batch, &s.pad_row, &s.pad_head}) *x = (*x + 7) / 8 * 8;
  s.pad_head += (8 - dim % 8) % 8;
}

/// A case of cache_case.h that Hopper's instance takes. Half of them have sequences with many
/// queries beside some with few, which are another kernel's. New keys may lie anywhere in memory.
CacheCase DrawPromptCase(uint64_t seed) {
  for (uint64_t again = 0;; ++again) {
    CacheCase c = GenerateCacheCase(seed + (again << 32));
    Rng rng(seed ^ again << 40 ^ 0xCAC4E90u);
    if (c.dtype != DType::kBFloat16 || std::max(c.head_dim, c.head_dim_v) > kWidth) continue;
    if (c.layout == CacheLayout::kDescending) c.layout = CacheLayout::kHeadsFirst;
    c.head_dim_v = (c.head_dim_v + 7) / 8 * 8;  // of which TMA stores whole units
    if (c.layout == CacheLayout::kInterleaved && c.head_dim != c.head_dim_v) continue;
    if (c.paged && (c.rows % 8 != 0 || c.with_leftpad)) continue;
    // A stride of 0, where there are no rows, is nothing for TMA.
    if (c.rows == 0 || c.longest_queries() == 0 || c.queries() * c.heads > 2000) continue;
    const int64_t few = strobe::cuda::few_queries(c.heads / c.heads_kv);
    const bool mixed = c.longest_queries() > few && (c.varlen || c.with_used_q);
    if (!mixed && rng.Chance(0.5)) continue;
    for (Spacing* const s : {&c.q, &c.k}) MakeUnits(*s, c.head_dim);
    for (Spacing* const s : {&c.v, &c.out}) MakeUnits(*s, c.head_dim_v);
    if (c.batch_invariant)  // a batch of one goes where a larger one goes
      for (Spacing* const s : {&c.q, &c.k, &c.v, &c.out}) s->odd_stride = 0;
    return c;
  }
}

TEST(EmulatedHopperCache, RandomPromptsAgreeWithTheOracle) {
  if (kUnderTsan) GTEST_SKIP() << "ThreadSanitizer takes equal writes for a race";
  const uint64_t first = FromEnvironment("STROBE_EMULATOR_SEED", 1);
  const uint64_t count = FromEnvironment("STROBE_EMULATOR_CASES", kHopperCases);
  int failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < 5; ++seed) {
    const CacheCase c = DrawPromptCase(seed);
    DrawHopper(seed);
    strobe::emulator::machine().forced_instance = "cached_sm90_bf16_64";
    CacheFixture f(c);
    std::string wrong = f.Run(ThroughTheEmulator(HoldsOf(seed), 90));
    if (wrong.empty()) wrong = f.Judge();
    if (wrong.empty()) continue;
    ++failures;
    ADD_FAILURE() << "STROBE_EMULATOR_SEED=" << seed << " STROBE_EMULATOR_CASES=1: " << wrong
                  << "\n"
                  << ToString(c);
  }
  strobe::emulator::machine().forced_instance.clear();
}

}  // namespace
}  // namespace strobe_test
