// In which order the Hopper backward takes its work items.
#ifndef STROBE_CUDA_HOPPER_ITEM_ORDER_H_
#define STROBE_CUDA_HOPPER_ITEM_ORDER_H_

#include <cstdint>

#include "core/macros.h"

namespace strobe::cuda::sm90 {

/// All key blocks of a head one after the other, those that see most queries under a causal mask
/// first; then the next head of the batch entry, then the next entry. Packed sequences count as one
/// entry: their records (backward_scratch.cuh's key_block_begin) follow one another.
struct ItemOrder {
  uint32_t records;         // key blocks of a batch entry
  uint32_t columns, parts;  // of a batch entry: key heads times parts of their groups
  uint32_t items;
  int32_t heads_per_part;

  struct Item {
    uint32_t record;
    int32_t head_kv, part;
  };
  STROBE_INLINE constexpr Item item(uint32_t index) const {
    const uint32_t column = index / records, entry = column / columns, of_entry = column % columns;
    return {entry * records + index % records, static_cast<int32_t>(of_entry / parts),
            static_cast<int32_t>(of_entry % parts)};
  }
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_ITEM_ORDER_H_
