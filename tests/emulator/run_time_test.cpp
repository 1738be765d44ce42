// The emulator itself: what its instructions compute, and that it sees the faults that it is there
// for.
#include "run_time.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/common/tile.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/float8.h"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/movmatrix.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/wgmma.h"
#include "cuda_runtime_api.h"
#include "numeric.h"
#include "tensor_copies.h"

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

TEST(RunTime, StmatrixIsLdmatrixBackwards) {
  ASSERT_EQ(run_block(32,
                      [] {
                        const uint32_t own = threadIdx.x, r[4] = {own, own + 100, own << 16, ~own};
                        const uint32_t row = shared_address(cuda::shared) + 16 * own;
                        cuda::ptx::stmatrix(row, r);
                        cuda::ptx::named_barrier_sync<32>(1);
                        uint32_t same[4], turned[4];
                        cuda::ptx::ldmatrix(same, row);
                        cuda::ptx::ldmatrix_trans(turned, row);
                        for (int i = 0; i < 4; ++i) {
                          if (same[i] != r[i]) fail("another word");
                          if (turned[i] != cuda::ptx::transpose_fragment(r[i]))
                            fail("another word of the transpose");
                        }
                      }),
            "");
}

// --- Products of warpgroups ---

using Tile = cuda::SharedTile<128, 128>;  // two panels, each 128 rows of 64 values

struct Products {
  float a[64][32], b[32][128];  // what is multiplied: 32 deep
  std::vector<float> sums;      // [128 threads][n / 2]
};

uint16_t* element_of(int tile, int row, int column) {
  char* const begin = cuda::shared + tile * Tile::kBytes;
  return reinterpret_cast<uint16_t*>(begin + Tile::offset(row, column / 8 * 8)) + column % 8;
}
// Puts A and B into shared memory, and multiplies: two products of 16 in a group.
template <typename T, int kN>
std::string multiply(Products& p, Operands operands, const std::function<void()>& before_wait) {
  p.sums.assign(size_t{128} * kN / 2, 0);
  return run(1, 1, 128, 2 * Tile::kBytes, [&] {
    const int thread = own_thread(), lane = thread % 32, warp = thread / 32;
    const auto is_turned = operands == Operands::kColumns;  // of A: rows are 16-bit neighbours
    for (int i = thread; i < 64 * 32; i += 128) {
      const int row = i / 32, k = i % 32;
      *(is_turned ? element_of(0, k, row) : element_of(0, row, k)) = T(p.a[row][k]).bits;
    }
    for (int i = thread; i < 32 * kN; i += 128) {
      const int k = i / kN, n = i % kN;
      *(operands == Operands::kRows ? element_of(1, n, k) : element_of(1, k, n)) =
          T(p.b[k][n]).bits;
    }
    cuda::ptx::fence_proxy_async();
    barrier(0, 128);
    float d[kN / 2];
    uint32_t registers[2][4];
    for (int step = 0; step < 2; ++step) {
      for (int r = 0; r < 4; ++r) {
        const int row = 16 * warp + lane / 4 + r % 2 * 8, k = 16 * step + lane % 4 * 2 + r / 2 * 8;
        registers[step][r] = T(p.a[row][k]).bits | uint32_t{T(p.a[row][k + 1]).bits} << 16;
      }
    }
    const uint32_t begin = shared_address(cuda::shared);
    const auto a = cuda::ptx::Descriptor::make(begin, Tile::kPanelBytes);
    const auto b = cuda::ptx::Descriptor::make(begin + Tile::kBytes, Tile::kPanelBytes);
    using Wgmma = cuda::ptx::Wgmma<T, kN>;
    cuda::ptx::wgmma_fence();
    for (int step = 0; step < 2; ++step) {
      const int turned = 16 * step * Tile::kRowBytes;  // 16 rows on
      if (operands == Operands::kRows) {
        Wgmma::ss(d, a.at(32 * step), b.at(32 * step), step);
      } else if (operands == Operands::kColumns) {
        Wgmma::ss_mn(d, a.at(turned), b.at(turned), step);
      } else {
        Wgmma::rs(d, registers[step], b.at(turned), step);
      }
    }
    cuda::ptx::wgmma_commit();
    if (d[0] == d[0]) fail("sums are there that nobody has waited for");
    if (before_wait) before_wait();
    cuda::ptx::wgmma_wait<0>();
    std::memcpy(&p.sums[static_cast<size_t>(thread * kN / 2)], d, sizeof d);
  });
}

