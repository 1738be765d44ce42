// Walks that leave out random blocks: lists, made of a mask's interval and of core/random_blocks.h.
// For tests alone: see walks.h.
#ifndef STROBE_CPU_RANDOM_WALKS_H_
#define STROBE_CPU_RANDOM_WALKS_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/list_walk.h"
#include "core/random_blocks.h"
#include "core/sequence.h"
#include "core/walk.h"

namespace strobe::cpu {

using RandomWalk = ListWalk<int64_t, 8>;

STROBE_INLINE RandomWalk random_key_walk(const Sequence& s, int64_t head, Range queries,
                                         int64_t size) {
  return RandomWalk::of(key_walk(s.mask, queries, size), [&](int64_t block, bool& some) {
    const Range keys{block * size, min64((block + 1) * size, s.mask.seqlen_k)};
    return strobe_random_blocks.hides_all(s.batch, head, queries, keys, some);
  });
}
STROBE_INLINE RandomWalk random_query_walk(const Sequence& s, int64_t head, Range keys,
                                           int64_t size) {
  return RandomWalk::of(query_walk(s.mask, keys, size), [&](int64_t block, bool& some) {
    const Range queries{block * size, min64((block + 1) * size, s.mask.seqlen_q)};
    return strobe_random_blocks.hides_all(s.batch, head, queries, keys, some);
  });
}

}  // namespace strobe::cpu

#endif  // STROBE_CPU_RANDOM_WALKS_H_
