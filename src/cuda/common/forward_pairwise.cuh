// One row of attention, key by key, from the keys that it sees alone: slow, exact, for any input.
//
// The tiled kernels multiply weights of 0 with values of keys that a row does not see. Where such a
// value is infinite or NaN, the product is NaN. And where weights above 1, against a reference that
// is not the maximum, meet values near the largest float, the sum overflows. Both show in O, and
// such rows are computed again here. So are rows whose scores are so large that a fused x * scale -
// reference is too inexact (is_coarse), which the tiled kernel marks in the same way.
#ifndef STROBE_CUDA_COMMON_FORWARD_PAIRWISE_CUH_
#define STROBE_CUDA_COMMON_FORWARD_PAIRWISE_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/dropout.cuh"
#include "cuda/common/hidden_pairs.cuh"
#include "cuda/common/load.cuh"
#include "cuda/common/params.h"
#include "cuda/common/score.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/walks.h"
#include "cuda/ptx/arithmetic.h"
#include "cuda/ptx/float8.h"

namespace strobe::cuda {

/// marks + 0 * x for two packed values: marks stay zero (of either sign) as long as x is finite.
template <typename T>
__device__ __forceinline__ uint32_t mark_not_finite(uint32_t marks, uint32_t x) {
  return ptx::multiply_add_pair<T>(x, 0, marks);
}
__device__ __forceinline__ bool marked(uint32_t marks) { return (marks & 0x7fff7fff) != 0; }

/// A tile of queries of which some row of O is not finite, in a list.
struct SuspectTile {
  int32_t next;  // negative: the last
  int32_t batch, head, first;
};

/// A row of out, element by element: of type T, or float32.
template <typename T>
struct OutRow {
  char* data;
  bool is_float;

  __device__ __forceinline__ float operator[](int column) const {
    if (is_float) return reinterpret_cast<const float*>(data)[column];
    return static_cast<float>(reinterpret_cast<const T*>(data)[column]);
  }
  __device__ __forceinline__ void put(int column, float x) const {
    if (is_float) {
      reinterpret_cast<float*>(data)[column] = x;
    } else {
      reinterpret_cast<T*>(data)[column] = static_cast<T>(x);
    }
  }
};

/// The same where q, k and v are float8: of bf16, fp16 or float32.
template <>
struct OutRow<ptx::E4m3> {
  char* data;
  bool is_float, is_half;

