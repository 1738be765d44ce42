// A work item of the backward pass through mma.sync, and its steps. An item is a tile of keys of
// one key head, with the query heads of its group or a part of them; a step is one tile of queries
// of one of these heads. One thread fills the item's record, all threads read it.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_ITEM_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_ITEM_CUH_

#include <cstdint>

#include "cuda/backward/order.cuh"
#include "cuda/backward/steps.h"
#include "cuda/common/load.cuh"
#include "cuda/common/params.h"
#include "cuda/common/walks.h"

namespace strobe::cuda::sm80 {

/// An item's tiles of queries descend: all items of a head that are under way then begin at the
/// same tile, also under a causal mask, and in a deterministic launch none waits long for the one
/// that adds to dQ before it.
inline constexpr int32_t kDirection = -1;

/// How the threads copy rows of q and dout.
enum RowCopies : int32_t {
  kCopyValues,     // value by value: the rows are not aligned to 16 bytes
  kCopyChunks,     // 16 bytes at a time, as far as a row has columns
  kCopyWholeTiles  // 16 bytes at a time; the rows have all columns of a tile
};

/// What the threads have to know of an item. It is kept in shared memory, since it is the same for
/// all threads and the kernel is short of registers.
struct alignas(16) ItemRecord {
  ItemWalk walk;         // first, so that it is aligned and read in one piece
  const char *q, *dout;  // row 0 of the sequence, head 0
  Mask mask;             // of the sequence
  int64_t k_row;         // of its first key
  int32_t batch, head_kv, part, key_begin;
  int32_t position;              // of query 0 among the keys
  int32_t head_begin, head_end;  // of the query heads
  int32_t steps;                 // 0: none; -1: there is no item
  uint32_t scratch;              // first scratch tile of the sequence
  RowCopies copies;
  int32_t keys_nonfinite;
  uint32_t ended;  // EndedItems::first_word of the item's track; under a mask as data

  __device__ __forceinline__ void fill(const BackwardParams& p, const Sequence& sequence,
                                       const BackwardItem& item, int32_t heads_per_part,
                                       int32_t tile_q, int32_t tile_k, int32_t width) {
    mask = sequence.mask;
    k_row = sequence.k_row;
    batch = item.batch;
    head_kv = item.head_kv;
    part = item.part;
    key_begin = item.block * tile_k;
    head_begin = head_kv * p.group + item.part * heads_per_part;
    position = static_cast<int32_t>(mask.position(0));
    keys_nonfinite = 0;
    const Range keys{key_begin, min64(key_begin + tile_k, mask.seqlen_k)};
    walk = item_walk(WalkLists::of_heads(p, batch, 0, p.heads), mask, keys, tile_q, tile_k);
    head_end = min(head_begin + heads_per_part, (head_kv + 1) * p.group);
    steps = steps_of(walk, head_begin, head_end);
    scratch = scratch_begin(p, tile_q, batch);
    const RowsView q_rows = rows_view(p.q, batch, sequence.q_row, 0, mask.seqlen_q, p.head_dim);
    const RowsView dout_rows =
        rows_view(p.dout, batch, sequence.q_row, 0, mask.seqlen_q, p.head_dim_v);
    q = q_rows.data;
    dout = dout_rows.data;
    const bool aligned =
        q_rows.aligned() && dout_rows.aligned() && (p.q.head_stride | p.dout.head_stride) % 8 == 0;
    copies = !aligned                                       ? kCopyValues
             : p.head_dim == width && p.head_dim_v == width ? kCopyWholeTiles
                                                            : kCopyChunks;
  }
};

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_ITEM_CUH_