template <typename T>
Products draw_products(uint64_t seed) {
  Rng rng(seed);
  Products p;
  for (auto& row : p.a)
    for (float& x : row) x = static_cast<float>(T(static_cast<float>(rng.Normal())));
  for (auto& row : p.b)
    for (float& x : row) x = static_cast<float>(T(static_cast<float>(rng.Normal())));
  return p;
}

template <typename T, int kN>
int wrong_sums(const Products& p) {
  int wrong = 0;
  for (int thread = 0; thread < 128; ++thread) {
    for (int i = 0; i < kN / 2; ++i) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
      const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      double wanted = 0;
      for (int k = 0; k < 32; ++k) wanted += static_cast<double>(p.a[row][k]) * p.b[k][column];
      const float got = p.sums[static_cast<size_t>(thread * kN / 2 + i)];
      if (!(std::fabs(got - wanted) < 1e-4)) ++wrong;
    }
  }
  return wrong;
}

template <typename T, int kN>
void expect_products() {
  for (const Operands operands : {Operands::kRows, Operands::kColumns, Operands::kRegisters}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      settings().seed = seed;
      Products p = draw_products<T>(seed);
      ASSERT_EQ((multiply<T, kN>(p, operands, {})), "");
      ASSERT_EQ((wrong_sums<T, kN>(p)), 0) << static_cast<int>(operands) << ", n = " << kN;
    }
  }
}

TEST(RunTime, WgmmaIsAMatrixProduct) {
  expect_products<__nv_bfloat16, 64>();
  expect_products<__nv_bfloat16, 96>();
  expect_products<__nv_bfloat16, 128>();
  expect_products<__half, 128>();
}

// Float8: both operands K-major, 32 products a step, and four values of A in a register.
TEST(RunTime, WgmmaOfFloat8IsAMatrixProduct) {
  using cuda::ptx::E4m3;
  using Codes = cuda::SharedTile<64, 128, 1>;  // rows of 128 codes
  constexpr int kN = 64, kDeep = 64;
  for (const bool from_registers : {false, true}) {
    for (uint64_t seed = 0; seed < 4; ++seed) {
      settings().seed = seed;
      Rng rng(seed);
      E4m3 a[64][kDeep], b[kN][kDeep];
      for (auto* matrix : {a, b})
        for (int row = 0; row < 64; ++row)
          for (int k = 0; k < kDeep; ++k) matrix[row][k] = E4m3(static_cast<float>(rng.Normal()));
      std::vector<float> sums(size_t{128} * kN / 2);
      const std::string wrong = run(1, 1, 128, 2 * Codes::kBytes, [&] {
        const int thread = own_thread(), lane = thread % 32, warp = thread / 32;
        for (int i = thread; i < 64 * kDeep; i += 128) {
          const int row = i / kDeep, k = i % kDeep, at = Codes::offset(row, k / 16 * 16) + k % 16;
          std::memcpy(cuda::shared + at, &a[row][k].bits, 1);
          std::memcpy(cuda::shared + Codes::kBytes + at, &b[row][k].bits, 1);
        }
        cuda::ptx::fence_proxy_async();
        barrier(0, 128);
        float d[kN / 2];
        uint32_t registers[2][4];
        for (int step = 0; step < 2; ++step) {
          for (int r = 0; r < 4; ++r) {
            const int row = 16 * warp + lane / 4 + r % 2 * 8;
            std::memcpy(&registers[step][r], &a[row][32 * step + 4 * (lane % 4) + r / 2 * 16], 4);
          }
        }
        const uint32_t begin = shared_address(cuda::shared);
        const auto left = cuda::ptx::Descriptor::make(begin, 0);
        const auto right = cuda::ptx::Descriptor::make(begin + Codes::kBytes, 0);
        using Wgmma = cuda::ptx::Wgmma<E4m3, kN>;
        cuda::ptx::wgmma_fence();
        for (int step = 0; step < 2; ++step) {
          if (from_registers) {
            Wgmma::rs(d, registers[step], right.at(32 * step), step);
          } else {
            Wgmma::ss(d, left.at(32 * step), right.at(32 * step), step);
          }
        }
        cuda::ptx::wgmma_commit();
        cuda::ptx::wgmma_wait<0>();
        std::memcpy(&sums[static_cast<size_t>(thread * kN / 2)], d, sizeof d);
      });
      ASSERT_EQ(wrong, "");
      for (int thread = 0; thread < 128; ++thread) {
        for (int i = 0; i < kN / 2; ++i) {
          const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
          const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
          double wanted = 0;
          for (int k = 0; k < kDeep; ++k)
            wanted +=
                double{static_cast<float>(a[row][k])} * double{static_cast<float>(b[column][k])};
          ASSERT_NEAR(sums[static_cast<size_t>(thread * kN / 2 + i)], wanted, 1e-4);
        }
      }
    }
  }
}

