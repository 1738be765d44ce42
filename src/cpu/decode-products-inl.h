// The two products of decoding: q.k of a few rows and keys, and weights times V.
//
// Layout. The dimensions of a head lie along the lanes, so that K and V are read as they lie in
// memory, each vector once for kDecodeMicroRows rows. Values of two bytes are read a vector of
// 4-byte words at a time; of bf16, the lower and the upper halves of the words are the even and the
// odd dimensions, which Q and O keep apart as well: no shuffle is needed, and the order is undone
// when O is written. So it is with the halves of q4_0's bytes (elements-inl.h). Codes of int8 and
// float8 are multiplied as they are: their row's scale multiplies the score, or the weight.
#ifndef STROBE_CPU_DECODE_PRODUCTS_INL_H_
#define STROBE_CPU_DECODE_PRODUCTS_INL_H_

#include "cpu/decode.h"
#include "cpu/elements-inl.h"

namespace strobe::cpu::STROBE_ISA {

constexpr int kDecodeMicroRows = 4;
// Sums that a step of either product keeps: 16 of AVX-512's and NEON's 32 registers, 8 of
// AVX2's 16.
#if HWY_TARGET == HWY_AVX2
constexpr int kDecodeMicroKeys = 2, kDecodeMicroPairs = 1;
#else
constexpr int kDecodeMicroKeys = 4, kDecodeMicroPairs = 2;
#endif

/// Calls body(Rows<rows>()) for `rows` = 1 to kDecodeMicroRows.
template <int kRows>
using Rows = std::integral_constant<int, kRows>;
template <typename Body>
STROBE_SIMD void for_rows(int64_t rows, const Body& body) {
  static_assert(kDecodeMicroRows == 4);
  if (rows >= 4) {
    body(Rows<4>());
  } else if (rows == 3) {
    body(Rows<3>());
  } else if (rows == 2) {
    body(Rows<2>());
  } else {
    body(Rows<1>());
  }
}

/// A row of n values (a multiple of kPair) times `factor`, in the order in which load_pair gives
/// them, and back.
template <typename T>
STROBE_SIMD void order_row(const float* from, int64_t n, float factor, float* to) {
  for (int64_t i = 0; i < n; i += kPair) {
    VF first, second;
    take_pair<T>(from, i, first, second);
    store(hn::Mul(first, set(factor)), to + i);
    store(hn::Mul(second, set(factor)), to + i + kLanes);
  }
}
template <typename T>
STROBE_SIMD void restore_row(const float* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += kPair) {
    put_pair<T>(load(from + i), load(from + i + kLanes), i, to);
  }
}

