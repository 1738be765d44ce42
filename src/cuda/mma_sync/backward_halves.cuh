// The two halves of the backward pass through mma.sync, each a loop over items and their steps.
// backward_sm80.cuh says what they do and how they hand each other their results.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_HALVES_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_HALVES_CUH_

#include "cuda/common/backward_order.cuh"
#include "cuda/common/dropout.cuh"
#include "cuda/common/score.cuh"
#include "cuda/mma_sync/backward_block.cuh"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda::sm80 {

// --- Turns ---

// Who adds to one warp's part of a query tile's dQ, and when. The first key block to come by
// stores, so the others wait for it; in a deterministic launch each waits for the one before. Items
// are handed out with key blocks ascending, so whoever waits, waits for an item that is under way.
// Each part has a counter of the key blocks that have added (not deterministic: whether one has).
//
// To pass a turn on is a release, which waits until L2 has acknowledged the additions. In a
// deterministic launch, where every step has one, the weights half does it, two steps later: one of
// its warps, each in its turn, for all warps of the gradients half. Not for an item's last two
// steps: there it would wait for the next item, and the item for others that wait for these turns.

/// Key blocks that add to a step's dQ before this one, as far as it has to know.
template <BackwardConfig kC, bool kRules, bool kOrdered>
__device__ __forceinline__ uint32_t turn_order(const BackwardThread<kC, kRules, kOrdered>& t,
                                               const BackwardStep& step) {
  const int32_t q = step.tile * kC.tile_q;
  if (q >= t.block_int(offsetof(BackwardBlock, first_query))) return 0;
  if (!t.deterministic()) return 1;
  const int32_t first_key = max(q + t.block_int(offsetof(BackwardBlock, first_key)), 0);
  return static_cast<uint32_t>(t.block_int(offsetof(BackwardBlock, key_begin)) / kC.tile_k -
                               first_key / kC.tile_k);
}
template <BackwardConfig kC, bool kRules, bool kOrdered>
__device__ __forceinline__ uint32_t* turn_counter(const BackwardThread<kC, kRules, kOrdered>& t,
                                                  uint32_t tile, int warp) {
  return t.scratch.turn + int64_t{tile} * BackwardShape<kC>::kHalfWarps + warp;
}
/// Passes on a warp's turn, after all additions that this thread knows of; false where the slot
/// holds none. A slot holds a scratch tile and the counter's new value, which is not 0.
template <BackwardConfig kC, bool kRules, bool kOrdered>
__device__ __forceinline__ bool release_turn(const BackwardThread<kC, kRules, kOrdered>& t,
                                             uint32_t slot, int warp) {
  const auto turn = ptx::load_shared_wide<uint2>(slot);
  if (turn.y == 0) return false;
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turn_counter(t, turn.x, warp)),
               "r"(turn.y)
               : "memory");
  return true;
}
__device__ __forceinline__ uint32_t look_at(const uint32_t* counter) {
  uint32_t now;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

// --- S^T, P, dV ---

/// Fetches item i into its block, with its keys where their ring has a place; by the weights half.
template <BackwardConfig kC, bool kRules, bool kOrdered>
__device__ __forceinline__ void fetch_item(const BackwardThread<kC, kRules, kOrdered>& t,
                                           const BackwardOrder& order, int i) {
  using Thread = BackwardThread<kC, kRules, kOrdered>;
  t.wait_empty(t.block_empty(i), i, 2);
  BackwardBlock& block = t.block(i);
  if (t.fresh_place().thread == 0) {
    int64_t index;
    int32_t key_begin;
    do {
      index = atomicAdd(t.scratch.ticket, 1u);
      if (index >= order.items) break;
      const BackwardItem item = backward_item(order, t.p.heads_kv, index);
      block.sequence = t.p.sequence(item.batch);
      key_begin = item.block * kC.tile_k;
      if (key_begin < block.sequence.mask.seqlen_k) {
        block.fill(t.p, item, order.heads_per_part, kC.tile_q, kC.tile_k, kC.width);
        break;
      }
      // With varlen, short sequences have fewer key blocks than the longest: nobody else need come
      // across the gap.
      const int64_t next =
          past_gap(order, t.p.heads_kv, index, [&](int32_t batch, int32_t block_of_sequence) {
            return t.p.cu_k[batch + 1] - t.p.cu_k[batch] > block_of_sequence * kC.tile_k;
          });
      if (next > index + 1) atomicMax(t.scratch.ticket, static_cast<uint32_t>(next));
    } while (true);
    if (index >= order.items) block.steps = -1;
  }
  Thread::sync_weights_half();
  if constexpr (Thread::kKeyStages == 2) {
    if (block.steps >= 0) t.load_k(i);
  }
  ptx::barrier_arrive(t.block_full(i));
}

template <BackwardConfig kC, bool kRules, bool kOrdered>
__device__ __forceinline__ void weights_half(BackwardThread<kC, kRules, kOrdered> t,
                                             const BackwardOrder& order) {
  using Thread = BackwardThread<kC, kRules, kOrdered>;
  using Shape = typename Thread::Shape;
  using T = typename Shape::T;
  constexpr int kM = Shape::kM, kN = Shape::kN, kStages = Shape::kStages;
  const BackwardParams& p = t.p;

  /// Whether it is this warp's part to pass on the turn of two steps ago.
  const auto passes_turn = [&] {
    return t.deterministic() && t.place().warp() == t.n_step() % Shape::kHalfWarps;
  };
  /// Fetches item i and copies its first tile, as step n.
  const auto begin_item = [&](int i, int n) {
    fetch_item(t, order, i);
    if (t.block_int(i, offsetof(BackwardBlock, steps)) > 0) t.load_step(i, t.first_step(i), n);
  };
  begin_item(0, 0);
  if (t.block_int(offsetof(BackwardBlock, steps)) < 0) return;
  if constexpr (Thread::kKeyStages == 1) t.load_k(0);
  t.load_v(0);

  for (;; t.next_item()) {
    t.wait_full(t.block_full(t.item()), t.item(), 2);
    const int steps = t.block_int(offsetof(BackwardBlock, steps));
    if (steps < 0) return;
    BackwardStep step = t.first_step(t.item());
    float dv[kM][Shape::kSumN][4] = {};
    t.wait_full(t.k_full(t.item()), t.item(), Thread::kKeyStages);
    if (steps == 0) begin_item(t.item() + 1, t.n_step());

#pragma unroll 1
    for (bool more = steps > 0; more; t.next_step()) {
      const int stage = t.n_step() % kStages;
      const bool masked = t.masked(step, t.limits());
      const bool seen_only = masked && t.nonfinite(step);

      // The additions of two steps ago. Now, while registers are free; and before this step's
      // weights are handed on, without which the other half cannot end this step, whose barrier is
      // the same.
      if (passes_turn()) t.wait_empty(t.added(t.n_step()), t.n_step(), 2);
      t.wait_full(t.q_full(stage), t.n_step(), kStages);
      float x[kM][kN][4];
      constexpr int kBlock = kN < 4 ? kN : 4;  // accumulators that share a call of Philox
      // Of the lane's two queries of each accumulator; as many as there are registers for (fewer
      // before 9.0).
      constexpr int kHave = kRules ? 1 : kN > 8 || (Shape::kFresh && !kAddFour) ? kBlock : kN;
      float2 lse[kHave];
      const typename Thread::Place me = t.place();
      const uint32_t lse_at =
          t.shared + static_cast<uint32_t>(Shape::kLseAt + 4 * (stage * kC.tile_q + me.query()) +
                                           8 * (me.lane() % 4));
      t.scores(x, t.k_tile(t.item()), t.tile_at(Shape::kQAt, stage), [&] {
#pragma unroll
        for (int n = 0; n < kHave; ++n) lse[n] = ptx::load_shared_pair(lse_at + 32 * n);
      });

      // Scores to weights, for dV in registers and for the other half in shared memory.
      uint32_t weight[kM][kN / 2][4];
      Score score = Score::scaled(p);
      const auto weigh = [&](auto is_masked, auto is_precise) {
        constexpr bool kMasked = decltype(is_masked)::value;
        const int lane = me.lane();
        const int32_t q_begin = step.tile * kC.tile_q + me.query();
        const uint32_t exchange = t.exchange(me);
        int32_t key = 0;
        uint32_t batch_head = 0;
        float distance = 0.f;  // from the lane's first key to its first query's position
        if constexpr (kRules) {
          const int32_t batch = t.block_int(offsetof(BackwardBlock, batch));
          score = Score::of(p, batch, step.head);
          batch_head = static_cast<uint32_t>(batch * p.heads + step.head);
          key = t.block_int(offsetof(BackwardBlock, key_begin)) + me.key_row();
          distance = static_cast<float>(
              static_cast<int32_t>(t.block(t.item()).sequence.mask.position(q_begin)) +
              2 * (lane % 4) - key - lane / 4);
        }
#pragma unroll
        for (int n0 = 0; n0 < kN; n0 += kBlock) {
          if (kHave == kBlock && n0 > 0) {
#pragma unroll
            for (int d = 0; d < kBlock; ++d)
              lse[d % kHave] = ptx::load_shared_pair(lse_at + 32 * (n0 + d));
          }
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            SeenQueries<kMasked ? 2 : 0> seen(t.seen_limits(me, 16 * m), q_begin);
            uint32_t word[2][4];
            if constexpr (kRules) {
              if (p.dropout.enabled()) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                  dropout_words_transposed(
                      p.dropout, batch_head, static_cast<uint32_t>(q_begin + 8 * n0),
                      static_cast<uint32_t>(key + 16 * m + 8 * h) / 8, lane, word[h]);
                }
              }
            }
            uint32_t half[4];  // of the exchange
#pragma unroll
            for (int d = 0; d < kBlock; ++d) {
              const int n = n0 + d;
              if (kHave == 1) lse[0] = ptx::load_shared_pair(lse_at + 32 * n);
              float shared_value[4];
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                float& w = x[m][n][i];
                const float2 references = lse[n % kHave];
                const float reference = i % 2 ? references.y : references.x;
                float slope = 1.f;  // d(score) / d(scaled q . k): below 1 with softcap
                if constexpr (kRules) {
                  const Score::ValueAndDerivative s =
                      Score::Row{score, distance}
                          .template value_and_derivative<decltype(is_precise)::value>(
                              w, 16 * m + i / 2 * 8 - 8 * n - i % 2);
                  slope = s.derivative;
                  w = s.value - reference;
                } else {
                  w = fmaf(w, score.scale_log2, -reference);
                }
                // No weight is above 1, however coarse lse is.
                w = exp2_fast(min_or_nan(w, kWeightShift));
                if constexpr (kMasked) {
                  if (!seen(i / 2, 8 * n + 2 * (lane % 4) + i % 2)) w = 0.f;
                }
                shared_value[i] = w;
                if constexpr (kRules) {
                  shared_value[i] *= slope;
                  if (p.dropout.enabled()) {
                    const uint32_t bits = word[i / 2][d];
                    if (!(i % 2 ? keep_high(p.dropout, bits) : keep_low(p.dropout, bits))) {
                      w *= 0.f;  // NaN stays
                      shared_value[i] = -shared_value[i];
                    }
                  }
                }
              }
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const int r = n % 2 * 2 + h;
                weight[m][n / 2][r] = ptx::pack<T>(x[m][n][2 * h], x[m][n][2 * h + 1]);
                half[r] = ptx::pack<__half>(shared_value[2 * h], shared_value[2 * h + 1]);
              }
              if (n % 2 == 1) {
                asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                                 exchange + static_cast<uint32_t>(512 * (m * (kN / 2) + n / 2))),
                             "r"(half[0]), "r"(half[1]), "r"(half[2]), "r"(half[3])
                             : "memory");
              }
            }
          }
        }
      };
      t.wait_empty(t.exchange_empty(), t.n_step(), 1);
      if constexpr (kRules) {  // masked or not: one copy of the long code is enough
        if (Score::of(p, 0.f).cap() == Cap::kAny) {
          weigh(std::true_type(), std::true_type());
        } else {
          weigh(std::true_type(), std::false_type());
        }
      } else if (masked) {
        weigh(std::true_type(), std::false_type());
      } else {
        weigh(std::false_type(), std::false_type());
      }
      t.arrive_warp(t.exchange_full());
      t.arrive_warp(t.q_empty(stage));
      if (t.is_last(step)) t.arrive_warp(t.k_empty(t.item()));
      if constexpr (Shape::kSplit) {
        t.wait_empty(t.weights_empty(), t.n_step(), 1);
        t.store_scores(Shape::kWeightsAt, weight);
        Thread::sync_weights_half();
      }

      const int32_t q_begin = step.tile * kC.tile_q;
      BackwardStep after;
      if constexpr (!Shape::kOneStep) after = t.after(step, t.limits());
      const auto copy_ahead = [&] {
        if constexpr (Shape::kOneStep) {
          more = !t.is_last(step);
          step = after = t.after(step, t.limits());
        }
        if (Shape::kOneStep ? more : !t.is_last(step)) {
          t.load_step(t.item(), after, t.n_step() + 1);
        } else {
          begin_item(t.item() + 1, t.n_step() + 1);
        }
      };
      const auto pass_turn = [&] {
        if (!passes_turn()) return;
        const int lane = t.place().lane();  // of each warp's counter one
        if (lane < Shape::kHalfWarps) release_turn(t, t.turn_slot(t.place(), t.n_step() - 2), lane);
      };
      if constexpr (Shape::kPassEarly) pass_turn();
      if constexpr (kStages == 2) copy_ahead();  // where the step before was
      if constexpr (!Shape::kPassEarly) pass_turn();
      t.wait_full(t.dout_full(stage), t.n_step(), kStages);
      t.accumulate(dv, weight, Shape::kWeightsAt, t.tile_at(Shape::kDoutAt, stage), seen_only,
                   q_begin);
      t.arrive_warp(t.dout_empty(stage));
      if constexpr (Shape::kSplit) t.arrive_warp(t.weights_empty());
      if constexpr (kStages == 1) copy_ahead();
      if constexpr (!Shape::kOneStep) {
        more = !t.is_last(step);
        step = after;
      }
    }

    if (t.block_int(offsetof(BackwardBlock, steps)) == 0) t.arrive_warp(t.k_empty(t.item()));
    if (t.block_int(t.item() + 1, offsetof(BackwardBlock, steps)) >= 0) {
      if constexpr (Thread::kKeyStages == 1) t.load_k(t.item() + 1);
      t.load_v(t.item() + 1);
    }
    t.store(dv, p.dropout.keep_scale / kWeightScale, p.dv, p.head_dim_v, t.scratch.dv, order.parts);
    t.arrive_warp(t.block_empty(t.item()));
  }
}

