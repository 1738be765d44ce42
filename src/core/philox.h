// Dropout's random bits: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011).
//
// A weight's bits depend on (seed, offset, batch, head, row, column) alone, so that forward and
// backward, CPU and GPU and every tile shape agree; and those of a part of a problem with the
// whole, as batch, head, row and column are the whole's. One call of the generator serves eight
// columns of one row, 16 bits each: word (column / 2) % 4, low half for even columns. On the GPU
// that is one 8-column block of an mma accumulator.
#ifndef STROBE_CORE_PHILOX_H_
#define STROBE_CORE_PHILOX_H_

#include <cstdint>

#include "core/macros.h"

namespace strobe {

struct Philox4 {
  uint32_t word[4];
};

inline constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
inline constexpr int kPhiloxRounds = 10;

STROBE_INLINE constexpr Philox4 philox4x32(Philox4 counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxM0} * counter.word[0];
    const uint64_t p1 = uint64_t{kPhiloxM1} * counter.word[2];
    counter = {{static_cast<uint32_t>(p1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(p1),
                static_cast<uint32_t>(p0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<uint32_t>(p0)}};
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return counter;
}

/// The generator of one launch: key and the part of the counter that is the same everywhere.
struct Dropout {
  uint32_t key0 = 0, key1 = 0;
  uint32_t counter3 = 0;
  uint32_t threshold = 0;  // a weight is kept when its 16 bits are at least this
  float keep_scale = 1;    // 1 / (1 - p)
  // Where the problem lies in the whole: the row and the column that its first ones are, the latter
  // also by 8, and the head of its first (batch, head); and how many heads the whole has.
  uint32_t first_row = 0, first_column = 0, first_group = 0, first_head = 0;
  uint32_t heads = 0;

  STROBE_INLINE constexpr bool enabled() const { return threshold > 0 || keep_scale != 1; }

  STROBE_INLINE static constexpr Dropout make(float p, uint64_t seed, uint64_t offset) {
    Dropout d;
    if (!(p > 0)) return d;
    d.key0 = static_cast<uint32_t>(seed);
    // The counter has no room for the offset's high half; it goes into the key, spread by the Weyl
    // constant.
    d.key1 = static_cast<uint32_t>(seed >> 32) ^ (static_cast<uint32_t>(offset >> 32) * kPhiloxW0);
    d.counter3 = static_cast<uint32_t>(offset);
    d.threshold = static_cast<uint32_t>(p * 65536.0f + 0.5f);
    d.keep_scale = 1.0f / (1.0f - p);
    return d;
  }

  /// That of a problem, which may be a part of a larger one.
  template <typename Problem>
  STROBE_INLINE static constexpr Dropout of(const Problem& p, uint64_t seed, uint64_t offset) {
    Dropout d = make(p.dropout_p, seed, offset);
    d.first_row = static_cast<uint32_t>(p.dropout_first_query);
    d.first_column = static_cast<uint32_t>(p.dropout_first_key);
    d.first_group = d.first_column / 8;
    d.first_head = static_cast<uint32_t>(p.dropout_first_head);
    d.heads = static_cast<uint32_t>(p.dropout_heads);
    return d;
  }

  /// The counter's number of a head of the problem: it counts through all sequences of the whole.
  STROBE_INLINE constexpr uint32_t batch_head(int64_t batch, int64_t head) const {
    return static_cast<uint32_t>(batch) * heads + static_cast<uint32_t>(head) + first_head;
  }

  /// Bits of columns 8 * group to 8 * group + 7 of the problem, whose first column is one of whole
  /// groups.
  STROBE_INLINE constexpr Philox4 bits(uint32_t batch_head, uint32_t row, uint32_t group) const {
    return philox4x32({{first_group + group, first_row + row, batch_head, counter3}}, key0, key1);
  }
  /// Likewise of one weight.
  STROBE_INLINE constexpr bool keep(uint32_t batch_head, uint32_t row, uint32_t column) const {
    const uint32_t word = bits(batch_head, row, column / 8).word[column / 2 % 4];
    return (column % 2 ? word >> 16 : word & 0xFFFFu) >= threshold;
  }
};

}  // namespace strobe

#endif  // STROBE_CORE_PHILOX_H_