#if HWY_TARGET != HWY_SCALAR
/// Adds the halves of a vector until kTo lanes are left.
template <int kTo, typename V>
STROBE_SIMD auto fold(V v) {
  using D = hn::DFromV<V>;
  if constexpr (hn::MaxLanes(D()) == kTo) {
    return v;
  } else {
    const hn::Half<D> half;
    return fold<kTo>(hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}
/// [a0 + a2, b0 + b2, a1 + a3, b1 + b3] of each four lanes.
STROBE_SIMD VF add_crosswise(VF a, VF b) {
  return hn::Add(hn::InterleaveLower(f32, a, b), hn::InterleaveUpper(f32, a, b));
}
#endif

/// to[i] = sum of the lanes of v[i].
STROBE_SIMD void store_sums(const VF (&v)[kDecodeMicroKeys], float* to) {
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < kDecodeMicroKeys; ++i) to[i] = hn::GetLane(v[i]);
#else
  if constexpr (kDecodeMicroKeys == 2) {
    const auto sums = fold<2>(add_crosswise(v[0], v[1]));
    hn::StoreU(sums, hn::DFromV<decltype(sums)>(), to);
  } else {
    const hn::RepartitionToWide<F> wide;
    const auto ab = hn::BitCast(wide, add_crosswise(v[0], v[1]));
    const auto cd = hn::BitCast(wide, add_crosswise(v[2], v[3]));
    const VF sums = hn::Add(hn::BitCast(f32, hn::InterleaveLower(wide, ab, cd)),
                            hn::BitCast(f32, hn::InterleaveUpper(wide, ab, cd)));
    const auto four = fold<4>(sums);
    hn::StoreU(four, hn::DFromV<decltype(four)>(), to);
  }
#endif
}

/// Rows of memory that will be read soon, fetched a few lines at a time.
struct Ahead {
  const std::byte* const* rows;
  int64_t count, bytes;  // of a row
  int64_t row = 0;       // after the one that [at, end) is left of
  const std::byte *at = nullptr, *end = nullptr;

  STROBE_INLINE int64_t lines() const { return count * ceil_div(bytes, 64); }
  STROBE_INLINE void fetch(int64_t lines) {
    for (; lines > 0; --lines) {
      if (at >= end) {
        if (row == count) return;
        at = rows[row++];
        end = at + bytes;
      }
      __builtin_prefetch(at, 0, 2);
      at += 64;
    }
  }
};

/// Keys that a line is fetched ahead once more on a CPU that drops fetches (drops_fetches). It also
/// drops those that find too many others waiting for memory. A second fetch costs little where the
/// line has come, and saves most of a wait where it has not.
constexpr int64_t kAgainKeys = 16;

STROBE_INLINE void fetch_again(const std::byte* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}
/// For a product with V that is at key j: `bytes` of the key that is kAgainKeys further on; at the
/// end of the keys, of one of the first, in the columns behind these.
STROBE_INLINE void fetch_values_again(const std::byte* const* v, int64_t offset, int64_t j,
                                      Range keys, int64_t bytes) {
  int64_t n = j + kAgainKeys;
  if (n >= keys.end) {
    n -= keys.size();
    offset += bytes;
  }
  fetch_again(v[min64(n, keys.end - 1)] + offset, bytes);
}

/// The least size of a page, and the bytes of K (and of V) whose pages are opened together.
constexpr int64_t kPageBytes = 4096, kOpenBytes = 128 * 1024;

/// Loads a byte for nothing but its page. A CPU that drops fetches (drops_fetches) cannot drop a
/// load, and waits for many loads at once hardly longer than for one.
STROBE_INLINE void open_page(const std::byte* at) {
  const auto byte = static_cast<uint32_t>(*at);
  asm volatile("" : : "r"(byte));  // not to be optimised away
}

/// scores[r][i] = q[r] . k[i] of kRows rows of Q and kDecodeMicroKeys keys. dim: of a row of q, a
/// multiple of kPair; values: that a row of K has, which is dim but where kLoadsParts.
template <int kRows, typename T>
static void score_keys(const float* q, int64_t dim, int64_t values,
                       const std::byte* const (&k)[kDecodeMicroKeys], float* scores) {
  constexpr int kKeys = kDecodeMicroKeys;
  VF sum[kRows][kKeys];
  STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
    STROBE_UNROLL for (int j = 0; j < kKeys; ++j) sum[r][j] = hn::Zero(f32);
  }
  const auto add_products = [&](int64_t i, const VF(&value)[kKeys]) __attribute__((always_inline)) {
    STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
      const VF x = load(q + r * dim + i);
      STROBE_UNROLL for (int j = 0; j < kKeys; ++j) sum[r][j] = hn::MulAdd(value[j], x, sum[r][j]);
    }
  };
  VF first[kKeys], second[kKeys];
  int64_t i = 0;
  for (; i + kPair <= values; i += kPair) {
    STROBE_UNROLL for (int j = 0; j < kKeys; ++j) load_pair<T>(k[j], i, first[j], second[j]);
    add_products(i, first);
    add_products(i + kLanes, second);
  }
  if constexpr (kLoadsParts<T>) {
    if (i < values) {
      STROBE_UNROLL for (int j = 0; j < kKeys; ++j) {
        load_part<T>(k[j], i, values - i, first[j], second[j]);
      }
      add_products(i, first);
      const bool has_second = ElementOf<T>::kOrder == PairOrder::kEvenAndOdd || values - i > kLanes;
      if (has_second) add_products(i + kLanes, second);
    }
  }
  STROBE_UNROLL for (int r = 0; r < kRows; ++r) store_sums(sum[r], scores + r * kDecodeKeys);
}

/// scores[r][i] = q[r] . k[i] of kGroups vectors of keys, each a sum over ascending dimensions, as
/// gemm-inl.h adds up. q: [rows][dim]; dim: a multiple of kLanes. fetch(i): called with the
/// dimension, for what is to be fetched meanwhile.
template <int kGroups, typename T, typename Fetch>
static void score_in_order(const float* q, int64_t rows, int64_t dim, const std::byte* const* k,
                           float* scores, const Fetch& fetch) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    fetch(i);
    for (int64_t g = 0; g < kGroups; ++g) {
      VF key[kLanes];
      STROBE_UNROLL for (int64_t j = 0; j < kLanes; ++j) {
        key[j] = load_as_float(reinterpret_cast<const T*>(k[g * kLanes + j]) + i);
      }
      transpose_lanes(key);
      // The sums of other vectors of keys do not wait for this one's.
      for (int64_t r = 0; r < rows; ++r) {
        float* const to = scores + r * kDecodeKeys + g * kLanes;
        VF sum = i == 0 ? hn::Zero(f32) : load(to);
        const float* const x = q + r * dim + i;
        STROBE_UNROLL for (int64_t j = 0; j < kLanes; ++j) {
          sum = hn::MulAdd(key[j], set(x[j]), sum);
        }
        store(sum, to);
      }
    }
  }
}

