// Sizes and scratch memory of the backward pass, and which of its tiles belong to which sequence
// and head.
//
// Scratch rows are padded: every sequence begins at a multiple of the query tile, so that a tile is
// one piece of memory, aligned, whatever the lengths.
#ifndef STROBE_CUDA_BACKWARD_SCRATCH_CUH_
#define STROBE_CUDA_BACKWARD_SCRATCH_CUH_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/workspace.h"
#include "cuda/common/params.h"
#include "cuda/common/walks.h"

namespace strobe::cuda {

/// Weights are at most 1; where they are held as fp16 they are so times 2^12: from 2^-26 on (a row
/// that looks evenly at 64 million keys) they keep all bits of an fp16.
inline constexpr float kWeightShift = 12.f;
inline constexpr float kWeightScale = 4096.f;

/// What is subtracted from a row's scores, in log 2 units: lse * log2(e) - shift. From 2^22
/// on, where a float32 is off by 0.25 and more, down by as much as its roundings on the way from
/// the forward pass may come to (from is_coarse's 2^27 on, where the forward pass sums q.k in
/// another order, by as much as that does). Weights are bounded at 1, so that the key that has
/// nearly all of a row's weight, as far from 0 almost every row has one, gets it whole.
STROBE_INLINE float weight_reference(float lse, float shift = kWeightShift) {
  constexpr float kLog2e = 1.44269504088896340736f;
  const float scaled = lse * kLog2e, size = scaled < 0.f ? -scaled : scaled;
  // Of a row that a bias next to the largest number is in: a finite one all the same.
  constexpr float kMost = 3.40282347e38f;
  if (scaled > kMost && lse <= kMost) return kMost;
  const float reference = lse * kLog2e - shift;
  if (!(size >= 0x1p22f && size <= 3e38f)) return reference;
  return reference - size * (size < 0x1p27f ? 0x1p-22f : 0x1p-18f);
}

/// The sizes that decide the scratch: of a problem, or of a launch's params.
struct BackwardSizes {
  int64_t batch, heads, heads_kv, seqlen_q, seqlen_k;
  bool varlen;
  int64_t total_q, total_k;              // varlen: of all sequences; total_k only decides sizes
  bool batch_invariant, lengths_differ;  // of keys
  bool keeps_sums;                       // BackwardParams::keeps_sums
};

STROBE_INLINE constexpr BackwardSizes sizes_of(const BackwardParams& p) {
  return {p.batch,
          p.heads,
          p.heads_kv,
          p.seqlen_q,
          p.seqlen_k,
          p.cu_q != nullptr,
          p.total_q,
          p.cu_k ? p.total_k : p.batch * p.total_k,
          p.batch_invariant != 0,
          p.cu_k || p.used_k,
          p.keeps_sums()};
}

/// Query tiles of one head in the scratch, all sequences together.
STROBE_INLINE constexpr int64_t scratch_tiles(const BackwardSizes& s, int64_t tile) {
  return s.varlen ? ceil_div(s.total_q, tile) + s.batch : s.batch * ceil_div(s.seqlen_q, tile);
}
/// The first of sequence b: there is room for all its tiles before that of sequence b + 1.
STROBE_INLINE constexpr uint32_t scratch_begin(const CommonParams& p, int32_t tile, int32_t b) {
  return static_cast<uint32_t>(p.cu_q ? p.cu_q[b] / tile + b
                                      : b * ((p.seqlen_q + tile - 1) / tile));
}

/// Key blocks of one head, all sequences together, as a kernel numbers them that has a record of
/// each; of packed ones an upper bound.
STROBE_INLINE constexpr int64_t key_blocks(const BackwardSizes& s, int64_t tile) {
  return s.varlen ? ceil_div(s.total_k, tile) + s.batch : s.batch * ceil_div(s.seqlen_k, tile);
}
/// The first of sequence b: there is room for all its blocks before that of sequence b + 1.
STROBE_INLINE constexpr uint32_t key_block_begin(const CommonParams& p, int32_t tile, int32_t b) {
  return static_cast<uint32_t>(p.cu_k ? p.cu_k[b] / tile + b
                                      : b * ((p.seqlen_k + tile - 1) / tile));
}

/// Work items that keep a large GPU busy, also where they are unequal. A constant, not the
/// device's, so that the order of summation, hence every bit of the result, is the same on every
/// GPU.
inline constexpr int64_t kWantedItems = 256;

/// Into how many parts the query heads of a key head are cut: 1 where there are key blocks enough.
/// The parts' dK and dV are summed in a fixed order afterwards; so that a sequence's bits do not
/// depend on the batch, batch_invariant counts its own blocks alone, and none where lengths vary.
STROBE_INLINE constexpr int64_t group_parts(const BackwardSizes& s, int64_t tile_k) {
  const int64_t group = s.heads / s.heads_kv;
  if (s.batch_invariant && s.lengths_differ) return 1;
  const int64_t blocks =
      (s.batch_invariant ? 1 : s.batch) * s.heads_kv * max64(1, ceil_div(s.seqlen_k, tile_k));
  const int64_t parts = min64(group, ceil_div(kWantedItems, blocks));
  return ceil_div(group, ceil_div(group, parts));
}

struct BackwardScratch {
  float* lse;    // [heads, tiles, tile_q]: weight_reference(lse), in the main kernel's order
  float* delta;  // [heads, tiles, tile_q]: rowsum(dout * out) - dlse, over the weights' scale
  float* dq;     // [heads, tiles, tile_q / 16, width / 8, 128]: blocks of 16 x 8 in the
                 // order of sum_offset. Null where the main kernel writes dQ itself
  uint32_t* nonfinite;      // with kMarksNonfinite (pre.cuh) [heads, tiles]: q or dout may hold an
                            // inf or a NaN there; without, [items, warps]: dK or dV does
  uint32_t* any_nonfinite;  // without: whether one of them is set. If not, none is read; flags of
                            // items that do not exist never are
  uint32_t* dq_nonfinite;   // without, [heads, tiles]: some of the tile's dQ is not finite
  uint32_t* additions;      // [heads, tiles, counters]: the rank of the key tile that adds to dq
                            // next; unless deterministic, whether dq is zero there (items_zero)
  uint32_t items_zero;    // whether the main kernel's items set dq to zero, and not the pre kernel
  uint32_t stores_sum;    // whether they store to dq, and nobody sets it to zero (adds_once)
  uint32_t descending;    // key heads (OrderedItems) whose last key tile adds first
  uint32_t* ticket;       // the next work item
  uint32_t first_ticket;  // the first that is drawn; those before belong to thread blocks
  float *dk, *dv;         // [rows_k, heads_kv, parts, width]: where there are several parts, or
                          // keeps_sums; else null, and the main kernel writes dK and dV
  void* key_records;      // [key_blocks], where StageTraits::kPreparesKeys; at first null
  uint32_t key_blocks;
  int32_t tile_k;      // keys of a work item
  uint32_t tiles;      // of a head (all heads' are fewer than 2^32: a tile takes 16 KB)
  uint32_t key_tiles;  // of the longest sequence
};

/// When a key tile adds to a tile of dq, as the tile's counter counts: from its place in the walk
/// of the tile of queries. Where additions have an order it is that of these numbers, hence that in
/// which the work items are drawn: key tiles ascend, or, in heads that descend, the last one is the
/// first. key_tiles: BackwardScratch's. (They may pass 0, which nobody minds who asks whether two
/// are the same.)
STROBE_INLINE constexpr uint32_t addition_rank(uint32_t place, uint32_t key_tiles, bool descends) {
  return descends ? key_tiles - 1 - place : place;
}

/// The lowest rank of the key tiles that add to a tile of dq, which are those of its walk. A packed
/// sequence may have more keys than the problem's bound: no item is there for these.
STROBE_INLINE constexpr uint32_t first_rank(const CommonParams& p, const BackwardScratch& s,
                                            int32_t batch, int32_t head,
                                            const WalkOf<int64_t>& walk) {
  const auto of_heads = static_cast<uint32_t>((p.cu_k ? 0 : batch) * p.heads_kv + head / p.group);
  const bool descends = of_heads < s.descending;
  const int64_t first =
      descends ? min64(walk.end, walk.rank(int64_t{s.key_tiles})) - 1 : walk.begin;
  return addition_rank(static_cast<uint32_t>(first), s.key_tiles, descends);
}

/// Words that say which work items have ended (backward/ended_items.cuh).
STROBE_INLINE constexpr int64_t ended_words(const BackwardSizes& s, int64_t tile_k,
                                            int64_t counters) {
  return counters * s.batch * s.heads_kv * group_parts(s, tile_k) *
         (ceil_div(s.seqlen_k, tile_k) + 1);
}

/// key_flags: `nonfinite` words that the main kernel writes (none where there are no keys);
/// negative with kMarksNonfinite. sums_dq: whether there is a sum of dQ, because the main kernel
/// does not write dQ itself. notes_ends: whether which items have ended is noted behind
/// `additions`.
STROBE_INLINE BackwardScratch carve_backward(Arena& arena, const BackwardSizes& s, int64_t width,
                                             int64_t tile_q, int64_t tile_k, int64_t counters,
                                             int64_t key_flags = -1, bool sums_dq = true,
                                             bool notes_ends = false) {
  BackwardScratch c{};
  c.tile_k = static_cast<int32_t>(tile_k);
  c.key_tiles = static_cast<uint32_t>(ceil_div(s.seqlen_k, tile_k));
  c.tiles = static_cast<uint32_t>(scratch_tiles(s, tile_q));
  const int64_t all = s.heads * c.tiles;
  c.lse = arena.take<float>(all * tile_q);
  c.delta = arena.take<float>(all * tile_q);
  if (sums_dq) c.dq = arena.take<float>(all * tile_q * width);
  c.nonfinite = arena.take<uint32_t>(max64(all, key_flags));
  if (key_flags >= 0) c.dq_nonfinite = arena.take<uint32_t>(all);
  c.additions =
      arena.take<uint32_t>(all * counters + (notes_ends ? ended_words(s, tile_k, counters) : 0));
  c.ticket = arena.take<uint32_t>(2);
  c.any_nonfinite = c.ticket ? c.ticket + 1 : nullptr;
  const int64_t parts = group_parts(s, tile_k);
  if (parts > 1 || s.keeps_sums) {
    // dK and dV in one piece and last of all, so that total_k decides only the size and moves
    // nothing else.
    c.dk = arena.take<float>(2 * s.total_k * s.heads_kv * parts * width);
    c.dv = c.dk ? c.dk + width : nullptr;
  }
  return c;
}

/// Work items of the main kernel.
STROBE_INLINE constexpr int64_t backward_items(const BackwardSizes& s, int64_t tile_k) {
  return s.batch * s.heads_kv * group_parts(s, tile_k) * ceil_div(s.seqlen_k, tile_k);
}

/// Where a query of a tile has its lse and delta, for a main kernel that holds S^T in wgmma
/// accumulators: those of queries 8j + {0, 1} and 8j + {8, 9}, j even, that a lane has are side by
/// side.
STROBE_INLINE constexpr int quad_order(int query) {
  return query / 16 * 16 + query % 8 / 2 * 4 + query / 8 % 2 * 2 + query % 2;
}

/// A tile of queries of one head, and where it is in the scratch.
struct QueryTile {
  int32_t batch, head, begin;
  int64_t scratch;
};

/// The last of `batch` sequences that begins at `place` or before; begin(b) does not descend.
template <typename Begin>
STROBE_INLINE constexpr int32_t sequence_at(uint32_t place, int32_t batch, const Begin& begin) {
  int32_t found = 0;
  for (int32_t past = batch; past - found > 1;) {
    const int32_t middle = found + (past - found) / 2;
    (begin(middle) <= place ? found : past) = middle;
  }
  return found;
}

/// How many thread blocks the kernels before and after are given, one a tile.
STROBE_INLINE constexpr int64_t query_tiles(const CommonParams& p, uint32_t tiles_of_head) {
  return int64_t{p.heads} * tiles_of_head;
}

/// The index-th. Of packed sequences some have no queries: `begin` is past the end then.
STROBE_INLINE constexpr QueryTile query_tile(const CommonParams& p, int64_t index,
                                             uint32_t tiles_of_head, int32_t tile_q) {
  int32_t head, place;
  if (index <= INT32_MAX) {  // 32-bit division takes a fifth of the time
    head = static_cast<int32_t>(static_cast<uint32_t>(index) / tiles_of_head);
    place = static_cast<int32_t>(static_cast<uint32_t>(index) % tiles_of_head);
  } else {
    head = static_cast<int32_t>(index / tiles_of_head);
    place = static_cast<int32_t>(index % tiles_of_head);
  }
  int32_t batch = 0;
  if (p.cu_q) {
    batch = sequence_at(static_cast<uint32_t>(place), p.batch,
                        [&](int32_t b) { return scratch_begin(p, tile_q, b); });
  } else {
    batch = place / ((p.seqlen_q + tile_q - 1) / tile_q);
  }
  const auto tile = place - static_cast<int32_t>(scratch_begin(p, tile_q, batch));
  return {batch, head, tile * tile_q, index};
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_SCRATCH_CUH_
