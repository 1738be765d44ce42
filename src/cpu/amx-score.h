// What happens to a score between q.k and the softmax: scale, softcap, ALiBi; and dropout after it.
#ifndef STROBE_CPU_AMX_SCORE_H_
#define STROBE_CPU_AMX_SCORE_H_

#include "cpu/amx-math.h"

namespace strobe::cpu::amx {

/// From this size on a score or lse leaves rounding errors in the weights, where it is a product's
/// initial value, that bf16's no longer hide: a few times 2^-24 of it.
constexpr float kLargeScore = 1024;

/// Queries that see no more keys than these have their weights (and their gradients) split into two
/// bf16 values for the products. Few weights are large ones, and so are the results and their
/// errors: rounded once, weights would add as much to them as rounding the results does.
constexpr int64_t kFewKeys = 48;

struct ScoreRule {
  float scale;
  bool capped;  // by softcap
  Softcap softcap;
  float alibi;  // slope
  bool plain;   // scale only
  Dropout generator;
  uint32_t batch_head;
  bool dropout;

  STROBE_INLINE ScoreRule(const Context& c, int64_t batch, int64_t head)
      : scale(c.problem.scale),
        capped(c.problem.softcap > 0),
        softcap(c.problem.softcap),
        alibi(plain_nan(c.alibi_slope(batch, head))),
        plain(!capped && !c.alibi_slopes && !c.dropout.enabled()),
        generator(c.dropout),
        batch_head(static_cast<uint32_t>(batch * c.problem.heads + head)),
        dropout(c.dropout.enabled()) {}

  /// The score of products q.k. Lane l stands `distance - l` keys before its query's position.
  /// slope: the derivative of the score by the scaled product, where softcap makes it differ
  /// from 1.
  STROBE_INLINE __m512 apply(__m512 product, float distance, __m512& slope) const {
    const __m512 lane = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return apply(product, _mm512_sub_ps(set(distance), lane), slope);
  }
  STROBE_INLINE __m512 apply(__m512 product, __m512 distance, __m512& slope) const {
    __m512 s = _mm512_mul_ps(product, set(scale));
    slope = set(1);
    if (capped) s = softcap(s, slope);
    return alibi == 0 ? s : _mm512_fnmadd_ps(set(alibi), _mm512_abs_ps(distance), s);
  }

  /// Bit j of keep[i]: whether the weight of key `key + 32 i + j` is kept. key: a multiple of 32.
  STROBE_INLINE void keep_keys(int64_t query, int64_t key, uint32_t (&keep)[4]) const {
    // One lane, eight keys.
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i group = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(key / 8)), lane);
    const Philox16 bits =
        philox(generator, batch_head, _mm512_set1_epi32(static_cast<int>(query)), group);
    const __m512i threshold = _mm512_set1_epi16(static_cast<int16_t>(generator.threshold));
    uint64_t low = 0, high = 0;
    STROBE_UNROLL for (int w = 0; w < 4; ++w) {
      // Bits 2 l and 2 l + 1: keys 8 l + 2 w and the next.
      const uint32_t kept = _mm512_cmpge_epu16_mask(bits.word[w], threshold);
      low |= _pdep_u64(kept & 0xFFFF, uint64_t{0x0303030303030303} << (2 * w));
      high |= _pdep_u64(kept >> 16, uint64_t{0x0303030303030303} << (2 * w));
    }
    // A threshold of 2^16 does not fit 16 bits; p close to 1 drops everything.
    if (generator.threshold > 0xFFFF) low = high = 0;
    keep[0] = static_cast<uint32_t>(low);
    keep[1] = static_cast<uint32_t>(low >> 32);
    keep[2] = static_cast<uint32_t>(high);
    keep[3] = static_cast<uint32_t>(high >> 32);
  }

  /// Bit i of keep[j]: whether the weight of query `query + i` and key `key + j` is kept.
  STROBE_INLINE void keep_queries(int64_t query, int64_t key, uint32_t (&keep)[32]) const {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i threshold = _mm512_set1_epi32(static_cast<int>(generator.threshold));
    for (int64_t half = 0; half < 2; ++half) {
      const __m512i row =
          _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(query + half * kTile)), lane);
      for (int64_t group = 0; group < 4; ++group) {
        const Philox16 bits = philox(generator, batch_head, row,
                                     _mm512_set1_epi32(static_cast<int>(key / 8 + group)));
        for (int64_t j = 0; j < 8; ++j) {
          const __m512i word = bits.word[j / 2];
          const __m512i value = j % 2 ? _mm512_srli_epi32(word, 16)
                                      : _mm512_and_si512(word, _mm512_set1_epi32(0xFFFF));
          const uint32_t kept = _mm512_cmpge_epu32_mask(value, threshold);
          uint32_t& to = keep[group * 8 + j];
          to = half == 0 ? kept : to | kept << 16;
        }
      }
    }
  }
};

}  // namespace strobe::cpu::amx

#endif  // STROBE_CPU_AMX_SCORE_H_
