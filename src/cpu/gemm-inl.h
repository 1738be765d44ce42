// The one matrix product that these kernels are made of: C (+)= A B on small tiles in cache.
//
// A is read one element at a time and broadcast, so it may lie row-major or transposed; B and C are
// rows of whole vectors. The elements of A and B are float32, or pairs of bf16 along the dimension
// that is summed (pairs-inl.h). A micro-kernel holds kRows x kVectors accumulators: 6 x 4 fills 24
// of AVX-512's 32 registers, 6 x 2 fills 12 of AVX2's 16, and both do more arithmetic than loads
// (24 FMA for 10 loads; 12 for 8). Of one vector there are twice as many rows: six sums would be
// fewer than an FMA's latency has room for (4 cycles, two a cycle).
#ifndef STROBE_CPU_GEMM_INL_H_
#define STROBE_CPU_GEMM_INL_H_

#include "cpu/pairs-inl.h"

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

template <typename T>  // float or Pair
struct Gemm {
  const T* a;
  int64_t a_row, a_col;  // strides of A in elements
  const T* b;            // aligned rows
  int64_t b_row;
  float* c;  // aligned rows
  int64_t c_row;
  const float* alpha = nullptr;  // kScale: one factor per column of C
};

/// What a step of the sum does with elements of A and B.
STROBE_SIMD VF same_in_all(float x) { return set(x); }
STROBE_SIMD VU same_in_all(Pair x) { return hn::Set(u32, x); }
STROBE_SIMD VF elements(const float* p) { return load(p); }
STROBE_SIMD VU elements(const Pair* p) { return hn::Load(u32, p); }
STROBE_SIMD VF add_products(VF a, VF b, VF sum) { return hn::MulAdd(a, b, sum); }
/// How many of the summed dimension an element holds.
template <typename T>
constexpr int64_t kValues = 1;
template <>
inline constexpr int64_t kValues<Pair> = 2;

/// x where `keep` has ones, and zeros elsewhere, for products that leave out some values of
/// elements: they round as those of gemm do, where what is left out has zeros on the other side.
STROBE_SIMD VF part(VF x, VU keep) { return hn::BitCast(f32, hn::And(hn::BitCast(u32, x), keep)); }
STROBE_SIMD VU part(VU x, VU keep) { return hn::And(x, keep); }
/// Ones where `first` holds and, in the second value of a pair, `second`.
template <typename T>
STROBE_SIMD VU kept_values(hn::Mask<F> first, hn::Mask<F> second) {
  const VU a = hn::VecFromMask(u32, hn::RebindMask(u32, first));
  if constexpr (kValues<T> == 1) return a;
  const VU b = hn::VecFromMask(u32, hn::RebindMask(u32, second));
  return hn::Or(hn::ShiftRight<16>(a), hn::ShiftLeft<16>(b));
}

template <int kRows, int kVectors, Old kOld, typename T>
STROBE_SIMD void micro_kernel(const Gemm<T>& g, int64_t row, int64_t column, int64_t depth) {
  VF sum[kRows][kVectors];
  float* const c = g.c + row * g.c_row + column;
  STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
    STROBE_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v] = hn::Zero(f32);
  }
  const T* a = g.a + row * g.a_row;
  const T* b = g.b + column;
  const int64_t a_row = g.a_row, a_col = g.a_col, b_row = g.b_row;
  for (int64_t k = 0; k < depth; ++k) {
    decltype(elements(b)) vb[kVectors];
    STROBE_UNROLL for (int v = 0; v < kVectors; ++v) vb[v] = elements(b + v * kLanes);
    STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
      const auto va = same_in_all(a[r * a_row]);
      STROBE_UNROLL for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = add_products(va, vb[v], sum[r][v]);
      }
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

/// What else is done after each micro-kernel of a product: nothing.
struct Nothing {
  STROBE_INLINE void operator()() const {}
};
/// How many micro-kernels a product has that makes so many rows of so many vectors, at most.
STROBE_SIMD int64_t micro_kernels(int64_t rows, int64_t vectors) {
  return ceil_div(rows, kMicroRows) * ceil_div(vectors, kMicroVectors);
}

/// All rows of kVectors columns of C.
template <int kVectors, Old kOld, typename T, typename Meanwhile>
static void gemm_panel(const Gemm<T>& g, int64_t rows, int64_t column, int64_t depth,
                       Meanwhile& meanwhile) {
  int64_t r = 0;
  if constexpr (kVectors == 1) {
    for (; r + 2 * kMicroRows <= rows; r += 2 * kMicroRows) {
      micro_kernel<2 * kMicroRows, kVectors, kOld>(g, r, column, depth);
      meanwhile();
    }
  }
  for (; r + kMicroRows <= rows; r += kMicroRows) {
    micro_kernel<kMicroRows, kVectors, kOld>(g, r, column, depth);
    meanwhile();
  }
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

/// C[rows][vectors * kLanes] (+)= A[rows][depth] B[depth][vectors * kLanes]. meanwhile(): called
/// between micro-kernels.
template <Old kOld, typename T = float, typename Meanwhile = const Nothing>
static void gemm(const Gemm<T>& g, int64_t rows, int64_t vectors, int64_t depth,
                 Meanwhile&& meanwhile = {}) {
  int64_t v = 0;
  for (; v + kMicroVectors <= vectors; v += kMicroVectors)
    gemm_panel<kMicroVectors, kOld>(g, rows, v * kLanes, depth, meanwhile);
  if constexpr (kMicroVectors > 2) {
    if (vectors - v == 3) {
      gemm_panel<3, kOld>(g, rows, v * kLanes, depth, meanwhile);
      v += 3;
    }
    if (vectors - v == 2) {
      gemm_panel<2, kOld>(g, rows, v * kLanes, depth, meanwhile);
      v += 2;
    }
  }
  if (v < vectors) gemm_panel<1, kOld>(g, rows, v * kLanes, depth, meanwhile);
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_GEMM_INL_H_