TEST(RunTime, FourFloatsBecomeFourCodes) {
  const float nan = std::nanf("");
  EXPECT_EQ(cuda::ptx::pack_e4m3(1.f, -2.f, 1000.f, nan), 0x7f7ec038u);
  EXPECT_EQ(cuda::ptx::pack_e4m3(0x1p-9f, 0x1p-11f, -0.f, 256.f), 0x78800001u);
}

// An operand that is written before the wait: in some order it is read then.
TEST(RunTime, AnOperandThatIsWrittenTooEarlyShows) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "which ThreadSanitizer ends the program for";
#endif
  int wrong = 0;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    settings().seed = seed;
    Products p = draw_products<__nv_bfloat16>(seed);
    ASSERT_EQ((multiply<__nv_bfloat16, 64>(p, Operands::kRegisters,
                                           [] { *element_of(1, 3, own_thread() % 64) = 0; })),
              "");
    wrong += wrong_sums<__nv_bfloat16, 64>(p) > 0;
  }
  EXPECT_GT(wrong, 0);
}

TEST(RunTime, WgmmaWithoutItsFencesIsNamed) {
  const auto issue = [] {
    float d[32];
    const auto tile = cuda::ptx::Descriptor::make(shared_address(cuda::shared), 0);
    cuda::ptx::Wgmma<__nv_bfloat16, 64>::ss(d, tile.at(0), tile.at(0), 0);
    cuda::ptx::wgmma_commit();
    cuda::ptx::wgmma_wait<0>();
  };
  std::string wrong = run(1, 1, 128, 16384, issue);
  EXPECT_NE(wrong.find("no wgmma.fence"), std::string::npos) << wrong;
  wrong = run(1, 1, 128, 16384, [&] {
    cuda::ptx::store_shared(shared_address(cuda::shared) + 4 * threadIdx.x, 0);
    barrier(0, 128);
    cuda::ptx::wgmma_fence();
    float own[32];
    const auto tile = cuda::ptx::Descriptor::make(shared_address(cuda::shared), 0);
    cuda::ptx::Wgmma<__nv_bfloat16, 64>::ss(own, tile.at(0), tile.at(0), 0);
    cuda::ptx::wgmma_commit();
    cuda::ptx::wgmma_wait<0>();
  });
  EXPECT_NE(wrong.find("has written without fence.proxy.async"), std::string::npos) << wrong;
  wrong = run(1, 1, 128, 16384, [&] {
    cuda::ptx::wgmma_fence();
    float own[32];
    const auto tile = cuda::ptx::Descriptor::make(shared_address(cuda::shared), 0);
    cuda::ptx::Wgmma<__nv_bfloat16, 64>::ss(own, tile.at(0), tile.at(0), 0);
    cuda::ptx::wgmma_commit();
    own[7] = 0;
    cuda::ptx::wgmma_wait<0>();
  });
  EXPECT_NE(wrong.find("were written while a product"), std::string::npos) << wrong;
}

