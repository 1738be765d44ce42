// How float32 sums become gradients where they are not simply written in the inputs' type: as
// float32, or added to what is there.
#ifndef STROBE_CUDA_BACKWARD_GRADIENTS_CUH_
#define STROBE_CUDA_BACKWARD_GRADIENTS_CUH_

#include <cstdint>

#include "cuda/common/load.cuh"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// Rows of one (batch, head) of dQ, dK or dV, whatever the caller wants of them. T: of the inputs,
/// and of the gradients unless they are float32.
template <typename T>
struct GradientRows {
  RowsView view;
  bool is_float, accumulates;

  /// Writes or adds x to neighbouring columns of a row, as far as there are. column: a multiple of
  /// kCount.
  template <int kCount>
  __device__ __forceinline__ void put(int64_t row, int column, const float (&x)[kCount]) const {
    if (is_float) {
      put_as<float>(row, column, x);
    } else {
      put_as<T>(row, column, x);
    }
  }

 private:
  template <typename Value, int kCount>
  __device__ __forceinline__ void put_as(int64_t row, int column, const float (&x)[kCount]) const {
    constexpr int kBytes = kCount * static_cast<int>(sizeof(Value));
    struct alignas(kBytes < 16 ? kBytes : 16) Values {
      Value of[kCount];
    };
    Value* const to = reinterpret_cast<Value*>(view.row(row)) + column;
    const auto sum = [&](Value before, float more) {
      return static_cast<Value>(accumulates ? static_cast<float>(before) + more : more);
    };
    if (view.aligned()) {  // then all of these columns are there, or none
      if (column >= view.dim) return;
      Values values = {};
      if (accumulates) values = *reinterpret_cast<const Values*>(to);
#pragma unroll
      for (int i = 0; i < kCount; ++i) values.of[i] = sum(values.of[i], x[i]);
      *reinterpret_cast<Values*>(to) = values;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (column + i < view.dim) to[i] = sum(to[i], x[i]);
      }
    }
  }
};

/// rows, dim: of the head. tensor: p's dq, dk or dv.
template <typename T>
__device__ __forceinline__ GradientRows<T> gradient_rows(const BackwardParams& p,
                                                         const Tensor& tensor, int32_t batch,
                                                         int64_t row, int32_t head, int64_t rows,
                                                         int32_t dim) {
  return {rows_view(tensor, batch, row, head, rows, dim, 2 * p.grad_words()), p.float_grads != 0,
          p.accumulates != 0};
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_GRADIENTS_CUH_
