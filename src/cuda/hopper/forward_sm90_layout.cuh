// Hopper forward: the numbers of a configuration, and what lies in shared memory and in the
// workspace. forward_sm90.cuh has the kernel, and the whole picture.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_LAYOUT_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_LAYOUT_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/config.h"
#include "cuda/common/element.h"
#include "cuda/common/forward_pairwise.cuh"
#include "cuda/common/key_boxes.h"
#include "cuda/common/params.h"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/common/tile_mask.h"
#include "cuda/hopper/forward_sm90_mask.cuh"
#include "cuda/hopper/key_chunks.h"
#include "cuda/hopper/part_walk.h"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/hopper/transposed_values.h"
#include "cuda/ptx/tensor_map.h"

namespace strobe::cuda::sm90 {

constexpr int kSharedBytes = 232448;  // that a thread block of a 9.0 device can have
constexpr int kWarpgroupRows = 64, kWarpgroupThreads = 128;

/// A tile of queries, as the scheduler hands it to the other warps.
template <int kWarpgroups>
struct Tile {
  PartWalk part[kWarpgroups];
  alignas(16) TileMask mask;
  // The walk of all warpgroups together: blocks that some of them need. Where there are none, and
  // in the tile that says that there are no more, it is one place whose block is not loaded
  // (`loaded` is 0): consumers finish the tile before in its turn.
  BlocksOf<int32_t> walk;
  int32_t loaded;
  int32_t batch;  // negative: there are no more tiles
  int32_t head, head_kv;
  int32_t first, rows;              // the first of its queries; rows in use, of all heads
  int32_t map_batch, map_q, map_k;  // coordinates of query `first` and of key 0 in the tensor maps
  int32_t entry;                    // of a cache: there `map_k` are the rows before key 0
  int32_t number, suspect;          // suspect: it is on the list of those that are not finite
  int64_t lse_row;                  // of query `first`
};

/// What products of a tile's float8 tensors are to be multiplied by: scores, to units of log 2, and
/// O. A scale that is not finite is NaN here.
struct TileScales {
  // That of scores is positive, or NaN: the softmax takes the largest score's product for the
  // largest product. Where it is negative, the signs of Q are turned.
  float score, value;
  int32_t turns_q;

  __device__ __forceinline__ static TileScales of(const ForwardParams& p, int32_t batch,
                                                  int32_t head) {
    // A scale of 0 would make NaN of the -inf of keys that a row does not see. This one is as good:
    // its products with scores, below 2^27, are nothing beside 1.
    constexpr float kLeast = 0x1p-100f;
    const float score = p.scale * p.score_factor(batch, head) * kLog2e;
    return {fabsf(score) < kLeast ? kLeast : fabsf(score), p.value_factor(batch, head), score < 0};
  }
};

/// What a float8 kernel has in shared memory besides.
template <typename VTile, int kStages, int kTileSlots>
struct alignas(1024) Float8Shared {
  uint8_t v[kStages][VTile::kBytes];  // transposed
  Ring<kStages> v_ring;
  TileScales scales[kTileSlots];
};
struct NoFloat8Shared {};

/// The bias of a block of keys, as a kernel with a bias has it: 64 queries of each warpgroup.
template <typename BiasTile, int kStages, int kWarpgroups>
struct alignas(1024) BiasShared {
  uint8_t tiles[kStages][kWarpgroups][BiasTile::kBytes];
};
template <int kStages, int kWarpgroups>
struct BiasRings {
  Ring<kStages> of[kWarpgroups];
};
struct NoBiasShared {};

/// A ForwardConfig as plain numbers: nvcc 13 writes stubs that do not compile for kernels with
/// template arguments of class type. kMasked: for masks as data (forward_sm90_mask.cuh). kBias:
/// with a bias (forward_sm90_bias.cuh). kInvariant: a row's reference depends on nothing beside the
/// row in its tile (Kind). kChunked: keys have chunks (key_chunks.h), if the launch has any.
template <int kDtype, int kWidth_, int kTileQ, int kTileK_, int kStages_, int kWarps, bool kMasked_,
          bool kBias_, bool kInvariant_, bool kChunked_>
struct Traits {
  using T = Element<kDtype>;
  // Q, K, V and P are float8 e4m3, and V is transposed (transposed_values.h).
  static constexpr bool kFloat8 = std::is_same_v<T, ptx::E4m3>;
  static constexpr bool kMasked = kMasked_, kBias = kBias_, kInvariant = kInvariant_,
                        kChunked = kChunked_;
  static constexpr int kWarpgroups = kWarps / 4;
  static constexpr int kWidth = kWidth_, kTileK = kTileK_, kStages = kStages_;
  static constexpr int kPanel = 128 / static_cast<int>(sizeof(T));  // columns
  static constexpr int kPanels = (kWidth + kPanel - 1) / kPanel;
  using QTile = SharedTile<kWarpgroupRows, kPanel * kPanels, sizeof(T)>;  // of one warpgroup
  using KTile = SharedTile<kTileK, kPanel * kPanels, sizeof(T)>;
  using VTile = std::conditional_t<kFloat8, TransposedTile<kFloat8 ? kTileK : 32, kWidth>, KTile>;
  // A block's bias for one warpgroup. Where there is room for two of them, one is on its way while
  // the other is used; else the next one is once this one is in registers.
  using BiasTile = SharedTile<kWarpgroupRows, (kTileK + 63) / 64 * 64>;
  static constexpr int kBiasStages = kWidth <= 64 ? 2 : 1;
  // Columns of O that a product of float8 adds to at a time: their accumulators are apart from O's.
  static constexpr int kSlice = kWidth % 64 == 0 ? 64 : kWidth;

