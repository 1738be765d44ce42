// A work item of the backward pass through mma.sync, and its steps. An item is a tile of keys of
// one key head, with the query heads of its group or a part of them; a step is one tile of queries
// of one of these heads. One thread fills the item's record, all threads read it.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_ITEM_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_ITEM_CUH_

#include <cstdint>

#include "core/walk.h"
#include "cuda/backward/order.cuh"
#include "cuda/common/load.cuh"
#include "cuda/common/params.h"
#include "cuda/mma_sync/addition_order.h"

namespace strobe::cuda::sm80 {

/// A step of an item: one query tile of one head.
struct BackwardStep {
  int32_t head, tile;
};

/// Visits of query tiles, in 32 bits. (With the full ones as numbers of tiles too, not of queries,
/// ptxas spills at head_dim 128.)
struct TileVisits {
  int32_t begin, end;            // tiles that see some key of the item
  int32_t full_begin, full_end;  // queries of those that have no masked pair, and none past the end

  STROBE_INLINE static constexpr TileVisits of(const IntervalWalk<int64_t>& v, int32_t tile_q) {
    return {static_cast<int32_t>(v.begin), static_cast<int32_t>(v.end),
            static_cast<int32_t>(v.full_begin) * tile_q, static_cast<int32_t>(v.full_end) * tile_q};
  }
};

/// How the threads copy rows of q and dout.
enum RowCopies : int32_t {
  kCopyValues,     // value by value: the rows are not aligned to 16 bytes
  kCopyChunks,     // 16 bytes at a time, as far as a row has columns
  kCopyWholeTiles  // 16 bytes at a time; the rows have all columns of a tile
};

/// What the threads have to know of an item. It is kept in shared memory, since it is the same for
/// all threads and the kernel is short of registers.
struct alignas(16) ItemRecord {
  TileVisits visits;     // first, so that it is aligned and read in one piece
  int32_t first_query;   // from this tile's first query on this item is the first to add to dQ
  uint32_t scratch;      // first scratch tile of the sequence
  const char *q, *dout;  // row 0 of the sequence, head 0
  Mask mask;             // of the sequence
  int64_t k_row;         // of its first key
  int32_t batch, head_kv, part, key_begin;
  int32_t position;              // of query 0 among the keys
  int32_t head_begin, head_end;  // of the query heads
  int32_t steps;                 // -1: there is no item
  RowCopies copies;
  int32_t keys_nonfinite;

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
    visits = TileVisits::of(query_walk(mask, keys, tile_q), tile_q);
    // Keys past the end are no part of the visits: where the item has some, every step is masked.
    if (keys.size() < tile_k) visits.full_end = visits.full_begin;
    first_query = first_tile_started(mask, key_begin, tile_q) * tile_q;
    head_end = min(head_begin + heads_per_part, (head_kv + 1) * p.group);
    steps = (head_end - head_begin) * (visits.end - visits.begin);
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
