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

/// A list that answers what walks.h's own walks answer.
struct RandomWalk : ListWalk<int64_t, 8> {
  STROBE_INLINE int64_t after(int64_t place) const { return place + 1; }
  STROBE_INLINE int64_t places_before(int64_t place) const { return place - begin; }
  STROBE_INLINE RandomWalk within(int64_t first, int64_t last) const {
    return {ListWalk::within(first, last)};
  }
  STROBE_INLINE bool is_convex() const { return kConvex; }
  STROBE_INLINE bool has_full() const {
    for (int64_t place = begin; place < end; ++place) {
      if (is_full(place)) return true;
    }
    return false;
  }
};

STROBE_INLINE RandomWalk random_key_walk(const Sequence& s, int64_t head, Range queries,
                                         int64_t size) {
  return {RandomWalk::of(key_walk(s.mask, queries, size), [&](int64_t block, bool& some) {
    const Range keys{block * size, min64((block + 1) * size, s.mask.seqlen_k)};
    return strobe_random_blocks.hides_all(s.batch, head, queries, keys, some);
  })};
}
STROBE_INLINE RandomWalk random_query_walk(const Sequence& s, int64_t head, Range keys,
                                           int64_t size) {
  return {RandomWalk::of(query_walk(s.mask, keys, size), [&](int64_t block, bool& some) {
    const Range queries{block * size, min64((block + 1) * size, s.mask.seqlen_q)};
    return strobe_random_blocks.hides_all(s.batch, head, queries, keys, some);
  })};
}

}  // namespace strobe::cpu

#endif  // STROBE_CPU_RANDOM_WALKS_H_
