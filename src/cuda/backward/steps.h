// The steps of a work item of the backward pass, in all kernels: a tile of keys goes through its
// walk of tiles of queries (core/walk.h), for one query head of its group after the other. Where
// walks are lists each query head has its own.
#ifndef STROBE_CUDA_BACKWARD_STEPS_H_
#define STROBE_CUDA_BACKWARD_STEPS_H_

#include <cstdint>

#include "core/macros.h"
#include "cuda/common/walks.h"

namespace strobe::cuda {

/// Where the steps of a head begin and end.
template <typename Walk>
STROBE_INLINE constexpr int32_t first_place(const Walk& walk, int32_t direction) {
  return direction < 0 ? walk.end - 1 : walk.begin;
}
template <typename Walk>
STROBE_INLINE constexpr int32_t last_place(const Walk& walk, int32_t direction) {
  return direction < 0 ? walk.begin : walk.end - 1;
}

#if STROBE_RANDOM_WALKS

/// What the walks of an item's query heads are made of: of all heads of the sequence, since a
/// record may serve several items.
struct ItemWalk {
  RandomBlocks blocks;
  IntervalWalk<int32_t>
      interval;             // tiles of queries that the mask leaves, of which lists have some
  BasicMask<int32_t> mask;  // of the sequence
  int32_t sequence, heads, key_tile, tile_q, tile_k;

  STROBE_INLINE constexpr WalkLists lists(int32_t head) const {
    return {blocks, sequence, 0, head, head + 1};
  }
  STROBE_INLINE constexpr WalkOf<int32_t> of_head(int32_t head) const {
    return WalkOf<int32_t>::of(interval, [&](int64_t tile, bool& some) {
      return lists(head).hides_all({tile * tile_q, (tile + 1) * tile_q},
                                   {int64_t{key_tile} * tile_k, int64_t{key_tile + 1} * tile_k},
                                   some);
    });
  }
  /// The first head from this one on whose walk has some tile, or one past all.
  STROBE_INLINE constexpr int32_t next_head(int32_t head) const {
    constexpr int32_t kNone = 1 << 30;
    while (head < heads && of_head(head).empty()) ++head;
    return head < heads ? head : kNone;
  }
};

template <typename Int>
STROBE_INLINE constexpr ItemWalk item_walk(const WalkLists& lists, const BasicMask<Int>& mask,
                                           Range keys, int64_t tile_q, int64_t tile_k) {
  const auto walk = static_cast<IntervalWalk<int32_t>>(query_walk(mask, keys, tile_q));
  return {lists.blocks,
          keys.size() < tile_k ? walk.all_partial() : walk,
          mask.tile(0, mask.seqlen_q),
          static_cast<int32_t>(lists.sequence),
          lists.head_end,
          static_cast<int32_t>(keys.begin / tile_k),
          static_cast<int32_t>(tile_q),
          static_cast<int32_t>(tile_k)};
}
STROBE_INLINE constexpr bool has_steps(const ItemWalk& walk, int32_t head_begin, int32_t head_end) {
  return walk.next_head(head_begin) < head_end;
}
STROBE_INLINE constexpr int32_t steps_of(const ItemWalk& walk, int32_t head_begin,
                                         int32_t head_end) {
  int32_t steps = 0;
  for (int32_t head = head_begin; head < head_end; ++head) steps += walk.of_head(head).count();
  return steps;
}
STROBE_INLINE constexpr bool all_full(const ItemWalk& walk, int32_t head_begin, int32_t head_end) {
  bool all = true;
  for (int32_t head = head_begin; head < head_end; ++head) all &= walk.of_head(head).all_full();
  return all;
}
STROBE_INLINE constexpr const IntervalWalk<int32_t>& rule_interval(const ItemWalk& walk) {
  return walk.interval;
}
STROBE_INLINE constexpr uint32_t place_in(const ItemWalk& walk, int32_t head, int32_t tile,
                                          uint32_t key_tile) {
  const int32_t begin = tile * walk.tile_q, end = begin + walk.tile_q;
  const Range queries{begin, end < walk.mask.seqlen_q ? end : walk.mask.seqlen_q};
  const auto of_queries = key_walk(walk.lists(head), walk.mask, queries, int64_t{walk.tile_k});
  return static_cast<uint32_t>(of_queries.rank(static_cast<int32_t>(key_tile)));
}

/// A step: a place in the walk of one of an item's query heads, which the step keeps.
struct HeadStep {
  int32_t head, place;
  WalkOf<int32_t> walk;  // the head's
  int32_t next_head;     // that has a step