  // Whether O += P V of a block runs beside the softmax of the next one. In float8 at width 256
  // there are no registers for both S and the product's accumulators.
  static constexpr bool kRunsBeside = !kFloat8 || kWidth <= 192;

  // Up to width 128 there is room for a second Q and, unless a bias lies there, for O on its way
  // out. Else O leaves in rounds
  // of two panels, or, where there is no room for them either, straight from registers.
  static constexpr bool kWide = kWidth > 128;
  static constexpr int kQStages = kWide ? 1 : 2;
  static constexpr int kOPanels = kWide ? 2 : (kWidth + 63) / 64;
  using OTile = SharedTile<kWarpgroupRows, 64 * kOPanels>;
  static constexpr int64_t kNeeded =
      int64_t{kQStages} * kWarpgroups * QTile::kBytes + int64_t{2} * kStages * KTile::kBytes +
      (kFloat8 ? int64_t{kStages} * VTile::kBytes + 1024 : 0) +
      (kBias ? int64_t{kBiasStages} * kWarpgroups * BiasTile::kBytes : 0) + 2048;
  static constexpr bool kStagesO = kNeeded + kWarpgroups * OTile::kBytes <= kSharedBytes;
  // At least 3 tiles are in use at a time. While consumers compute the last block of tile t, tile t
  // - 1 may be unfinished; and the warp that loads K and V holds tile t + 1 already, for it loads
  // the last V of tile t after the first K of tile t + 1.
  static constexpr int kTileSlots = 4;
  // Warps that are no consumers: the producers, and those that transpose V.
  static constexpr int kOtherWarps = kFloat8 ? 8 : 4;
  static constexpr int kThreads = kWarpgroupThreads * kWarpgroups + 32 * kOtherWarps;
  // Together no more than the registers that the block starts with: 504 a thread of each warpgroup
  // with 3 warpgroups, 512 with 4.
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : kFloat8 ? 216 : 224;
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32
                                            : kFloat8        ? (512 - 2 * kConsumerRegisters) / 2
                                                             : 504 - 2 * kConsumerRegisters;
  // Whether the first tile is worked out while the barriers are initialised: 1 to 2 % at short
  // sequences up to width 96, nothing at 128, and 2 % slower at 256, where it is not known why.
  static constexpr bool kEarlyTile = kWidth <= 96 && !kFloat8;
  static_assert(kTileQ == kWarpgroups * kWarpgroupRows);
  static_assert(kWarpgroups == 2 || kWarpgroups == 3);
  static_assert(kTileK % 16 == 0 && kWidth % 32 == 0);
  static_assert(!kFloat8 || (kWarpgroups == 2 && !kMasked && !kBias));
  static_assert(!kChunked || (!kMasked && !kBias && !kFloat8));
  static_assert(!kBias || (kWarpgroups == 2 && kTileK % 64 == 0 && !kMasked));
  static_assert(!kInvariant || kChunked);
  static_assert(!kMasked || (kWarpgroups == 2 && kTileK % 64 == 0));