// --- mbarriers and copies ---

struct Copied {
  alignas(1024) uint8_t tile[64 * 128];
  alignas(16) float values[4];
  cuda::ptx::Barrier full, empty;
};
Copied& copied() { return *reinterpret_cast<Copied*>(cuda::shared); }

// A tensor of 2 heads, 50 rows, 70 columns; rows are 80 values apart.
struct Source {
  std::vector<uint16_t> values;
  CUtensorMap map;
  alignas(16) float floats[4] = {1, 2, 3, 4};

  static uint16_t value(int head, int row, int column) {
    return static_cast<uint16_t>(1 + column + 100 * row + 10000 * head);
  }
  Source() : values(2 * 50 * 80 + 8, 0xffff) {
    for (int head = 0; head < 2; ++head) {
      for (int row = 0; row < 50; ++row) {
        for (int column = 0; column < 70; ++column) {
          begin()[(head * 50 + row) * 80 + column] = value(head, row, column);
        }
      }
    }
    const cuuint64_t lengths[] = {70, 50, 2, 1}, strides[] = {160, 8000, 16};
    const cuuint32_t box[] = {64, 64, 1, 1}, steps[] = {1, 1, 1, 1};
    EXPECT_EQ(encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, begin(), lengths, strides,
                           box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
              CUDA_SUCCESS);
  }
  uint16_t* begin() {
    auto at = reinterpret_cast<uintptr_t>(values.data());
    return values.data() + (16 - at % 16) % 16 / 2;
  }
};

TEST(RunTime, CopiesAreThereWhenTheirBarrierSaysSoAndNotBefore) {
  Source source;
  for (uint64_t seed = 0; seed < 6; ++seed) {
    settings().seed = seed;
    for (const int column : {0, 64}) {
      ASSERT_EQ(run(1, 1, 64, sizeof(Copied),
                    [&] {
                      Copied& c = copied();
                      if (own_thread() == 0) {
                        c.full.init(1);
                        c.full.arrive_expect(sizeof c.tile + sizeof c.values);
                        cuda::ptx::tma_load(c.tile, source.map, c.full, cuda::ptx::L2::kEvictLast,
                                            column, 20, 1, 0);
                        cuda::ptx::bulk_load(c.values, source.floats, sizeof c.values, c.full);
#if !defined(__SANITIZE_THREAD__)  // it says so itself
                        if (c.values[2] == c.values[2])
                          fail("a copy is there that nobody waited for");
#endif
                      }
                      barrier(0, 64);
                      c.full.wait(0);
                      if (c.values[2] != 3) fail("a copy is not there");
                      using Box = cuda::SharedTile<64, 64>;
                      for (int i = own_thread(); i < 64 * 64; i += 64) {
                        const int row = i / 64, x = i % 64;
                        uint16_t got;
                        std::memcpy(&got, c.tile + Box::offset(row, x / 8 * 8) + x % 8 * 2, 2);
                        const bool inside = row + 20 < 50 && column + x < 70;
                        if (got != (inside ? Source::value(1, 20 + row, column + x) : 0))
                          fail("another value in row " + std::to_string(row));
                      }
                    }),
                "");
    }
  }
  settings() = {};
}

TEST(RunTime, AnMbarrierHandsOnWhatWasWritten) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    settings().seed = seed;
    ASSERT_EQ(run_block(64,
                        [] {
                          auto& barriers =
                              *reinterpret_cast<cuda::ptx::Barrier(*)[2]>(cuda::shared + 1024);
                          if (own_thread() == 0) {
                            barriers[0].init(32);
                            barriers[1].init(32);
                          }
                          barrier(0, 64);
                          const int own = own_thread() % 32;
                          for (uint32_t step = 0; step < 9; ++step) {
                            if (own_thread() < 32) {
                              barriers[1].wait(step % 2 ^ 1);
                              floats()[own] = static_cast<float>(step);
                              barriers[0].arrive();
                            } else {
                              barriers[0].wait(step % 2);
                              if (floats()[31 - own] != static_cast<float>(step))
                                fail("a value of another step");
                              barriers[1].arrive();
                            }
                          }
                        }),
              "");
  }
  settings() = {};
}

