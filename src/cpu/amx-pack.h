// Copies of rows in the forms that tiles want. A group is 32 rows of the tensor; dimensions are
// padded with zeros to whole blocks of 32, rows past the last to whole groups.
//
//   rows        A operand, the sum runs over the dimension.  [row / 16][dim / 32] tiles [16][32]
//   transposed  B operand, the sum runs over the dimension.  [row / 16][dim / 32] tiles [16 pairs
//   of
//               dimensions][16 rows]
//   pairs       B operand, the sum runs over the rows.       [row / 32][dim / 16] tiles [16 pairs
//   of
//               rows r and r + 16][16 dimensions, in the order that pair_column gives]
//
// Rows r and r + 16 make a pair because one shuffle then turns the softmax's two vectors of 16
// weights into such pairs.
#ifndef STROBE_CPU_AMX_PACK_H_
#define STROBE_CPU_AMX_PACK_H_

#include "cpu/amx-math.h"

namespace strobe::cpu::amx {

/// Some rows of a sequence's head, to be packed. Row 0 is the first of them.
struct Rows {
  RowView view;
  int64_t first, count, dim;

  STROBE_INLINE Rows(const RowView& v, Range rows, int64_t dimensions)
      : view(v), first(rows.begin), count(rows.size()), dim(dimensions) {}

  STROBE_INLINE const Bf16* data(int64_t row) const {
    return reinterpret_cast<const Bf16*>(view.row(first + row));
  }
  /// Where rows i to i + kRows - 1 of the view lie.
  template <int kRows>
  STROBE_INLINE void find(int64_t i, const std::byte* (&at)[kRows]) const {
    if (!view.keys.pages) return view.rows(i, at);
    for (int n = 0; n < kRows;) {
      const int end = static_cast<int>(view.run_end(i + n, i + kRows) - i);
      at[n] = view.row(i + n);
      for (++n; n < end; ++n) at[n] = at[n - 1] + view.row_bytes;
    }
  }
  /// 32 values; zeros outside.
  STROBE_INLINE __m512i at(int64_t row, int64_t begin) const {
    if (row >= count) return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16(lanes(0, dim - begin), data(row) + begin);
  }
  /// The same for kRows rows from `row` on.
  template <int kRows>
  STROBE_INLINE void block(int64_t row, int64_t begin, __m512i (&x)[kRows]) const {
    if (row + kRows <= count && begin + kPair <= dim) {
      const std::byte* from[kRows];
      find(first + row, from);
      STROBE_UNROLL for (int i = 0; i < kRows; ++i) {
        x[i] = _mm512_loadu_si512(from[i] + begin * static_cast<int64_t>(sizeof(Bf16)));
      }
    } else {
      for (int i = 0; i < kRows; ++i) x[i] = at(row + i, begin);
    }
  }
};

STROBE_AMX int64_t padded_dim(int64_t dim) { return round_up(dim, kPair); }

/// Tiles of the rows; kTransposed: of 16 x 16 pairs of values each, rows as columns.
template <bool kTransposed = false>
STROBE_AMX void pack_rows(const Rows& rows, int64_t padded_rows, Bf16* to) {
  for (int64_t strip = 0; strip < padded_rows; strip += kTile) {
    for (int64_t d = 0; d < rows.dim; d += kPair, to += kTileBf16) {
      __m512i x[16];
      rows.block(strip, d, x);
      if constexpr (kTransposed) transpose(x);
      STROBE_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * kPair, x[i]);
    }
  }
}
static void pack_transposed(const Rows& rows, int64_t padded_rows, Bf16* to) {
  pack_rows<true>(rows, padded_rows, to);
}

/// Whether any of 32 values is an infinity or a NaN.
STROBE_AMX bool any_nonfinite(__m512i x) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent) != 0;
}

/// Takes the rows of a packed group that hold an infinity or a NaN out of it. Returns their bits.
/// repeated: the group's rows stand in both places of the pairs.
static uint32_t remove_nonfinite(const Rows& rows, int64_t group, bool repeated, Bf16* packed) {
  uint32_t found = 0;
  for (int64_t r = 0; r < 32; ++r) {
    bool bad = false;
    for (int64_t d = 0; d < rows.dim; d += kPair) bad |= any_nonfinite(rows.at(group + r, d));
    if (!bad) continue;
    found |= 1u << r;
    Bf16* const end = packed + padded_dim(rows.dim) * kPair;
    for (Bf16* tile = packed; tile < end; tile += kTileBf16) {
      for (int64_t i = 0; i < kTile; ++i) {
        tile[(r % 16 * kTile + i) * 2 + r / 16] = 0;
        if (repeated) tile[(r % 16 * kTile + i) * 2 + 1] = 0;
      }
    }
  }
  return found;
}

