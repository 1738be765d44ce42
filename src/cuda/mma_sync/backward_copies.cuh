// What the weights half brings into shared memory for both halves: the record of the next item, its
// keys and values with the limits of the keys, and each step's queries and rows of dO with their
// lse and delta. Every copy waits for the `empty` barrier of the buffer that it fills, and arrives
// at its `full` barrier when it has landed (backward_barriers.cuh). The threads themselves do not
// wait for that.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_COPIES_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_COPIES_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/backward/ended_items.cuh"
#include "cuda/backward/order.cuh"
#include "cuda/backward/seen_queries.cuh"
#include "cuda/common/bias.cuh"
#include "cuda/common/load.cuh"
#include "cuda/mma_sync/backward_thread.cuh"
#include "cuda/ptx/barrier.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda::sm80 {

/// Called when this thread has issued its part of a copy: lets the barrier know when that has
/// landed. aligned: the copy was made by cp.async.
__device__ __forceinline__ void arrive_when_landed(uint32_t barrier, bool aligned) {
  if (aligned) {
    ptx::barrier_arrive_after_copies(barrier);
  } else {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::barrier_arrive(barrier);
  }
}

/// Rows of K or V of item i.
template <typename Thread>
__device__ __forceinline__ void load_rows_of_keys(const Thread& t, int i, const Tensor& tensor,
                                                  int32_t dim, uint32_t to, uint32_t full) {
  constexpr BackwardConfig kC = Thread::kConfig;
  const ItemRecord& b = t.record(i);
  const RowsView rows = rows_view(tensor, b.batch, b.k_row, b.head_kv, b.mask.seqlen_k, dim);
  const bool aligned = rows.aligned();
  load_tile<kC.tile_k, kC.width, Thread::Shape::kHalfThreads>(to, rows, b.key_begin, aligned,
                                                              t.fresh_place().thread);
  arrive_when_landed(full, aligned);
}

template <typename Thread>
__device__ __forceinline__ void load_k(const Thread& t, int i) {
  constexpr BackwardConfig kC = Thread::kConfig;
  t.barriers.wait_empty(t.barriers.k_empty(), i, 1);
  const ItemRecord& b = t.record(i);
  for (int row = t.fresh_place().thread; row < kC.tile_k; row += Thread::Shape::kHalfThreads) {
    const int2 seen = key_limits(b.mask, b.key_begin + row);
    ptx::store_shared(t.limits_at() + 8 * row, static_cast<uint32_t>(seen.x));
    ptx::store_shared(t.limits_at() + 8 * row + 4, static_cast<uint32_t>(seen.y));
  }
  ptx::barrier_arrive(t.barriers.k_full());  // for the limits
  load_rows_of_keys(t, i, t.p.k, t.p.head_dim, t.k_tile(), t.barriers.k_full());
}

template <typename Thread>
__device__ __forceinline__ void load_v(const Thread& t, int i) {
  t.barriers.wait_empty(t.barriers.v_empty(), i, 1);
  load_rows_of_keys(t, i, t.p.v, t.p.head_dim_v, t.v_tile(), t.barriers.v_full());
}

