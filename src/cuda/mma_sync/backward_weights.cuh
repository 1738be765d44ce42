// The weights half of the backward pass through mma.sync: for each step S^T = K Q^T,
// P^T = exp2(S^T - lse), which it hands to the gradients half, and dV += P^T dO. It runs ahead of
// the gradients half, into the next item too; it fetches the items and copies everything, and in a
// deterministic launch it reports the gradients half's additions to dQ (backward_results.cuh).
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_WEIGHTS_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_WEIGHTS_CUH_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/backward/order.cuh"
#include "cuda/backward/seen_queries.cuh"
#include "cuda/common/bias.cuh"
#include "cuda/common/dropout.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/tile_mask.h"
#include "cuda/mma_sync/backward_copies.cuh"
#include "cuda/mma_sync/backward_products.cuh"
#include "cuda/mma_sync/backward_results.cuh"
#include "cuda/mma_sync/backward_thread.cuh"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda::sm80 {

/// How many of the lane's lse, a pair for the two queries of each accumulator, are held in
/// registers at a time: as many as there is room for (less before 9.0).
template <typename Thread>
inline constexpr int kLsePairs =
    Thread::kGeneral                                              ? 1
    : Thread::Shape::kFresh && !kAddFour && Thread::Shape::kN > 4 ? 4
                                                                  : Thread::Shape::kN;

/// What general kernels have copies of weigh for.
enum class ScoreForm {
  kScaled,  // neither softcap nor ALiBi nor dropout, in kernels with a bias: no branch stands
            // between two scores, which would have each wait for the one before it
  kAny,
  kAnyPrecise  // of any_value_and_derivative
};

/// Scores x of a step to weights: `weight`, packed for dV, and in shared memory, times
/// d(score) / d(scaled q.k), for the gradients half. lse: the first pairs of lse, the others are
/// read from lse_at.
template <bool kMasked, ScoreForm kForm, typename Thread, int kM, int kN, int kHave>
__device__ __forceinline__ void weigh(const Thread& t, const typename Thread::Place& me,
                                      const typename Thread::Step& step, Score& score,
                                      float (&x)[kM][kN][4], float2 (&lse)[kHave], uint32_t lse_at,
                                      uint32_t (&weight)[kM][kN / 2][4]) {
  constexpr bool kGeneral = Thread::kGeneral;
  constexpr bool kAnyScore = kGeneral && kForm != ScoreForm::kScaled;
  constexpr int kBlock = kN < 4 ? kN : 4;  // accumulators that share a call of Philox
  constexpr int kTogether = kBlock;        // and loads of the bias that do not wait for each other
  static_assert(kHave == 1 || kHave == kBlock || kHave == kN);
  const BackwardParams& p = t.p;
  const int lane = me.lane();
  const int32_t q_begin = t.q_begin(step) + me.query();
  const uint32_t exchange = t.exchange(me);
  int32_t key = 0;
  uint32_t batch_head = 0;
  float distance = 0.f;  // from the lane's first key to its first query's position
  BiasPlane bias{};
  int32_t last_query = 0, last_key = 0;  // of the sequence
  if constexpr (kGeneral) {
    const int32_t batch = t.record_int(offsetof(ItemRecord, batch));
    score = Score::of(p, batch, step.head);
    batch_head = p.dropout.batch_head(batch, step.head);
    key = t.record_int(offsetof(ItemRecord, key_begin)) + me.key_row();
    distance = static_cast<float>(t.record_int(offsetof(ItemRecord, position)) + q_begin +
                                  2 * (lane % 4) - key - lane / 4);
    if constexpr (Thread::kBias) {
      const Mask& mask = t.record(t.item()).mask;
      if (!Thread::kMask || p.bias.data) bias = BiasPlane::of(p.bias, batch, step.head);
      last_query = static_cast<int32_t>(mask.seqlen_q) - 1;
      last_key = static_cast<int32_t>(mask.seqlen_k) - 1;
    }
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
      constexpr bool kLimits = kMasked && !Thread::kMask;
      SeenQueries<kLimits ? 2 : 0> seen(t.seen_limits(me, 16 * m), q_begin);
      uint32_t shown[2];  // by rule and mask as data, from the lane's first query on
      if constexpr (Thread::kMask) {
        const StepBits bits = t.step_bits();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const auto limit = ptx::load_shared_wide<int2>(t.seen_limits(me, 16 * m) + 64 * h);
          const uint32_t seen_by_rule =
              bits_below(limit.y - q_begin) & ~bits_below(limit.x - q_begin);
          const int key_row = me.key_row() + 16 * m + 8 * h + lane / 4;
          uint32_t allowed = t.allowed(bits, key_row, me.query());
          // Where warps share 32 queries, those of the word from this warp's first one on.
          if constexpr (Thread::Shape::kQueries < 32) allowed >>= me.query() % 32;
          shown[h] = (allowed & seen_by_rule) >> 2 * (lane % 4);
        }
      }
      uint32_t word[2][4];
      if constexpr (kAnyScore) {
        if (p.dropout.enabled()) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            dropout_words_transposed(p.dropout, batch_head, static_cast<uint32_t>(q_begin + 8 * n0),
                                     static_cast<uint32_t>(key + 16 * m + 8 * h) / 8, lane,
                                     word[h]);
          }
        }
      }
      uint32_t packed[4];             // fp16, for the exchange
      float biases[kTogether][2][2];  // [d][h][column]
