// Vectors of float32 for one instruction set: loads that convert, exp2, transposes.
//
// Each kernels_<isa>.cpp includes this with its own namespace in STROBE_ISA, so that one file is
// compiled for one instruction set. Highway supplies the vectors. Nothing from std:: may be called
// here (core/macros.h says why).
#ifndef STROBE_CPU_SIMD_INL_H_
#define STROBE_CPU_SIMD_INL_H_

#include <hwy/highway.h>
// After highway.h:
#include <hwy/contrib/math/math-inl.h>

#include "core/half.h"
#include "core/mask.h"
#include "core/philox.h"
#include "core/problem.h"
#include "core/workspace.h"
#include "cpu/kernels.h"

namespace strobe::cpu::STROBE_ISA {

namespace hn = hwy::HWY_NAMESPACE;

#define STROBE_SIMD static inline __attribute__((always_inline))
#define STROBE_UNROLL _Pragma("GCC unroll 16")

using F = hn::ScalableTag<float>;
using I = hn::RebindToSigned<F>;
using U = hn::RebindToUnsigned<F>;
using VF = hn::Vec<F>;
using VI = hn::Vec<I>;
using VU = hn::Vec<U>;

constexpr F f32;
constexpr I i32;
constexpr U u32;
constexpr int64_t kLanes = HWY_MAX_BYTES == 1 ? 1 : static_cast<int64_t>(HWY_LANES(float));

STROBE_SIMD VF load(const float* p) { return hn::Load(f32, p); }
STROBE_SIMD void store(VF v, float* p) { hn::Store(v, f32, p); }
STROBE_SIMD VF set(float x) { return hn::Set(f32, x); }
STROBE_SIMD VI same(int64_t x) { return hn::Set(i32, static_cast<int32_t>(x)); }
/// Integers from `first` on. Highway's Iota goes through memory, unless its argument is constant.
STROBE_SIMD VI count_from(int64_t first) { return hn::Add(same(first), hn::Iota(i32, 0)); }
/// Lanes whose key lies between the two.
STROBE_SIMD hn::Mask<F> sees(VI before, VI end, VI key) {
  return hn::RebindMask(f32, hn::And(hn::Gt(key, before), hn::Gt(end, key)));
}
/// Lane n: bit n of the word.
STROBE_SIMD hn::Mask<F> bit_lanes(uint32_t word) {
  const VU bit = hn::Shl(hn::Set(u32, 1), hn::Iota(u32, 0));
  return hn::RebindMask(f32, hn::TestBit(hn::Set(u32, word), bit));
}

/// 2^(x * unit) for products up to 127, -inf included, within 1.25 ulp; NaN stays NaN. Below
/// 2^-125.5 the result is 0 (no denormals). With x * unit = n + f and |f| <= 1/2, a polynomial of
/// degree 6 gives 2^f. It is fitted for the least relative error (3.0e-9) with its constant held at
/// 1, so that 2^0 is exact.
STROBE_SIMD VF exp2(VF x, float unit) {
  // Adding 1.5 * 2^23 rounds to an integer; + 127 leaves the biased exponent n + 127 in the low
  // bits. The product x * unit is never rounded: its rounding error would become a relative error
  // of |x| * 6e-8 in the result.
  const VF magic = set(12582912.0f + 127.0f);
  const VF t = hn::MulAdd(x, set(unit), magic);
  const VF f = hn::MulSub(x, set(unit), hn::Sub(t, magic));
  VF p = set(1.5325976710300893e-4f);
  p = hn::MulAdd(p, f, set(1.339080510661006e-3f));
  p = hn::MulAdd(p, f, set(9.618506766855717e-3f));
  p = hn::MulAdd(p, f, set(5.550359934568405e-2f));
  p = hn::MulAdd(p, f, set(2.4022647738456726e-1f));
  p = hn::MulAdd(p, f, set(6.931471824645996e-1f));
  p = hn::MulAdd(p, f, set(1.0f));
  const VF power = hn::BitCast(f32, hn::ShiftLeft<23>(hn::BitCast(u32, t)));
  return hn::IfThenZeroElse(hn::Lt(t, set(12582912.0f + 2.0f)), hn::Mul(p, power));
}

/// n values of `dtype` at p, as float32.
STROBE_SIMD VF load_as_float(const float* p) { return hn::LoadU(f32, p); }
STROBE_SIMD VF load_as_float(const hwy::bfloat16_t* p) {
  return hn::PromoteTo(f32, hn::LoadU(hn::Rebind<hwy::bfloat16_t, F>(), p));
}
STROBE_SIMD VF load_as_float(const hwy::float16_t* p) {
#if HWY_TARGET == HWY_SCALAR
  // Highway 1.0's scalar conversions know neither infinity nor NaN, and truncate.
  uint16_t half;
  __builtin_memcpy(&half, p, sizeof half);
  return set(float_from_half(half));
#else
  return hn::PromoteTo(f32, hn::LoadU(hn::Rebind<hwy::float16_t, F>(), p));
#endif
}
STROBE_SIMD void store_from_float(VF v, float* p) { hn::StoreU(v, f32, p); }
STROBE_SIMD void store_from_float(VF v, hwy::bfloat16_t* p) {
  // Highway 1.0 truncates; round to nearest even here, and keep NaN quiet.
  const hn::Rebind<uint16_t, F> u16;
  const VU bits = hn::BitCast(u32, v);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u32, 1));
  const VU rounded = hn::Add(bits, hn::Add(odd, hn::Set(u32, 0x7FFF)));
  const VU quiet = hn::Or(bits, hn::Set(u32, 0x400000));
  const VU chosen = hn::IfThenElse(hn::RebindMask(u32, hn::IsNaN(v)), quiet, rounded);
  hn::StoreU(hn::TruncateTo(u16, hn::ShiftRight<16>(chosen)), u16, reinterpret_cast<uint16_t*>(p));
}
STROBE_SIMD void store_from_float(VF v, hwy::float16_t* p) {
#if HWY_TARGET == HWY_SCALAR
  const uint16_t half = half_from_float(hn::GetLane(v));
  __builtin_memcpy(p, &half, sizeof half);
#else
  const hn::Rebind<hwy::float16_t, F> f16;
  hn::StoreU(hn::DemoteTo(f16, v), f16, p);
#endif
}

