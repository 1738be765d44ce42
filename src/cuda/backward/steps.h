// The steps of a work item of the backward pass, in all kernels: a tile of keys goes through its
// walk of tiles of queries (core/walk.h), for one query head of its group after the other.
#ifndef STROBE_CUDA_BACKWARD_STEPS_H_
#define STROBE_CUDA_BACKWARD_STEPS_H_

#include <cstdint>

#include "core/macros.h"
#include "cuda/common/walks.h"

namespace strobe::cuda {

#if STROBE_RANDOM_WALKS

struct ItemWalk {
  WalkOf<int32_t> list;
  int32_t begin, end;
  uint8_t places[64];  // of the item's keys in the walks of the tiles of queries

  STROBE_INLINE constexpr int32_t count() const { return list.count(); }
  STROBE_INLINE constexpr int32_t block(int32_t place) const { return list.block(place); }
  STROBE_INLINE constexpr bool is_full(int32_t place) const { return list.is_full(place); }
  STROBE_INLINE constexpr bool all_full() const { return list.all_full(); }
};
STROBE_INLINE constexpr uint32_t place_in(const ItemWalk& walk, int32_t tile,
                                          uint32_t /*key_tile*/) {
  return walk.places[tile];
}

template <typename Int>
STROBE_INLINE constexpr ItemWalk item_walk(const WalkLists& lists, const BasicMask<Int>& mask,
                                           Range keys, int64_t tile_q, int64_t tile_k) {
  const WalkOf<Int> walk = query_walk(lists, mask, keys, tile_q);
  ItemWalk item{};
  item.list = static_cast<WalkOf<int32_t>>(keys.size() < tile_k ? walk.all_partial() : walk);
  item.begin = item.list.begin;
  item.end = item.list.end;
  for (int32_t place = item.begin; place < item.end; ++place) {
    const int32_t tile = item.block(place);
    const Range queries{tile * tile_q,
                        min64((tile + 1) * tile_q, static_cast<int64_t>(mask.seqlen_q))};
    item.places[tile] = static_cast<uint8_t>(
        key_walk(lists, mask, queries, tile_k).rank(static_cast<Int>(keys.begin / tile_k)));
  }
  return item;
}

#else

/// Walk of a work item: tiles of tile_q queries that see some of its keys.
using ItemWalk = IntervalWalk<int32_t>;

/// The place of an item's keys, which are the block key_tile, in the walk of one of its tiles: the
/// same for all tiles where walks are intervals.
STROBE_INLINE constexpr uint32_t place_in(const ItemWalk&, int32_t /*tile*/, uint32_t key_tile) {
  return key_tile;
}

/// Keys past the end of the sequence would count as seen in a full tile: where an item has some, no
/// tile is full.
template <typename Int>
STROBE_INLINE constexpr ItemWalk item_walk(WalkLists lists, const BasicMask<Int>& mask, Range keys,
                                           int64_t tile_q, int64_t tile_k) {
  const IntervalWalk<Int> walk = query_walk(lists, mask, keys, tile_q);
  return static_cast<ItemWalk>(keys.size() < tile_k ? walk.all_partial() : walk);
}

#endif

/// A step: a place in the item's walk, for one query head. The steps of a head go through all
/// places, upwards or downwards, and then come those of the next head. The walk may be of any kind
/// that has a begin and an end, and is not empty. direction: of the places, 1 or -1.
struct HeadStep {
  int32_t head, place;

  template <typename Walk>
  STROBE_INLINE static constexpr int32_t first_place(const Walk& walk, int32_t direction) {
    return direction < 0 ? walk.end - 1 : walk.begin;
  }
  template <typename Walk>
  STROBE_INLINE static constexpr int32_t last_place(const Walk& walk, int32_t direction) {
    return direction < 0 ? walk.begin : walk.end - 1;
  }

  /// The first step of an item whose query heads begin at head_begin.
  template <typename Walk>
  STROBE_INLINE static constexpr HeadStep first(const Walk& walk, int32_t head_begin,
                                                int32_t direction) {
    return {head_begin, first_place(walk, direction)};
  }
  /// Whether all steps of an item whose query heads end at head_end have been.
  STROBE_INLINE constexpr bool done(int32_t head_end) const { return head >= head_end; }
  template <typename Walk>
  STROBE_INLINE constexpr bool is_last(const Walk& walk, int32_t head_end,
                                       int32_t direction) const {
    return place == last_place(walk, direction) && head == head_end - 1;
  }
  template <typename Walk>
  STROBE_INLINE constexpr void advance(const Walk& walk, int32_t direction) {
    place += direction;
    if (direction < 0 ? place < walk.begin : place >= walk.end) {
      place = first_place(walk, direction);
      ++head;
    }
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_STEPS_H_