  STROBE_INLINE static constexpr HeadStep first(const ItemWalk& item, int32_t head_begin,
                                                int32_t direction) {
    HeadStep step{};
    step.enter(item, item.next_head(head_begin), direction);
    return step;
  }
  STROBE_INLINE constexpr bool done(int32_t head_end) const { return head >= head_end; }
  STROBE_INLINE constexpr bool is_last(const ItemWalk&, int32_t head_end, int32_t direction) const {
    return place == last_place(walk, direction) && next_head >= head_end;
  }
  STROBE_INLINE constexpr void advance(const ItemWalk& item, int32_t direction) {
    if (place == last_place(walk, direction)) {
      enter(item, next_head, direction);
    } else {
      place += direction;
    }
  }
  STROBE_INLINE constexpr int32_t tile(const ItemWalk&) const { return walk.block(place); }
  STROBE_INLINE constexpr bool is_full(const ItemWalk&) const { return walk.is_full(place); }

 private:
  STROBE_INLINE constexpr void enter(const ItemWalk& item, int32_t of, int32_t direction) {
    head = of;
    walk = item.of_head(of);
    next_head = item.next_head(of + 1);
    place = first_place(walk, direction);
  }
};

#else

/// Walk of a work item: tiles of tile_q queries that see some of its keys, the same for all its
/// query heads.
using ItemWalk = IntervalWalk<int32_t>;

/// lists: of all query heads. Keys past the end of the sequence would count as seen in a full tile:
/// where an item has some, no tile is full.
template <typename Int>
STROBE_INLINE constexpr ItemWalk item_walk(WalkLists lists, const BasicMask<Int>& mask, Range keys,
                                           int64_t tile_q, int64_t tile_k) {
  const IntervalWalk<Int> walk = query_walk(lists, mask, keys, tile_q);
  return static_cast<ItemWalk>(keys.size() < tile_k ? walk.all_partial() : walk);
}
/// Of an item of these query heads: whether it has a step, how many, and whether all are full.
STROBE_INLINE constexpr bool has_steps(const ItemWalk& walk, int32_t, int32_t) {
  return walk.begin < walk.end;
}
STROBE_INLINE constexpr int32_t steps_of(const ItemWalk& walk, int32_t head_begin,
                                         int32_t head_end) {
  return (head_end - head_begin) * walk.count();
}
STROBE_INLINE constexpr bool all_full(const ItemWalk& walk, int32_t, int32_t) {
  return walk.all_full();
}
/// The tiles that the rule leaves, whatever lists say.
STROBE_INLINE constexpr const IntervalWalk<int32_t>& rule_interval(const ItemWalk& walk) {
  return walk;
}
/// The place of an item's keys, which are the block key_tile, in the walk of one of a head's tiles:
/// the same for all of them where walks are intervals.
STROBE_INLINE constexpr uint32_t place_in(const ItemWalk&, int32_t /*head*/, int32_t /*tile*/,
                                          uint32_t key_tile) {
  return key_tile;
}

/// A step: a place in the item's walk, for one query head. The steps of a head go through all
/// places, upwards or downwards, and then come those of the next head that has some. The item's
/// walk is handed to each function, since it is kept once for all threads. It may be of any kind
/// that has a begin and an end, and is not empty. direction: of the places, 1 or -1.
struct HeadStep {
  int32_t head, place;

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
  /// The step's tile of queries, and whether it is full.
  template <typename Walk>
  STROBE_INLINE constexpr int32_t tile(const Walk& walk) const {
    return walk.block(place);
  }
  template <typename Walk>
  STROBE_INLINE constexpr bool is_full(const Walk& walk) const {
    return walk.is_full(place);
  }
};

#endif

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_STEPS_H_