/// A step's Q and lse, or dO and delta. rows_at: of the record's q or dout; values: lse or delta;
/// at, values_at: their first stages in shared memory.
template <typename Thread>
__device__ __forceinline__ void load_queries(const Thread& t, int i,
                                             const typename Thread::Step& step,
                                             const Tensor& tensor, int32_t dim, size_t rows_at,
                                             int at, const float* values, int values_at, int stage,
                                             uint32_t full) {
  using Shape = typename Thread::Shape;
  using QTile = typename Thread::QTile;
  constexpr int kTileQ = Thread::kConfig.tile_q, kWidth = Thread::kConfig.width;
  constexpr int kRowsAtOnce = Shape::kHalfThreads / QTile::kChunks;
  const int thread = t.fresh_place().thread;
  const int chunk = thread % QTile::kChunks, first = thread / QTile::kChunks;
  const int32_t row = t.q_begin(i, step);
  const int32_t seqlen = t.record_int(i, offsetof(ItemRecord, mask) + offsetof(Mask, seqlen_q));
  const char* const head = ptx::load_shared_wide<const char*>(t.record_at(i, rows_at)) +
                           2 * step.head * tensor.head_stride;
  const int32_t copies = t.record_int(i, offsetof(ItemRecord, copies));
  const uint32_t tile = t.q_tile(at, stage);
  const auto copy = [&](auto is_whole) {
    const uint32_t to = tile + static_cast<uint32_t>(QTile::offset(first, 8 * chunk));
    const char* source = head + 2 * (row + first) * tensor.row_stride + 16 * chunk;
#pragma unroll
    for (int r = 0; r < kTileQ; r += kRowsAtOnce) {
#pragma unroll
      for (int panel = 0; panel < QTile::kPanels; ++panel) {
        const uint32_t address =
            to + static_cast<uint32_t>(panel * QTile::kPanelBytes + r * QTile::kRowBytes);
        if constexpr (decltype(is_whole)::value) {
          ptx::cp_async_16_if(address, source + panel * QTile::kRowBytes, true);
        } else {
          ptx::cp_async_16_if(address, source + panel * QTile::kRowBytes,
                              row + first + r < seqlen && 8 * chunk + panel * QTile::kPanel < dim);
        }
      }
      source += 2 * kRowsAtOnce * tensor.row_stride;
    }
  };
  if (copies == kCopyWholeTiles && row + kTileQ <= seqlen) {
    copy(std::true_type());
  } else if (copies > kCopyValues) {
    copy(std::false_type());
  } else {
    load_tile<kTileQ, kWidth, Shape::kHalfThreads>(
        tile, {const_cast<char*>(head), 2 * tensor.row_stride, seqlen, dim}, row, false, thread);
  }
  if (thread < kTileQ / 4) {
    ptx::cp_async_16_if(
        t.shared + static_cast<uint32_t>(values_at + 4 * stage * kTileQ + 16 * thread),
        values + int64_t{t.scratch_tile(i, step)} * kTileQ + 4 * thread, true);
  }
  arrive_when_landed(full, copies > kCopyValues);
}

/// The bits of the n-th of all steps, where the mask has some for it.
template <typename Thread>
__device__ __forceinline__ void load_bits(const Thread& t, int i, int n) {
  constexpr int kTileK = Thread::kConfig.tile_k;
  const MaskLayout& l = t.p.mask_layout;
  const int32_t place = t.masked_step_int(n, offsetof(typename Thread::StepRecord, bits));
  if (place < 0) return;
  const uint32_t stride = StepBits::stride_of(t.p);
  const int thread = t.fresh_place().thread, rows = stride == 8 ? 2 : 1;
  static_assert(kTileK <= Thread::Shape::kHalfThreads);
  if (thread >= kTileK / rows) return;
  const auto block_q = static_cast<int32_t>(l.block_q), block_k = static_cast<int32_t>(l.block_k);
  const int32_t key = t.record_int(i, offsetof(ItemRecord, key_begin)) % block_k + thread * rows;
  const int32_t query = t.masked_step(n).tile * Thread::kConfig.tile_q % block_q;
  const int32_t* const from =
      t.p.mask + l.key_bits + place * l.words_of_bits() + key * (block_q / 32) + query / 128 * 4;
  ptx::cp_async_16_if(t.bits_at(n) + static_cast<uint32_t>(16 * thread), from, true);
}
/// Finds the step after the n-th, which is one of the same item if there is one, and says whether
/// there is. By one thread.
template <typename Thread>
__device__ __forceinline__ void find_step_after(const Thread& t, int n) {
  const bool more = t.finder().next(t.p, t.step_record(n + 1));
  ptx::store_shared(t.last_at(n), more ? 0 : 1);
}

