// How the sums of the backward pass through mma.sync leave registers: dQ, to which several items
// add; dK and dV, which are one item's.
//
// The sum of a tile's dQ is 0 when the items begin (backward/pre.cuh), and each item that visits
// the tile adds to it: whoever comes first, unless the launch is deterministic. Where no tile gets
// a second addition it is stored, and nobody has written zeros (BackwardScratch::stores_sum).
//
// In a deterministic launch additions to a tile follow on each other by the ranks of their items,
// which are the places of the items' keys in the tile's walk (core/walk.h), and each of a warp's
// parts of a tile has a counter: the rank that is to add next. An item waits until it is its own.
// Items are handed out with ranks ascending, so an item that is waited for is always under way.
//
// To report an addition is to raise the counter. That is a release, which waits until L2 has
// acknowledged the addition. The weights half does it two steps later for all warps of the
// gradients half, its warps by turns. The last two steps of an item are reported by the gradients
// half itself. The weights half would wait for the next item first, and that item may wait for
// others that wait for these reports: a deadlock.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_RESULTS_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_RESULTS_CUH_

#include <cstddef>
#include <cstdint>

#include "cuda/backward/math.cuh"
#include "cuda/mma_sync/backward_thread.cuh"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda::sm80 {

/// The item's rank among those that add to dQ of a step's tile: the counter has it when it is the
/// item's turn, and one more when the item has added.
template <typename Thread>
__device__ __forceinline__ uint32_t rank(const Thread& t,
                                         [[maybe_unused]] const typename Thread::Step& step) {
  if constexpr (Thread::kMask) {
    return static_cast<uint32_t>(
        t.masked_step_int(t.n_step(), offsetof(typename Thread::StepRecord, rank)));
  }
  const auto key_tile =
      static_cast<uint32_t>(t.record_int(offsetof(ItemRecord, key_begin)) / Thread::kConfig.tile_k);
  // (Intervals' place_in is that too; but the walk would be read.)
  if constexpr (kWalksAreLists && !Thread::kMask) {
    return place_in(t.walk(), step.head, step.tile(t.walk()), key_tile);
  }
  return key_tile;
}
/// The counter of a warp's part of a scratch tile.
template <typename Thread>
__device__ __forceinline__ uint32_t* additions(const Thread& t, uint32_t tile, int warp) {
  return t.scratch.additions + int64_t{tile} * Thread::Shape::kHalfWarps + warp;
}

/// Where step n's addition waits to be reported: a scratch tile, and the counter's new value, which
/// is not 0.
template <typename Thread>
__device__ __forceinline__ uint32_t report_slot(const Thread& t, const typename Thread::Place& me,
                                                int n) {
  return t.shared + static_cast<uint32_t>(Thread::Shape::kReportsAt + 32 * me.warp() + 8 * (n & 3));
}
template <typename Thread>
__device__ __forceinline__ void clear_reports(const Thread& t) {
  for (int at = 0; at < Thread::Shape::kReportBytes; at += 4) {
    ptx::store_shared(t.shared + static_cast<uint32_t>(Thread::Shape::kReportsAt + at), 0);
  }
}
/// Reports what is in the slot of one of the gradients half's warps, after all additions that this
/// thread knows of; false where there is nothing.
template <typename Thread>
__device__ __forceinline__ bool report_addition(const Thread& t, uint32_t slot, int warp) {
  const auto report = ptx::load_shared_wide<uint2>(slot);
  if (report.y == 0) return false;
  ptx::store_release(additions(t, report.x, warp), report.y);
  return true;
}

/// Adds a pass of the warp's dq to the tile's sum, or makes it the sum.
template <typename Thread, int kPassN>
__device__ __forceinline__ void add_dq(const Thread& t, const float (&dq)[2][kPassN][4], int pass,
                                       float* sum) {
  constexpr int kWidth = Thread::kConfig.width;
  const int32_t head_dim = t.p.head_dim;
  const typename Thread::Place me = t.place();
  const int first = (me.dq_column() + pass) / 8;
  sum += (me.dq_row() / 16 * (kWidth / 8) + first) * 128 + sum_offset(me.lane());
  const auto each = [&](const auto& put) {
    if (head_dim == kWidth) {
#pragma unroll
      for (int n = 0; n < kPassN; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) put(sum + (m * (kWidth / 8) + n) * 128, dq[m][n]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kPassN; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (8 * (first + n) < head_dim) put(sum + (m * (kWidth / 8) + n) * 128, dq[m][n]);
        }
      }
    }
  };
  if (Thread::Shape::kStoresSum && t.scratch.stores_sum) {
    each([](float* to, const float(&x)[4]) { sum_store(to, x); });
  } else {
    each([](float* to, const float(&x)[4]) { sum_add(to, x); });
  }
}

/// Writes dK or dV of the item.
template <typename Thread, int kM, int kSumN>
__device__ __forceinline__ void store_keys(const Thread& t, const float (&sum)[kM][kSumN][4],
                                           float scale, const Tensor& tensor, int32_t dim,
                                           float* parts_sum, int32_t parts) {
  const typename Thread::Place me = t.fresh_place();
  const ItemRecord& b = t.record(t.item());
  cuda::store_keys<typename Thread::T, Thread::kConfig.width>(
      t.p,
      {b.batch, b.head_kv, b.part, static_cast<uint32_t>(parts), b.k_row,
       static_cast<int32_t>(b.mask.seqlen_k)},
      b.key_begin + me.key_row() + me.lane() / 4, me.column(), me.lane(), sum, scale, tensor, dim,
      parts_sum);
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_RESULTS_CUH_