/// Rows that hold an infinity or a NaN become zeros, and their bits are set in `nonfinite`, one
/// word for each group. Such rows are multiplied pair by pair, as their weight may be the 0 of a
/// key that the mask hides. Returns whether there are any. kRepeat: where a group has at most 16
/// rows, rows r + 16 are rows r once more.
template <bool kRepeat>
static bool pack_pairs(const Rows& rows, int64_t padded_rows, Bf16* to, uint32_t* nonfinite) {
  bool any = false;
  for (int64_t group = 0; group < padded_rows; group += kPair, ++nonfinite) {
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
    __m512i largest = _mm512_setzero_si512();
    Bf16* const packed = to;
    const bool repeated = kRepeat && rows.count - group <= 16;
    for (int64_t d = 0; d < rows.dim; d += kPair, to += 2 * kTileBf16) {
      __m512i a[16], b[16];
      rows.block(group, d, a);
      rows.block(repeated ? group : group + 16, d, b);
      STROBE_UNROLL for (int i = 0; i < 16; ++i) {
        largest = _mm512_max_epu16(largest, _mm512_and_si512(a[i], magnitude));
        largest = _mm512_max_epu16(largest, _mm512_and_si512(b[i], magnitude));
        _mm512_store_si512(to + i * kPair, _mm512_unpacklo_epi16(a[i], b[i]));
        _mm512_store_si512(to + kTileBf16 + i * kPair, _mm512_unpackhi_epi16(a[i], b[i]));
      }
    }
    *nonfinite = any_nonfinite(largest) ? remove_nonfinite(rows, group, repeated, packed) : 0;
    any |= *nonfinite != 0;
  }
  return any;
}

/// Columns 0 to 15 and 16 to 31 of a block of 32 from rows of its two tiles in pair order.
STROBE_AMX void pair_columns(__m512 low_tile, __m512 high_tile, __m512& first, __m512& second) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  first = _mm512_permutex2var_ps(low_tile, low, high_tile);
  second = _mm512_permutex2var_ps(low_tile, high, high_tile);
}

/// Where column `column` of a block of 32 stands in pair order: tile (0 or 1) * 16 + column of the
/// tile.
STROBE_AMX constexpr int64_t pair_column(int64_t column) {
  return column / 4 % 2 * kTile + column / 8 * 4 + column % 4;
}

/// sum += weight * row, where sum is a row of blocks of 2 x 2 tiles with columns in pair order.
static void add_row_to_tiles(const Rows& row, Bf16 weight, float* sum) {
  const __m512 w = set(to_float(weight));
  for (int64_t d = 0; d < row.dim; d += kPair, sum += 4 * kTileFloat) {
    alignas(64) Bf16 value[32], tiles[32];
    _mm512_store_si512(value, row.at(0, d));
    for (int64_t e = 0; e < 32; ++e) tiles[pair_column(e)] = value[e];
    for (int64_t h = 0; h < 2; ++h) {
      const auto* const half = reinterpret_cast<const __m256i*>(tiles + h * kTile);
      float* const at = sum + h * kTileFloat;
      store(at, _mm512_fmadd_ps(w, from_bf16(_mm256_load_si256(half)), load(at)));
    }
  }
}

/// 32 float32 values times factor, as bf16, to the first `count` places at `to`.
STROBE_AMX void write_block(__m512 first, __m512 second, __m512 factor, int64_t count, Bf16* to) {
  const auto x =
      (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(second, factor), _mm512_mul_ps(first, factor));
  _mm512_mask_storeu_epi16(to, lanes(0, count), x);
}

/// 32 values of a gradient's row, from its element `at` on, of which `dim` are the row's: first and
/// second times factor, added to what is there where the problem says so.
STROBE_AMX void write_gradient(const AttentionProblem& p, __m512 first, __m512 second,
                               __m512 factor, int64_t dim, std::byte* row, int64_t at) {
  const uint32_t lane = lanes(0, dim - at);
  if (p.grad_dtype == STROBE_FLOAT32) {
    float* const to = reinterpret_cast<float*>(row) + at;
    const auto low = static_cast<__mmask16>(lane), high = static_cast<__mmask16>(lane >> 16);
    __m512 a = _mm512_setzero_ps(), b = a;
    if (p.accumulate) {
      a = _mm512_maskz_loadu_ps(low, to);
      b = _mm512_maskz_loadu_ps(high, to + kTile);
    }
    _mm512_mask_storeu_ps(to, low, _mm512_fmadd_ps(first, factor, a));
    _mm512_mask_storeu_ps(to + kTile, high, _mm512_fmadd_ps(second, factor, b));
    return;
  }
  auto* const to = reinterpret_cast<Bf16*>(row) + at;
  if (!p.accumulate) return write_block(first, second, factor, dim - at, to);
  const __m512i old = _mm512_maskz_loadu_epi16(lane, to);
  first = _mm512_fmadd_ps(first, factor, from_bf16(_mm512_castsi512_si256(old)));
  second = _mm512_fmadd_ps(second, factor, from_bf16(_mm512_extracti64x4_epi64(old, 1)));
  write_block(first, second, set(1), dim - at, to);
}

/// A row of blocks of 2 x 2 tiles with columns in pair order, times `factor`, as `dim` bf16 values.
/// Returns whether all of the row is finite. own: zeros lose their signs, which keys without weight
/// may have given them (batch_invariant).
STROBE_AMX bool write_tile_row(const float* row, __m512 factor, int64_t dim, Bf16* to,
                               bool own = false) {
  __m512 check = _mm512_setzero_ps();
  for (int64_t d = 0; d < dim; d += kPair, row += 4 * kTileFloat) {
    __m512 first, second;
    pair_columns(load(row), load(row + kTileFloat), first, second);
    if (own) {
      first = _mm512_add_ps(first, _mm512_setzero_ps());
      second = _mm512_add_ps(second, _mm512_setzero_ps());
    }
    write_block(first, second, factor, dim - d, to + d);
    // 0 * x is NaN where x is not finite.
    check = _mm512_fmadd_ps(first, _mm512_setzero_ps(), check);
    check = _mm512_fmadd_ps(second, _mm512_setzero_ps(), check);
  }
  return _mm512_cmpneq_ps_mask(check, check) == 0;
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_PACK_H_
