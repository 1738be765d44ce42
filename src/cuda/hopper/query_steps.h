// Which query tiles a work item of the Hopper backward goes through, and in which order.
#ifndef STROBE_CUDA_HOPPER_QUERY_STEPS_H_
#define STROBE_CUDA_HOPPER_QUERY_STEPS_H_

#include <cstdint>

#include "core/macros.h"
#include "core/walk.h"

namespace strobe::cuda::sm90 {

/// Blocks of tile_q queries that a block of keys visits, and those of them in which every query
/// sees every key.
struct QueryVisits {
  int32_t begin, end, full_begin, full_end;

  template <typename Int>
  STROBE_INLINE static constexpr QueryVisits make(const BasicMask<Int>& mask, Range keys,
                                                  int32_t tile_q, int32_t tile_k) {
    const IntervalWalk<Int> v = query_walk(mask, keys, tile_q);
    const auto begin = static_cast<int32_t>(v.begin);
    const auto end = static_cast<int32_t>(v.end);
    // Keys past the end would count as seen: where the block has some, no tile is full.
    if (keys.size() < tile_k) return {begin, end, begin, begin};
    return {begin, end, static_cast<int32_t>(v.full_begin), static_cast<int32_t>(v.full_end)};
  }
  STROBE_INLINE constexpr bool is_full(int32_t tile) const {
    return full_begin <= tile && tile < full_end;
  }
  STROBE_INLINE constexpr bool all_full() const { return full_begin <= begin && end <= full_end; }
};

/// A step of a block: one tile of queries of one head. A block has visits, query heads from
/// head_begin to head_end, and a tile_step of 1 or -1: its tiles ascend or descend.
struct QueryStep {
  int32_t head, tile;

  template <typename Block>
  STROBE_INLINE static constexpr int32_t first_tile(const Block& block) {
    return block.tile_step < 0 ? block.visits.end - 1 : block.visits.begin;
  }
  template <typename Block>
  STROBE_INLINE static constexpr QueryStep first(const Block& block) {
    return {block.head_begin, first_tile(block)};
  }
  template <typename Block>
  STROBE_INLINE constexpr bool done(const Block& block) const {
    return head >= block.head_end;
  }
  template <typename Block>
  STROBE_INLINE constexpr bool is_last(const Block& block) const {
    return tile == (block.tile_step < 0 ? block.visits.begin : block.visits.end - 1) &&
           head == block.head_end - 1;
  }
  template <typename Block>
  STROBE_INLINE constexpr void advance(const Block& block) {
    tile += block.tile_step;
    if (block.tile_step < 0 ? tile < block.visits.begin : tile >= block.visits.end) {
      tile = first_tile(block);
      ++head;
    }
  }
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_QUERY_STEPS_H_
