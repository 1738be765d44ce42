// The gradient of a bias (backward/dbias.cuh) through wgmma.
#ifndef STROBE_CUDA_HOPPER_DBIAS_FORM_CUH_
#define STROBE_CUDA_HOPPER_DBIAS_FORM_CUH_

#include <cstdint>

#include "cuda/backward/dbias.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/wgmma.h"

namespace strobe::cuda::sm90 {

/// acc += A B^T of 64 columns: 64 rows of A, of which a warp has 16, and 64 of B. wgmma's
/// accumulators lie as mma.sync's do.
struct DbiasForm {
  using Tile = SharedTile<64, 64>;
  static constexpr int kMinBlocks = 3;  // thread blocks of a multiprocessor
  /// What the kernel before computes: rows and bias are as TMA takes them, and scores plain ones.
  static constexpr bool kUnits = true, kAnyScores = false, kCopies = true;
  template <typename T>
  using StepBias = TileOfBias<T>;

  /// wgmma reads what cp.async has written.
  __device__ __forceinline__ static void before_barrier() { ptx::fence_proxy_async(); }
  /// a, b: tiles in shared memory.
  template <typename T>
  __device__ __forceinline__ static void add(float (&acc)[1][8][4], uint32_t a, uint32_t b) {
    float(&sum)[32] = reinterpret_cast<float(&)[32]>(acc);
    const auto of_a = ptx::Descriptor::make(a, 0), of_b = ptx::Descriptor::make(b, 0);
    ptx::pin(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::Wgmma<T, 64>::ss(sum, of_a.at(32 * i), of_b.at(32 * i), 1);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
  }
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_DBIAS_FORM_CUH_
