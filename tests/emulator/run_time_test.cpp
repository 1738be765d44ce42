// The emulator itself: what its instructions compute, and that it sees the faults that it is there
// for.
#include "run_time.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda_runtime_api.h"
#include "numeric.h"

namespace strobe::cuda {
extern char shared[];
}

#ifdef __SANITIZE_ADDRESS__
// A fault leaves fibres where they stand, with the memory that they hold.
extern "C" __attribute__((visibility("default"))) int __lsan_is_turned_off();
int __lsan_is_turned_off() { return 1; }
#endif

namespace strobe::emulator {
namespace {

using oracle::DType;
using oracle::Rng;

int own_thread() { return static_cast<int>(threadIdx.x); }
float* floats() { return reinterpret_cast<float*>(cuda::shared); }

std::string run_block(int threads, const std::function<void()>& body) {
  return run(1, 1, threads, 4096, body);
}

TEST(RunTime, ConversionsAreThoseOfTheTypes) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float wide[] = {from_half(half), from_bfloat16(half)};
    const uint16_t back[] = {to_half(wide[0]), to_bfloat16(wide[1])};
    const DType types[] = {DType::kFloat16, DType::kBFloat16};
    for (int n = 0; n < 2; ++n) {
      const float wanted = oracle::Load(types[n], &half, 0);
      if (std::isnan(wanted)) {
        ASSERT_TRUE(std::isnan(wide[n])) << bits;
        continue;
      }
      ASSERT_EQ(wide[n], wanted) << bits;
      ASSERT_EQ(back[n], half) << bits;
    }
  }
  Rng rng(1);
  for (int n = 0; n < 20000; ++n) {
    const float x = static_cast<float>(rng.Normal() * std::exp2(rng.Uniform(-30, 20)));
    ASSERT_EQ(from_half(to_half(x)), oracle::Round(DType::kFloat16, x)) << x;
    ASSERT_EQ(from_bfloat16(to_bfloat16(x)), oracle::Round(DType::kBFloat16, x)) << x;
  }
}

// The layouts as the PTX ISA draws them.
TEST(RunTime, MmaIsAMatrixProduct) {
  Rng rng(2);
  float a[16][16], b[16][8], c[16][8], got[16][8];
  for (auto& row : a)
    for (float& x : row) x = oracle::Round(DType::kBFloat16, static_cast<float>(rng.Normal()));
  for (auto& row : b)
    for (float& x : row) x = oracle::Round(DType::kBFloat16, static_cast<float>(rng.Normal()));
  for (auto& row : c)
    for (float& x : row) x = static_cast<float>(rng.Normal());
  ASSERT_EQ(
      run_block(32,
                [&] {
                  const int group = own_thread() / 4, in_group = own_thread() % 4;
                  uint32_t registers_a[4], registers_b[2];
                  float own[4];
                  for (int r = 0; r < 4; ++r) {
                    const int row = group + 8 * (r % 2), k = 2 * in_group + 8 * (r / 2);
                    registers_a[r] = to_bfloat16(a[row][k]) | uint32_t{to_bfloat16(a[row][k + 1])}
                                                                  << 16;
                  }
                  for (int r = 0; r < 2; ++r) {
                    const int k = 2 * in_group + 8 * r;
                    registers_b[r] =
                        to_bfloat16(b[k][group]) | uint32_t{to_bfloat16(b[k + 1][group])} << 16;
                  }
                  for (int i = 0; i < 4; ++i) own[i] = c[group + 8 * (i / 2)][2 * in_group + i % 2];
                  cuda::ptx::mma<__nv_bfloat16>(own, registers_a, registers_b[0], registers_b[1]);
                  for (int i = 0; i < 4; ++i)
                    got[group + 8 * (i / 2)][2 * in_group + i % 2] = own[i];
                }),
      "");
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double wanted = c[row][column];
      for (int k = 0; k < 16; ++k) wanted += static_cast<double>(a[row][k]) * b[k][column];
      EXPECT_NEAR(got[row][column], wanted, 1e-6 * std::fabs(wanted) + 1e-6);
    }
  }
}

