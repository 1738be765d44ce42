// Rows of dQ, dK and dV from the pairs of query and key that the mask allows alone, and no bias
// hides: slow, exact, for any input.
//
// A tiled kernel multiplies weights of 0 with rows of q, k and dout of which a key or a query sees
// nothing. Where such a row holds an infinity or a NaN, so does the product: a row of a gradient
// that is not finite, and that has met a masked tile, is computed again here.
#ifndef STROBE_CUDA_BACKWARD_PAIRWISE_CUH_
#define STROBE_CUDA_BACKWARD_PAIRWISE_CUH_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/sink.h"
#include "cuda/backward/gradients.cuh"
#include "cuda/backward/order.cuh"
#include "cuda/backward/scratch.cuh"
#include "cuda/common/bias.cuh"
#include "cuda/common/dropout.cuh"
#include "cuda/common/params.h"
#include "cuda/common/score.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/walks.h"

namespace strobe::cuda {

/// A sequence and a query head of it, as a whole warp goes through its pairs: lane i has columns
/// i, i + 32, ... of every row.
template <typename T>
struct SeenPairs {
  static constexpr int kShare = 8;  // columns of a lane: head_dim <= 256

  const BackwardParams& p;
  const Sequence& sequence;
  int32_t batch, head;

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  template <typename Value = T>
  __device__ __forceinline__ Value* row(const Tensor& t, int64_t row, int32_t head_of) const {
    return static_cast<Value*>(t.data) + t.element(batch, row, head_of);
  }
  template <typename Value = T>
  __device__ __forceinline__ Value* query_row(const Tensor& t, int64_t query) const {
    return row<Value>(t, sequence.q_row + query, head);
  }
  __device__ __forceinline__ T* key_row(const Tensor& t, int64_t key) const {
    return row(t, sequence.k_row + key, head / p.group);
  }
  template <typename Value>
  __device__ __forceinline__ static float dot(const T* x, const Value* y, int32_t dim) {
    float sum = 0.f;
#pragma unroll 1
    for (int d = lane(); d < dim; d += 32)
      sum = fmaf(static_cast<float>(x[d]), static_cast<float>(y[d]), sum);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
  }

  struct Pair {
    float weight, ds;  // P with dropout, and dS
  };
  /// What is added to the score of a query and a key; -inf hides the pair, whatever it holds.
  __device__ __forceinline__ float bias(int64_t query, int64_t key) const {
    if (!p.bias.data) return 0.f;
    const BiasPlane plane = BiasPlane::of(p.bias, batch, head);
    // (A packed sequence may be longer than the caller has said, and than the bias.)
    return plane.value(plane.row(static_cast<int32_t>(min64(query, p.bias.rows - 1))),
                       static_cast<int32_t>(min64(key, p.bias.keys - 1)));
  }
  /// Of a query and a key that it sees, and that bias, above -inf.
  __device__ __forceinline__ Pair pair(int64_t query, int64_t key, float bias) const {
    const float qk = dot(query_row(p.q, query), key_row(p.k, key), p.head_dim);
    const float dp = dot(query_row(p.dout, query), key_row(p.v, key), p.head_dim_v);
    const int64_t lse_at = sequence.lse_row + head * p.lse_head_stride + query;
    SinkOfRow with{p.lse[lse_at], 0.f, 1.f};
    if (p.sinks) with = SinkOfRow::of<NaturalMath>(p.sinks[head], with.lse, p.sinks_in_lse);
    float delta;
    if (p.delta) {
      delta = p.delta[lse_at];
    } else {
      const T* const dout = query_row(p.dout, query);
      delta = p.float_out ? dot(dout, query_row<float>(p.out, query), p.head_dim_v)
                          : dot(dout, query_row(p.out, query), p.head_dim_v);
      if (p.dlse) delta -= p.dlse[lse_at] * with.dlse_factor;
    }
    const auto distance = static_cast<float>(sequence.mask.position(query) - key);
    const Score score = Score::of(p, batch, head);
    const Score::ValueAndDerivative s =
        Score::Row{score, distance}.template any_value_and_derivative<true>(qk, 0);
    const float reference = weight_reference(with.lse, 0.f);
    const float weight = exp2_fast(min_or_nan(add_bias(s.value, bias) - reference, 0.f));
    float kept = 1.f;
    if (p.dropout.enabled()) {
      const uint32_t batch_head = p.dropout.batch_head(batch, head);
      // (Of a dropped weight too, what is NaN stays NaN.)
      kept = keep_one(p.dropout, batch_head, query, key) ? p.dropout.keep_scale : 0.f;
    }
    return {weight * kept, weight * s.derivative * (dp * kept - delta)};
  }
  /// sum += factor * row.
  __device__ __forceinline__ static void add(float (&sum)[kShare], float factor, const T* row,
                                             int32_t dim) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int d = lane() + 32 * i;
      if (d < dim) sum[i] = fmaf(factor, static_cast<float>(row[d]), sum[i]);
    }
  }
  template <typename Value>
  __device__ __forceinline__ static void store(Value* to, const float (&sum)[kShare], float scale,
                                               int32_t dim) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int d = lane() + 32 * i;
      if (d < dim) to[d] = static_cast<Value>(sum[i] * scale);
    }
  }
};

