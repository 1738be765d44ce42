// In which order the Hopper backward takes its work items.
#ifndef STROBE_CUDA_HOPPER_ITEM_ORDER_H_
#define STROBE_CUDA_HOPPER_ITEM_ORDER_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "cuda/common/params.h"

namespace strobe::cuda::sm90 {

/// All key blocks of a head one after the other, those that see most queries under a causal mask
/// first; then the next head of the batch entry, then the next entry. Packed sequences count as one
/// entry: their records (backward/scratch.cuh's key_block_begin) follow one another.
struct ItemOrder {
  uint32_t records;        // key blocks of a batch entry
  uint32_t tracks, parts;  // of a batch entry: key heads times parts of their groups
  uint32_t items;
  int32_t heads_per_part;

  struct Item {
    uint32_t record;
    int32_t head_kv, part;
  };
  STROBE_INLINE constexpr Item item(uint32_t index) const {
    return item_of(index / records, index % records);
  }
  /// The block-th key block of a track; tracks of all batch entries are counted.
  STROBE_INLINE constexpr Item item_of(uint32_t track, uint32_t block) const {
    const uint32_t entry = track / tracks, of_entry = track % tracks;
    return {entry * records + block, static_cast<int32_t>(of_entry / parts),
            static_cast<int32_t>(of_entry % parts)};
  }
};

/// The order of a deterministic launch, in which each key block waits at each query tile for the
/// one that adds to the tile's dQ before it. An item only waits for items that were handed out
/// earlier, so that one of them always goes on.
///
/// Key blocks ascend and go through their query tiles descending, or the other way round. Under a
/// causal mask each key block that descends begins at its own diagonal, a tile or two before the
/// tiles of the block that was handed out before it, which it then follows: it need not wait. But
/// then the longest items come last, so the last heads of all ascend.
struct OrderedItems {
  ItemOrder order;
  uint32_t group, groups;  // tracks side by side
  uint32_t last_group;     // of which the last group has those that are left too
  uint32_t descending;     // key heads, of all batch entries, whose key blocks descend; then those
                           // that ascend

  struct Item : ItemOrder::Item {
    bool descends;
  };
  STROBE_INLINE constexpr Item item(uint32_t index) const {
    uint32_t g = index / (group * order.records);
    if (g >= groups) g = groups - 1;
    const uint32_t first = g * group, rest = index - first * order.records;
    const uint32_t here = g == groups - 1 ? last_group : group;
    const uint32_t track = first + rest % here, block = rest / here;
    const bool descends = track / order.parts < descending;
    return {order.item_of(track, descends ? order.records - 1 - block : block), descends};
  }

  /// Items in the order of ItemOrder, all of them ascending.
  STROBE_INLINE static constexpr OrderedItems one_by_one(const ItemOrder& order) {
    return {order, 1, order.records > 0 ? order.items / order.records : 1, 1, 0};
  }
  /// tiles: query tiles of a head that a key block visits. later_see_more: MaskRule's.
  /// blocks_of_item: thread blocks that take an item together.
  STROBE_INLINE static constexpr OrderedItems make(const ItemOrder& order, int64_t tiles,
                                                   bool later_see_more, bool batch_invariant,
                                                   int64_t blocks_of_item) {
    // Two key blocks that follow each other in a track begin so many steps apart that the first has
    // added to a tile, and reported it, by the time the second wants to add there. Under a causal
    // mask they need fewer, since they begin at different tiles. These are constants and not the
    // device's numbers because the order of additions depends on them.
    constexpr int64_t kMultiprocessors = 132;
    const int64_t lead = later_see_more ? 3 : 5;
    const int64_t all = order.records > 0 ? order.items / order.records : 0;
    OrderedItems o{order, 1, 1, 1, 0};
    if (all == 0) return o;
    const int64_t wanted = min64(ceil_div(lead * (kMultiprocessors / blocks_of_item),
                                          max64(1, tiles * order.heads_per_part)),
                                 all);
    const int64_t groups = all / wanted;
    o.groups = static_cast<uint32_t>(groups);
    o.group = static_cast<uint32_t>(all / groups);
    o.last_group = static_cast<uint32_t>(all - (groups - 1) * (all / groups));
    if (later_see_more) {
      const int64_t heads = all / order.parts;
      // Which heads are the last of all depends on the batch; with batch_invariant none ascends.
      const int64_t ascending = batch_invariant ? 0 : min64(ceil_div(o.group, order.parts), heads);
      o.descending = static_cast<uint32_t>(heads - ascending);
    }
    return o;
  }
};

/// The order under a mask as data. A block of keys that many more queries see than others (global
/// tokens beside a window) may have more steps than a thread block has of all the rest together:
/// as its head's first item it would begin, in the last head, when the others are nearly done. So
/// the long ones of all heads come first, then the others, head by head.
///
/// Who is long the mask's own order says, where the mask is one for all sequences and heads, its
/// blocks of keys are the items', and additions to dQ have no order.
struct MaskedItems : OrderedItems {
  // A block is long that is visited so many times as often as the average one.
  static constexpr int32_t kUneven = 4;

  bool has_order;

  STROBE_INLINE static constexpr MaskedItems make(const OrderedItems& items, const CommonParams& p,
                                                  int32_t tile_k, bool deterministic) {
    const MaskLayout& l = p.mask_layout;
    return {items, !deterministic && !p.cu_k && l.block_k == tile_k &&
                       l.blocks_k == l.per_sequence_k && l.blocks_k == items.order.records};
  }
  /// How many key blocks of a track are long: the same for all thread blocks.
  STROBE_INLINE constexpr uint32_t long_blocks(const CommonParams& p) const {
    if (!has_order) return 0;
    constexpr int kNeeded = 7;  // entries: a word of the header
    uint32_t low = 0, high = order.records;
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      const int64_t visits = p.mask[p.mask_layout.key_lists + 2 * int64_t{block_at(p, middle)} + 1];
      if (visits * order.records > int64_t{kUneven} * p.mask[kNeeded]) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  STROBE_INLINE constexpr Item item(const CommonParams& p, uint32_t index,
                                    uint32_t long_blocks) const {
    if (long_blocks == 0) return OrderedItems::item(index);
    const uint32_t tracks = order.items / order.records, all_long = long_blocks * tracks;
    uint32_t track = index % tracks, n = index / tracks;
    if (index >= all_long) {
      const uint32_t short_blocks = order.records - long_blocks, rest = index - all_long;
      track = rest / short_blocks;
      n = long_blocks + rest % short_blocks;
    }
    return {order.item_of(track, block_at(p, n)), false};
  }

 private:
  /// The block of keys that is the n-th by its visits. Words that are no mask's stay inside.
  STROBE_INLINE constexpr uint32_t block_at(const CommonParams& p, uint32_t n) const {
    const int64_t block = p.mask[p.mask_layout.key_order + n];
    return static_cast<uint32_t>(min64(max64(block, 0), int64_t{order.records} - 1));
  }
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_ITEM_ORDER_H_
