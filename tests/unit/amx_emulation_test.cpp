// The tiles in memory that stand for AMX's on machines without it: arithmetic and refusals are
// those of Intel's manual. The kernels over them run in the tests named emulated.*.
#include "gtest/gtest.h"

#if defined(__x86_64__)
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/amx-emulated.h"

namespace strobe::cpu::amx {
namespace {

constexpr float kSmallest = std::numeric_limits<float>::min();

uint16_t Bf16Of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  EXPECT_EQ(bits & 0xFFFF, 0u) << x << " is no bf16 value";
  return static_cast<uint16_t>(bits >> 16);
}

struct Config {
  alignas(64) uint8_t bytes[64] = {1};

  Config() {
    for (int t = 0; t < 8; ++t) Shape(t, 16, 64);
  }
  Config& Shape(int t, int rows, int row_bytes) {
    bytes[16 + 2 * t] = static_cast<uint8_t>(row_bytes);
    bytes[17 + 2 * t] = static_cast<uint8_t>(row_bytes >> 8);
    bytes[48 + t] = static_cast<uint8_t>(rows);
    return *this;
  }
};

struct Operands {
  std::vector<float> c = std::vector<float>(256);
  std::vector<uint16_t> a = std::vector<uint16_t>(512), b = a;

  /// C + A B, tiles 0, 1 and 2.
  void Multiply() {
    tile_load<0>(c.data());
    tile_load<1>(a.data());
    tile_stream<2>(b.data());
    tile_multiply<0, 1, 2>();
    tile_store<0>(c.data());
  }
  /// a[m][pair k, half] and b[pair k, half][n]
  void SetA(int m, int k, int half, float x) {
    a[static_cast<size_t>(m * 32 + 2 * k + half)] = Bf16Of(x);
  }
  void SetB(int k, int half, int n, float x) {
    b[static_cast<size_t>(k * 32 + 2 * n + half)] = Bf16Of(x);
  }
};

class Emulated : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!__builtin_cpu_supports("avx512f")) GTEST_SKIP() << "this machine lacks AVX-512";
    tile_configure(Config().bytes);
  }
  void TearDown() override { tile_release(); }
};
using EmulatedDeathTest = Emulated;

TEST_F(Emulated, ProductIsTheSumOverPairs) {
  Operands x;
  std::vector<double> wanted(256);
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) x.c[static_cast<size_t>(m * 16 + n)] = static_cast<float>(m - n);
    for (int k = 0; k < 16; ++k) {
      for (int half = 0; half < 2; ++half) {
        x.SetA(m, k, half, static_cast<float>((m * 5 + k * 3 + half) % 7 - 3));
        x.SetB(k, half, m, static_cast<float>((m * 2 + k * 7 + half) % 11 - 5));
      }
    }
  }
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 16; ++n) {
      double sum = m - n;
      for (int k = 0; k < 16; ++k) {
        for (int half = 0; half < 2; ++half) {
          sum += ((m * 5 + k * 3 + half) % 7 - 3) * ((n * 2 + k * 7 + half) % 11 - 5);
        }
      }
      wanted[static_cast<size_t>(m * 16 + n)] = sum;
    }
  }
  x.Multiply();
  for (size_t i = 0; i < 256; ++i) EXPECT_EQ(x.c[i], wanted[i]) << i;
}

// The pairs' first values and their second values have a sum each, from zero; C comes last.
TEST_F(Emulated, OrderOfTheSum) {
  Operands x;
  const float large = 0x1p24f;
  // First values: 2^24 + 1 + 1 in this order loses both ones; second values: 1 + 1.
  x.SetA(0, 0, 0, large);
  for (int k = 1; k < 3; ++k) x.SetA(0, k, 0, 1);
  for (int k = 1; k < 3; ++k) x.SetA(0, k, 1, 1);
  for (int k = 0; k < 3; ++k) {
    for (int half = 0; half < 2; ++half) x.SetB(k, half, 0, 1);
  }
  x.c[0] = -large;
  x.Multiply();
  EXPECT_EQ(x.c[0], 2);

  // One product after the other onto C would give 0: C's 1 is lost beside 2^25, which cancels.
  Operands y;
  y.SetA(0, 0, 0, 0x1p25f);
  y.SetA(0, 1, 0, -0x1p25f);
  y.SetB(0, 0, 0, 1);
  y.SetB(1, 0, 0, 1);
  y.c[0] = 1;
  y.Multiply();
  EXPECT_EQ(y.c[0], 1);
}

// A product and a sum are rounded once, to nearest even.
TEST_F(Emulated, RoundsOnceToNearestEven) {
  Operands x;
  const float a = 1 + 0x1p-7f;
  // a^2 = 1 + 2^-6 + 2^-14, exact. 2^10 and that: the last bit of 2^10 is 2^-13, so a tie.
  x.SetA(0, 0, 0, 0x1p10f);
  x.SetA(0, 1, 0, a);
  x.SetB(0, 0, 0, 1);
  x.SetB(1, 0, 0, a);
  x.Multiply();
  EXPECT_EQ(x.c[0], 0x1p10f + 1 + 0x1p-6f);
}