  __device__ __forceinline__ float operator[](int column) const {
    if (!is_float && is_half) return OutRow<__half>{data, false}[column];
    return OutRow<__nv_bfloat16>{data, is_float}[column];
  }
  __device__ __forceinline__ void put(int column, float x) const {
    if (!is_float && is_half) {
      OutRow<__half>{data, false}.put(column, x);
    } else {
      OutRow<__nv_bfloat16>{data, is_float}.put(column, x);
    }
  }
};

/// That of a query. kMayBeFloat: as in ForwardParams::writes_float.
template <typename T, bool kMayBeFloat = true>
__device__ __forceinline__ OutRow<T> out_row(const ForwardParams& p, const SequenceRows& sequence,
                                             int32_t head, int64_t query) {
  char* const data =
      static_cast<char*>(p.out.data) +
      2 * p.out_words<kMayBeFloat>() * p.out.element(sequence.batch, sequence.q_row + query, head);
  if constexpr (std::is_same_v<T, ptx::E4m3>) {
    return {data, p.writes_float<kMayBeFloat>(), p.half_out != 0};
  } else {
    return {data, p.writes_float<kMayBeFloat>()};
  }
}

/// Row `query` of O from its keys, one by one. By a whole warp: lane i has columns i, i + 32, ...
/// of head_dim. q, key_at, value_at: rows of Q, K and V, whose elements are of type T; a null row
/// of a key makes O's row NaN. write(column, value): takes the result. No value of V enters lse,
/// which is written only where scores were too large for the tiled kernel, or where pairs may be
/// hidden. kBias: whether there may be a bias or a mask as data. kScaled: whether scores have
/// ForwardParams::score_factor.
template <typename T, bool kDropout, bool kBias, bool kScaled = false, typename Query,
          typename KeyAt, typename ValueAt, typename Write>
__device__ __forceinline__ void pairwise_row_of(const ForwardParams& p,
                                                const SequenceRows& sequence, const Mask& mask,
                                                int32_t head, int32_t query, const Query& q,
                                                const KeyAt& key_at, const ValueAt& value_at,
                                                const Write& write) {
  constexpr int kShare = 8;  // head_dim <= 256
  constexpr bool kFloat8 = std::is_same_v<T, ptx::E4m3>;
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const auto batch = static_cast<int32_t>(sequence.batch);
  const RowWalk keys = single_keys(WalkLists::of(p, batch, head), mask, query);
  Score of_head = Score::of(p, batch, head);
  if constexpr (kScaled) of_head = of_head.times(p.score_factor(batch, head));
  float sum = 0.f, max = -infinity(), out[kShare] = {};
  const HiddenPairs hidden = kBias ? HiddenPairs::of(p, sequence, head) : HiddenPairs{};
  uint32_t shown = 0;  // of 32 places, each lane has looked at one
  bool some = !kBias;
#pragma unroll 1
  for (int64_t place = keys.begin; place < keys.end; ++place) {
    const int64_t key = keys.block(place);
    if constexpr (kBias) {
      const auto n = static_cast<int>((place - keys.begin) % 32);
      if (n == 0) {
        const bool there = place + lane < keys.end;
        shown = __ballot_sync(
            0xffffffffu,
            there && !hidden.hides(query, static_cast<int32_t>(keys.block(place + lane))));
      }
      if (!(shown >> n & 1)) {
        if (shown == 0) place += 31 - n;
        continue;
      }
      some = true;
    }
    const auto k = key_at(key);
    const auto v = value_at(key);
    float dot = 0.f;
    if (!k || !v) {
      sum = __int_as_float(0x7fffffff);
      break;
    }
#pragma unroll 1
    for (int d = lane; d < p.head_dim; d += 32)
      dot += static_cast<float>(q[d]) * static_cast<float>(k[d]);
    for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
    const Score::Row row =
        of_head.row(static_cast<int32_t>(mask.position(query)), static_cast<int32_t>(key));
    float score = row.any_value_and_derivative<true>(dot, 0).value;
    if (kBias && hidden.bias.data) {
      const BiasPlane& bias = hidden.bias;
      score = add_bias(score, bias.value(bias.row(query), static_cast<int32_t>(key)));
    }
    const float most = fmaxf(max, score), reference = reference_of(most);
    const float alpha = exp2_fast(max - reference);
    const float weight = exp2_fast(score - reference - kValueShift);
    max = most;
    sum = sum * alpha + weight;
    if (sum != sum) break;  // the row is NaN, whatever comes
    // Dropout comes after the softmax, and 0 * inf is NaN.
    const bool drops = kDropout && p.dropout.enabled() &&
                       !keep_one(p.dropout, p.dropout.batch_head(batch, head), query, key);
    const float kept = drops ? weight * 0.f : weight;
    // An infinity is one times any weight that is not 0: those that are 0 because of the shift
    // alone are not.
    const float of_infinity = drops ? 0.f : exp2_fast(score - reference);
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int d = lane + 32 * i;
      if (d < p.head_dim_v) {
        const auto x = static_cast<float>(v[d]);
        out[i] = out[i] * alpha + (fabsf(x) == infinity() ? of_infinity : kept) * x;
      }
    }
  }
  RowResult result = finish_row(p, head, !keys.empty() && some, max + kValueShift, sum,
                                kDropout ? p.dropout.keep_scale : 1.f);
  if constexpr (kFloat8) result.scale_values(p.value_factor(batch, head));
  if (p.lse && lane == 0 && (kBias || is_coarse<T>(max)))
    p.lse[sequence.lse_row + head * p.lse_head_stride + query] = result.lse;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int d = lane + 32 * i;
    if (d < p.head_dim_v) write(d, out[i] * result.factor);
  }
}

