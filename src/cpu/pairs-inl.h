// Pairs of bf16 values: what vdpbf16ps multiplies. A lane of float32 gets the sum of two products,
// so that a product of matrices takes half as many steps as in float32.
//
// A matrix whose pairs run along its columns keeps its rows as they are, two columns to a word. One
// whose pairs run along its rows has rows 2 r and 2 r + 1 as one row of words, the first in the
// lower halves. Both are made of float32 rows, which load_rows has made of the tensor's: the
// values are bf16's, or weights, which are rounded to nearest even here.
//
// vdpbf16ps and the conversion take a value below the least normal number for 0, whatever the
// thread's modes are.
#ifndef STROBE_CPU_PAIRS_INL_H_
#define STROBE_CPU_PAIRS_INL_H_

#include "cpu/simd-inl.h"

namespace strobe::cpu::STROBE_ISA {

/// Two bf16 values, the first in the lower half.
using Pair = uint32_t;

/// Whether this instruction set multiplies pairs. It is then for problems in bf16 alone, and all
/// products are of pairs, but those with weights of which a sum has few (score.h).
#ifdef __AVX512BF16__
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

/// Values in a row of pairs: what the summed dimension is padded to.
constexpr int64_t kPairLanes = 2 * kLanes;
STROBE_SIMD int64_t row_pairs(int64_t dim) { return round_up(dim, kPairLanes) / 2; }

#ifdef __AVX512BF16__

STROBE_SIMD VF add_products(VU a, VU b, VF sum) {
  return VF{_mm512_dpbf16_ps(sum.raw, reinterpret_cast<__m512bh>(a.raw),
                             reinterpret_cast<__m512bh>(b.raw))};
}
/// The values of a, then those of b.
STROBE_SIMD VU join(VF a, VF b) {
  return VU{reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b.raw, a.raw))};
}
/// Lane by lane a value of a and one of b.
STROBE_SIMD VU pair(VF a, VF b) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return VU{_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), join(a, b).raw)};
}

#else

// Never called, but named in branches of kPairs.
STROBE_SIMD VF add_products(VU, VU, VF sum) { return sum; }
STROBE_SIMD VU join(VF, VF) { return hn::Zero(u32); }
STROBE_SIMD VU pair(VF, VF) { return hn::Zero(u32); }

#endif

/// Pairs along the columns, of which `from` has whole vectors: to[rows][row_pairs(columns)]. May be
/// in place.
STROBE_SIMD void pack_columns(const float* from, int64_t stride, int64_t rows, int64_t columns,
                              Pair* to) {
  for (int64_t r = 0; r < rows; ++r, from += stride) {
    for (int64_t c = 0; c < columns; c += kPairLanes, to += kLanes) {
      const VF second = c + kLanes < columns ? load(from + c + kLanes) : hn::Zero(f32);
      hn::Store(join(load(from + c), second), u32, to);
    }
  }
}

/// Pairs along the rows, with a row of zeros after the last where there is an odd number of them:
/// to[ceil(rows / 2)][to_stride]. May be in place where the strides are the same.
STROBE_SIMD void pack_rows(const float* from, int64_t stride, int64_t rows, int64_t vectors,
                           Pair* to, int64_t to_stride) {
  for (int64_t r = 0; r < rows; r += 2, from += 2 * stride, to += to_stride) {
    for (int64_t c = 0; c < vectors * kLanes; c += kLanes) {
      const VF second = r + 1 < rows ? load(from + stride + c) : hn::Zero(f32);
      hn::Store(pair(load(from + c), second), u32, to + c);
    }
  }
}

/// The same memory as pairs.
STROBE_SIMD Pair* as_pairs(float* p) { return reinterpret_cast<Pair*>(p); }
STROBE_SIMD const Pair* as_pairs(const float* p) { return reinterpret_cast<const Pair*>(p); }

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_PAIRS_INL_H_
