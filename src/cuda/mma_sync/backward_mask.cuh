// The backward pass through mma.sync under a mask as data: which tiles of queries an item goes
// through, and which pairs of a tile the mask allows.
//
// Tiles are of 64 queries and 64 keys or of 32 each, so that an item's keys have one list of each
// query head, and a step's pairs lie in one pair of the mask's blocks. The item's walk stays the
// rule's interval of tiles; its steps are those of them that a list of the mask has
// (backward/masked_steps.cuh).
//
// One thread of the weights half goes through the lists, a step ahead of the copies, and leaves
// what a step is in shared memory, where all threads find it. Of steps n - 2 to n + 1 there is a
// record at a time, while step n is being copied: whoever copies has waited until no thread is at
// step n - 3 (q_empty, backward_barriers.cuh). The bits of a step are copied together with its
// queries.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_MASK_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_MASK_CUH_

#include <cstdint>

#include "cuda/backward/masked_steps.cuh"
#include "cuda/common/params.h"

namespace strobe::cuda::sm80 {

/// Where the bits of the step that is computed lie in shared memory: of each key of the tile a word
/// for 32 of the tile's queries.
struct StepBits {
  uint32_t at;      // of key 0; 0: every pair is allowed
  uint32_t stride;  // of keys, in bytes

  /// A copy takes 16 bytes: two keys' of blocks of 64 queries, else a key's 128 queries.
  __device__ __forceinline__ static uint32_t stride_of(const CommonParams& p) {
    return p.mask_layout.block_q == 64 ? 8 : 16;
  }
};

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_MASK_CUH_
