// Tensors of floats become quantised rows, and back: strobe::quantize() and strobe::dequantize().
// Part of strobe.hpp, which includes it.
#ifndef STROBE_QUANTIZE_HPP_
#define STROBE_QUANTIZE_HPP_

#include <strobe/strobe.h>

#include <cstdint>
#include <strobe/strobe.hpp>

namespace strobe {
inline namespace v0 {

// A tensor of floats and its quantised form: strobe.h has shapes and strides. Floats, Codes: void,
// or const void of what is read alone.
template <typename Floats, typename Codes>
struct QuantizedTensor {
  Device device = Device::kCpu;       // where the tensors are
  int32_t device_index = 0;           // which GPU; CPU: 0
  DType dtype = DType::kFloat32;      // of x: kFloat32, kBFloat16 or kFloat16
  DType kv_dtype = DType::kInt8;      // of codes: kInt8, kFloat8E4M3, kFloat8E5M2, kQ8_0 or kQ4_0
  KvScale kv_scale = KvScale::kNone;  // kInt8 and float8 need one
  DType kv_scale_dtype = DType::kFloat32;  // of scale; or, but of batch and head, kFloat16
  bool scale_is_given = false;             // quantize: scale is read, and not made
  int32_t threads = 0;                     // at most; 0: OpenMP's number
  int64_t batch = 1, seqlen = 0, heads = 1, head_dim = 0;  // extents of x
  // Strides of the tensor of the same name; all zero: contiguous.
  Strides x_strides = {}, codes_strides = {}, scale_strides = {};
  Floats* x = nullptr;     // [batch, seqlen, heads, head_dim]
  Codes* codes = nullptr;  // [batch, seqlen, heads, bytes of a row]
  // [batch, seqlen, heads], [batch, heads_kv], [heads_kv] or one; null without a kv_scale
  Codes* scale = nullptr;
  void* stream = nullptr;  // CUDA: cudaStream_t, on which the work is enqueued
  int64_t heads_kv = 0;    // of the scales of heads; divides heads, as of queries; 0: heads
  bool hadamard = false;   // rows are rotated by the Hadamard matrix before, or after dequantize
  int64_t scale_rows = 0;  // quantize with kRow: rows of a head that share a scale; 0: each its own

  // The same arguments for the C interface.
  [[nodiscard]] strobe_quantize_args c() const noexcept {
    strobe_quantize_args a = {};
    a.struct_size = sizeof a;
    a.device = static_cast<int32_t>(device);
    a.device_index = device_index;
    a.dtype = static_cast<int32_t>(dtype);
    a.kv_dtype = static_cast<int32_t>(kv_dtype);
    a.kv_scale = static_cast<int32_t>(kv_scale);
    a.kv_scale_dtype = static_cast<int32_t>(kv_scale_dtype);
    a.scale_is_given = scale_is_given;
    a.threads = threads;
    a.batch = batch;
    a.seqlen = seqlen;
    a.heads = heads;
    a.head_dim = head_dim;
    a.x_strides = x_strides;
    a.codes_strides = codes_strides;
    a.scale_strides = scale_strides;
    // Of one struct, whose function reads what is const here.
    a.x = const_cast<void*>(static_cast<const void*>(x));
    a.codes = const_cast<void*>(static_cast<const void*>(codes));
    a.scale = const_cast<void*>(static_cast<const void*>(scale));
    a.stream = stream;
    a.heads_kv = heads_kv;
    a.hadamard = hadamard;
    a.scale_rows = scale_rows;
    return a;
  }
};

// Of quantize, which writes codes, and scale but where it is given.
using QuantizeArgs = QuantizedTensor<const void, void>;
// Of dequantize, which writes x.
using DequantizeArgs = QuantizedTensor<void, const void>;

// Quantises x as an append to a cache does, without throwing.
[[nodiscard]] inline Status try_quantize(const QuantizeArgs& args) noexcept {
  const strobe_quantize_args a = args.c();
  return static_cast<Status>(strobe_quantize(&a));
}
// Quantises x as an append to a cache does. Throws Error.
inline void quantize(const QuantizeArgs& args) { internal::throw_unless_ok(try_quantize(args)); }

// Writes to x what codes and scales stand for, without throwing.
[[nodiscard]] inline Status try_dequantize(const DequantizeArgs& args) noexcept {
  const strobe_quantize_args a = args.c();
  return static_cast<Status>(strobe_dequantize(&a));
}
// Writes to x what codes and scales stand for. Throws Error.
inline void dequantize(const DequantizeArgs& args) {
  internal::throw_unless_ok(try_dequantize(args));
}

}  // namespace v0
}  // namespace strobe

#endif  // STROBE_QUANTIZE_HPP_
