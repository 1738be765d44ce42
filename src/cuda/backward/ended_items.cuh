// Which work items have ended, in a deterministic launch under a mask as data.
//
// An item's rank among those that add to dQ of a tile is a word of such a mask
// (backward/masked_steps.cuh), and words that strobe_mask_pack did not write may name a turn that
// never comes: ranks that no other item goes before, or lists by queries and by keys that differ.
// So an item waits for its turn no longer than until all items have ended that could go before it:
// those of its track (backward/order.cuh) with the key blocks before its own, which were drawn
// earlier. Whoever was drawn first of all that have not ended waits for nobody then, and ends; so
// does the launch.
//
// Of a packed mask the turn has come by then: what goes before it has been added, whether or not
// the counter says so yet. (Whose report comes late sets a counter back, at which the next item
// waits a while longer.) So the order of additions, and with it every bit, is what it is without.
//
// Each counter of a tile has words of its own for each track, behind the counters of all tiles: how
// many of the track's items have ended, from the first one on; and of each item whether it has.
#ifndef STROBE_CUDA_BACKWARD_ENDED_ITEMS_CUH_
#define STROBE_CUDA_BACKWARD_ENDED_ITEMS_CUH_

#include <cstdint>

#include "cuda/backward/scratch.cuh"
#include "cuda/ptx/global_access.h"

namespace strobe::cuda {

/// Those of a track, for one of the counters that a tile has. The words of the counters lie beside
/// each other, so that a warp gets to its own by an addition.
template <int kCounters>
struct EndedItems {
  uint32_t* words;

  /// The number, among all from the counters on, of a track's first word. (Words that a GPU has
  /// memory for have numbers of 32 bits.)
  __device__ __forceinline__ static uint32_t first_word(const CommonParams& p,
                                                        const BackwardScratch& s, uint32_t parts,
                                                        int32_t batch, int32_t head_kv,
                                                        int32_t part) {
    const uint32_t track = (static_cast<uint32_t>(batch) * static_cast<uint32_t>(p.heads_kv) +
                            static_cast<uint32_t>(head_kv)) *
                               parts +
                           static_cast<uint32_t>(part);
    return (static_cast<uint32_t>(p.heads) * s.tiles + track * (s.key_tiles + 1)) * kCounters;
  }
  __device__ __forceinline__ static EndedItems of(const BackwardScratch& s, uint32_t first_word,
                                                  int counter = 0) {
    return {s.additions + (first_word + static_cast<uint32_t>(counter))};
  }
  /// Whether all items before this one have, each item being a key block. (Who polls need not order
  /// anything while the answer is no.)
  __device__ __forceinline__ bool all_before(uint32_t block) const {
    return ptx::load_relaxed(words) >= block && ptx::load_acquire(words) >= block;
  }
  /// Notes that one has, whose additions this thread has made, or knows to be made. Of a block past
  /// the last there is no word.
  __device__ __forceinline__ void add(uint32_t block, uint32_t key_tiles) const {
    if (block >= key_tiles) return;
    ptx::store_release(words + (1 + block) * kCounters, 1);
    // Of two that end at the same time one sees the other's word.
    __threadfence();
    const uint32_t before = ptx::load_relaxed(words);
    uint32_t ended = before;
#pragma unroll 1
    while (ended < key_tiles && ptx::load_acquire(words + (1 + ended) * kCounters) != 0) ++ended;
    if (ended == before) return;
    __threadfence();
    atomicMax(words, ended);
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_ENDED_ITEMS_CUH_