  struct alignas(1024) Shared {
    uint8_t q[kQStages][kWarpgroups][QTile::kBytes];
    uint8_t k[kStages][KTile::kBytes];
    uint8_t v[kStages][KTile::kBytes];
    uint8_t o[kStagesO ? kWarpgroups : 1][kStagesO ? OTile::kBytes : 16];
    Tile<kWarpgroups> tiles[kTileSlots];
    Ring<kQStages> q_ring[kWarpgroups];
    Ring<kStages> k_ring, v_ring;
    Ring<1> o_ring[kWarpgroups];
    Ring<kTileSlots> tile_ring;
    [[no_unique_address]] std::conditional_t<kBias, BiasRings<kBiasStages, kWarpgroups>,
                                             NoBiasShared>
        bias_ring;
    ptx::Barrier request;
    int32_t suspects;     // head of the list; negative: none
    float never_written;  // see keep_before_wait
    std::conditional_t<kMasked, MaskShared<kWarpgroups, kStages, kTileSlots>, NoMaskShared> mask;
    std::conditional_t<kFloat8, Float8Shared<VTile, kStages, kTileSlots>, NoFloat8Shared> float8;
    std::conditional_t<kBias, BiasShared<BiasTile, kBiasStages, kWarpgroups>, NoBiasShared> bias;
  };
  static_assert(sizeof(Shared) <= kSharedBytes,
                "more shared memory than a Hopper thread block has");
};

/// Those of the kernel that computes these features. Rows are invariant in two of them: the general
/// kernel takes the maximum of every block, which no other row has a part in; the one without
/// softcap and ALiBi has a form for that.
template <ForwardConfig c, Features kComputes>
using TraitsOf =
    Traits<c.dtype, c.width, c.tile_q, c.tile_k, c.stages, c.warps, kComputes.has(features::kMask),
           kComputes.has(features::kBias),
           kComputes.has(features::kInvariantRows) && !kComputes.has(features::kScores),
           kComputes.has(features::kInvariantRows)>;

struct TensorMaps {
  CUtensorMap q, k, v, out;
};
/// Of keys in a cache.
struct CachedTensorMaps : TensorMaps {
  KeyBoxes boxes;
};
/// With a bias.
struct BiasTensorMaps : TensorMaps {
  CUtensorMap bias;
};

/// Whether a kernel with these parameters finds its keys in a cache. Its tiles then hold several
/// heads.
template <typename Params>
inline constexpr bool kCached = std::is_base_of_v<TileParams, Params>;
/// The query of a tile's row, and the head, counted from the tile's.
template <typename Params>
__device__ __forceinline__ int query_of([[maybe_unused]] const Params& p, int row) {
  if constexpr (kCached<Params>) return p.query(row);
  return row;
}
template <typename Params>
__device__ __forceinline__ int head_of([[maybe_unused]] const Params& p, [[maybe_unused]] int row) {
  if constexpr (kCached<Params>) return p.head(row);
  return 0;
}
/// log2 of the rows of a query.
template <typename Params>
__device__ __forceinline__ int pack_of([[maybe_unused]] const Params& p) {
  if constexpr (kCached<Params>) return p.pack;
  return 0;
}
template <typename Tr, typename Params>
using MapsOf = std::conditional_t<kCached<Params>, CachedTensorMaps,
                                  std::conditional_t<Tr::kBias, BiasTensorMaps, TensorMaps>>;

/// What tells the sequences of a launch apart. kAllRowsUsed: as Sequences::assuming has it.
template <bool kAllRowsUsed, typename Params>
__device__ __forceinline__ decltype(auto) sequences_of(const Params& p) {
  if constexpr (kCached<Params>) {
    static_assert(!kAllRowsUsed);
    return (p.cache);
  } else {
    return p.template assuming<kAllRowsUsed>();
  }
}

/// Of a launch, in global memory. Needs no preparation.
struct Workspace {
  unsigned long long tile_counter, unused;
  SuspectTile suspects[1];  // one for each tile
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_LAYOUT_CUH_
