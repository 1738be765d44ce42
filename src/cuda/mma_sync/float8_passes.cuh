// What float8 attention does around the forward kernel through mma.sync, which multiplies fp16: a
// kernel before it writes the codes of Q, K and V as fp16, which holds every e4m3 and e5m2 exactly,
// and one after it multiplies O, which is float32 until then, by V's scales and rounds it once. The
// scales of Q and K are part of the score (ForwardParams::score_factor). Both go through the
// workspace; with rows of O(seqlen) it stays linear.
//
// This is to be right, and not to be fast: the codes are read once, and twice as many bytes written
// and read again.
#ifndef STROBE_CUDA_MMA_SYNC_FLOAT8_PASSES_CUH_
#define STROBE_CUDA_MMA_SYNC_FLOAT8_PASSES_CUH_

#include <cstdint>

#include "core/codes.h"
#include "cuda/common/element.h"
#include "cuda/common/params.h"

namespace strobe::cuda::sm80 {

inline constexpr int kPassThreads = 128;

/// The rows of all heads of a tensor, packed or not: a warp has one at a time.
struct PassRows {
  int64_t entries, rows;  // packed: one entry
  int32_t heads, dim;
  int32_t width;  // values from a row to the next where they lie in the workspace

  STROBE_INLINE constexpr int64_t count() const { return entries * rows * heads; }
  STROBE_INLINE constexpr int64_t values() const { return count() * width; }
  /// Where they lie there: [entries, rows, heads, width].
  STROBE_INLINE constexpr Tensor in(void* data, bool packed) const {
    const int64_t row = int64_t{heads} * width;
    return {data, packed ? 0 : rows * row, row, width};
  }
};

/// The scales of rows, packed or not.
struct RowScales {
  Float8Scales scales;
  const int32_t* begins;  // of packed sequences; null: each is an entry
  int32_t batch, group;   // sequences; heads that share a scale

  /// That of a row's head; NaN where it is not finite. Rows that are nobody's have a neighbour's.
  STROBE_INLINE constexpr float of(int64_t entry, int64_t row, int64_t head) const {
    int64_t sequence = entry;
    if (begins) {  // the last one that begins at the row or before it
      int32_t low = 0, end = batch;
#pragma unroll 1
      while (end - low > 1) {
        const int32_t middle = (low + end) / 2;
        (begins[middle] <= row ? low : end) = middle;
      }
      sequence = low;
    }
    return usable_scale(scales.of(sequence, static_cast<int32_t>(head) / group));
  }
};

/// Codes, and where they go.
struct Codes {
  PassRows rows;
  Tensor from;  // strides in codes
  __half* to;
  int32_t e5m2;
  // Of V: where it is NaN, values are NaN here already, codes that are 0 too, of whose sums the
  // kernel after could not tell that they see a key. Of Q and K none.
  RowScales scale;
};
struct UnpackParams {
  Codes tensors[3];
};

/// visit(entry, row, head, number) for the rows of a warp.
template <typename Visit>
__device__ __forceinline__ void visit_pass_rows(const PassRows& r, const Visit& visit) {
  constexpr int kWarps = kPassThreads / 32;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
  for (int64_t n = warp; n < r.count(); n += int64_t{gridDim.x} * kWarps) {
    const int64_t row = n / r.heads;
    visit(row / r.rows, row % r.rows, n - row * r.heads, n);
  }
}

/// One tensor for each y of the grid. (A template, as it is in every file that includes this.)
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    unpack_codes_kernel(const __grid_constant__ UnpackParams p) {
  const Codes& t = p.tensors[blockIdx.y];
  visit_pass_rows(t.rows, [&](int64_t entry, int64_t row, int64_t head, int64_t n) {
    const auto* const from =
        static_cast<const uint8_t*>(t.from.data) + t.from.element(entry, row, head);
    __half* const to = t.to + n * t.rows.width;
    const float scale = t.scale.scales.data ? t.scale.of(entry, row, head) : 1.0f;
#pragma unroll 1
    for (int d = static_cast<int>(threadIdx.x % 32); d < t.rows.dim; d += 32) {
      const float code = t.e5m2 ? float_from_e5m2(from[d]) : float_from_e4m3(from[d]);
      to[d] = static_cast<__half>(scale != scale ? scale : code);
    }
  });
}

/// O before V's scales, and where it goes.
struct ScaleParams {
  PassRows rows;
  const float* from;
  Tensor to;
  RowScales scale;
  int32_t float_out, half_out;  // as in ForwardParams
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    scale_out_kernel(const __grid_constant__ ScaleParams p) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  visit_pass_rows(p.rows, [&](int64_t entry, int64_t row, int64_t head, int64_t n) {
    const float* const from = p.from + n * p.rows.width;
    const int64_t to = p.to.element(entry, row, head);
    const float by = p.scale.of(entry, row, head);
    // A row that sees no key is 0, whatever the scale is. (One that sees some is NaN before a scale
    // that is NaN.)
    bool some = false;
#pragma unroll 1
    for (int d = lane; d < p.rows.dim; d += 32) some |= from[d] != 0.f;
    some = __any_sync(0xffffffffu, some) != 0;
#pragma unroll 1
    for (int d = lane; d < p.rows.dim; d += 32) {
      const float x = some ? from[d] * by : 0.f;
      if (p.float_out) {
        static_cast<float*>(p.to.data)[to + d] = x;
      } else if (p.half_out) {
        static_cast<__half*>(p.to.data)[to + d] = static_cast<__half>(x);
      } else {
        static_cast<__nv_bfloat16*>(p.to.data)[to + d] = static_cast<__nv_bfloat16>(x);
      }
    }
  });
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_FLOAT8_PASSES_CUH_