/// Rewrites row `query` of O. kAllRowsUsed: as Sequences::assuming has it; out is then of type T.
template <typename T, bool kDropout, bool kAllRowsUsed, bool kBias, bool kScaled = false>
__device__ void pairwise_row(const ForwardParams& p, int32_t batch, int32_t head, int32_t query) {
  const Sequence sequence = p.assuming<kAllRowsUsed>().sequence(batch, head);
  // A row that the mask has no room for stays NaN.
  if (kBias && p.mask && p.head_mask(sequence, head).lacks_room(query)) return;
  const auto keys_of = [&](const Tensor& t, int32_t dim) {
    return rows_view(t, batch, sequence.k_row, head / p.group, sequence.seqlen_k, dim, sizeof(T));
  };
  const auto queries_of = [&](const Tensor& t, int32_t dim) {
    return rows_view(t, batch, sequence.q_row, head, sequence.seqlen_q, dim, sizeof(T));
  };
  const auto row_of = [](const RowsView& view, int64_t row) {
    return reinterpret_cast<T*>(view.row(row));
  };
  const RowsView all_k = keys_of(p.k, p.head_dim), all_v = keys_of(p.v, p.head_dim_v);
  const OutRow<T> to = out_row<T, !kAllRowsUsed>(p, sequence, head, query);
  pairwise_row_of<T, kDropout, kBias, kScaled>(
      p, sequence, sequence.mask, head, query, row_of(queries_of(p.q, p.head_dim), query),
      [&](int64_t key) { return row_of(all_k, key); },
      [&](int64_t key) { return row_of(all_v, key); }, [&](int d, float x) { to.put(d, x); });
}

/// Rows of out that are looked for: those with an element that is not finite, or is infinite.
enum class Suspects { kNotFinite, kInfinite };

/// Calls again(row) for those rows of a tile of `rows` rows that are suspects; for this warp's
/// share of them. row_of: a row's OutRow.
template <typename RowOf, typename Again>
__device__ __forceinline__ void for_each_suspect(const ForwardParams& p, Suspects which, int warp,
                                                 int warps, int rows, const RowOf& row_of,
                                                 const Again& again) {
#pragma unroll 1
  for (int row = warp; row < rows; row += warps) {
    const auto out = row_of(row);
    bool found = false;
    for (int d = static_cast<int>(threadIdx.x % 32); d < p.head_dim_v; d += 32) {
      const float size = fabsf(out[d]);
      found |= which == Suspects::kInfinite ? size == infinity() : !(size < infinity());
    }
    if (__any_sync(0xffffffffu, found)) again(row);
  }
}

/// Rewrites those rows of a tile of `rows` queries that are suspects; this warp's share of them.
template <typename T, bool kDropout, bool kAllRowsUsed, bool kBias = false, bool kScaled = false>
__device__ void pairwise_rows(const ForwardParams& p, const SuspectTile& tile, int warp, int warps,
                              int rows, Suspects which = Suspects::kNotFinite) {
  const SequenceRows sequence = p.assuming<kAllRowsUsed>().sequence_rows(tile.batch);
  const int64_t left = sequence.seqlen_q - tile.first;
  if (left < rows) rows = static_cast<int>(left);
  for_each_suspect(
      p, which, warp, warps, rows,
      [&](int row) { return out_row<T, !kAllRowsUsed>(p, sequence, tile.head, tile.first + row); },
      [&](int row) {
        pairwise_row<T, kDropout, kAllRowsUsed, kBias, kScaled>(p, tile.batch, tile.head,
                                                                tile.first + row);
      });
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_FORWARD_PAIRWISE_CUH_
