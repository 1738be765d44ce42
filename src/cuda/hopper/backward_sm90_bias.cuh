// Hopper backward: an additive bias, of the type of Q.
//
// TMA lays a step's bias out as it lies in memory, [query][key]: panels of 64 keys, 128-byte
// swizzle. Scores are transposed here, and so ldmatrix transposes: a thread gets the values at the
// very places of its scores.
//
//   S^T, 16 keys of a warp x 16 queries | queries 0 to 7 | queries 8 to 15 |
//   keys 0 to 7                         |      w[0]      |      w[1]       |   a word: two queries
//   keys 8 to 15                        |      w[2]      |      w[3]       |   of a key
//
// The bias is added after lse has been taken off, in log 2 units, by one more fma for each score. A
// bias of -inf gives a weight of 0, unless q.k is NaN: then, as where the other factor of a
// gradient is not finite, the row is not finite, and is computed again pair by pair
// (backward/pairwise.cuh).
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_BIAS_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_BIAS_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/bias.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/hopper/backward_sm90_layout.cuh"
#include "cuda/hopper/pipeline.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/tma.h"

namespace strobe::cuda::sm90 {

/// Rows of a TMA box of the bias.
inline constexpr int kBiasBoxRows = 64;

/// Loads the bias of a step, once the one before is in its scores; by one thread. query, key: the
/// first of the tile, counted in the sequence.
template <typename Tr>
__device__ __forceinline__ void load_bias(typename Tr::Shared& shared, const Bias& bias,
                                          const CUtensorMap& map, typename Tr::BiasPosition at,
                                          int query, int key, int head, int batch) {
  using Tile = typename Tr::BiasTile;
  ptx::Barrier& full = shared.bias_ring.full[0];
  shared.bias_ring.empty[0].wait(at.free());
  // Of a bias that all queries share the first box begins with its one row. All else are zeros.
  full.arrive_expect(Tile::kBytes);
  // An axis that the bias has once has one coordinate.
  const int first = bias.row_stride ? query : 0;
  const int head_at = bias.head_stride ? head : 0, batch_at = bias.batch_stride ? batch : 0;
  const bool is_shared = !bias.head_stride || !bias.batch_stride;
  const ptx::L2 policy = is_shared ? ptx::L2::kEvictLast : ptx::L2::kEvictFirst;
#pragma unroll
  for (int panel = 0; panel < Tile::kPanels; ++panel) {
#pragma unroll
    for (int row = 0; row < Tr::kTileQ; row += kBiasBoxRows) {
      ptx::tma_load(shared.bias + panel * Tile::kPanelBytes + row * Tile::kRowBytes, map, full,
                    policy, key + panel * Tile::kPanel, first + row, head_at, batch_at);
    }
  }
}

/// The lane's part of the addresses of its bias: of the warp's 16 keys, from `key` on, and the
/// tile's first 16 queries. Of a bias that all queries share the tile's first row has them all.
template <typename Tile>
__device__ __forceinline__ uint32_t bias_address(uint32_t tile, const Bias& bias, int key,
                                                 int lane) {
  const int row = bias.row_stride ? lane % 16 : 0;
  return tile + static_cast<uint32_t>(Tile::offset(row, key + lane / 16 * Tile::kChunk));
}

/// The bias of eight of a lane's scores: 2 keys x 4 of 16 queries.
template <typename T>
struct BiasOfQueries {
  uint32_t words[4];

  /// Of queries 16 j to 16 j + 15. address: bias_address.
  template <typename Tile>
  __device__ __forceinline__ static BiasOfQueries load(uint32_t address, const Bias& bias, int j) {
    BiasOfQueries of;
    const uint32_t rows = bias.row_stride ? 16 * Tile::kRowBytes : 0;
    ptx::ldmatrix_trans(of.words, address + static_cast<uint32_t>(j) * rows);
    return of;
  }
  /// x plus the bias of the i-th score, in log 2 units.
  __device__ __forceinline__ float added_to(float x, int i) const {
    constexpr int32_t kType = std::is_same_v<T, __half> ? kBiasFloat16 : kBiasBfloat16;
    const float2 two = BiasPlane::both<kType>(words[i / 2 % 2 * 2 + i / 4]);
    return __fmaf_rn(i % 2 ? two.y : two.x, kLog2e, x);
  }
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_BIAS_CUH_
