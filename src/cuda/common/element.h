// The types of a tensor's values. Device code names dtypes by the numbers below and not by those of
// strobe/strobe.h: functions of the host are an error to NVRTC, already where they are declared.
#ifndef STROBE_CUDA_COMMON_ELEMENT_H_
#define STROBE_CUDA_COMMON_ELEMENT_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/ptx/float8.h"

namespace strobe::cuda {

/// Of strobe_dtype; host/instance.h holds them against it.
inline constexpr int kBfloat16 = 1, kFloat16 = 2;
/// The same, of keys and values of a quantised cache (core/quantised.h), and of float8 attention.
inline constexpr int kE4m3Codes = 3, kE5m2Codes = 4, kInt8Codes = 5, kQ8Blocks = 6, kQ4Blocks = 7;
/// In their place where keys and values have q's dtype.
inline constexpr int kSameAsQ = -1;
/// In their place where a kernel takes e4m3 and e5m2 beside q's e4m3 (ForwardParams::e5m2_kv).
inline constexpr int kEitherFloat8 = -2;

/// Not defined for other dtypes: a kernel for one of them has to say what it computes with.
template <int kDtype>
struct ElementOf;
template <>
struct ElementOf<kBfloat16> {
  using Type = __nv_bfloat16;
};
template <>
struct ElementOf<kFloat16> {
  using Type = __half;
};
template <>
struct ElementOf<kE4m3Codes> {
  using Type = ptx::E4m3;
};
template <int kDtype>
using Element = typename ElementOf<kDtype>::Type;

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_ELEMENT_H_