TEST(RunTime, LdmatrixGivesRowsOrColumns) {
  ASSERT_EQ(
      run_block(32,
                [] {
                  auto* const values = reinterpret_cast<uint16_t*>(cuda::shared);  // [32 rows][8]
                  for (int i = 0; i < 8; ++i)
                    values[8 * own_thread() + i] = static_cast<uint16_t>(8 * own_thread() + i);
                  cuda::ptx::named_barrier_sync<32>(1);
                  uint32_t plain[4], turned[4];
                  const uint32_t row = shared_address(values + 8 * own_thread());
                  cuda::ptx::ldmatrix(plain, row);
                  cuda::ptx::ldmatrix_trans(turned, row);
                  for (int m = 0; m < 4; ++m) {
                    for (int half = 0; half < 2; ++half) {
                      const int x = own_thread() / 4, y = 2 * (own_thread() % 4) + half;
                      if ((plain[m] >> 16 * half & 0xffff) !=
                              static_cast<uint32_t>(64 * m + 8 * x + y) ||
                          (turned[m] >> 16 * half & 0xffff) !=
                              static_cast<uint32_t>(64 * m + 8 * y + x)) {
                        fail("wrong element of matrix " + std::to_string(m));
                      }
                    }
                  }
                }),
      "");
}

// --- Faults ---

TEST(RunTime, AThreadThatStaysAwayFromABarrierIsNamed) {
  const std::string wrong = run_block(64, [] {
    if (own_thread() != 63) barrier(0, 64);
  });
  EXPECT_NE(wrong.find("thread 0 at barrier 0: 63 of 64 are there"), std::string::npos) << wrong;
  EXPECT_EQ(run_block(64, [] { barrier(0, 64); }), "");  // and what came before is forgotten
}

TEST(RunTime, LanesAtDifferentInstructionsAreNamed) {
  const std::string wrong = run_block(32, [] {
    if (own_thread() < 16) {
      shuffle("shuffle", 0xffffffffu, 1, 0);
    } else {
      ballot("ballot", 0xffffffffu, true);
    }
  });
  EXPECT_NE(wrong.find("other lanes of its warp are at"), std::string::npos) << wrong;
}

TEST(RunTime, AddressesOutsideOfSharedMemoryAreNamed) {
  const std::string wrong = run_block(32, [] {
    uint32_t r[4];
    cuda::ptx::ldmatrix(r, shared_address(cuda::shared) + 4096);
  });
  EXPECT_NE(wrong.find("16 bytes at shared address 4096, of 4096"), std::string::npos) << wrong;
}

TEST(RunTime, ACopyIsThereWhenItIsWaitedForAndNotBefore) {
  alignas(16) static const float source[] = {1, 2, 3, 4};
  ASSERT_EQ(run_block(32,
                      [] {
                        const uint32_t own = shared_address(cuda::shared) + 16 * threadIdx.x;
                        cuda::ptx::cp_async_16_if(own, source, true);
                        cuda::ptx::cp_async_commit();
                        cuda::ptx::cp_async_16_if(own + 512, nullptr, false);
                        cuda::ptx::cp_async_commit();
                        const float* const first = floats() + 4 * own_thread();
                        if (first[1] == first[1])
                          fail("a copy is there that nobody has waited for");
                        cuda::ptx::cp_async_wait<1>();
                        if (first[1] != 2) fail("a copy is not there");
                        if (first[128] == first[128]) fail("the next copy is there");
                        cuda::ptx::cp_async_wait<0>();
                        if (first[128] != 0) fail("zeros are not there");
                      }),
            "");
}

// Threads that hand values on: with a barrier in between they are there, in any order of threads;
// without it there are orders in which they are not.
TEST(RunTime, AMissingBarrierShows) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "which ThreadSanitizer ends the program for";
#endif
  for (const bool waits : {true, false}) {
    int wrong = 0;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      settings().seed = seed;
      ASSERT_EQ(run_block(64,
                          [&] {
                            floats()[own_thread()] = 1;
                            exchange("__syncwarp", {}, true);
                            if (waits) barrier(0, 64);
                            if (floats()[63 - own_thread()] != 1) ++wrong;
                          }),
                "");
    }
    EXPECT_EQ(wrong == 0, waits) << wrong;
  }
}

TEST(RunTime, BlocksHaveSharedMemoryOfTheirOwn) {
  settings().blocks_at_once = 3;
  std::vector<int> came(7);
  for (uint64_t seed = 0; seed < 5; ++seed) {
    settings().seed = seed;
    ASSERT_EQ(run(7, 1, 64, 256,
                  [&] {
                    const auto value = static_cast<float>(blockIdx.x);
                    if (floats()[own_thread()] == floats()[own_thread()])
                      fail("shared memory is no NaN");
                    floats()[own_thread()] = value;
                    for (int n = 0; n < 20; ++n) {
                      barrier(0, 64);
                      if (floats()[63 - own_thread()] != value) fail("another block's value");
                    }
                    if (own_thread() == 0) ++came[blockIdx.x];
                  }),
              "");
  }
  settings() = {};
  EXPECT_EQ(came, std::vector<int>(7, 5));
}

}  // namespace
}  // namespace strobe::emulator