TEST(RunTime, WaitsAtMbarriersThatNeverEndAreNamed) {
  std::string wrong = run_block(32, [] {
    auto& barrier = *reinterpret_cast<cuda::ptx::Barrier*>(cuda::shared);
    if (own_thread() == 0) {
      barrier.init(3);
      barrier.arrive_expect(64);
      barrier.wait(0);
    }
  });
  EXPECT_NE(wrong.find("thread 0 at mbarrier 0, shared address 0: 2 of 3 arrivals and 64 bytes are "
                       "missing"),
            std::string::npos)
      << wrong;
  wrong = run_block(32, [] {
    auto& barrier = *reinterpret_cast<cuda::ptx::Barrier*>(cuda::shared);
    if (own_thread() == 0) {
      barrier.init(1);
      while (!barrier.test(0)) {
      }
    }
  });
  EXPECT_NE(wrong.find("threads wait for ever"), std::string::npos) << wrong;
  static const uint32_t word = 0;
  wrong = run_block(32, [] {
    while (cuda::ptx::load_acquire(&word) == 0) {
    }
  });
  EXPECT_NE(wrong.find("at a word in memory"), std::string::npos) << wrong;
}

TEST(RunTime, MisusedMbarriersAreNamed) {
  const auto barrier_at = [](int offset) -> cuda::ptx::Barrier& {
    return *reinterpret_cast<cuda::ptx::Barrier*>(cuda::shared + offset);
  };
  std::string wrong = run_block(32, [&] { barrier_at(64).arrive(); });
  EXPECT_NE(wrong.find("no mbarrier at shared address 64"), std::string::npos) << wrong;
  wrong = run_block(32, [&] {
    if (own_thread() != 0) return;
    barrier_at(0).init(2);
    barrier_at(0).arrive_expect(16);
    barrier_at(0).arrive(2);
  });
  EXPECT_NE(wrong.find("once too often"), std::string::npos) << wrong;
  alignas(16) static const float source[4] = {};
  wrong = run_block(32, [&] {
    if (own_thread() != 0) return;
    barrier_at(0).init(1);
    barrier_at(0).arrive_expect(16);
    cuda::ptx::bulk_load(cuda::shared + 64, source, 16, barrier_at(0));
  });
  // Unless the copy has landed by then, as some seeds have it.
  EXPECT_NE(wrong.find("has ended while copies"), std::string::npos) << wrong;
}

TEST(RunTime, BlocksOfAClusterReachEachOther) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "clusters are not emulated under ThreadSanitizer";
#endif
  for (uint64_t seed = 0; seed < 10; ++seed) {
    settings().seed = seed;
    ASSERT_EQ(run(
                  6, 1, 32, 4096,
                  [] {
                    namespace ptx = cuda::ptx;
                    auto& full = *reinterpret_cast<ptx::Barrier*>(cuda::shared + 1024);
                    const uint32_t rank = ptx::cluster_rank(), peer = rank ^ 1;
                    if (own_thread() == 0) full.init(1);
                    ptx::cluster_sync();
                    const uint32_t own = shared_address(cuda::shared);
                    ptx::store_shared(own + 4 * threadIdx.x, blockIdx.x);
                    ptx::fence_proxy_async();
                    exchange("__syncwarp", {}, true);
                    if (own_thread() == 0) {
                      full.arrive_expect(132);
                      const uint32_t barrier = ptx::shared_of(full.address(), peer);
                      ptx::send(ptx::shared_of(own + 256, peer), own, 128, barrier);
                      ptx::send_word(ptx::shared_of(own + 512, peer), 77, barrier);
                    }
                    full.wait(0);
                    if (ptx::load_shared(own + 256 + 4 * threadIdx.x) != (blockIdx.x ^ 1) ||
                        ptx::load_shared(own + 512) != 77) {
                      fail("not what the other block has sent");
                    }
                    ptx::cluster_sync();
                  },
                  2),
              "");
  }
  settings() = {};
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
