// A row of a quantised cache, value by value.
#ifndef STROBE_CUDA_CACHE_CODED_ROW_CUH_
#define STROBE_CUDA_CACHE_CODED_ROW_CUH_

#include <cuda_fp16.h>

#include <cstdint>

#include "core/codes.h"
#include "cuda/common/element.h"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// Any two bytes as fp16: a row may lie at an odd address.
__device__ __forceinline__ float half_at(const char* at) {
  const auto byte = [&](int i) { return static_cast<uint32_t>(static_cast<uint8_t>(at[i])); };
  return static_cast<float>(
      __builtin_bit_cast(__half, static_cast<uint16_t>(byte(0) | byte(1) << 8)));
}

/// Null: there is none.
struct CodedRow {
  const char* row;
  float scale;  // of all its codes; not with blocks
  int32_t dtype;

  /// The row whose codes and whose scale lie there.
  __device__ __forceinline__ static CodedRow at(int32_t dtype, const char* row,
                                                const RowScales& scales, const char* scale) {
    float by = 0.f;
    if (scales.data) {
      by = scales.is_half ? static_cast<float>(*reinterpret_cast<const __half*>(scale))
                          : *reinterpret_cast<const float*>(scale);
    }
    return {row, usable_scale(by), dtype};
  }

  __device__ __forceinline__ explicit operator bool() const { return row != nullptr; }
  __device__ __forceinline__ float operator[](int d) const {
    if (dtype == kInt8Codes) return scale * int8_at(row + d);
    if (dtype == kE4m3Codes) return scale * float_from_e4m3(static_cast<uint8_t>(row[d]));
    const int block = d / 32, n = d % 32;
    if (dtype == kQ8Blocks) {
      const char* const from = row + 34 * block;
      return usable_scale(half_at(from)) * int8_at(from + 2 + n);
    }
    const char* const from = row + 18 * block;
    const int both = static_cast<uint8_t>(from[2 + n % 16]);
    return usable_scale(half_at(from)) * static_cast<float>((n < 16 ? both & 15 : both >> 4) - 8);
  }

 private:
  __device__ __forceinline__ static float int8_at(const char* at) {
    return static_cast<float>(static_cast<int8_t>(*at));
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_CACHE_CODED_ROW_CUH_