/// memcpy of n values, without a call of a function.
template <typename T>
STROBE_SIMD void copy_bytes(T* to, const T* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) __builtin_memcpy(to + i, from + i, sizeof(T));
}

/// to[0, round_up(n, kLanes)) = from[0, n), zeros beyond. Aligned `to`.
template <typename T>
STROBE_SIMD void row_to_float(const T* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(load_as_float(from + i), to + i);
  if (i < n) {
    T tail[kLanes] = {};
    copy_bytes(tail, from + i, n - i);
    store(load_as_float(tail), to + i);
  }
}

/// to[0, n) = from[0, n) * factor. `from` aligned and padded to a whole vector.
template <typename T>
STROBE_SIMD void row_from_float(const float* from, float factor, int64_t n, T* to) {
  const VF by = set(factor);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_from_float(hn::Mul(load(from + i), by), to + i);
  if (i < n) {
    T tail[kLanes];
    store_from_float(hn::Mul(load(from + i), by), tail);
    copy_bytes(to + i, tail, n - i);
  }
}

/// The same, of values that lie `step` apart.
template <typename T>
STROBE_SIMD void spread_to_float(const T* from, int64_t step, int64_t n, float* to) {
  if (step == 1) return row_to_float(from, n, to);
  for (int64_t i = 0; i < n; i += kLanes) {
    T some[kLanes] = {};
    for (int64_t j = i; j < n && j < i + kLanes; ++j) copy_bytes(some + j - i, from + j * step, 1);
    store(load_as_float(some), to + i);
  }
}
/// The same to values that lie `step` apart.
template <typename T>
STROBE_SIMD void spread_from_float(const float* from, int64_t step, int64_t n, T* to) {
  if (step == 1) return row_from_float(from, 1, n, to);
  for (int64_t i = 0; i < n; i += kLanes) {
    T some[kLanes];
    store_from_float(load(from + i), some);
    for (int64_t j = i; j < n && j < i + kLanes; ++j) copy_bytes(to + j * step, some + j - i, 1);
  }
}

/// Calls body(T*) with a null pointer of the dtype's type; not at all where the dtype is none of
/// these, which dispatch.cpp declines.
template <typename Body>
STROBE_SIMD void for_dtype(int32_t dtype, const Body& body) {
  if (dtype == STROBE_FLOAT32) {
    body(static_cast<float*>(nullptr));
  } else if (dtype == STROBE_BFLOAT16) {
    body(static_cast<hwy::bfloat16_t*>(nullptr));
  } else if (dtype == STROBE_FLOAT16) {
    body(static_cast<hwy::float16_t*>(nullptr));
  }
}

