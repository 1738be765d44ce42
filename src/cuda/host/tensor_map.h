// Tensor maps: what TMA needs to know of a tensor. Built on the host at launch, and passed to the
// kernel by value.
#ifndef STROBE_CUDA_HOST_TENSOR_MAP_H_
#define STROBE_CUDA_HOST_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/common/element.h"
#include "cuda/common/params.h"
#include "cuda/host/driver_function.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

/// What a map describes besides the address: [batch, rows, heads, dim] values of `dtype`, in boxes
/// of box_rows rows of 128 bytes, 128-byte swizzle: panels of a SharedTile. Strides in elements, as
/// in Tensor. box_heads: 0, or so many neighbouring heads of a row are a box's rows before those of
/// the next row: then the map has five dimensions, [batch, heads / box_heads, rows, box_heads,
/// dim], and a box box_rows / box_heads rows.
struct TensorShape {
  int64_t dim, rows, heads, batch;
  int64_t batch_stride, row_stride, head_stride;
  int32_t dtype;
  uint32_t box_rows, box_heads = 0;

  friend bool operator==(const TensorShape&, const TensorShape&) = default;
};

/// Data and strides must be multiples of 16 bytes.
inline cudaError_t make_tensor_map(CUtensorMap& map, void* data, const TensorShape& shape) {
  static const auto encode =
      driver_function<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  if (!encode) return cudaErrorSymbolNotFound;
  // A dimension of length 0 (no keys at all) becomes 1: the kernel then loads nothing of it.
  const auto length = [](int64_t n) { return static_cast<cuuint64_t>(n > 0 ? n : 1); };
  if (shape.dtype != kBfloat16 && shape.dtype != kFloat16 && shape.dtype != kE4m3Codes)
    return cudaErrorInvalidValue;
  const CUtensorMapDataType type = shape.dtype == kBfloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : shape.dtype == kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto bytes = static_cast<cuuint32_t>(element_size(shape.dtype));
  constexpr cuuint32_t kBoxBytes = 128;
  cuuint64_t lengths[5] = {length(shape.dim)}, strides[4] = {};
  cuuint32_t box[5] = {kBoxBytes / bytes}, rank = 1;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const auto add = [&](int64_t count, int64_t elements, uint32_t of_box) {
    lengths[rank] = length(count);
    // A dimension of length 1 may have any stride, also 0, which TMA does not take.
    strides[rank - 1] =
        lengths[rank] > 1 ? static_cast<cuuint64_t>(elements) * bytes : cuuint64_t{16};
    box[rank++] = of_box;
  };
  if (shape.box_heads > 0) add(shape.box_heads, shape.head_stride, shape.box_heads);
  const uint32_t heads = shape.box_heads > 0 ? shape.box_heads : 1;
  add(shape.rows, shape.row_stride, shape.box_rows / heads);
  add(shape.heads / heads, shape.head_stride * heads, 1);
  add(shape.batch, shape.batch_stride, 1);
  const auto encode_now = [&] {
    return encode(&map, type, rank, data, lengths, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode_now();
  if (result != CUDA_SUCCESS) {
    // A host thread that has launched nothing yet, such as autograd's, has no context: setting the
    // device, which is current already, makes its context so.
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess)
      result = encode_now();
  }
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/// A map that is kept from launch to launch. An engine's layers differ in their addresses alone,
/// and to exchange that takes 0.03 microseconds, where a map takes 0.05 to 0.09.
class KeptTensorMap {
 public:
  cudaError_t make(CUtensorMap& map, void* data, const TensorShape& shape) {
    if (!data_ || shape != shape_) {
      data_ = nullptr;
      STROBE_RETURN_IF_CUDA_ERROR(make_tensor_map(map, data, shape));
    } else if (data != data_) {
      static const auto replace =
          driver_function<decltype(&cuTensorMapReplaceAddress)>("cuTensorMapReplaceAddress");
      data_ = nullptr;
      if (!replace || replace(&map, data) != CUDA_SUCCESS) return make_tensor_map(map, data, shape);
    }
    data_ = data;
    shape_ = shape;
    return cudaSuccess;
  }
  /// Of a tensor of a launch, with the rows and heads of its keys or of its queries.
  enum class Rows { kQueries, kKeys };
  cudaError_t make(CUtensorMap& map, const CommonParams& p, const Tensor& t, Rows of, int64_t dim,
                   int32_t dtype, uint32_t box_rows, uint32_t box_heads = 0) {
    const bool keys = of == Rows::kKeys;
    return make(
        map, t.data,
        {dim, keys ? p.total_k : p.total_q, keys ? p.heads_kv : p.heads, p.cu_q ? 1 : p.batch,
         t.batch_stride, t.row_stride, t.head_stride, dtype, box_rows, box_heads});
  }
  /// Of a bias of 16 bits. An axis that it has once, or along which it does not move, has one
  /// entry. instead: some address. Nothing is loaded of a bias that has no values, but there is no
  /// tensor map of a null pointer.
  cudaError_t make(CUtensorMap& map, const Bias& bias, const void* instead, uint32_t box_rows) {
    const bool is_there = bias.keys > 0 && bias.rows > 0;
    const Bias b = is_there ? bias : Bias{instead, 0, 0, 0, 1, bias.type, 1, 1, 1, 1};
    const auto entries = [](int64_t stride, int32_t count) { return stride ? count : 1; };
    return make(map, const_cast<void*>(b.data),
                {b.keys, entries(b.row_stride, b.rows), entries(b.head_stride, b.heads),
                 entries(b.batch_stride, b.batch), b.batch_stride, b.row_stride, b.head_stride,
                 b.type == kBiasBfloat16 ? kBfloat16 : kFloat16, box_rows});
  }

 private:
  void* data_ = nullptr;  // null: the map is not to be used again
  TensorShape shape_{};
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_TENSOR_MAP_H_
