// Hopper forward: an additive bias, of the type of Q.
//
// A block of keys has a tile of the bias for each warpgroup, 64 queries x tile_k keys, which TMA
// lays out as it does Q: panels of 64 columns, 128-byte swizzle. ldmatrix gives a thread the values
// at the very places of its scores:
//
//   S, 16 rows of a warp x 16 keys    | keys 0 to 7 | keys 8 to 15 |
//   rows 0 to 7                       |    w[0]     |    w[2]      |    a word: two keys of a row
//   rows 8 to 15                      |    w[1]     |    w[3]      |
//
// so that no shuffle and no second layout is needed. Each warpgroup has a ring of its own, and
// gives a stage back as soon as its values are in S, before the softmax: the next block's bias
// comes meanwhile.
//
// Scores with a bias follow no order of q.k, so every block takes its maximum, as in the general
// kernel; but no branch stands between the products of a step, so that O += P V runs beside the
// softmax. Scores are in natural units, in which a finite bias stays finite. One that is -inf gives
// a score of -inf unless q.k is NaN. Where that counts, or where it hides all keys of a row, the
// row's sum is NaN or 0, and the row is computed again key by key.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_BIAS_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_BIAS_CUH_

#include <cstdint>

#include "cuda/common/bias.cuh"
#include "cuda/hopper/forward_sm90_consumer.cuh"
#include "cuda/hopper/forward_sm90_layout.cuh"
#include "cuda/hopper/forward_sm90_producer.cuh"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/tma.h"

namespace strobe::cuda::sm90 {

/// Loads Q of tile after tile, and the bias of its blocks, in the order in which load_kv loads
/// these; by one thread.
template <typename Tr>
__device__ void load_q_and_bias(typename Tr::Shared& shared, const ForwardParams& p,
                                const BiasTensorMaps& maps) {
  using BiasTile = typename Tr::BiasTile;
  RingPosition<Tr::kQStages> q_at;
  RingPosition<Tr::kBiasStages> at[Tr::kWarpgroups];
  for_each_tile<Tr>(shared, [&](const Tile<Tr::kWarpgroups>& tile) {
    load_tile_q<Tr>(shared, p, maps.q, tile, q_at);
    ++q_at.count;
    // An axis that the bias has once has one coordinate.
    const int head = p.bias.head_stride ? tile.head : 0;
    const int batch = p.bias.batch_stride ? tile.batch : 0;
    const int first = p.bias.row_stride ? tile.first : 0;
    const int rows = p.bias.row_stride ? kWarpgroupRows : 0;
    // BiasTileOrder counts on it that L2 keeps what several tiles read.
    const bool is_shared = !p.bias.head_stride || !p.bias.batch_stride;
    const ptx::L2 policy = is_shared ? ptx::L2::kEvictLast : ptx::L2::kEvictFirst;
    for (int place = tile.walk.end - 1; tile.loaded && place >= tile.walk.begin; --place) {
      const int key = tile.walk.block(place) * Tr::kTileK;
#pragma unroll
      for (int w = 0; w < Tr::kWarpgroups; ++w) {
        if (!tile.part[w].has(place)) continue;  // the warpgroup skips the block
        Ring<Tr::kBiasStages>& ring = shared.bias_ring.of[w];
        const int stage = at[w].stage();
        ring.empty[stage].wait(at[w].free());
        ring.full[stage].arrive_expect(BiasTile::kBytes);
        for (int panel = 0; panel < BiasTile::kPanels; ++panel) {
          ptx::tma_load(shared.bias.tiles[stage][w] + panel * BiasTile::kPanelBytes, maps.bias,
                        ring.full[stage], policy, key + panel * BiasTile::kPanel, first + w * rows,
                        head, batch);
        }
        ++at[w].count;
      }
    }
  });
}

/// S = S * scale + bias, of the block under way, whose bias is there: step_halves
/// has waited for it before it issued products, since a wait is a branch.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::add_bias_of_block() {
  using BiasTile = typename Tr::BiasTile;
  constexpr int32_t kType = std::is_same_v<T, __half> ? kBiasFloat16 : kBiasBfloat16;
  const int stage = bias_at_.stage();
  // Of a bias that all queries share TMA has written one row.
  const int own = BiasTile::fragment_offset(lane(), 0);
  const int shared_row = BiasTile::swizzle(0, lane() / 16);
  const uint32_t from =
      ptx::shared_address(shared_.bias.tiles[stage][warpgroup_]) +
      static_cast<uint32_t>(p_.bias.row_stride ? own + BiasTile::block_offset(16 * warp(), 0)
                                               : shared_row);
#pragma unroll
  for (int j = 0; j < kTileK / 16; ++j) {
    uint32_t w[4];
    ptx::ldmatrix(w, (from ^ static_cast<uint32_t>(32 * (j % 4))) +
                         static_cast<uint32_t>(j / 4 * BiasTile::kPanelBytes));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = BiasPlane::both<kType>(w[i]);
      float* const s = s_ + 8 * j + i / 2 * 4 + i % 2 * 2;
      s[0] = __fmaf_rn(s[0], p_.scale, two.x);
      s[1] = __fmaf_rn(s[1], p_.scale, two.y);
    }
  }
  arrive(shared_.bias_ring.of[warpgroup_].empty[stage]);
  ++bias_at_.count;
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_BIAS_CUH_
