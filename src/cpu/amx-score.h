// The score and dropout in vectors of 16; score.h says what they are.
#ifndef STROBE_CPU_AMX_SCORE_H_
#define STROBE_CPU_AMX_SCORE_H_

#include "cpu/amx-math.h"
#include "cpu/score.h"
#include "cpu/walks.h"

namespace strobe::cpu::amx {

/// Whether a tile's weights are split. walk: the tile's. By a rule its queries see few keys
/// together, or many each, but for a few rows; with a mask as data any of them may see few.
STROBE_AMX bool splits_weights(const Context& c, const Sequence& s, int64_t head, Range queries,
                               const BlockWalk& walk) {
  return s.mask.kv_range(queries).size() <= kFewKeys ||
         (c.mask && data_leaves_few_keys(c, s, head, queries, walk));
}

struct Score {
  __m512 value;
  __m512 derivative;  // of the value by the scaled product
};

/// 16 integers from `first` on.
STROBE_AMX __m512i count_from(int64_t first) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)), lane);
}
STROBE_AMX __m512i same(int64_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }

/// The scores of one (batch, head). The lanes may be queries or keys.
struct Scorer {
  const ScoreOptions options;
  const Softcap softcap;
  const float slope;

  STROBE_INLINE explicit Scorer(const ScoreOptions& r)
      : options(r), softcap(r.softcap), slope(canonical_nan(r.slope)) {}

  /// product: q.k. position: the key position that the query stands at.
  STROBE_INLINE Score operator()(__m512 product, __m512i position, __m512i key) const {
    Score s{_mm512_mul_ps(product, set(options.scale)), set(1)};
    if (options.softcap > 0) s.value = softcap(s.value, s.derivative);
    if (slope != 0) {
      // The distance is an integer until here: forward and backward round it alike.
      const __m512 distance = _mm512_cvtepi32_ps(_mm512_abs_epi32(_mm512_sub_epi32(position, key)));
      s.value = _mm512_fnmadd_ps(set(slope), distance, s.value);
    }
    return s;
  }
};

/// The bias of those of 16 keys from `key` on that are lanes of `lane`. Nothing is read of others.
STROBE_AMX __m512 load_bias(const BiasRow& row, int64_t key, __mmask16 lane) {
  alignas(64) std::byte some[kTile * sizeof(float)];
  const std::byte* from = row.at(key);
  if (row.step != 1) {
    const int64_t size = element_size(row.dtype);
    for (int64_t i = 0; i < kTile; ++i) {
      if (lane >> i & 1) __builtin_memcpy(some + i * size, row.at(key + i), size_t(size));
    }
    from = some;
  }
  if (row.dtype == STROBE_FLOAT32) {
    const __m512 x = _mm512_maskz_loadu_ps(lane, from);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);  // see canonical_nan
    return _mm512_mask_mov_ps(x, nan, set(__builtin_nanf("")));
  }
  const __m256i x = _mm256_maskz_loadu_epi16(lane, from);
  if (row.dtype == STROBE_FLOAT16) return _mm512_cvtph_ps(x);
  return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
/// Lanes that a bias does not hide.
STROBE_AMX __mmask16 shown(__m512 bias) {
  return _mm512_cmp_ps_mask(bias, set(-kInfinity), _CMP_NEQ_UQ);
}
/// A score and its bias. -inf hides the pair, even where q.k is NaN.
STROBE_AMX __m512 add_bias(__m512 score, __m512 bias) {
  return _mm512_mask_add_ps(set(-kInfinity), shown(bias), score, bias);
}

struct PhiloxLanes {
  using V = __m512i;
  STROBE_INLINE static __m512i set(uint32_t word) {
    return _mm512_set1_epi32(static_cast<int>(word));
  }
  STROBE_INLINE static __m512i xor3(__m512i a, __m512i b, __m512i c) {
    return _mm512_ternarylogic_epi32(a, b, c, 0x96);
  }
  STROBE_INLINE static void multiply(__m512i a, uint32_t by, __m512i& high, __m512i& low) {
    const __m512i m = set(by);
    const __m512i even = _mm512_mul_epu32(a, m);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), m);
    high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  }
};

/// Dropout::bits for 16 lanes of (query, group of 8 keys). The problem begins with a whole group.
struct DropoutBits {
  __m512i word[4];
};
STROBE_AMX DropoutBits dropout_bits(const ScoreOptions& options, __m512i query, __m512i group) {
  const Dropout& generator = options.generator;
  DropoutBits bits{{_mm512_add_epi32(group, PhiloxLanes::set(generator.first_group)),
                    _mm512_add_epi32(query, PhiloxLanes::set(generator.first_row)),
                    PhiloxLanes::set(options.batch_head), PhiloxLanes::set(generator.counter3)}};
  philox_rounds<PhiloxLanes>(options.generator, bits.word);
  return bits;
}

/// Bit j of kept[i]: whether the weight of key `key + 32 i + j` is kept. key: a multiple of 32.
STROBE_AMX void kept_keys(const ScoreOptions& options, int64_t query, int64_t key,
                          uint32_t (&kept)[4]) {
  // One lane, eight keys.
  const DropoutBits bits = dropout_bits(options, same(query), count_from(key / 8));
  const __m512i threshold = _mm512_set1_epi16(static_cast<int16_t>(options.generator.threshold));
  uint64_t low = 0, high = 0;
  STROBE_UNROLL for (int w = 0; w < 4; ++w) {
    // Bits 2 l and 2 l + 1: keys 8 l + 2 w and the next.
    const uint32_t keep = _mm512_cmpge_epu16_mask(bits.word[w], threshold);
    low |= _pdep_u64(keep & 0xFFFF, uint64_t{0x0303030303030303} << (2 * w));
    high |= _pdep_u64(keep >> 16, uint64_t{0x0303030303030303} << (2 * w));
  }
  // A threshold of 2^16 does not fit 16 bits; p close to 1 drops everything.
  if (options.generator.threshold > 0xFFFF) low = high = 0;
  kept[0] = static_cast<uint32_t>(low);
  kept[1] = static_cast<uint32_t>(low >> 32);
  kept[2] = static_cast<uint32_t>(high);
  kept[3] = static_cast<uint32_t>(high >> 32);
}

/// Bit i of kept[j]: whether the weight of query `query + i` and key `key + j` is kept.
STROBE_AMX void kept_queries(const ScoreOptions& options, int64_t query, int64_t key,
                             uint32_t (&kept)[32]) {
  const __m512i threshold = _mm512_set1_epi32(static_cast<int>(options.generator.threshold));
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t group = 0; group < 4; ++group) {
      const DropoutBits bits =
          dropout_bits(options, count_from(query + half * kTile), same(key / 8 + group));
      for (int64_t j = 0; j < 8; ++j) {
        const __m512i word = bits.word[j / 2];
        const __m512i value =
            j % 2 ? _mm512_srli_epi32(word, 16) : _mm512_and_si512(word, _mm512_set1_epi32(0xFFFF));
        const uint32_t keep = _mm512_cmpge_epu32_mask(value, threshold);
        uint32_t& to = kept[group * 8 + j];
        to = half == 0 ? keep : to | keep << 16;
      }
    }
  }
}

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_SCORE_H_
