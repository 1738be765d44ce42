// The order in which key blocks add to a query tile's dQ: that of their places in the tile's walk.
//
// Every (batch, head, query tile) has a counter of the key blocks that have added to it, its turn.
// A key block adds when all key blocks before it have added. The order of the additions, and with
// it every bit of dQ, is then the same whatever the threads do. Work items are handed out with key
// blocks ascending, as the places are, so that a thread that waits, waits for an item that another
// thread already runs: there is no deadlock.
//
// The first addition is stored, so that nobody has to clear the sum before: where sequences have
// one key block, clearing takes 3 % of the time at 64 tokens of width 64, and 1.5 % at 128. The
// last one is written as the result.
#ifndef STROBE_CPU_TURNSTILE_H_
#define STROBE_CPU_TURNSTILE_H_

#include <sched.h>

#include "cpu/kernels.h"
#include "cpu/walks.h"

namespace strobe::cpu {

/// Which of the additions to a query tile's dQ a key block makes.
struct Addition {
  uint32_t order;    // 0 for the first
  bool first, last;  // of all
};

/// place: the block's, in the tile's walk of the plan's key blocks.
STROBE_INLINE Addition addition_at(const BlockWalk& walk, int64_t place) {
  return {static_cast<uint32_t>(walk.places_before(place)), place == walk.begin,
          place == walk.end - 1};
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
