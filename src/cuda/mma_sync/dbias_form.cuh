// The gradient of a bias (backward/dbias.cuh) through mma.sync.
#ifndef STROBE_CUDA_MMA_SYNC_DBIAS_FORM_CUH_
#define STROBE_CUDA_MMA_SYNC_DBIAS_FORM_CUH_

#include <cstdint>

#include "cuda/backward/dbias.cuh"
#include "cuda/backward/math.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/ptx/ldmatrix.h"

namespace strobe::cuda::sm80 {

/// acc += A B^T of 64 columns: the warp's 16 rows of A, and 64 of B.
struct DbiasForm {
  using Tile = SharedTile<64, 64>;
  static constexpr int kMinBlocks = 2;  // thread blocks of a multiprocessor
  /// Whether rows begin at 16-byte units, which is not asked then.
  static constexpr bool kUnits = false;
  /// Scores may have softcap and ALiBi, and weights dropout.
  static constexpr bool kAnyScores = true;
  /// Whether the score's arithmetic has copies for the options that there are. Without, it has
  /// branches between two scores, and needs fewer registers: 7.5's products take more instructions.
#if STROBE_CUDA_INSTRUCTIONS >= 800
  static constexpr bool kCopies = true;
  template <typename T>
  using StepBias = EarlyBias;
#else
  static constexpr bool kCopies = false;
  template <typename T>
  using StepBias = LateBias;
#endif

  /// What a thread does between its copies and the barrier after which all have theirs.
  __device__ __forceinline__ static void before_barrier() {}
  /// a, b: tiles in shared memory.
  template <typename T>
  __device__ __forceinline__ static void add(float (&acc)[1][8][4], uint32_t a, uint32_t b) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const uint32_t rows =
        a + static_cast<uint32_t>(16 * warp * Tile::kRowBytes + Tile::fragment_offset(lane, 0));
    const uint32_t columns = b + static_cast<uint32_t>(Tile::fragment_offset_b(lane, 0));
    multiply<T, 4, 2>(
        acc,
        [&](int slice, uint32_t(&x)[1][4]) {
          ptx::ldmatrix(x[0], block_address<Tile>(rows, 0, 16 * slice));
        },
        [&](int slice, int pair, uint32_t(&x)[4]) {
          ptx::ldmatrix(x, block_address<Tile>(columns, 16 * pair, 16 * slice));
        },
        [] {});
  }
};

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_DBIAS_FORM_CUH_