#pragma unroll
      for (int d = 0; d < kBlock; ++d) {
        const int n = n0 + d;
        if constexpr (Thread::kBias) {
          if (d % kTogether == 0 && (!Thread::kMask || bias.data)) {
            // Queries and keys past the last are masked, and take its bias.
            bias.of_type([&](auto type) {
#pragma unroll
              for (int i = 0; i < 4 * kTogether; ++i) {
                const int h = i / 2 % 2, column = i % 2;
                const int32_t query =
                    min(q_begin + 8 * (n + i / 4) + 2 * (lane % 4) + column, last_query);
                biases[i / 4][h][column] = bias.template value_as<decltype(type)::value>(
                    bias.row(query), min(key + 16 * m + 8 * h + lane / 4, last_key));
              }
            });
          }
        }
        if (kHave == 1) lse[0] = ptx::load_shared_pair(lse_at + 32 * n);
        float shared_value[2][2];
        for_block(x[m][n], [&](int h, int column, float& w) {
          const float2 references = lse[n % kHave];
          const float reference = column ? references.y : references.x;
          float slope = 1.f;  // d(score) / d(scaled q . k): below 1 with softcap
          bool hidden = false;
          if constexpr (kGeneral) {
            if constexpr (kAnyScore) {
              constexpr bool kPrecise = kForm == ScoreForm::kAnyPrecise;
              const Score::ValueAndDerivative s =
                  Score::Row{score, distance}.template any_value_and_derivative<kPrecise>(
                      w, 16 * m + 8 * h - 8 * n - column);
              slope = s.derivative;
              w = s.value;
            } else {
              w = __fmul_rn(w, score.scale_log2);
            }
            if (Thread::kBias && (!Thread::kMask || bias.data)) {
              const float b = biases[d % kTogether][h][column];
              hidden = b == -infinity();
              w = add_bias(w, b);
            }
            if constexpr (Thread::kMask) hidden |= (shown[h] >> (8 * n + column) & 1) == 0;
            w -= reference;
          } else {
            w = fmaf(w, score.scale_log2, -reference);
          }
          // No weight is above 1, however coarse lse is.
          w = exp2_fast(min_or_nan(w, kWeightShift));
          if constexpr (kLimits) {
            if (!seen(h, 8 * n + 2 * (lane % 4) + column)) w = 0.f;
          }
          if (Thread::kHides && hidden) w = 0.f;  // also where lse is -inf
          shared_value[h][column] = w;
          if constexpr (kGeneral) {
            if constexpr (kAnyScore) shared_value[h][column] *= slope;
            if (kAnyScore && p.dropout.enabled()) {
              const uint32_t bits = word[h][d];
              if (!(column ? keep_high(p.dropout, bits) : keep_low(p.dropout, bits))) {
                w *= 0.f;  // a NaN stays a NaN
                shared_value[h][column] = -shared_value[h][column];
              }
            }
            if (Thread::kHides && hidden) shared_value[h][column] = -infinity();
          }
        });
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int r = n % 2 * 2 + h;
          weight[m][n / 2][r] = ptx::pack<typename Thread::T>(x[m][n][2 * h], x[m][n][2 * h + 1]);
          packed[r] = ptx::pack<__half>(shared_value[h][0], shared_value[h][1]);
        }
        if (n % 2 == 1) {
          ptx::store_shared_words(exchange + static_cast<uint32_t>(512 * (m * (kN / 2) + n / 2)),
                                  packed);
        }
      }
    }
  }
}

