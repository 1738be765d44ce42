// For tests: random blocks of pairs that are left out of all walks, in builds with
// STROBE_RANDOM_WALKS. The test gives the oracle the same rule, element by element, so that what it
// takes for the truth does not come from the walks themselves.
#ifndef STROBE_CORE_RANDOM_BLOCKS_H_
#define STROBE_CORE_RANDOM_BLOCKS_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "core/mask.h"

namespace strobe {

/// Which blocks of pairs are hidden: a plain struct, which tests in other languages fill too.
struct RandomBlocks {
  /// 0: nothing is hidden. Else its low two bits say how much is: a quarter to nearly all.
  uint64_t seed = 0;
  /// Rows of a block: multiples of all tiles of the kernels that go through these lists, so that
  /// no tile has two of them. As they stand here they are so for the CPU's.
  int64_t queries = 128, keys = 192;
  /// Whether the query heads of a sequence differ. Where they do not, kernels may take several
  /// heads through one walk that otherwise have walks of their own.
  int64_t by_head = 1;

  /// Whether a query of a sequence's head does not see a key.
  STROBE_INLINE constexpr bool hides(int64_t sequence, int64_t head, int64_t query,
                                     int64_t key) const {
    if (seed == 0) return false;
    const int64_t numbers[] = {sequence, by_head ? head : 0, query / queries, key / keys};
    uint64_t x = seed;
    for (const int64_t number : numbers) {
      x = (x ^ static_cast<uint64_t>(number)) * 0x9E3779B97F4A7C15;
      x ^= x >> 29;
    }
    x *= 0xBF58476D1CE4E5B9;
    constexpr uint64_t kOf16[] = {4, 8, 12, 15};
    return (x >> 60) < kOf16[seed & 3];
  }
  /// Whether no query of a range sees any key of one. some: becomes true where one does not see
  /// one.
  STROBE_INLINE constexpr bool hides_all(int64_t sequence, int64_t head, Range of_queries,
                                         Range of_keys, bool& some) const {
    bool all = true;
    for (int64_t q = of_queries.begin / queries * queries; q < of_queries.end; q += queries) {
      for (int64_t k = of_keys.begin / keys * keys; k < of_keys.end; k += keys) {
        const bool hidden = hides(sequence, head, q, k);
        all &= hidden;
        some |= hidden;
      }
    }
    return all;
  }
};

extern "C" {
/// Of the launches that follow.
extern __attribute__((visibility("default"))) RandomBlocks strobe_random_blocks;
}

}  // namespace strobe

#endif  // STROBE_CORE_RANDOM_BLOCKS_H_