/// Asks for some rows of so many values, which are read soon.
STROBE_SIMD void prefetch_rows(const RowView& view, Range rows, int64_t values) {
  const int64_t bytes = row_bytes(view.dtype, values);
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const std::byte* const row = view.row(i);
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
}

/// The same rows of two tensors that are read soon, K and V of the next block of keys, say. They
/// come into the cache a few lines at a time, while something is computed: only so many lines can
/// be on their way at once, and asking for one more waits as reading it would. A few queries have
/// less to do with a block than memory has.
class RowsAhead {
 public:
  RowsAhead() = default;  // none
  /// In so many calls.
  RowsAhead(const RowView& a, int64_t values_a, const RowView& b, int64_t values_b, Range rows,
            int64_t calls)
      : rows_{&a, &b},
        bytes_{row_bytes(a.dtype, values_a), row_bytes(b.dtype, values_b)},
        range_(rows),
        left_(2 * rows.size()),
        lines_(ceil_div(rows.size() * (ceil_div(bytes_[0], 64) + ceil_div(bytes_[1], 64)), calls)) {
  }
  STROBE_INLINE void operator()() {
    for (int64_t n = 0; n < lines_; ++n, at_ += 64) {
      if (at_ >= end_ && !next_row()) return;
      __builtin_prefetch(at_, 0, 2);
    }
  }

 private:
  /// All of the first tensor come before the second's.
  STROBE_INLINE bool next_row() {
    if (left_ == 0) return false;
    const int64_t tensor = left_ <= range_.size();
    at_ = rows_[tensor]->row(range_.end - (tensor ? left_ : left_ - range_.size()));
    end_ = at_ + bytes_[tensor];
    --left_;
    return true;
  }

  const RowView* rows_[2] = {};
  int64_t bytes_[2] = {};
  Range range_{};
  int64_t left_ = 0, lines_ = 0;
  const std::byte *at_ = nullptr, *end_ = nullptr;  // of a row
};

/// Some rows as float32: to[rows.size()][stride], padded with zeros to whole vectors.
STROBE_SIMD void load_rows(const RowView& view, Range rows, int64_t dim, float* to,
                           int64_t stride) {
  for_dtype(
      view.dtype, [&]<typename T>(T*) __attribute__((always_inline)) {
        for (int64_t i = rows.begin; i < rows.end; ++i, to += stride) {
          row_to_float(reinterpret_cast<const T*>(view.row(i)), dim, to);
        }
      });
}

STROBE_SIMD void store_row(const RowView& view, int64_t row, int64_t dim, const float* from,
                           float factor) {
  for_dtype(
      view.dtype, [&]<typename T>(T*) __attribute__((always_inline)) {
        row_from_float(from, factor, dim, reinterpret_cast<T*>(view.row(row)));
      });
}

/// The bias of some keys, as float32; zeros behind, up to a whole vector.
STROBE_SIMD void load_bias(const BiasRow& row, Range keys, float* to) {
  for_dtype(
      row.dtype, [&]<typename T>(T*) __attribute__((always_inline)) {
        spread_to_float(reinterpret_cast<const T*>(row.at(keys.begin)), row.step, keys.size(), to);
      });
}

/// `row` to the places of a row that hold an infinity or a NaN. was: room for that row.
STROBE_SIMD void mend_row(const RowView& view, int64_t i, int64_t dim, float* row, float* was) {
  load_rows(view, {i, i + 1}, dim, was, 0);
  for (int64_t e = 0; e < dim; e += kLanes) {
    const VF x = load(was + e);
    const auto finite = hn::Lt(hn::Abs(x), set(__builtin_inff()));
    store(hn::IfThenElse(finite, x, load(row + e)), row + e);
  }
  store_row(view, i, dim, row, 1);
}

/// Rows that transpose_rows takes at a time, which makes it write whole cache lines of 16 floats.
/// With four rows at a time each line was written four times, and where the stride is a power of
/// two it had left L1 in between.
constexpr int64_t kTransposeRows = 16;

