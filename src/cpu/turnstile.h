// The order in which key blocks add to a query tile's dQ.
//
// Every (batch, head, query tile) has a counter of the key blocks that have added to it, its turn.
// A key block adds when all key blocks before it have added. The order of the additions, and with
// it every bit of dQ, is then the same whatever the threads do. Work items are handed out with key
// blocks ascending, so that a thread that waits, waits for an item that another thread already
// runs: there is no deadlock.
#ifndef STROBE_CPU_TURNSTILE_H_
#define STROBE_CPU_TURNSTILE_H_

#include <sched.h>

#include "core/walk.h"
#include "cpu/kernels.h"

namespace strobe::cpu {

/// One key block's visit to one query tile.
struct Visit {
  bool none;         // the tile sees no key of the block
  bool first, last;  // of all visits to the tile
  uint32_t order;    // 0 for the first
};

STROBE_INLINE Visit visit_of(const BackwardContext& context, const Mask& mask, Range q_tile,
                             int64_t k_begin) {
  const IntervalWalk<int64_t> blocks = key_walk(mask, q_tile, context.block_k);
  const int64_t block = k_begin / context.block_k;
  if (!blocks.visits(block)) return {true, false, false, 0};
  return {false, block == blocks.begin, block == blocks.end - 1,
          static_cast<uint32_t>(block - blocks.begin)};
}

STROBE_INLINE uint32_t* turn_of(const BackwardContext& context, int64_t batch, int64_t head,
                                int64_t q_begin) {
  // Packed sequences' counters are counted by rows, so that their room does not grow with the bound
  // of the lengths. Each sequence has one counter more than the rows before it fill, so that two
  // sequences never share one.
  const int64_t first = context.sequences.cu_q
                            ? context.sequences.cu_q[batch] / context.tile_q + batch
                            : batch * ceil_div(context.problem.seqlen_q, context.tile_q);
  return context.turn + head * context.turn_tiles + first + q_begin / context.tile_q;
}

STROBE_INLINE void wait_turn(const uint32_t* turn, uint32_t order) {
  for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != order; ++spins) {
    // The thread waited for may have lost its core: past a microsecond or so, give it ours.
    if (spins >= 64) {
      sched_yield();
      continue;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

STROBE_INLINE void pass_turn(uint32_t* turn, uint32_t order) {
  __atomic_store_n(turn, order + 1, __ATOMIC_RELEASE);
}

}  // namespace strobe::cpu

#endif  // STROBE_CPU_TURNSTILE_H_