// --- dP^T, dS, dK, dQ ---

template <BackwardConfig kC, bool kRules, bool kOrdered>
__device__ __forceinline__ void gradients_half(BackwardThread<kC, kRules, kOrdered> t,
                                               const BackwardOrder& order) {
  using Thread = BackwardThread<kC, kRules, kOrdered>;
  using Shape = typename Thread::Shape;
  using T = typename Shape::T;
  constexpr int kM = Shape::kM, kN = Shape::kN, kStages = Shape::kStages;
  const BackwardParams& p = t.p;
  const float dp_scale = kRules ? p.dropout.keep_scale / kWeightScale : 1 / kWeightScale;
  // Passes on the turn of the step before, a while after its additions, so that nobody waits for
  // them to arrive.
  const auto pass_turn = [&] {
    __syncwarp();  // all lanes' additions
    if (t.place().lane() != 0) return;
    const uint32_t slot = t.turn_slot(t.place(), t.deterministic() ? t.n_step() - 1 : 0);
    if (release_turn(t, slot, t.place().warp())) ptx::store_shared(slot + 4, 0);
  };

  for (;; t.next_item()) {
    t.wait_full(t.block_full(t.item()), t.item(), 2);
    const int steps = t.block_int(offsetof(BackwardBlock, steps));
    if (steps < 0) return;
    BackwardStep step = t.first_step(t.item());
    float dk[kM][Shape::kSumN][4] = {};
    t.wait_full(t.k_full(t.item()), t.item(), Thread::kKeyStages);
    if (t.keys_nonfinite())
      ptx::store_shared(t.block_at(t.item(), offsetof(BackwardBlock, keys_nonfinite)), 1);
    t.wait_full(t.v_full(), t.item(), 1);
    if (steps == 0) t.arrive_warp(t.v_empty());

#pragma unroll 1
    for (bool more = steps > 0; more; t.next_step()) {
      const int stage = t.n_step() % kStages;
      const bool masked = t.masked(step, t.limits());
      const bool seen_only = masked && t.nonfinite(step);

      t.wait_full(t.dout_full(stage), t.n_step(), kStages);
      float x[kM][kN][4];
      const typename Thread::Place me = t.place();
      const uint32_t delta_at =
          t.shared + static_cast<uint32_t>(Shape::kDeltaAt + 4 * (stage * kC.tile_q + me.query()) +
                                           8 * (me.lane() % 4));
      constexpr int kHave = kRules || kN > 8 ? 2 : kN;
      float2 delta[kHave];  // of the lane's two queries of each accumulator
      t.scores(x, t.v_tile(), t.tile_at(Shape::kDoutAt, stage), [&] {
#pragma unroll
        for (int n = 0; n < kHave; ++n) delta[n] = ptx::load_shared_pair(delta_at + 32 * n);
      });
      const bool is_last = t.is_last(step);
      if (is_last) t.arrive_warp(t.v_empty());
      if (is_last || !t.deterministic()) pass_turn();

      // dP to dS = P * (dP - delta), P from the other half.
      uint32_t ds[kM][kN / 2][4];
      const auto differentiate = [&](auto is_masked) {
        constexpr bool kMasked = decltype(is_masked)::value;
        const int lane = me.lane();
        const uint32_t exchange = t.exchange(me);
        SeenQueries<kMasked ? 2 * kM : 0> seen(t.seen_limits(me, 0),
                                               step.tile * kC.tile_q + me.query());
#pragma unroll
        for (int pair = 0; pair < kN / 2; ++pair) {
          if (kHave == 2 && pair > 0) {
            delta[0] = ptx::load_shared_pair(delta_at + 64 * pair);
            delta[1] = ptx::load_shared_pair(delta_at + 64 * pair + 32);
          }
#pragma unroll
          for (int m = 0; m < kM; ++m) {
            uint32_t half[4];
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(half[0]), "=r"(half[1]), "=r"(half[2]), "=r"(half[3])
                         : "r"(exchange + static_cast<uint32_t>(512 * (m * (kN / 2) + pair)))
                         : "memory");
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              const int n = 2 * pair + r / 2, h = r % 2;
              __half2 bits;
              memcpy(&bits, &half[r], sizeof bits);
              const float2 weight = __half22float2(bits);
              float value[2];
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float w = e ? weight.y : weight.x, dp = x[m][n][2 * h + e];
                if constexpr (kRules) {
                  if (__float_as_int(w) < 0) dp *= 0.f;  // dropped; NaN stays
                  w = fabsf(w);
                }
                const float2 subtract = delta[n % kHave];
                value[e] = w * fmaf(dp, dp_scale, -(e ? subtract.y : subtract.x));
                if constexpr (kMasked) {
                  if (!seen(2 * m + h, 8 * n + 2 * (lane % 4) + e)) value[e] = 0.f;
                }
              }
              ds[m][pair][r] = ptx::pack<T>(value[0], value[1]);
            }
          }
        }
      };
      t.wait_full(t.exchange_full(), t.n_step(), 1);
      if (kRules || masked) {
        differentiate(std::true_type());
      } else {
        differentiate(std::bool_constant<kRules>());
      }
      t.arrive_warp(t.exchange_empty());
      t.arrive_warp(t.dout_empty(stage));
      t.wait_empty(t.ds_empty(), t.n_step(), 1);
      t.store_scores(Shape::kDsAt, ds);
      t.arrive_warp(t.ds_full());
      uint32_t tile = t.scratch_tile(
          static_cast<uint32_t>(t.block_int(offsetof(BackwardBlock, scratch))), step);

      uint32_t turn =
          look_at(turn_counter(t, tile, t.place().warp()));  // not needed before dQ is there
      asm volatile("" : "+r"(tile));                         // addresses are not kept until then

      // dK needs the warp's own dS alone, unless queries are split; dQ that of all warps.
      if constexpr (Shape::kSplit) t.wait_full(t.ds_full(), t.n_step(), 1);
      t.wait_full(t.q_full(stage), t.n_step(), kStages);
      t.accumulate(dk, ds, Shape::kDsAt, t.tile_at(Shape::kQAt, stage), seen_only,
                   step.tile * kC.tile_q);
      t.arrive_warp(t.q_empty(stage));
      if constexpr (!Shape::kSplit) t.wait_full(t.ds_full(), t.n_step(), 1);

      const bool dq_seen_only = masked && t.block_int(offsetof(BackwardBlock, keys_nonfinite)) != 0;
