// The gradients half of the backward pass through mma.sync: for each step dP^T = V dO^T,
// dS^T = P^T * (dP^T - delta) with P from the weights half, dK += dS^T Q, and dQ = dS K, which it
// adds to the sum in global memory (backward_results.cuh).
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_GRADIENTS_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_GRADIENTS_CUH_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cuda/backward/ended_items.cuh"
#include "cuda/backward/order.cuh"
#include "cuda/backward/seen_queries.cuh"
#include "cuda/mma_sync/backward_products.cuh"
#include "cuda/mma_sync/backward_results.cuh"
#include "cuda/mma_sync/backward_thread.cuh"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/opaque.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda::sm80 {

/// dP, which is x, of a step to dS = P * (dP - delta), packed. P comes from the weights half,
/// through the exchange. delta: the first pairs of delta, the others are read from delta_at.
template <bool kMasked, typename Thread, int kM, int kN, int kHave>
__device__ __forceinline__ void differentiate(const Thread& t, const typename Thread::Place& me,
                                              const typename Thread::Step& step,
                                              const float (&x)[kM][kN][4], float2 (&delta)[kHave],
                                              uint32_t delta_at, float dp_scale,
                                              uint32_t (&ds)[kM][kN / 2][4]) {
  const int lane = me.lane();
  const uint32_t exchange = t.exchange(me);
  SeenQueries<kMasked ? 2 * kM : 0> seen(t.seen_limits(me, 0), t.q_begin(step) + me.query());
#pragma unroll
  for (int pair = 0; pair < kN / 2; ++pair) {
    if (kHave == 2 && pair > 0) {
      delta[0] = ptx::load_shared_pair(delta_at + 64 * pair);
      delta[1] = ptx::load_shared_pair(delta_at + 64 * pair + 32);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      uint32_t packed[4];  // P as fp16
      ptx::load_shared_words(exchange + static_cast<uint32_t>(512 * (m * (kN / 2) + pair)), packed);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int n = 2 * pair + r / 2, h = r % 2;
        __half2 bits;
        memcpy(&bits, &packed[r], sizeof bits);
        const float2 weight = __half22float2(bits);
        float value[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float w = e ? weight.y : weight.x, dp = x[m][n][2 * h + e];
          if constexpr (Thread::kGeneral) {
            if (__float_as_int(w) < 0) dp *= 0.f;  // dropped; a NaN stays a NaN
            w = fabsf(w);
          }
          const float2 subtract = delta[n % kHave];
          value[e] = w * fmaf(dp, dp_scale, -(e ? subtract.y : subtract.x));
          if constexpr (Thread::kHides) {
            if (w == infinity()) value[e] = 0.f;  // hidden, whatever V holds
          }
          if constexpr (kMasked) {
            if (!seen(2 * m + h, 8 * n + 2 * (lane % 4) + e)) value[e] = 0.f;
          }
        }
        ds[m][pair][r] = ptx::pack<typename Thread::T>(value[0], value[1]);
      }
    }
  }
}

/// The items of the track that the thread is in which have ended, and the item's own number.
template <typename Thread>
__device__ __forceinline__ auto ended_items(const Thread& t) {
  return EndedItems<Thread::Shape::kHalfWarps>::of(
      t.scratch, static_cast<uint32_t>(t.record_int(offsetof(ItemRecord, ended))),
      t.place().warp());
}
template <typename Thread>
__device__ __forceinline__ uint32_t key_block(const Thread& t) {
  return static_cast<uint32_t>(t.record_int(offsetof(ItemRecord, key_begin)) /
                               Thread::kConfig.tile_k);
}

