// Hopper backward, for scores that are more than a scale times q.k, and for dropout: P^T and dS^T
// from accumulators, as backward_sm90_weights.cuh makes them of plain scores.
//
//     dS = P d(score) / d(scaled q.k) (dP keep / (1 - dropout_p) - delta),   dV = (P keep)^T dO
//
// So a step has its weights in two forms. The one with dropout is dV's operand. The other, here
// called factors, is P times the derivative. A factor's sign says whether its weight is dropped:
// factors are never negative otherwise.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_SCORES_CUH_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_SCORES_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/dropout.cuh"
#include "cuda/common/params.h"
#include "cuda/common/score.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/hopper/backward_sm90_weights.cuh"
#include "cuda/ptx/opaque.h"
#include "cuda/ptx/packed.h"

namespace strobe::cuda::sm90 {

/// Which of a thread's weights of a tile of queries are dropped.
template <int kTileQ>
struct DroppedWeights {
  static_assert(kTileQ % 64 == 0);
  uint32_t bits[kTileQ / 64] = {};  // dropped_bit

  /// query: the tile's first one. key: the first of the warp's 16.
  __device__ __forceinline__ static DroppedWeights draw(const CommonParams& p, int32_t batch,
                                                        int32_t head, int32_t query, int32_t key,
                                                        int lane) {
    DroppedWeights dropped;
    if (!p.dropout.enabled()) return dropped;
    Dropout dropout = p.dropout;
    // (Opaque, so that the compiler works Philox's round keys out anew. It would keep those of all
    // rounds through all steps, and spill them.)
    ptx::make_opaque(dropout.key0);
    ptx::make_opaque(dropout.key1);
    const uint32_t batch_head = p.dropout.batch_head(batch, head);
#pragma unroll
    for (int b = 0; b < kTileQ / 32; ++b) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        uint32_t word[4];
        dropout_words_transposed(dropout, batch_head, static_cast<uint32_t>(query + 32 * b),
                                 static_cast<uint32_t>(key + 8 * row) / 8, lane, word);
        dropped.bits[b / 2] |= dropped_bits(dropout, word, b % 2, row);
      }
    }
    return dropped;
  }
  __device__ __forceinline__ bool operator()(int j, int i) const {
    return (bits[j / 4] >> dropped_bit(j, i) & 1) != 0;
  }
};

/// Calls body(cap, drops), a Cap and a bool constant: which softcap a score has, and whether there
/// is dropout. Softcap with dropout has the form for all caps.
template <typename Body>
__device__ __forceinline__ void choose_copy(const Score& score, bool drops, const Body& body) {
  using Drops = std::true_type;
  using KeepsAll = std::false_type;
  const Cap cap = score.cap();
  if (cap == Cap::kNone && !drops) {
    body(CapConstant<Cap::kNone>(), KeepsAll());
  } else if (cap == Cap::kNone) {
    body(CapConstant<Cap::kNone>(), Drops());
  } else if (cap == Cap::kSmall && !drops) {
    body(CapConstant<Cap::kSmall>(), KeepsAll());
  } else {
    body(CapConstant<Cap::kAny>(), Drops());
  }
}

/// P^T with dropout, packed; and factors, which leave(j, words) is given for queries 16 j to 16 j +
/// 15. distance: from the warp's first key to the position of the tile's first query. lse_of(j): of
/// these queries, as load_of_queries has them.
template <typename Traits, int kTileQ, typename LseOf, typename Seen, typename Leave>
__device__ __forceinline__ void take_general_weights(
    const float (&s)[kTileQ / 2], const Score& score, int32_t distance, bool drops,
    const DroppedWeights<kTileQ>& dropped, const LseOf& lse_of, int lane, const Seen& seen,
    uint32_t (&weights)[kTileQ / 4], const Leave& leave) {
  using T = typename Traits::T;
  choose_copy(score, drops, [&](auto cap, auto with_dropout) {
    // One Row serves all queries: a score depends on the distance of key and query, and a query one
    // further on is as a key one less.
    const Score::Row row{score, static_cast<float>(distance + 2 * (lane % 4) - lane / 4)};
#pragma unroll
    for (int j = 0; j < kTileQ / 16; ++j) {
      const float4 lse = lse_of(j);
      const float references[4] = {lse.x, lse.y, lse.z, lse.w};
      float w[8], factor[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int key_at = 8 * (i / 2 % 2), query_at = 16 * j + i / 4 * 8 + i % 2;
        const Score::ValueAndDerivative x = row.template value_and_derivative<decltype(cap)::value>(
            s[8 * j + i], key_at - query_at);
        // No weight is above 1, however coarse lse is.
        w[i] = exp2_fast(
            min_or_nan(x.value - references[i / 4 * 2 + i % 2], Traits::StageTraits::kShift));
        if constexpr (!kSeesTwo<Seen>) {
          if (!seen(i / 2 % 2, 16 * j + query_of(lane, i))) w[i] = 0.f;
        }
        factor[i] = w[i] * x.derivative;
        if (decltype(with_dropout)::value && dropped(j, i)) {
          w[i] *= 0.f;  // NaN stays
          factor[i] = -factor[i];
        }
      }
      uint32_t factors[4];
      [[maybe_unused]] const auto allowed = [&] {
        if constexpr (kSeesTwo<Seen>) {
          return seen.of(16 * j);
        } else {
          return 0;
        }
      }();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[4 * j + i] = ptx::pack<T>(w[2 * i], w[2 * i + 1]);
        factors[i] = ptx::pack<T>(factor[2 * i], factor[2 * i + 1]);
        if constexpr (kSeesTwo<Seen>) {
          weights[4 * j + i] &= allowed.two(16 * j, i);
          factors[i] &= allowed.two(16 * j, i);
        }
      }
      leave(j, factors);
    }
  });
}

/// dS^T, packed, of 16 queries. dp_scale: 1 / (1 - dropout_p), over what weights are held times
/// (StageTraits::kScale). A pair that the mask hides has a factor of 0, or NaN where softcap's
/// derivative is. So it gives 0, or a NaN where something is not finite: that shows in its rows of
/// dQ and dK, which are then computed again (backward/pairwise.cuh).
template <typename T>
__device__ __forceinline__ void take_general_ds(const float* dp, const uint32_t (&factors)[4],
                                                float dp_scale, const float4& delta, uint32_t* ds) {
  const float deltas[4] = {delta.x, delta.y, delta.z, delta.w};
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t factor = i % 2 ? factors[i / 2] : factors[i / 2] << 16;
    const bool is_dropped = static_cast<int32_t>(factor) < 0;
    x[i] = fmaf(is_dropped ? dp[i] * 0.f : dp[i], dp_scale, -deltas[i / 4 * 2 + i % 2]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ds[i] = times_weights<T>(factors[i] & 0x7fff7fffu, x[2 * i], x[2 * i + 1]);
  }
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_SCORES_CUH_
