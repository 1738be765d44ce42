// Hopper backward: the sums of dQ are set to zero by the main kernel itself, where that spares
// memory a way out and back. backward_sm90.cuh has the whole picture.
//
// Zeros that the kernel before writes are written back to memory and read again where the sums of
// all heads are larger than L2. Here the first key block of a sequence, which is drawn before its
// others, sets those of its heads to zero, tile by tile, beginning while its thread block is still
// busy with the item before. A flag of each tile says so, which all key blocks await before they
// add to it: the consumers know nothing of it, since they wait at ds.full. There is no deadlock:
// an item waits for zeros of none that was drawn after it, so the first of those that are not done
// goes on.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_ZEROS_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_ZEROS_CUH_

#include <cstdint>

#include "cuda/backward/scratch.cuh"
#include "cuda/hopper/backward_sm90_layout.cuh"
#include "cuda/hopper/backward_sm90_turns.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/thread_again.h"

namespace strobe::cuda::sm90 {

/// Sets the sums of dQ to zero, where the thread block has a first key block. One warp.
template <typename Tr>
class ZeroSums {
 public:
  __device__ __forceinline__ ZeroSums(typename Tr::Shared& shared, const BackwardScratch& scratch)
      : shared_(shared), scratch_(scratch) {}

  __device__ __forceinline__ void run() {
    RingPosition<Tr::kItemStages> item;
    const int lane = ptx::thread_again() % 32;
#pragma unroll 1
    for (;; ++item.count) {
      shared_.block_ring.full[item.stage()].wait(item.phase());
      const typename Tr::Block& block = shared_.blocks[item.stage()];
      if (block.head_kv < 0) return;
      if (scratch_.items_zero && block.exists() && block.key_begin == 0) {
#pragma unroll 1
        for (int32_t head = block.head_begin; head < block.head_end; ++head)
          clear(block, head, lane);
      }
      if (!Tr::kPersistent) return;
      __syncwarp();
      if (ptx::arrives(lane)) shared_.block_ring.empty[item.stage()].arrive();
    }
  }

 private:
  /// The last tile first, as the items go through them. A tile's sum is blocks of 16 queries.
  __device__ __forceinline__ void clear(const typename Tr::Block& block, int32_t head, int lane) {
#pragma unroll 1
    for (int32_t i = (block.seqlen_q + Tr::kTileQ - 1) / Tr::kTileQ - 1; i >= 0; --i) {
      const int64_t tile = int64_t{head} * scratch_.tiles + block.scratch + i;
      auto* sum = reinterpret_cast<float4*>(scratch_.dq + tile * (Tr::kTileQ * Tr::kWidth)) + lane;
      const int32_t rows = min(Tr::kTileQ, block.seqlen_q - i * Tr::kTileQ);
#pragma unroll 1
      for (int32_t row = 0; row < rows; row += 16, sum += 4 * Tr::kWidth) {
#pragma unroll
        for (int k = 0; k < Tr::kWidth / 8; ++k) sum[32 * k] = make_float4(0.f, 0.f, 0.f, 0.f);
      }
      __syncwarp();
      if (lane == 0) ptx::store_release(scratch_.additions + tile, 1);
    }
  }

  typename Tr::Shared& shared_;
  const BackwardScratch& scratch_;
};

/// Arrives at ds.full when the sum of a step's tile is known to be zero. One thread.
template <typename Tr>
class AwaitZeros : AdditionOrder<Tr> {
 public:
  using typename AdditionOrder<Tr>::Block;
  __device__ __forceinline__ AwaitZeros(typename Tr::Shared& shared, const BackwardParams& p,
                                        const BackwardScratch& scratch, const BackwardOrder& order)
      : AdditionOrder<Tr>(shared, p, scratch, order) {}

  __device__ __forceinline__ void run() {
    this->for_each_step([&](const Block& block, const auto& now) {
      const int stage = this->at_.stage();
      this->shared_.ds_ring.empty[stage].wait(this->at_.free());
      if (this->scratch_.items_zero) {
        const uint32_t* const flag = this->counter(block, now);
        while (ptx::load_acquire(flag) == 0) {
        }
      }
      this->shared_.ds_ring.full[stage].arrive();
    });
  }
};

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_ZEROS_CUH_