template <typename Thread>
__device__ __forceinline__ void gradients_half(Thread t, const BackwardOrder& order) {
  using Shape = typename Thread::Shape;
  constexpr BackwardConfig kC = Thread::kConfig;
  constexpr bool kGeneral = Thread::kGeneral;
  constexpr int kM = Shape::kM, kN = Shape::kN, kStages = Shape::kStages;
  const typename Thread::Barriers& barriers = t.barriers;
  const BackwardParams& p = t.p;
  const float dp_scale = kGeneral ? p.dropout.keep_scale / kWeightScale : 1 / kWeightScale;
  // Reports the additions of the step before. They were issued a while ago, so the report need not
  // wait until they have arrived in L2.
  const auto report = [&] {
    if (!t.deterministic()) return;
    __syncwarp();  // the additions of all lanes come before the report
    if (t.place().lane() != 0) return;
    const uint32_t slot = report_slot(t, t.place(), t.n_step() - 1);
    if (report_addition(t, slot, t.place().warp())) ptx::store_shared(slot + 4, 0);
  };

  for (;; t.next_item()) {
    barriers.wait_full(barriers.record_full(t.item()), t.item(), 2);
    const int steps = t.record_int(offsetof(ItemRecord, steps));
    if (steps < 0) return;
    typename Thread::Step step = t.first_step(t.item(), t.n_step());
    float dk[kM][Shape::kSumN][4] = {};
    barriers.wait_full(barriers.k_full(), t.item(), 1);
    if (keys_nonfinite(t))
      ptx::store_shared(t.record_at(t.item(), offsetof(ItemRecord, keys_nonfinite)), 1);
    barriers.wait_full(barriers.v_full(), t.item(), 1);
    if (steps == 0) t.arrive_warp(barriers.v_empty());

#pragma unroll 1
    for (bool more = steps > 0; more; t.next_step()) {
      const int stage = t.n_step() % kStages;
      const bool masked = t.masked(step);
      const bool seen_only = (Thread::kHides || masked) && t.queries_nonfinite(step);

      barriers.wait_full(barriers.dout_full(stage), t.n_step(), kStages);
      float x[kM][kN][4];
      const typename Thread::Place me = t.place();
      const uint32_t delta_at =
          t.shared + static_cast<uint32_t>(Shape::kDeltaAt + 4 * (stage * kC.tile_q + me.query()) +
                                           8 * (me.lane() % 4));
      constexpr int kHave = kGeneral ? 2 : kN;
      float2 delta[kHave];  // of the lane's two queries of each accumulator
      scores(t, x, t.v_tile(), t.q_tile(Shape::kDoutAt, stage), [&] {
#pragma unroll
        for (int n = 0; n < kHave; ++n) delta[n] = ptx::load_shared_pair(delta_at + 32 * n);
      });
      const bool is_last = t.is_last(step);
      if (is_last) t.arrive_warp(barriers.v_empty());
      if (is_last) report();

      uint32_t ds[kM][kN / 2][4];
      barriers.wait_full(barriers.exchange_full(t.place().warp()), t.n_step(), 1);
      if constexpr (Thread::kMask) {  // the exchange says what rule and mask hide
        differentiate<false>(t, me, step, x, delta, delta_at, dp_scale, ds);
      } else if (kGeneral || masked) {
        differentiate<true>(t, me, step, x, delta, delta_at, dp_scale, ds);
      } else {
        differentiate<kGeneral>(t, me, step, x, delta, delta_at, dp_scale, ds);
      }
      t.arrive_warp(barriers.exchange_empty(t.place().warp()));
      t.arrive_warp(barriers.dout_empty(stage));
      barriers.wait_empty(barriers.ds_empty(), t.n_step(), 1);
      store_scores(t, Shape::kDsAt, ds);
      t.arrive_warp(barriers.ds_full());
      uint32_t tile = t.scratch_tile(t.item(), step);

      // The counter is read early, since nothing waits for its value before dQ is there. Its
      // address is not kept until then, but computed again where the counter has to be read again.
      uint32_t turn = 0;
      if (t.deterministic()) turn = ptx::load_relaxed(additions(t, tile, t.place().warp()));
      ptx::make_opaque(tile);

      // For dK a warp needs its own dS alone, unless warps share the queries; for dQ it needs that
      // of all warps, and waits for them.
      if constexpr (Shape::kSplit) barriers.wait_full(barriers.ds_full(), t.n_step(), 1);
      barriers.wait_full(barriers.q_full(stage), t.n_step(), kStages);
      accumulate(t, dk, ds, Shape::kDsAt, t.q_tile(Shape::kQAt, stage), seen_only, t.q_begin(step),
                 step.head);
      t.arrive_warp(barriers.q_empty(stage));
      if constexpr (!Shape::kSplit) barriers.wait_full(barriers.ds_full(), t.n_step(), 1);

      const bool dq_seen_only =
          (Thread::kHides || masked) && t.record_int(offsetof(ItemRecord, keys_nonfinite)) != 0;
#pragma unroll 1
      for (int pass = 0; pass < Shape::kDqColumns; pass += Shape::kPass) {
        float dq[2][Shape::kPass / 8][4] = {};
        multiply_dq(t, dq, pass, dq_seen_only, t.q_begin(step), step.head);
        if (pass + Shape::kPass == Shape::kDqColumns) {
          t.arrive_warp(barriers.ds_empty());
          if (t.is_last(step)) t.arrive_warp(barriers.k_empty());
        }
        // Everything else that has to be read from memory is read now: after the additions it would
        // wait behind them in the queue to memory.
        const uint32_t own = t.deterministic() ? rank(t, step) : 0;
        const bool last_pass = pass + Shape::kPass == Shape::kDqColumns;
        if (last_pass) {
          more = !t.is_last(step);
          step = t.after(step);
        }
        if (t.deterministic()) {
          // No acquire is needed: the additions that follow are done in L2, where those of the
          // other thread blocks have arrived by now.
          while (turn < own) {
            turn = ptx::load_relaxed(additions(t, tile, t.place().warp()));
            if constexpr (Thread::kMask) {
              if (ended_items(t).all_before(key_block(t))) break;
            }
          }
          __syncwarp();
        }
        float* const sum = t.scratch.dq + int64_t{tile} * (kC.tile_q * kC.width);
        add_dq(t, dq, pass, sum);
        if (last_pass && t.deterministic()) {
          if (t.place().lane() == 0) {
            const uint32_t slot = report_slot(t, t.place(), t.n_step());
            ptx::store_shared(slot, tile);
            ptx::store_shared(slot + 4, own + 1);
          }
          t.arrive_warp(barriers.added(t.n_step()));
        }
      }
    }

    if (t.record_int(offsetof(ItemRecord, steps)) == 0) t.arrive_warp(barriers.k_empty());
    store_keys(t, dk, p.scale, p.dk, p.head_dim, t.scratch.dk, order.parts);
    if constexpr (Thread::kMask) {
      report();
      if (t.deterministic() && t.place().lane() == 0)
        ended_items(t).add(key_block(t), t.scratch.key_tiles);
    }
    t.arrive_warp(barriers.record_empty(t.item()));
    if constexpr (!Thread::kMask) report();
  }
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_GRADIENTS_CUH_