/// visit(first + i) for each bit i, ascending, until it returns true. Returns whether it did.
template <typename Visit>
__device__ __forceinline__ bool visit_bits(int64_t first, uint32_t bits, const Visit& visit) {
#pragma unroll 1
  for (; bits != 0; bits >>= 1, ++first) {
    if ((bits & 1) != 0 && visit(first)) return true;
  }
  return false;
}
/// visit(key) for the keys that a query sees, ascending, until it returns true. kMask: there is a
/// mask as data.
template <bool kMask, typename Visit>
__device__ __forceinline__ void visit_keys(const CommonParams& p, const Sequence& sequence,
                                           int32_t batch, int32_t head, int32_t query,
                                           const Visit& visit) {
  if constexpr (kMask) {
    p.head_mask(sequence, head)
        .any_keys(query, sequence.mask.kv_range({query, query + 1}),
                  [&](int64_t first, uint32_t bits) { return visit_bits(first, bits, visit); });
  } else {
    const RowWalk keys = single_keys(WalkLists::of(p, batch, head), sequence.mask, query);
#pragma unroll 1
    for (int64_t place = keys.begin; place < keys.end; ++place) {
      if (visit(keys.block(place))) break;
    }
  }
}
/// The same for the queries that see a key.
template <bool kMask, typename Visit>
__device__ __forceinline__ void visit_queries(const CommonParams& p, const Sequence& sequence,
                                              int32_t batch, int32_t head, int32_t key,
                                              const Visit& visit) {
  if constexpr (kMask) {
    p.head_mask(sequence, head)
        .any_queries(key, sequence.mask.q_range({key, key + 1}),
                     [&](int64_t first, uint32_t bits) { return visit_bits(first, bits, visit); });
  } else {
    const RowWalk queries = single_queries(WalkLists::of(p, batch, head), sequence.mask, key);
#pragma unroll 1
    for (int64_t place = queries.begin; place < queries.end; ++place) {
      if (visit(queries.block(place))) break;
    }
  }
}

/// Whether a mask as data has no room for what a query sees.
inline __device__ __noinline__ bool lacks_room(const CommonParams& p, int32_t batch, int32_t head,
                                               int32_t query) {
  return p.head_mask(p.sequence_rows(batch), head).lacks_room(query);
}

/// Writes a row of dQ, or adds it to what is there. (Not inlined: its registers are not to count
/// where nothing is infinite.)
template <typename T, bool kMask>
__device__ __noinline__ void pairwise_query(const BackwardParams& p, int32_t batch, int32_t head,
                                            int32_t query) {
  const Sequence sequence = p.sequence(batch, head);
  const SeenPairs<T> pairs{p, sequence, batch, head};
  float dq[SeenPairs<T>::kShare] = {};
  if (kMask && lacks_room(p, batch, head, query)) {
#pragma unroll
    for (float& x : dq) x = __int_as_float(0x7fffffff);
  } else {
    visit_keys<kMask>(p, sequence, batch, head, query, [&](int64_t key) {
      const float bias = pairs.bias(query, key);
      if (bias == -infinity()) return false;
      const auto pair = pairs.pair(query, key, bias);
      pairs.add(dq, pair.ds, pairs.key_row(p.k, key), p.head_dim);
      return isnan(pair.ds);  // all columns are NaN, and stay so
    });
  }
  const GradientRows<T> rows =
      gradient_rows<T>(p, p.dq, batch, sequence.q_row, head, sequence.mask.seqlen_q, p.head_dim);
#pragma unroll
  for (int i = 0; i < SeenPairs<T>::kShare; ++i)
    rows.put(query, pairs.lane() + 32 * i, {dq[i] * p.scale});
}

/// Rewrites a key's row of dK and dV: of `item`'s part of the group. parts_sum: see
/// BackwardScratch::dk.
template <typename T, bool kMask>
__device__ __noinline__ void pairwise_key(const BackwardParams& p, const BackwardOrder& order,
                                          const BackwardItem& item, float* parts_sum, int32_t width,
                                          int32_t key) {
  const Sequence sequence = p.sequence_of_all_heads(item.batch);
  const int32_t begin = item.head_kv * p.group + item.part * order.heads_per_part;
  const int32_t end = min(begin + order.heads_per_part, (item.head_kv + 1) * p.group);
  float dk[SeenPairs<T>::kShare] = {}, dv[SeenPairs<T>::kShare] = {};
  bool all_nan = false;
#pragma unroll 1
  for (int32_t head = begin; head < end && !all_nan; ++head) {
    const SeenPairs<T> pairs{p, sequence, item.batch, head};
    visit_queries<kMask>(p, sequence, item.batch, head, key, [&](int64_t query) {
      const float bias = pairs.bias(query, key);
      if (bias == -infinity()) return false;
      const auto pair = pairs.pair(query, key, bias);
      pairs.add(dv, pair.weight, pairs.query_row(p.dout, query), p.head_dim_v);
      pairs.add(dk, pair.ds, pairs.query_row(p.q, query), p.head_dim);
      all_nan = isnan(pair.weight);
      return all_nan;
    });
  }
  const SeenPairs<T> pairs{p, sequence, item.batch, begin};
  if (parts_sum) {
    const int64_t row = (p.cu_k ? sequence.k_row : int64_t{item.batch} * p.seqlen_k) + key;
    float* const to =
        parts_sum + ((row * p.heads_kv + item.head_kv) * order.parts + item.part) * 2 * width;
    pairs.store(to, dk, p.scale, width);
    pairs.store(to + width, dv, 1.f, width);
  } else {
    pairs.store(pairs.key_row(p.dk, key), dk, p.scale, p.head_dim);
    pairs.store(pairs.key_row(p.dv, key), dv, 1.f, p.head_dim_v);
  }
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_PAIRWISE_CUH_
