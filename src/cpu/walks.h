// The walks of the CPU's kernels: which blocks a tile goes through, asked for by the sequence, the
// head and the tile's rows. Kernels go from place to place and ask the walk for the block
// (core/walk.h), so that walks of another type can stand here.
//
// With STROBE_RANDOM_WALKS, which tests build with, they are lists that leave out random blocks.
#ifndef STROBE_CPU_WALKS_H_
#define STROBE_CPU_WALKS_H_

#include "core/sequence.h"
#include "core/walk.h"
#if STROBE_RANDOM_WALKS
#include "cpu/random_walks.h"
#endif

namespace strobe::cpu {

#if STROBE_RANDOM_WALKS

using BlockWalk = RandomWalk;

STROBE_INLINE BlockWalk keys_of(const Sequence& s, int64_t head, Range queries, int64_t size) {
  return random_key_walk(s, head, queries, size);
}
STROBE_INLINE BlockWalk queries_of(const Sequence& s, int64_t head, Range keys, int64_t size) {
  return random_query_walk(s, head, keys, size);
}
STROBE_INLINE bool leaves_out(const Sequence& s, int64_t head, int64_t query, Range keys) {
  bool some = false;
  return strobe_random_blocks.hides_all(s.batch, head, {query, query + 1}, keys, some);
}

#else

using BlockWalk = IntervalWalk<int64_t>;

/// The blocks of `size` keys that some of the queries of a head see.
STROBE_INLINE BlockWalk keys_of(const Sequence& s, int64_t, Range queries, int64_t size) {
  return key_walk(s.mask, queries, size);
}
/// The blocks of `size` queries of a head that see some of the keys.
STROBE_INLINE BlockWalk queries_of(const Sequence& s, int64_t, Range keys, int64_t size) {
  return query_walk(s.mask, keys, size);
}
/// Whether the walk of a query leaves out a block of keys although the mask lets the query see some
/// of them. For kernels that take rows of several heads through one block.
STROBE_INLINE bool leaves_out(const Sequence&, int64_t, int64_t, Range) { return false; }

#endif

}  // namespace strobe::cpu

#endif  // STROBE_CPU_WALKS_H_
