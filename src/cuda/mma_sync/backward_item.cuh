// A work item of the backward pass through mma.sync, and its steps. An item is a tile of keys of
// one key head, with the query heads of its group or a part of them; a step is one tile of queries
// of one of these heads. One thread fills the item's record, all threads read it.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_ITEM_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_ITEM_CUH_

#include <cstdint>

#include "cuda/common/backward_order.cuh"
#include "cuda/common/load.cuh"
#include "cuda/common/params.h"

namespace strobe::cuda::sm80 {

/// A step of an item: one query tile of one head.
struct BackwardStep {
  int32_t head, tile;
};

/// How the threads copy rows of q and dout.
enum RowCopies : int32_t {
  kCopyValues,     // value by value: the rows are not aligned to 16 bytes
  kCopyChunks,     // 16 bytes at a time, as far as a row has columns
  kCopyWholeTiles  // 16 bytes at a time; the rows have all columns of a tile
};

/// What the threads have to know of an item. It lives in shared memory: it is the same for all
/// threads, and registers are what the kernel is short of.
struct alignas(16) ItemRecord {
  int32_t tile_begin, tile_end;  // query tiles that see some key of the item
  int32_t full_begin, full_end;  // queries that see every key of it
  int32_t first_query;   // tiles from here on see no key before the item: it is the first to add
  int32_t first_key;     // of query 0; negative: query -first_key is the last to see key 0
  uint32_t scratch;      // first scratch tile of the sequence
  const char *q, *dout;  // row 0 of the sequence, head 0
  Sequence sequence;
  int32_t batch, head_kv, part, key_begin;
  int32_t head_begin, head_end;  // of the query heads
  int32_t steps;                 // -1: there is no item
  RowCopies copies;
  int32_t keys_nonfinite;

  __device__ __forceinline__ void fill(const BackwardParams& p, const BackwardItem& item,
                                       int32_t heads_per_part, int32_t tile_q, int32_t tile_k,
                                       int32_t width) {
    batch = item.batch;
    head_kv = item.head_kv;
    part = item.part;
    key_begin = item.block * tile_k;
    head_begin = head_kv * p.group + item.part * heads_per_part;
    keys_nonfinite = 0;
    const Mask& mask = sequence.mask;
    const Range keys{key_begin, min64(key_begin + tile_k, mask.seqlen_k)};
    const Range queries = mask.q_range(keys);
    tile_begin = static_cast<int32_t>(queries.begin) / tile_q;
    tile_end =
        queries.empty() ? tile_begin : (static_cast<int32_t>(queries.end) + tile_q - 1) / tile_q;
    // Keys past the end would count as seen: where the item has some, every step is masked.
    const Range full = keys.size() < tile_k ? Range{0, 0} : mask.full_q_range(keys);
    full_begin = static_cast<int32_t>(full.begin);
    full_end = static_cast<int32_t>(full.end);
    first_query =
        key_begin == 0 ? 0 : static_cast<int32_t>(mask.q_range({key_begin - 1, key_begin}).end);
    // (Clamped, so that adding a query cannot overflow.)
    first_key = static_cast<int32_t>(max64(mask.position(0) - mask.left, -mask.seqlen_q));
    head_end = min(head_begin + heads_per_part, (head_kv + 1) * p.group);
    steps = (head_end - head_begin) * (tile_end - tile_begin);
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

static_assert(sizeof(ItemRecord) <= 176, "BackwardShape::kRecordBytes");

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_ITEM_CUH_