#if HWY_TARGET == HWY_AVX3
/// A row of n bf16 values (a multiple of kPair), which are float32 here, times 1, 0 or -1, as bf16:
/// to has two values in each float.
STROBE_SIMD void pack_row(const float* from, int64_t n, float factor, float* to) {
  for (int64_t i = 0; i < n; i += kPair) {
    VF even, odd;
    hn::LoadInterleaved2(f32, from + i, even, odd);
    const VU low = hn::ShiftRight<16>(hn::BitCast(u32, hn::Mul(even, set(factor))));
    const VU high = hn::And(hn::BitCast(u32, hn::Mul(odd, set(factor))), hn::Set(u32, 0xFFFF0000u));
    store(hn::BitCast(f32, hn::Or(low, high)), to + i / 2);
  }
}

/// score_keys of rows that pack_row made: products of bf16 pairs, added in float32. A value that is
/// smaller than the least normal number counts as 0.
template <int kRows>
__attribute__((target("avx512bf16"))) static void score_packed_keys(
    const float* q, int64_t dim, int64_t values, const std::byte* const (&k)[kDecodeMicroKeys],
    float* scores) {
  constexpr int kKeys = kDecodeMicroKeys;
  __m512 sum[kRows][kKeys];
  STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
    STROBE_UNROLL for (int j = 0; j < kKeys; ++j) sum[r][j] = _mm512_setzero_ps();
  }
  for (int64_t i = 0; i < values; i += kPair) {
    __m512i key[kKeys];
    const int64_t past = max64(i + kPair - values, 0);  // the row's end
    const __mmask32 some = ~__mmask32{0} >> past;
    STROBE_UNROLL for (int j = 0; j < kKeys; ++j) {
      key[j] = _mm512_maskz_loadu_epi16(some, k[j] + 2 * i);
    }
    STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
      const __m512i x = _mm512_load_si512(q + r * dim + i / 2);
      STROBE_UNROLL for (int j = 0; j < kKeys; ++j) {
        sum[r][j] = _mm512_dpbf16_ps(sum[r][j], reinterpret_cast<__m512bh>(key[j]),
                                     reinterpret_cast<__m512bh>(x));
      }
    }
  }
  STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
    VF v[kKeys];
    STROBE_UNROLL for (int j = 0; j < kKeys; ++j) v[j] = VF{sum[r][j]};
    store_sums(v, scores + r * kDecodeKeys);
  }
}
#endif

/// out[r][...] = weights[r] V for kRows rows, the keys `keys` of the block and kPairs pairs from
/// `column` on. part: how many values the last of these pairs has, where kPart says that the rows
/// of V end within it. head: bytes from where v points to the head's row. alpha: what out is
/// multiplied by before the products are added to it, for each row; null: it is overwritten.
template <int kRows, int kPairs, typename T, bool kPart>
static void weigh_values(const float* weights, const std::byte* const* v, int64_t head,
                         int64_t column, int64_t part, Range keys, float* out, int64_t dim_v,
                         const float* alpha, Ahead& ahead, int64_t lines, bool again) {
  constexpr int kWhole = kPart ? kPairs - 1 : kPairs;
  VF sum[kRows][2 * kPairs];
  STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
    STROBE_UNROLL for (int e = 0; e < 2 * kPairs; ++e) sum[r][e] = hn::Zero(f32);
  }
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    const std::byte* const row = v[j] + head;
    ahead.fetch(lines);
    if (again) {
      const int64_t values =
          kPart ? kWhole * kPair + part : max64(kPairs * kPair, ElementOf<T>::kValues);
      fetch_values_again(v, head + bytes_of<T>(column), j, keys, bytes_of<T>(values));
    }
    VF value[2 * kPairs];
    STROBE_UNROLL for (int e = 0; e < kWhole; ++e) {
      load_pair<T>(row, column + e * kPair, value[2 * e], value[2 * e + 1]);
    }
    if constexpr (kPart) {
      load_part<T>(row, column + kWhole * kPair, part, value[2 * kWhole], value[2 * kWhole + 1]);
    }
    STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
      const VF w = set(weights[r * kDecodeKeys + j]);
      STROBE_UNROLL for (int e = 0; e < 2 * kPairs; ++e) {
        sum[r][e] = hn::MulAdd(value[e], w, sum[r][e]);
      }
    }
  }
  STROBE_UNROLL for (int r = 0; r < kRows; ++r) {
    STROBE_UNROLL for (int e = 0; e < 2 * kPairs; ++e) {
      float* const to = out + r * dim_v + e * kLanes;
      if (alpha) sum[r][e] = hn::MulAdd(load(to), set(alpha[r]), sum[r][e]);
      store(sum[r][e], to);
    }
  }
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_DECODE_PRODUCTS_INL_H_
