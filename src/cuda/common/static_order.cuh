// The order in which thread blocks, one tile of queries each, take the tiles.
#ifndef STROBE_CUDA_COMMON_STATIC_ORDER_CUH_
#define STROBE_CUDA_COMMON_STATIC_ORDER_CUH_

#include <cstdint>

#include "core/arithmetic.h"
#include "cuda/common/params.h"

namespace strobe::cuda {

struct WorkItem {
  int32_t batch, head, tile;
};

/// Division by a number known at launch, of numbers below 2^31: a multiplication and a shift in
/// place of a chain of twenty instructions, some of them slow (Granlund and Montgomery, PLDI 1994).
struct Divisor {
  uint32_t value = 1, multiplier = 0, shift = 0;

  Divisor() = default;
  STROBE_INLINE constexpr explicit Divisor(uint32_t d) : value(d) {
    uint32_t bits = 0;  // of d - 1
    while (bits < 31 && (uint32_t{1} << bits) < d) ++bits;
    if (d > 1) {
      multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + bits)) + d - 1) / d);
      shift = bits - 1;
    }
  }
  STROBE_INLINE constexpr uint32_t divide(uint32_t n) const {
    return value == 1 ? n : static_cast<uint32_t>(uint64_t{n} * multiplier >> 32) >> shift;
  }
};

/// Items are (batch, head, query tile). Heads come in groups whose keys and values fit into L2
/// together; within a group the last tile comes first, of all its heads: under a causal mask that
/// is the most visits first. A group of one head is plain order, tiles of a head side by side,
/// which is best for L2 where all tiles are equally long.
struct StaticOrder {
  int64_t items;
  uint32_t tiles;        // of the longest sequence; packed: at least 1
  uint32_t batch_heads;  // batch * heads
  Divisor heads;         // query heads
  Divisor kv_group;      // query heads per key head
  Divisor group;         // heads (of all batches) of a group
  Divisor last_group;    // of the last group
  Divisor group_items;

  STROBE_INLINE constexpr WorkItem item(int64_t index) const {
    uint32_t g = 0, rest = 0;
    if (items <= INT32_MAX) {
      g = group_items.divide(static_cast<uint32_t>(index));
      rest = static_cast<uint32_t>(index) - g * group_items.value;
    } else {
      g = static_cast<uint32_t>(index / group_items.value);
      rest = static_cast<uint32_t>(index - int64_t{g} * group_items.value);
    }
    const uint32_t first = g * group.value;
    const bool last = batch_heads - first < group.value;
    const uint32_t from_end = last ? last_group.divide(rest) : group.divide(rest);
    const uint32_t batch_head = first + rest - from_end * (last ? last_group.value : group.value);
    const uint32_t batch = heads.divide(batch_head);
    return {static_cast<int32_t>(batch), static_cast<int32_t>(batch_head - batch * heads.value),
            static_cast<int32_t>(tiles - 1 - from_end)};
  }

  // What a group's keys and values may take of L2: a little over half of an H200's 50 MB, most of
  // an A100's 40 MB.
  static constexpr int64_t kGroupBytes = int64_t{32} << 20;
  /// Of the keys and values of a key head.
  STROBE_INLINE static constexpr int64_t head_bytes(const CommonParams& p) {
    return max64(1, int64_t{p.seqlen_k} * 2 * (p.head_dim + p.head_dim_v));
  }

  STROBE_INLINE static constexpr StaticOrder make(const CommonParams& p, int32_t tile_q) {
    return make(p, tile_q, p.rule.later_see_more(), 1);
  }
  /// most_first: whether the tiles of a group are wanted by their visits. least: heads of a group,
  /// though L2 may not hold them.
  STROBE_INLINE static constexpr StaticOrder make(const CommonParams& p, int32_t tile_q,
                                                  bool most_first, int64_t least) {
    StaticOrder o{};
    // Of packed sequences that are all empty one: rows past the end of the last get zeros.
    o.tiles = static_cast<uint32_t>(max64(p.cu_q ? 1 : 0, ceil_div(p.seqlen_q, tile_q)));
    o.batch_heads = static_cast<uint32_t>(p.batch) * static_cast<uint32_t>(p.heads);
    o.items = int64_t{o.batch_heads} * o.tiles;
    int64_t group = 1;
    if (most_first) {
      const int64_t bytes = max64(1, int64_t{p.seqlen_k} * 2 * (p.head_dim + p.head_dim_v));
      // Query heads of one key head share its keys.
      group =
          min64(max64(least, max64(1, kGroupBytes / bytes) * p.group), min64(o.batch_heads, 65536));
      if (group * o.tiles > INT32_MAX) group = 1;
    }
    o.heads = Divisor(static_cast<uint32_t>(p.heads));
    o.kv_group = Divisor(static_cast<uint32_t>(p.group));
    o.group = Divisor(static_cast<uint32_t>(group));
    o.last_group = Divisor(static_cast<uint32_t>(max64(1, o.batch_heads % group)));
    o.group_items = Divisor(static_cast<uint32_t>(max64(1, group * o.tiles)));
    return o;
  }
};

/// Grids are two-dimensional so that more than 2^31 items have room.
struct GridSize {
  uint32_t x, y;
};
STROBE_INLINE constexpr GridSize grid_for(int64_t items) {
  constexpr int64_t kMaxX = INT32_MAX;
  if (items <= kMaxX) return {static_cast<uint32_t>(items), 1};
  const int64_t y = ceil_div(items, kMaxX);
  return {static_cast<uint32_t>(ceil_div(items, y)), static_cast<uint32_t>(y)};
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_STATIC_ORDER_CUH_