#pragma unroll 1
      for (int pass = 0; pass < Shape::kDqColumns; pass += Shape::kPass) {
        float dq[2][Shape::kPass / 8][4] = {};
        t.multiply_dq(dq, pass, dq_seen_only, step.tile * kC.tile_q);
        if (pass + Shape::kPass == Shape::kDqColumns) {
          t.arrive_warp(t.ds_empty());
          if (t.is_last(step)) t.arrive_warp(t.k_empty(t.item()));
        }
        // All that is left to look up, before the additions fill the queue to memory.
        const uint32_t order = turn_order(t, step);
        const bool last_pass = pass + Shape::kPass == Shape::kDqColumns;
        if (last_pass) {
          more = !t.is_last(step);
          step = t.after(step, t.limits());
        }
        // No acquire: what follows goes to L2, where the others' additions have arrived by now.
        while (turn < order) turn = look_at(turn_counter(t, tile, t.place().warp()));
        __syncwarp();
        float* const sum = t.scratch.dq + int64_t{tile} * (kC.tile_q * kC.width);
        t.add_dq(dq, pass, sum, order == 0);
        if (last_pass && (order == 0 || t.deterministic()) && t.place().lane() == 0) {
          const uint32_t slot = t.turn_slot(t.place(), t.deterministic() ? t.n_step() : 0);
          ptx::store_shared(slot, tile);
          ptx::store_shared(slot + 4, order + 1);
        }
        if (last_pass && t.deterministic()) t.arrive_warp(t.added(t.n_step()));
      }
    }

    if (t.block_int(offsetof(BackwardBlock, steps)) == 0) t.arrive_warp(t.k_empty(t.item()));
    t.store(dk, p.scale, p.dk, p.head_dim, t.scratch.dk, order.parts);
    t.arrive_warp(t.block_empty(t.item()));
    pass_turn();
  }
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_HALVES_CUH_
