// The steps of examples/paper on the CPU, against float64: what the GPU program checks, on problems
// as small as reach every branch.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "numeric.h"
#include "paper/reference.h"
#include "paper/steps.h"
#include "run_time.h"

#ifdef __SANITIZE_ADDRESS__
// A fault leaves fibres where they stand, with the memory that they hold.
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off();
int __lsan_is_turned_off() { return 1; }
#endif

namespace strobe::paper {
namespace {

std::vector<bf16> normal(int64_t count, oracle::Rng& rng) {
  std::vector<bf16> values(static_cast<size_t>(count));
  for (bf16& x : values) x = bf16(static_cast<float>(rng.Normal()));
  return values;
}
/// `count` values and the guard, all bits set.
template <typename T>
std::vector<T> unwritten(int64_t count) {
  std::vector<T> values(static_cast<size_t>(count + kGuard));
  std::memset(static_cast<void*>(values.data()), 0xff, values.size() * sizeof(T));
  return values;
}

/// Threads take turns in as many orders as there are seeds.
void expect_exact(const Case& c, int seeds = 1) {
  SCOPED_TRACE(std::to_string(c.head_dim) + (c.causal ? " causal" : " full") + ", seqlen " +
               std::to_string(c.seqlen));
  oracle::Rng rng(static_cast<uint64_t>(c.seqlen));
  const std::vector<bf16> q = normal(c.elements(), rng), k = normal(c.elements(), rng);
  const std::vector<bf16> v = normal(c.elements(), rng);
  const Reference want = reference_of(c, q, k, v);
  for (int n = 0; n < seeds * kSteps; ++n) {
    const auto step = static_cast<Step>(n % kSteps);
    emulator::settings().seed = static_cast<uint64_t>(n / kSteps);
    SCOPED_TRACE(kKeys[step]);
    SCOPED_TRACE("seed " + std::to_string(n / kSteps));
    int thread_blocks = 0;  // of a head, in the step's last launch
    Results got{unwritten<bf16>(c.elements()), unwritten<bf16>(c.scores()),
                unwritten<float>(c.rows()), unwritten<float>(c.rows()), unwritten<float>(c.rows())};
    const Arguments p{q.data(),       k.data(),           v.data(),
                      got.out.data(), got.row_max.data(), got.row_sum.data(),
                      got.lse.data(), got.scores.data(),  stride_of_scores(c.seqlen),
                      c.batch,        c.seqlen,           c.heads,
                      c.scale()};
    run(step, c.head_dim, c.causal, p,
        [&](auto* kernel, dim3 grid, int threads, int bytes, const Arguments& arguments) {
          thread_blocks = static_cast<int>(grid.x);
          EXPECT_EQ(emulator::run(grid.x, grid.y, threads, static_cast<uint32_t>(bytes),
                                  [&] { kernel(arguments); }),
                    "");
        });
    // Step 4 is as exact as step 3: what tells them apart is the grid.
    EXPECT_EQ(thread_blocks, step == kFa1 || step == kUnscaled ? 1
                             : step == kSequence               ? tiles_of(c.seqlen, 64)
                                                               : tiles_of(c.seqlen, 128));
    const Verdict verdict = judge(step, c, want, got);
    EXPECT_LE(verdict.error, verdict.allowed);
    EXPECT_LE(verdict.lse_error, 1e-4);
    EXPECT_FALSE(verdict.wrote_elsewhere);
    EXPECT_TRUE(verdict.fine());
  }
}

// 1: rows and keys that are not there in every tile. 64: every row of step 2's tile. 200: two tiles
// of 128, four of 64; in the last block of keys some are not there, and of its queries too.
TEST(Paper, EveryStepIsExact64) {
  for (const bool causal : {false, true}) {
    expect_exact({64, 1, causal, 2, 1});
    expect_exact({64, 64, causal, 1, 1}, 12);
    expect_exact({64, 200, causal, 1, 2});
  }
}
TEST(Paper, EveryStepIsExact128) {
  for (const bool causal : {false, true}) expect_exact({128, 150, causal, 1, 1});
}

}  // namespace
}  // namespace strobe::paper