TEST_F(Emulated, DenormalsAreZero) {
  Operands x;
  x.SetA(0, 0, 0, kSmallest / 2);  // a denormal bf16
  x.SetB(0, 0, 0, 0x1p100f);
  x.SetA(1, 0, 0, kSmallest);  // a product that is one
  x.SetB(0, 0, 1, 0.5f);
  x.c[16 * 2] = kSmallest / 2;  // C is one
  x.SetA(3, 1, 0, kSmallest);   // a sum that is one: 1.5 - 1 times the smallest normal number
  x.SetA(3, 2, 0, -kSmallest);
  x.SetB(1, 0, 2, 1.5f);
  x.SetB(2, 0, 2, 1);
  x.Multiply();
  EXPECT_EQ(x.c[0], 0);
  EXPECT_EQ(x.c[16 + 1], 0);
  EXPECT_EQ(x.c[32], 0);
  EXPECT_EQ(x.c[16 * 3 + 2], 0);
  // The thread's own modes are as before.
  volatile float smallest = kSmallest;
  EXPECT_GT(smallest * 0.5f, 0);
}

TEST_F(Emulated, NaNAndInfinityComeThrough) {
  Operands x;
  const float infinity = std::numeric_limits<float>::infinity();
  x.SetA(0, 0, 0, infinity);
  x.SetB(0, 0, 0, 1);  // column 1: infinity * 0
  x.Multiply();
  EXPECT_EQ(x.c[0], infinity);
  EXPECT_TRUE(std::isnan(x.c[1]));
  EXPECT_EQ(x.c[16], 0);
}

// Only configured rows and columns are read and written, and the rest of a tile is zero.
TEST_F(Emulated, ShapesAreObeyed) {
  tile_configure(Config().Shape(3, 2, 8).Shape(4, 16, 64).bytes);
  const std::vector<float> from(16, 7.0f);
  std::vector<float> to(16, -1.0f);
  tile_load<3>(from.data(), 16);
  tile_store<3>(to.data(), 32);
  for (size_t i = 0; i < 16; ++i) EXPECT_EQ(to[i], i % 8 < 2 ? 7 : -1) << i;
}

TEST_F(Emulated, ConfigurationZeroesTiles) {
  std::vector<float> x(256, 3.0f);
  tile_load<5>(x.data());
  tile_configure(Config().bytes);
  tile_store<5>(x.data());
  EXPECT_EQ(x, std::vector<float>(256));
}

TEST_F(EmulatedDeathTest, WhatTheProcessorRefuses) {
  float x[256] = {};
  EXPECT_DEATH((tile_release(), tile_load<0>(x)), "emulated tileloadd: tiles are not configured");
  EXPECT_DEATH((tile_release(), tile_zero<0>()), "emulated tilezero: tiles are not configured");
  EXPECT_DEATH((tile_configure(Config().Shape(2, 0, 0).bytes), tile_store<2>(x)),
               "emulated tilestored: the tile has no shape");
  EXPECT_DEATH((tile_multiply<0, 1, 1>()), "not different ones");
  EXPECT_DEATH((tile_configure(Config().Shape(0, 15, 64).bytes), tile_multiply<0, 1, 2>()),
               "numbers of rows");
  EXPECT_DEATH((tile_configure(Config().Shape(0, 16, 60).bytes), tile_multiply<0, 1, 2>()),
               "numbers of columns");
  EXPECT_DEATH((tile_configure(Config().Shape(1, 16, 60).bytes), tile_multiply<0, 1, 2>()),
               "A's columns are not B's rows");
  EXPECT_DEATH((tile_configure(Config().Shape(1, 16, 62).bytes), tile_multiply<0, 1, 2>()),
               "multiple of 4");
  Config reserved, palette, start;
  reserved.bytes[40] = 1;
  palette.bytes[0] = 2;
  start.bytes[1] = 1;
  EXPECT_DEATH(tile_configure(reserved.bytes), "reserved byte");
  EXPECT_DEATH(tile_configure(palette.bytes), "palette");
  EXPECT_DEATH(tile_configure(start.bytes), "start row");
  EXPECT_DEATH(tile_configure(Config().Shape(7, 17, 64).bytes), "rows, expected");
  EXPECT_DEATH(tile_configure(Config().Shape(7, 16, 65).bytes), "bytes of a row, expected");
  EXPECT_DEATH(tile_configure(Config().Shape(7, 16, 0).bytes), "rows without bytes");
}

}  // namespace
}  // namespace strobe::cpu::amx
#endif