/// Q and dO of item i's `step`, the n-th of all steps.
template <typename Thread>
__device__ __forceinline__ void load_step(const Thread& t, int i, const typename Thread::Step& step,
                                          int n) {
  using Shape = typename Thread::Shape;
  constexpr int kStages = Shape::kStages;
  const int stage = n % kStages;
  t.barriers.wait_empty(t.barriers.q_empty(stage), n, kStages);
  if constexpr (Thread::kMask) load_bits(t, i, n);
  load_queries(t, i, step, t.p.q, t.p.head_dim, offsetof(ItemRecord, q), Shape::kQAt, t.scratch.lse,
               Shape::kLseAt, stage, t.barriers.q_full(stage));
  const auto finds = [&] { return Thread::kMask && t.fresh_place().thread == 0; };
  if constexpr (Thread::kMask) {
    if (finds()) {
      find_step_after(t, n);
      ptx::barrier_arrive(t.barriers.q_full(stage));
    }
  }
  t.barriers.wait_empty(t.barriers.dout_empty(stage), n, kStages);
  load_queries(t, i, step, t.p.dout, t.p.head_dim_v, offsetof(ItemRecord, dout), Shape::kDoutAt,
               t.scratch.delta, Shape::kDeltaAt, stage, t.barriers.dout_full(stage));
  if (finds()) ptx::barrier_arrive(t.barriers.dout_full(stage));
  if constexpr (Thread::kBias) {
    if (t.p.bias.data) {
      const ItemRecord& item = t.record(i);
      BiasPlane::of(t.p.bias, item.batch, step.head)
          .prefetch(t.q_begin(i, step), Shape::kConfig.tile_q,
                    static_cast<int32_t>(item.mask.seqlen_q) - 1, item.key_begin,
                    Shape::kConfig.tile_k, static_cast<int32_t>(item.mask.seqlen_k) - 1,
                    t.fresh_place().thread, Shape::kHalfThreads);
    }
  }
}

/// Draws item i, and fills its record. n: which of all steps its first one is.
template <typename Thread>
__device__ __forceinline__ void fetch_item(const Thread& t, const BackwardOrder& order, int i,
                                           [[maybe_unused]] int n) {
  constexpr BackwardConfig kC = Thread::kConfig;
  t.barriers.wait_empty(t.barriers.record_empty(i), i, 2);
  ItemRecord& record = t.record(i);
  if (t.fresh_place().thread == 0) {
    int64_t index;
    do {
      index = atomicAdd(t.scratch.ticket, 1u);
      if (index >= order.items) break;
      const BackwardItem item = backward_item(order, t.p.heads_kv, index);
      const Sequence sequence = t.p.sequence_of_all_heads(item.batch);
      if (item.block * kC.tile_k < sequence.mask.seqlen_k) {
        record.fill(t.p, sequence, item, order.heads_per_part, kC.tile_q, kC.tile_k, kC.width);
        if constexpr (Thread::kMask) {
          record.ended = EndedItems<Thread::Shape::kHalfWarps>::first_word(
              t.p, t.scratch, order.parts, item.batch, item.head_kv, item.part);
          typename Thread::StepFinder& steps = t.finder();
          const Range keys{record.key_begin,
                           min64(record.key_begin + kC.tile_k, sequence.mask.seqlen_k)};
          const auto rule = static_cast<IntervalWalk<int32_t>>(
              query_walk(sequence.mask, keys, int64_t{kC.tile_q}));
          steps.start(t.p,
                      Thread::StepFinder::Keys::of(t.p.mask_layout, sequence, record.key_begin),
                      rule.begin, rule.end, record.head_begin, record.head_end);
          record.steps = steps.next(t.p, t.step_record(n)) ? 1 : 0;  // or more
        }
        break;
      }
      // This item does not exist: its sequence has fewer keys than the longest one. The ticket
      // skips to the next item that exists, so that other thread blocks need not draw those
      // between.
      const int64_t next = next_existing_item(
          order, t.p.heads_kv, index, [&](int32_t batch, int32_t block_of_sequence) {
            return t.p.sequence_rows(batch).seqlen_k > block_of_sequence * kC.tile_k;
          });
      if (next > index + 1) atomicMax(t.scratch.ticket, static_cast<uint32_t>(next));
    } while (true);
    if (index >= order.items) record.steps = -1;
  }
  t.barriers.sync_weights_half();
  ptx::barrier_arrive(t.barriers.record_full(i));
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_COPIES_CUH_
