// For tests: random blocks of pairs that are left out of all walks, in builds with
// STROBE_RANDOM_WALKS. The test gives the oracle the same rule, element by element, so that what it
// takes for the truth does not come from the walks themselves.
#ifndef STROBE_CORE_RANDOM_BLOCKS_H_
#define STROBE_CORE_RANDOM_BLOCKS_H_

#include <cstdint>

#include "core/macros.h"

namespace strobe {

/// Rows of a block: multiples of all tiles of the CPU's kernels, so that no tile has two lists.
inline constexpr int64_t kRandomBlockQ = 128, kRandomBlockK = 192;

/// Whether the queries [query_block * kRandomBlockQ, ...) of a head see none of the keys
/// [key_block * kRandomBlockK, ...). seed: 0: nothing is hidden. Else its low two bits say how much
/// is: a quarter to nearly all.
STROBE_INLINE constexpr bool hides_random_block(uint64_t seed, int64_t batch, int64_t head,
                                                int64_t query_block, int64_t key_block) {
  if (seed == 0) return false;
  uint64_t x = seed;
  for (const int64_t number : {batch, head, query_block, key_block}) {
    x = (x ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15;
    x ^= x >> 29;
  }
  x *= 0xBF58476D1CE4E5B9;
  constexpr uint64_t kOf16[] = {4, 8, 12, 15};
  return (x >> 60) < kOf16[seed & 3];
}

}  // namespace strobe

#endif  // STROBE_CORE_RANDOM_BLOCKS_H_
