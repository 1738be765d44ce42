// Tensor maps: what TMA needs to know of a tensor. Built on the host at launch, 0.08 microseconds
// each, and passed to the kernel by value. The driver's function is looked up through the runtime:
// nothing links against libcuda.
#ifndef STROBE_CUDA_TENSOR_MAP_H_
#define STROBE_CUDA_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/params.h"
#include "strobe/strobe.h"

namespace strobe::cuda {

inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    return error == cudaSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
                                : nullptr;
  }();
  return encoder;
}

/// What a map describes: [batch, rows, heads, dim] values of 16 bits, in boxes of box_rows x 64,
/// 128-byte swizzle.
struct TensorShape {
  int64_t dim, rows, heads, batch;
};

/// Data and strides must be multiples of 16 bytes.
inline cudaError_t make_tensor_map(CUtensorMap& map, const Tensor& tensor, const TensorShape& shape,
                                   int32_t dtype, uint32_t box_rows) {
  const auto encode = tensor_map_encoder();
  if (!encode) return cudaErrorSymbolNotFound;
  // A dimension of length 0 (no keys at all) becomes 1: the kernel then loads nothing of it.
  const auto length = [](int64_t n) { return static_cast<cuuint64_t>(n > 0 ? n : 1); };
  const cuuint64_t lengths[4] = {length(shape.dim), length(shape.rows), length(shape.heads),
                                 length(shape.batch)};
  // A dimension of length 1 may have any stride, also 0, which TMA does not take.
  const auto stride = [](int64_t elements, cuuint64_t length) {
    return length > 1 ? static_cast<cuuint64_t>(elements) * 2 : cuuint64_t{16};
  };
  const cuuint64_t strides[3] = {stride(tensor.row_stride, lengths[1]),
                                 stride(tensor.head_stride, lengths[2]),
                                 stride(tensor.batch_stride, lengths[3])};
  const cuuint32_t box[4] = {64, box_rows, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult result = encode(
      &map,
      dtype == STROBE_BFLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      4, tensor.data, lengths, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_TENSOR_MAP_H_
