// An additive bias, read where it lies: a number for each pair of query and key, of any strides, in
// float32, bfloat16 or float16.
//
// Here no tile of it is staged in shared memory (Hopper's kernels do that, by TMA:
// hopper/forward_sm90_bias.cuh, hopper/backward_sm90_bias.cuh): each of its values is used once by
// a thread block, and a lane's pair of neighbouring keys is one load where the layout allows, so
// that a warp's load takes whole sectors. Which type it has is asked once for many values
// (of_type), but where values are few or registers are: a branch for each has each load wait for
// the one before it.
#ifndef STROBE_CUDA_COMMON_BIAS_CUH_
#define STROBE_CUDA_COMMON_BIAS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/params.h"
#include "cuda/common/softmax.cuh"
#include "cuda/ptx/global_access.h"
#include "cuda/ptx/mma.h"

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
  /// Calls body(type), an integral constant: the type, known when compiled.
  template <typename Body>
  __device__ __forceinline__ void of_type(const Body& body) const {
    if (type == kBiasFloat32) {
      body(std::integral_constant<int32_t, kBiasFloat32>());
    } else if (type == kBiasBfloat16) {
      body(std::integral_constant<int32_t, kBiasBfloat16>());
    } else {
      body(std::integral_constant<int32_t, kBiasFloat16>());
    }
  }
  /// The value of a key in a row, of a type that is known when compiled.
  template <int32_t kType>
  __device__ __forceinline__ float value_as(const char* row, int32_t key) const {
    const char* const at = row + key * key_bytes;
    if constexpr (kType == kBiasFloat32) {
      return *reinterpret_cast<const float*>(at);
    } else if constexpr (kType == kBiasBfloat16) {
      return static_cast<float>(*reinterpret_cast<const __nv_bfloat16*>(at));
    } else {
      return static_cast<float>(*reinterpret_cast<const __half*>(at));
    }
  }
  /// The same of any type.
  __device__ __forceinline__ float value(const char* row, int32_t key) const {
    if (type == kBiasFloat32) return value_as<kBiasFloat32>(row, key);
    return type == kBiasBfloat16 ? value_as<kBiasBfloat16>(row, key)
                                 : value_as<kBiasFloat16>(row, key);
  }
  /// Has L2 fetch what a tile of so many queries and keys reads, by so many threads: for the next
  /// tile. Keys that do not lie beside each other are left to who reads them.
  __device__ __forceinline__ void prefetch(int32_t query, int32_t queries, int32_t last_query,
                                           int32_t key, int32_t keys, int32_t last_key, int thread,
                                           int threads) const {
    constexpr int32_t kLine = 128;
    const int64_t element = type == kBiasFloat32 ? 4 : 2;
    if (key_bytes != element) return;
    const auto bytes = static_cast<int32_t>(min(keys, last_key + 1 - key) * element);
#pragma unroll 1
    for (int i = thread; i < queries && query + i <= last_query; i += threads) {
      const char* const from = row(query + i) + key * element;
#pragma unroll 1
      for (int32_t at = 0; at < bytes; at += kLine) ptx::prefetch(from + at);
      if (bytes > 0) ptx::prefetch(from + bytes - 1);  // where a row begins within a line
    }
  }
  /// Whether neighbouring keys, the first an even one, are read in words of two 16-bit values.
  __device__ __forceinline__ bool has_words() const { return pairs && type != kBiasFloat32; }
  /// Two neighbouring keys as such a word, the first an even one.
  __device__ __forceinline__ static uint32_t word(const char* row, int32_t key) {
    return *reinterpret_cast<const uint32_t*>(row + 2 * int64_t{key});
  }
  /// What a word stands for, of a type that is known when compiled.
  template <int32_t kType>
  __device__ __forceinline__ static float2 both(uint32_t word) {
    static_assert(kType != kBiasFloat32);
    if constexpr (kType == kBiasBfloat16) {
      return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
    } else {
      __half2 pair;
      memcpy(&pair, &word, sizeof pair);
      return __half22float2(pair);
    }
  }
  /// The values of two neighbouring keys of a row, the first an even one, where `pairs`.
  template <int32_t kType>
  __device__ __forceinline__ static float2 two(const char* row, int32_t key) {
    if constexpr (kType == kBiasFloat32) {
      return *reinterpret_cast<const float2*>(row + 4 * int64_t{key});
    } else {
      return both<kType>(word(row, key));
    }
  }
  /// Writes the values of two neighbouring keys of a row, the first an even one, as far as there
  /// are keys. For a gradient, which is described as a bias is.
  __device__ __forceinline__ void put_two(int32_t query, int32_t key, int32_t keys, float x,
                                          float y) const {
    char* const to = const_cast<char*>(row(query)) + key * key_bytes;
    const bool first = key < keys, second = key + 1 < keys;
    if (type == kBiasFloat32) {
      if (pairs && second) {
        *reinterpret_cast<float2*>(to) = make_float2(x, y);
        return;
      }
      if (first) *reinterpret_cast<float*>(to) = x;
      if (second) *reinterpret_cast<float*>(to + key_bytes) = y;
      return;
    }
    const uint32_t bits =
        type == kBiasBfloat16 ? ptx::pack<__nv_bfloat16>(x, y) : ptx::pack<__half>(x, y);
    if (pairs && second) {
      *reinterpret_cast<uint32_t*>(to) = bits;
      return;
    }
    if (first) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(bits);
    if (second) *reinterpret_cast<uint16_t*>(to + key_bytes) = static_cast<uint16_t>(bits >> 16);
  }
  /// Whether it hides a pair.
  __device__ __forceinline__ bool hides(int32_t query, int32_t key) const {
    return value(row(query), key) == -infinity();
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_BIAS_CUH_
