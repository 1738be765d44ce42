// Hopper backward, wide heads: the numbers of a configuration, and what lies in shared memory.
// backward_sm90_wide.cuh has the kernel, and the whole picture.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_LAYOUT_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_LAYOUT_CUH_

#include <type_traits>

#include "cuda/backward/order.cuh"
#include "cuda/backward/steps.h"
#include "cuda/common/config.h"
#include "cuda/common/element.h"
#include "cuda/common/tile.cuh"
#include "cuda/hopper/backward_sm90_layout.cuh"
#include "cuda/hopper/backward_sm90_wide_maps.cuh"
#include "cuda/hopper/item_order.h"
#include "cuda/hopper/pipeline.cuh"

namespace strobe::cuda::sm90_wide {

using sm90::BackwardMaps;
using sm90::OrderedItems;

/// A block's half of a work item: 64 keys of a key head, with all query heads that read them, or a
/// part of these.
struct alignas(16) KeyBlock {
  ItemWalk walk;  // of both halves: they go through the same steps
  BackwardItem item;
  int64_t number;  // of the item in BackwardOrder; negative: none, and the thread block ends
  int64_t k_row;   // of the sequence's first key
  int32_t seqlen_k;
  int32_t head_begin, head_end;  // query heads
  uint32_t scratch;              // the sequence's first scratch tile of head 0
  int32_t key_begin;
  int32_t map_batch, map_q, map_k;  // of query 0 and of the first key in the tensor maps
  static constexpr int32_t direction = -1;
};
/// The same where additions to dQ have an order (OrderedItems).
struct alignas(16) OrderedKeyBlock : KeyBlock {
  int32_t direction;  // 1 or -1: tiles ascend or descend, and key blocks the other way
  uint32_t rank;      // addition_rank, where it is the same for all tiles

  /// What the counter of the additions to a tile says when this item may add. tile: of the head's
  /// walk. key_tiles: BackwardScratch's.
  __device__ __forceinline__ uint32_t turn([[maybe_unused]] int32_t head,
                                           [[maybe_unused]] int32_t tile,
                                           [[maybe_unused]] uint32_t key_tiles) const {
    if constexpr (kWalksAreLists) {
      const auto key_tile = static_cast<uint32_t>(item.block);
      return addition_rank(place_in(walk, head, tile, key_tile), key_tiles, direction > 0);
    }
    return rank;
  }
};
/// The work items of a launch whose additions to dQ have an order: which item is drawn when.
struct OrderedBackwardOrder : BackwardOrder {
  OrderedItems items_in_order;
};

/// The counter of the additions that block `rank` of a pair makes to a tile of the scratch. Each
/// block has its own, since the two add to different columns: which columns of a tile are whose is
/// the same in all items.
__device__ __forceinline__ uint32_t* additions_of(const BackwardScratch& scratch, uint32_t tile,
                                                  uint32_t rank) {
  return scratch.additions + (int64_t{tile} * kBlocks + rank);
}
/// Whether any query sees any of an item's keys.
__device__ __forceinline__ bool has_steps(const KeyBlock& block) {
  return cuda::has_steps(block.walk, block.head_begin, block.head_end);
}
/// A BackwardConfig as plain numbers (nvcc 13 writes stubs that do not compile for kernels with
/// template arguments of class type), and the width of V's rows, which may be less than K's.
/// kGeneral: of the kernel that knows softcap, ALiBi and dropout. kOrdered: of the kernel whose
/// additions to dQ have an order.
template <int kDtype, int kWidth_, int kWidthV_, bool kGeneral_, bool kOrdered_>
struct WideTraits {
  static constexpr bool kGeneral = kGeneral_, kOrdered = kOrdered_;
  static constexpr bool kBf16 = kDtype == kBfloat16;
  using T = Element<kDtype>;
  static constexpr int kWidth = kWidth_, kWidthV = kWidthV_;
  static constexpr int kThreads = 512;
  static constexpr int kProducerRegisters = 32, kConsumerRegisters = 192, kDqRegisters = 96;

  using Block = std::conditional_t<kOrdered, OrderedKeyBlock, KeyBlock>;
  using Order = std::conditional_t<kOrdered, OrderedBackwardOrder, BackwardOrder>;

  using KTile = SharedTile<kKeys, kWidth>;
  using VTile = SharedTile<kKeys, kWidthV>;
  using QTile = SharedTile<kQueries, kWidth>;
  using DoutTile = SharedTile<kQueries, kWidthV>;
  using DsTile = SharedTile<kKeys, kQueries>;  // [key][query]

  static constexpr int kPeerPanels = peer_panels<KTile::kPanels>(0).count;
  static constexpr int kPeerBytes = kPeerPanels * KTile::kPanelBytes;
  static constexpr int kWeightsBytes = kKeys * kQueries * 2;
  /// Stages of dO: two where there is room.
  static constexpr int kFixedBytes = KTile::kBytes + VTile::kBytes + kPeerBytes +
                                     2 * QTile::kBytes + 2 * kWeightsBytes +
                                     2 * kBlocks * DsTile::kBytes;
  static constexpr int kMostBytes = 232448;  // that a Hopper thread block has
  static constexpr int kDoutStages =
      kFixedBytes + 2 * DoutTile::kBytes + 3072 <= kMostBytes ? 2 : 1;

  /// Whether a thread block always computes dQ two panels at a time.
  static constexpr bool kEvenShares = dq_share<KTile::kPanels>(0, 0).count % 2 == 0 &&
                                      dq_share<KTile::kPanels>(0, 1).count % 2 == 0;

  /// What the kernels before and after have to know (backward/pre.cuh). fp16 has few exponents: its
  /// weights are held times 2^12 (backward/scratch.cuh).
  struct StageTraits {
    static constexpr float kShift = kBf16 ? 0.f : kWeightShift, kScale = kBf16 ? 1.f : kWeightScale;
    static constexpr bool kQuadOrder = true, kMarksNonfinite = false, kPreparesKeys = false;
    static constexpr bool kMayStoreDq = false, kMask = false;
  };

  struct alignas(1024) Shared {
    uint8_t k[KTile::kBytes], v[VTile::kBytes];
    uint8_t q[2][QTile::kBytes], dout[kDoutStages][DoutTile::kBytes];
    uint8_t ds[2][kBlocks][DsTile::kBytes];  // of this block's keys, and of its peer's
    uint8_t weights[2][kWeightsBytes];
    uint8_t peer_k[kPeerBytes];
    alignas(16) float lse[2][kQueries], delta[kDoutStages][kQueries];
    // Of this item, and of the next.
    Block blocks[2];
    int2 limits[2][kKeys];     // queries [x, y) that see the key
    uint32_t nonfinite[2][4];  // whether dV's rows of a warp are
    uint32_t drawn[2];         // numbers that the other block has drawn for both
    Ring<2> block_ring, drawn_ring;
    ptx::Barrier request, nonfinite_full[2];
    Ring<1> k_ring, v_ring, peer_k_ring;
    Ring<2> q_ring, weights_ring, ds_ring;
    Ring<kDoutStages> dout_ring;
    Ring<2> added_ring;  // where additions to dQ have an order
  };
  static_assert(sizeof(Shared) <= kMostBytes);
};

}  // namespace strobe::cuda::sm90_wide

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_LAYOUT_CUH_