template <typename Thread>
__device__ __forceinline__ void weights_half(Thread t, const BackwardOrder& order) {
  using Shape = typename Thread::Shape;
  constexpr int kM = Shape::kM, kN = Shape::kN, kStages = Shape::kStages;
  const typename Thread::Barriers& barriers = t.barriers;
  const BackwardParams& p = t.p;

  /// Whether it is this warp that reports the additions of two steps ago.
  const auto reports = [&] {
    return t.deterministic() && t.place().warp() == t.n_step() % Shape::kHalfWarps;
  };
  /// Fetches item i and copies its first tile, as step n.
  const auto begin_item = [&](int i, int n) {
    fetch_item(t, order, i, n);
    if (t.record_int(i, offsetof(ItemRecord, steps)) > 0) load_step(t, i, t.first_step(i, n), n);
  };
  begin_item(0, 0);
  if (t.record_int(offsetof(ItemRecord, steps)) < 0) return;
  load_k(t, 0);
  load_v(t, 0);

  for (;; t.next_item()) {
    barriers.wait_full(barriers.record_full(t.item()), t.item(), 2);
    const int steps = t.record_int(offsetof(ItemRecord, steps));
    if (steps < 0) return;
    typename Thread::Step step = t.first_step(t.item(), t.n_step());
    float dv[kM][Shape::kSumN][4] = {};
    barriers.wait_full(barriers.k_full(), t.item(), 1);
    if (steps == 0) begin_item(t.item() + 1, t.n_step());

#pragma unroll 1
    for (bool more = steps > 0; more; t.next_step()) {
      const int stage = t.n_step() % kStages;
      const bool masked = t.masked(step);
      const bool seen_only = (Thread::kHides || masked) && t.queries_nonfinite(step);

      // Waits here, where registers are free, for the additions of two steps ago. It has to come
      // before this step's weights are handed to the other half: with them that half can end this
      // step, and would then arrive at the same barrier for another step.
      if (reports()) barriers.wait_empty(barriers.added(t.n_step()), t.n_step(), 2);
      barriers.wait_full(barriers.q_full(stage), t.n_step(), kStages);
      float x[kM][kN][4];
      constexpr int kHave = kLsePairs<Thread>;
      float2 lse[kHave];
      const typename Thread::Place me = t.place();
      const uint32_t lse_at =
          t.shared +
          static_cast<uint32_t>(Shape::kLseAt + 4 * (stage * Thread::kConfig.tile_q + me.query()) +
                                8 * (me.lane() % 4));
      scores(t, x, t.k_tile(), t.q_tile(Shape::kQAt, stage), [&] {
#pragma unroll
        for (int n = 0; n < kHave; ++n) lse[n] = ptx::load_shared_pair(lse_at + 32 * n);
      });

      uint32_t weight[kM][kN / 2][4];
      Score score = Score::scaled(p);
      barriers.wait_empty(barriers.exchange_empty(t.place().warp()), t.n_step(), 1);
      if constexpr (Thread::kGeneral) {  // its code is long: one copy of each, with the mask, for
                                         // all steps
        const Cap cap = Score::of(p, 0.f).cap();
        if (Thread::kBias && cap == Cap::kNone && !p.alibi_slopes && !p.dropout.enabled()) {
          if constexpr (Thread::kBias)
            weigh<true, ScoreForm::kScaled>(t, me, step, score, x, lse, lse_at, weight);
        } else if (cap == Cap::kAny) {
          weigh<true, ScoreForm::kAnyPrecise>(t, me, step, score, x, lse, lse_at, weight);
        } else {
          weigh<true, ScoreForm::kAny>(t, me, step, score, x, lse, lse_at, weight);
        }
      } else if (masked) {
        weigh<true, ScoreForm::kScaled>(t, me, step, score, x, lse, lse_at, weight);
      } else {
        weigh<false, ScoreForm::kScaled>(t, me, step, score, x, lse, lse_at, weight);
      }
      t.arrive_warp(barriers.exchange_full(t.place().warp()));
      t.arrive_warp(barriers.q_empty(stage));
      if (t.is_last(step)) t.arrive_warp(barriers.k_empty());
      if constexpr (Shape::kSplit) {
        barriers.wait_empty(barriers.weights_empty(), t.n_step(), 1);
        store_scores(t, Shape::kWeightsAt, weight);
        barriers.sync_weights_half();
      }

      const int32_t q_begin = t.q_begin(step), head = step.head;
      typename Thread::Step after;
      if constexpr (!Shape::kOneStep) after = t.after(step);
      const auto copy_ahead = [&] {
        if constexpr (Shape::kOneStep) {
          more = !t.is_last(step);
          step = after = t.after(step);
        }
        if (Shape::kOneStep ? more : !t.is_last(step)) {
          load_step(t, t.item(), after, t.n_step() + 1);
        } else {
          begin_item(t.item() + 1, t.n_step() + 1);
        }
      };
      const auto report = [&] {
        if (!reports()) return;
        const int lane = t.place().lane();  // of each warp's counter one
        if (lane < Shape::kHalfWarps)
          report_addition(t, report_slot(t, t.place(), t.n_step() - 2), lane);
      };
      if constexpr (Shape::kReportEarly) report();
      if constexpr (kStages == 2) copy_ahead();  // to the stage of the step before
      if constexpr (!Shape::kReportEarly) report();
      barriers.wait_full(barriers.dout_full(stage), t.n_step(), kStages);
      accumulate(t, dv, weight, Shape::kWeightsAt, t.q_tile(Shape::kDoutAt, stage), seen_only,
                 q_begin, head);
      t.arrive_warp(barriers.dout_empty(stage));
      if constexpr (Shape::kSplit) t.arrive_warp(barriers.weights_empty());
      if constexpr (kStages == 1) copy_ahead();
      if constexpr (!Shape::kOneStep) {
        more = !t.is_last(step);
        step = after;
      }
    }

    if (t.record_int(offsetof(ItemRecord, steps)) == 0) t.arrive_warp(barriers.k_empty());
    if (t.record_int(t.item() + 1, offsetof(ItemRecord, steps)) >= 0) {
      load_k(t, t.item() + 1);
      load_v(t, t.item() + 1);
    }
    store_keys(t, dv, p.dropout.keep_scale / kWeightScale, p.dv, p.head_dim_v, t.scratch.dv,
               order.parts);
    t.arrive_warp(barriers.record_empty(t.item()));
  }
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_WEIGHTS_CUH_