/// to[column][row] = from[row][column] * factor for kTransposeRows rows, padded to whole vectors.
STROBE_SIMD void transpose_rows(const float* from, int64_t from_stride, int64_t columns,
                                float factor, float* to, int64_t to_stride) {
  const VF by = set(factor);
  HWY_ALIGN float quads[kTransposeRows / 4][4 * kLanes];
  for (int64_t c = 0; c < columns; c += kLanes) {
    for (int64_t g = 0; g < kTransposeRows / 4; ++g) {
      const float* const row = from + 4 * g * from_stride + c;
      hn::StoreInterleaved4(hn::Mul(load(row), by), hn::Mul(load(row + from_stride), by),
                            hn::Mul(load(row + 2 * from_stride), by),
                            hn::Mul(load(row + 3 * from_stride), by), f32, quads[g]);
    }
    const int64_t n = columns - c < kLanes ? columns - c : kLanes;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t g = 0; g < kTransposeRows / 4; ++g) {
        __builtin_memcpy(to + (c + i) * to_stride + 4 * g, quads[g] + 4 * i, 4 * sizeof(float));
      }
    }
  }
}

/// Vector d becomes what lane d of each vector was.
STROBE_SIMD void transpose_lanes([[maybe_unused]] VF (&v)[kLanes]) {
#if HWY_TARGET != HWY_SCALAR
  // Within blocks of four lanes, of four vectors at a time.
  const hn::RepartitionToWide<F> wide;
  STROBE_UNROLL for (int64_t g = 0; g < kLanes; g += 4) {
    const auto low = [&](int64_t i) __attribute__((always_inline)) {
      return hn::BitCast(wide, hn::InterleaveLower(f32, v[g + i], v[g + i + 1]));
    };
    const auto high = [&](int64_t i) __attribute__((always_inline)) {
      return hn::BitCast(wide, hn::InterleaveUpper(f32, v[g + i], v[g + i + 1]));
    };
    const auto a = low(0), b = low(2), c = high(0), d = high(2);
    v[g] = hn::BitCast(f32, hn::InterleaveLower(wide, a, b));
    v[g + 1] = hn::BitCast(f32, hn::InterleaveUpper(wide, a, b));
    v[g + 2] = hn::BitCast(f32, hn::InterleaveLower(wide, c, d));
    v[g + 3] = hn::BitCast(f32, hn::InterleaveUpper(wide, c, d));
  }
  // The blocks: of neighbours, then of halves.
  if constexpr (kLanes >= 8) {
    STROBE_UNROLL for (int64_t g = 0; g < kLanes; g += 8) {
      STROBE_UNROLL for (int64_t i = g; i < g + 4; ++i) {
        const VF a = v[i], b = v[i + 4];
        v[i] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a);
        v[i + 4] = hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a));
      }
    }
  }
  if constexpr (kLanes == 16) {
    STROBE_UNROLL for (int64_t i = 0; i < 8; ++i) {
      const VF a = v[i], b = v[i + 8];
      v[i] = hn::ConcatLowerLower(f32, b, a);
      v[i + 8] = hn::ConcatUpperUpper(f32, b, a);
    }
  }
#endif
}

/// row[0, n) *= factor; n a multiple of kLanes.
STROBE_SIMD void scale_row(float* row, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += kLanes) store(hn::Mul(load(row + i), set(factor)), row + i);
}

/// -0 becomes 0; n a multiple of kLanes.
STROBE_SIMD void drop_signs_of_zeros(float* row, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(hn::Add(load(row + i), hn::Zero(f32)), row + i);
}

/// True when some value of the matrix is infinite or NaN. columns padded to whole vectors.
STROBE_SIMD bool any_nonfinite(const float* x, int64_t rows, int64_t columns, int64_t stride) {
  // x * 0 is NaN exactly where x is not finite, and NaN stays in a sum. Four sums, which need not
  // wait for each other.
  const VF zero = hn::Zero(f32);
  VF sum[4] = {zero, zero, zero, zero};
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const float* const row = x + r * stride;
    for (int64_t c = 0; c < columns; c += kLanes) {
      STROBE_UNROLL for (int i = 0; i < 4; ++i) {
        sum[i] = hn::MulAdd(load(row + i * stride + c), zero, sum[i]);
      }
    }
  }
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < columns; c += kLanes)
      sum[0] = hn::MulAdd(load(x + r * stride + c), zero, sum[0]);
  }
  const VF all = hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]));
  return !hn::AllTrue(f32, hn::Eq(all, zero));
}

/// Sum of all lanes.
STROBE_SIMD float sum_lanes(VF v) { return hn::GetLane(hn::SumOfLanes(f32, v)); }

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_SIMD_INL_H_
