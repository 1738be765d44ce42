#include "instructions.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda_runtime_api.h"
#include "run_time.h"

namespace strobe::emulator {

namespace {

int own_lane() { return static_cast<int>(threadIdx.x % kLanes); }

void expect_all_lanes(const char* name, uint32_t mask) {
  if (mask != 0xffffffffu) fail(std::string(name) + ": only whole warps are emulated");
}

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }

uint16_t half_of(uint32_t word, int half) { return static_cast<uint16_t>(word >> (16 * half)); }

}  // namespace

float from_bfloat16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_half(uint16_t bits) {
  // Exponent and fraction where a float has them, and a power of two that makes up for what the
  // exponents begin at: exact, of the smallest halves too.
  const uint32_t moved = (bits & 0x7fffu) << 13;
  float x;
  std::memcpy(&x, &moved, sizeof x);
  x *= 0x1p112f;
  uint32_t wide;
  std::memcpy(&wide, &x, sizeof wide);
  if ((bits & 0x7c00) == 0x7c00) wide |= 0x7f800000;  // infinity or NaN
  wide |= (bits & 0x8000u) << 16;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

uint16_t to_half(float x) {
  if (x != x) return 0x7fff;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float size = std::fabs(x);
  if (size >= 65520) return sign | 0x7c00;
  // Next to a number whose last place is a half's there, an addition rounds as the half is rounded:
  // 2^13 times the power of two of `size`, which is 2^-14 at least.
  uint32_t bits;
  std::memcpy(&bits, &size, sizeof bits);
  const uint32_t binade = std::max(bits & 0x7f800000u, 113u << 23) + (13u << 23);
  float next;
  std::memcpy(&next, &binade, sizeof next);
  const float sum = size + next;
  uint32_t rounded;
  std::memcpy(&rounded, &sum, sizeof rounded);
  // There are 1024 steps to a binade; those below it are counted in the field of the exponent.
  const uint32_t steps = rounded - binade;
  return static_cast<uint16_t>(sign | (steps + (((binade >> 23) - 126) << 10)));
}

uint32_t shuffle(const char* name, uint32_t mask, uint32_t x, int lane) {
  expect_all_lanes(name, mask);
  const Words* const all = exchange(name, {{x}});
  return all[lane & 31].w[0];
}

uint32_t ballot(const char* name, uint32_t mask, bool x) {
  expect_all_lanes(name, mask);
  const Words* const all = exchange(name, {{x}});
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= all[i].w[0] << i;
  return bits;
}

void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
         float (*to_float)(uint16_t)) {
  const Words* const all = exchange("mma", {{a[0], a[1], a[2], a[3], b0, b1}});
  const int group = own_lane() / 4, in_group = own_lane() % 4;
  // Element (row, k) of A is in the lane of its row, k / 2 % 4, of B (k, column) in that of its
  // column: registers are 8 rows and 8 k apart.
  float rows[2][16], columns[2][16];
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < 2; ++i) {
      rows[i][k] = to_float(half_of(all[4 * group + k / 2 % 4].w[i + 2 * (k / 8)], k % 2));
      columns[i][k] =
          to_float(half_of(all[4 * (2 * in_group + i) + k / 2 % 4].w[4 + k / 8], k % 2));
    }
  }
  // The sums of wgmma_products.cpp: on a GPU both instructions give the same bits
  // (docs/log/2026-11.md, three probes), and kernels count on that.
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) c[i] += rows[i / 2][k] * columns[i % 2][k];
  }
}

void ldmatrix(uint32_t (&r)[4], uint32_t address, bool transposed) {
  const Words* const all = exchange(transposed ? "ldmatrix.trans" : "ldmatrix", {{address}});
  const int lane = own_lane();
  const auto value = [&](int matrix, int row, int column) -> uint32_t {
    const char* const at = shared_at(all[8 * matrix + row].w[0], 16) + 2 * column;
    uint16_t x;
    std::memcpy(&x, at, 2);
    note_read(at, 2);
    return x;
  };
  for (int m = 0; m < 4; ++m) {
    uint32_t halves[2];
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4, column = 2 * (lane % 4) + i;
      halves[i] = transposed ? value(m, column, row) : value(m, row, column);
    }
    r[m] = halves[0] | halves[1] << 16;
  }
}

void stmatrix(uint32_t address, const uint32_t (&r)[4]) {
  const Words* const all = exchange("stmatrix", {{r[0], r[1], r[2], r[3]}});
  // The row that this lane has the address of.
  const int matrix = own_lane() / 8, row = own_lane() % 8;
  uint32_t words[4];
  for (int i = 0; i < 4; ++i) words[i] = all[4 * row + i].w[matrix];
  char* const to = shared_at(address, 16);
  note_write(to, 16);
  std::memcpy(to, words, 16);
  wrote_shared(address, 16);
}

uint32_t movmatrix(uint32_t x) {
  const Words* const all = exchange("movmatrix", {{x}});
  const int row = own_lane() / 4, column = 2 * (own_lane() % 4);
  uint32_t result = 0;
  for (int half = 0; half < 2; ++half) {
    // Element (column + half, row) of the matrix.
    const uint32_t word = all[4 * (column + half) + row / 2].w[0];
    result |= uint32_t{half_of(word, row % 2)} << 16 * half;
  }
  return result;
}

float exp2_approx(float x) { return flushed(std::exp2(flushed(x))); }
float reciprocal_approx(float x) { return flushed(1 / flushed(x)); }

}  // namespace strobe::emulator
