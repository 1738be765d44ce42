// Step 5: warps split the queries (arXiv:2307.08691, section 3.3, "Work Partitioning Between
// Warps"). This is FlashAttention-2.
//
// Step 4 but for Split. Every warp has a quarter of the tile's 128 queries and all 64 keys of the
// block. What a row needs - its maximum, its sum, its P V - is then all in one warp: between the
// lanes of the warp, and not between warps. So of what SplitKeys does nothing is left to do:
// nothing is told, nothing exchanged, and there is no barrier but those around the copies of K and
// V.
#ifndef STROBE_EXAMPLES_PAPER_5_WARPS_CUH_
#define STROBE_EXAMPLES_PAPER_5_WARPS_CUH_

#include "4_sequence.cuh"

namespace strobe::paper {

template <int kHeadDim>
struct SplitQueries : Shape<kHeadDim, 128, 64, 128 / kWarps, 64> {
  using Base = Shape<kHeadDim, 128, 64, 128 / kWarps, 64>;
  static constexpr int kColumnTiles = kHeadDim / 8;  // a warp holds whole rows of O
  static constexpr int kBytes = Base::kSplitOffset;  // and has nothing to exchange

  int warp = static_cast<int>(threadIdx.x) / 32;

  __device__ __forceinline__ explicit SplitQueries(char*) {}

  __device__ __forceinline__ int first_row() const { return warp * (Base::kTileQ / kWarps); }
  __device__ __forceinline__ int first_key() const { return 0; }
  __device__ __forceinline__ int column(int n) const { return 8 * n; }
  __device__ __forceinline__ bool stores_statistics() const { return true; }

  __device__ __forceinline__ void tell_max(int, int, float) const {}
  __device__ __forceinline__ float max_of_warps(int, int, float max) const { return max; }
  __device__ __forceinline__ void add_sums(OfRows<SplitQueries>&, int) const {}

  /// O = O * old_factor + P V.
  template <typename Scaling, typename V>
  __device__ __forceinline__ void add_values(Rows<SplitQueries>& rows, Block<SplitQueries>& block,
                                             const V& v) const {
    static_assert(!Scaling::kNeedsBlockSums, "step 3 comes before");
#pragma unroll
    for (int r = 0; r < Base::kRowBlocks; ++r) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.out[r][n][i] *= block.old_factor[r][i / 2];
      }
    }
#pragma unroll
    for (int k = 0; k < Base::kKeyTiles / 2; ++k) {
      multiply_pv(rows.out, block.weights[k], v, 16 * k, 0);
    }
  }
};

struct FlashAttention2 : Sequence {
  template <int kHeadDim>
  using Split = SplitQueries<kHeadDim>;
};

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_5_WARPS_CUH_
