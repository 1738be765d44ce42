// Hopper backward: the numbers of a configuration, and what lies in shared memory.
// backward_sm90.cuh has the kernel, and the whole picture.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_LAYOUT_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_LAYOUT_CUH_

#include <type_traits>

#include "core/visits.h"
#include "cuda/common/backward_order.cuh"
#include "cuda/common/backward_pre.cuh"
#include "cuda/common/config.h"
#include "cuda/common/element.h"
#include "cuda/common/params.h"
#include "cuda/common/tile.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/ptx/tensor_map.h"

namespace strobe::cuda::sm90 {

/// Blocks of tile_q queries that a block of keys visits, and those of them in which every query
/// sees every key.
struct QueryVisits {
  int32_t begin, end, full_begin, full_end;

  template <typename Int>
  __device__ __forceinline__ static QueryVisits make(const BasicMask<Int>& mask, Range keys,
                                                     int32_t tile_q, int32_t tile_k) {
    const Visits v = query_visits(mask, keys, tile_q);
    const auto begin = static_cast<int32_t>(v.blocks.begin);
    const auto end = static_cast<int32_t>(v.blocks.end);
    // Keys past the end would count as seen: where the block has some, no tile is full.
    if (keys.size() < tile_k) return {begin, end, begin, begin};
    return {begin, end, static_cast<int32_t>(v.full.begin), static_cast<int32_t>(v.full.end)};
  }
  __device__ __forceinline__ bool is_full(int32_t tile) const {
    return full_begin <= tile && tile < full_end;
  }
  __device__ __forceinline__ bool all_full() const {
    return full_begin <= begin && end <= full_end;
  }
};

/// What a thread block works at: tile_k keys of a key head, with all query heads that read them, or
/// a part of these.
struct alignas(16) KeyBlock {
  QueryVisits visits;
  BackwardItem item;
  int64_t number;  // of the item
  int64_t k_row;   // of the sequence's first key
  int32_t seqlen_k;
  int32_t head_begin, head_end;  // query heads
  uint32_t scratch;              // the sequence's first scratch tile of head 0
  int32_t key_begin;
  int32_t map_batch, map_q, map_k;  // of query 0 and of the first key in the tensor maps
};

/// A step of a block: one tile of queries of one head. Tiles descend, so that all key blocks of a
/// head that are under way begin with the same tile, also under a causal mask.
struct QueryStep {
  int32_t head, tile;

  template <typename Block>
  __device__ __forceinline__ static QueryStep first(const Block& block) {
    return {block.head_begin, block.visits.end - 1};
  }
  template <typename Block>
  __device__ __forceinline__ bool done(const Block& block) const {
    return head >= block.head_end;
  }
  template <typename Block>
  __device__ __forceinline__ void advance(const Block& block) {
    if (--tile < block.visits.begin) {
      tile = block.visits.end - 1;
      ++head;
    }
  }
};

/// A BackwardConfig as plain numbers: nvcc 13 writes stubs that do not compile for kernels with
/// template arguments of class type.
template <int kDtype, int kWidth_, int kTileQ_, int kTileK_>
struct BackwardTraits {
  static constexpr bool kBf16 = kDtype == kBfloat16;
  using T = Element<kDtype>;
  static constexpr int kWidth = kWidth_, kTileQ = kTileQ_, kTileK = kTileK_;
  static constexpr int kPanels = kWidth / 64;
  static constexpr int kStages = 2;  // of Q, dO and dS
  static constexpr int kWarpgroups = 2, kWarps = 4 * kWarpgroups;
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kConsumerRegisters = 240, kProducerRegisters = 24;

  using KTile = SharedTile<kTileK, kWidth>;
  using QTile = SharedTile<kTileQ, kWidth>;
  using DsTile = SharedTile<kTileK, kTileQ>;  // [key][query]

  // dQ of a tile is 128 x 64 or 64 x 128: 64 x 64 for each warpgroup.
  static constexpr bool kDqByColumns = kTileQ == 64;
  static_assert(kTileK == 64 * kWarpgroups && kTileQ * kWidth == 64 * 64 * kWarpgroups);
  /// Whether the warpgroups take turns.
  static constexpr bool kTurns = kWidth == 128;

  /// What the kernels before and after are told. fp16 has few exponents: its weights are held times
  /// 2^12 (backward_scratch.cuh).
  struct Form {
    static constexpr float kShift = kBf16 ? 0.f : kWeightShift, kScale = kBf16 ? 1.f : kWeightScale;
    static constexpr bool kQuadOrder = true, kZeroSum = true, kAsks = false;
  };

  struct alignas(1024) Shared {
    uint8_t k[KTile::kBytes], v[KTile::kBytes];
    uint8_t q[kStages][QTile::kBytes], dout[kStages][QTile::kBytes];
    uint8_t ds[kStages][DsTile::kBytes];
    alignas(16) float lse[kStages][kTileQ], delta[kStages][kTileQ];
    int2 limits[kTileK];  // queries [x, y) that see the key
    KeyBlock block;
    ptx::Barrier k_full, v_full;
    Ring<kStages> q_ring, dout_ring, ds_ring;
  };
  static_assert(sizeof(Shared) <= 232448, "more shared memory than a Hopper thread block has");
};

template <BackwardConfig c>
using BackwardTraitsOf = BackwardTraits<c.dtype, c.width, c.tile_q, c.tile_k>;

struct BackwardMaps {
  CUtensorMap q, k, v, dout;
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_LAYOUT_CUH_
