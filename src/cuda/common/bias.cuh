// An additive bias, read where it lies: a number for each pair of query and key, of any strides, in
// float32, bfloat16 or float16.
//
// No tile of it is staged in shared memory: each of its values is used once by a thread block, and
// a lane's pair of neighbouring keys is one load where the layout allows, so that a warp's load
// takes whole sectors.
#ifndef STROBE_CUDA_COMMON_BIAS_CUH_
#define STROBE_CUDA_COMMON_BIAS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/common/params.h"
#include "cuda/common/softmax.cuh"

namespace strobe::cuda {

/// A score in log 2 units and its bias. -inf hides the pair, even where q.k is NaN. A finite bias
/// stays finite in log 2 units too: a row that has the most negative number throughout is no empty
/// one.
__device__ __forceinline__ float add_bias(float score, float bias) {
  constexpr float kMost = 3.40282347e38f;
  if (bias == -infinity()) return bias;
  float log2 = bias * kLog2e;
  if (log2 < -kMost) log2 = -kMost;
  if (log2 > kMost && bias <= kMost) log2 = kMost;
  return score + log2;
}

/// The bias of one head of one sequence.
struct BiasPlane {
  const char* data;
  int64_t row_bytes, key_bytes;
  int32_t type;
  bool pairs;  // two keys from an even one on are one aligned load

  __device__ __forceinline__ static BiasPlane of(const Bias& b, int32_t batch, int32_t head) {
    const int64_t first = batch * b.batch_stride + head * b.head_stride;
    const char* const data = static_cast<const char*>(b.data) + first * b.element_bytes();
    const int64_t row_bytes = b.row_stride * b.element_bytes();
    // The strides that lead here are multiples of the pair's size wherever their sum is.
    const int64_t pair = 2 * b.element_bytes();
    const bool pairs =
        b.key_stride == 1 && (reinterpret_cast<uintptr_t>(data) | row_bytes) % pair == 0;
    return {data, row_bytes, b.key_stride * b.element_bytes(), b.type, pairs};
  }
  __device__ __forceinline__ const char* row(int32_t query) const {
    return data + query * row_bytes;
  }
  /// The value of a key in a row.
  __device__ __forceinline__ float value(const char* row, int32_t key) const {
    const char* const at = row + key * key_bytes;
    if (type == kBiasFloat32) return *reinterpret_cast<const float*>(at);
    if (type == kBiasBfloat16) {
      return static_cast<float>(*reinterpret_cast<const __nv_bfloat16*>(at));
    }
    return static_cast<float>(*reinterpret_cast<const __half*>(at));
  }
  /// Whether it hides a pair.
  __device__ __forceinline__ bool hides(int32_t query, int32_t key) const {
    return value(row(query), key) == -infinity();
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_BIAS_CUH_
