// The one matrix product that the float32 kernels are made of: C (+)= A B on small tiles in cache.
//
// A is read one element at a time and broadcast, so it may lie row-major or transposed; B and C are
// rows of whole vectors. A micro-kernel holds kRows x kVectors accumulators: 6 x 4 fills 24 of
// AVX-512's 32 registers, 6 x 2 fills 12 of AVX2's 16, and both do more arithmetic than loads (24
// FMA for 10 loads; 12 for 8).
#ifndef STROBE_CPU_GEMM_INL_H_
#define STROBE_CPU_GEMM_INL_H_

#include "cpu/simd-inl.h"

namespace strobe::cpu::STROBE_ISA {

constexpr int kMicroRows = 6;
#if HWY_TARGET == HWY_AVX2
constexpr int kMicroVectors = 2;
#else
constexpr int kMicroVectors = 4;
#endif

/// What becomes of C's old value. The product's sum always starts at zero and is added to C at the
/// end, which rounds less than a sum that starts at C. kDrop: C is overwritten. kAdd: the product
/// is added to it. kScale: as kAdd, after C's columns were multiplied by alpha.
enum class Old { kDrop, kAdd, kScale };

struct Gemm {
  const float* a;
  int64_t a_row, a_col;  // strides of A in elements
  const float* b;        // aligned rows
  int64_t b_row;
  float* c;  // aligned rows
  int64_t c_row;
  const float* alpha = nullptr;  // kScale: one factor per column of C
};

template <int kRows, int kVectors, Old kOld>
STROBE_SIMD void micro_kernel(const Gemm& g, int64_t row, int64_t column, int64_t depth) {
  VF sum[kRows][kVectors];
  float* const c = g.c + row * g.c_row + column;
  STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
    STROBE_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(f32);
  }
  const float* a = g.a + row * g.a_row;
  const float* b = g.b + column;
  const int64_t a_row = g.a_row, a_col = g.a_col, b_row = g.b_row;
  for (int64_t k = 0; k < depth; ++k) {
    VF vb[kVectors];
    STROBE_UNROLL for (int v = 0; v < kVectors; ++v) vb[v] = load(b + v * kLanes);
    STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
      const VF va = set(a[r * a_row]);
      STROBE_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::MulAdd(va, vb[v], sum[r][v]);
    }
    a += a_col;
    b += b_row;
  }
  STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
    STROBE_UNROLL for (int v = 0; v < kVectors; ++v) {
      float* const at = c + r * g.c_row + v * kLanes;
      if constexpr (kOld == Old::kAdd) sum[r][v] = hn::Add(load(at), sum[r][v]);
      if constexpr (kOld == Old::kScale)
        sum[r][v] = hn::MulAdd(load(at), load(g.alpha + column + v * kLanes), sum[r][v]);
      store(sum[r][v], at);
    }
  }
}

/// All rows of kVectors columns of C.
template <int kVectors, Old kOld>
static void gemm_panel(const Gemm& g, int64_t rows, int64_t column, int64_t depth) {
  int64_t r = 0;
  for (; r + kMicroRows <= rows; r += kMicroRows)
    micro_kernel<kMicroRows, kVectors, kOld>(g, r, column, depth);
  if (rows - r >= 4) {
    micro_kernel<4, kVectors, kOld>(g, r, column, depth);
    r += 4;
  }
  if (rows - r >= 2) {
    micro_kernel<2, kVectors, kOld>(g, r, column, depth);
    r += 2;
  }
  if (rows > r) micro_kernel<1, kVectors, kOld>(g, r, column, depth);
}

/// C[rows][vectors * kLanes] (+)= A[rows][depth] B[depth][vectors * kLanes].
template <Old kOld>
static void gemm(const Gemm& g, int64_t rows, int64_t vectors, int64_t depth) {
  int64_t v = 0;
  for (; v + kMicroVectors <= vectors; v += kMicroVectors)
    gemm_panel<kMicroVectors, kOld>(g, rows, v * kLanes, depth);
  if constexpr (kMicroVectors > 2) {
    if (vectors - v == 3) {
      gemm_panel<3, kOld>(g, rows, v * kLanes, depth);
      v += 3;
    }
    if (vectors - v == 2) {
      gemm_panel<2, kOld>(g, rows, v * kLanes, depth);
      v += 2;
    }
  }
  if (v < vectors) gemm_panel<1, kOld>(g, rows, v * kLanes, depth);
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_GEMM_INL_H_
