// Partial results of one attention become one: strobe::merge(); gradients of its parts are added
// up: strobe::add(). Part of strobe.hpp, which includes it.
#ifndef STROBE_MERGE_HPP_
#define STROBE_MERGE_HPP_

#include <strobe/strobe.h>

#include <cstdint>
#include <strobe/strobe.hpp>

namespace strobe {
inline namespace v0 {

// Partial results of one attention, and where the whole goes: strobe.h has shapes and strides.
struct MergeArgs {
  Device device = Device::kCpu;       // where the tensors are
  int32_t device_index = 0;           // CUDA: which GPU
  DType out_dtype = DType::kFloat32;  // of out: kFloat32, kBFloat16 or kFloat16
  int32_t threads = 0;                // at most; 0: OpenMP's number
  int64_t parts = 0;                  // how many partial results there are
  int64_t batch = 1, seqlen_q = 0, heads = 1, head_dim_v = 0;  // extents of out
  const float* outs = nullptr;  // [parts, batch, seqlen_q, heads, head_dim_v]
  const float* lses = nullptr;  // [parts, batch, heads, seqlen_q]; infinite: no keys in the part
  void* out = nullptr;          // [batch, seqlen_q, heads, head_dim_v]
  float* lse = nullptr;         // [batch, heads, seqlen_q]; null: not wanted
  // Strides of the tensor of the same name; all zero: contiguous.
  Strides outs_strides = {}, lses_strides = {}, out_strides = {}, lse_strides = {};
  int64_t outs_part = 0, lses_part = 0;  // elements from a part to the next; 0: contiguous
  void* stream = nullptr;                // CUDA: cudaStream_t
  const float* sinks = nullptr;          // [heads]: sinks that enter here; null: none

  // The same arguments for the C interface.
  [[nodiscard]] strobe_merge_args c() const noexcept {
    strobe_merge_args a = {};
    a.struct_size = sizeof a;
    a.device = static_cast<int32_t>(device);
    a.device_index = device_index;
    a.out_dtype = static_cast<int32_t>(out_dtype);
    a.threads = threads;
    a.parts = parts;
    a.batch = batch;
    a.seqlen_q = seqlen_q;
    a.heads = heads;
    a.head_dim_v = head_dim_v;
    a.outs = outs;
    a.lses = lses;
    a.out = out;
    a.lse = lse;
    a.outs_strides = outs_strides;
    a.lses_strides = lses_strides;
    a.out_strides = out_strides;
    a.lse_strides = lse_strides;
    a.outs_part = outs_part;
    a.lses_part = lses_part;
    a.stream = stream;
    a.sinks = sinks;
    return a;
  }
};

// Merges partial results exactly, without throwing: out = sum of exp(lses - lse) * outs over the
// parts.
[[nodiscard]] inline Status try_merge(const MergeArgs& args) noexcept {
  const strobe_merge_args a = args.c();
  return static_cast<Status>(strobe_merge(&a));
}
// Merges partial results exactly, as try_merge(). Throws Error.
inline void merge(const MergeArgs& args) { internal::throw_unless_ok(try_merge(args)); }

// Float32 gradients of one part of a problem, and where they go: strobe.h has shapes and strides.
struct AddArgs {
  Device device = Device::kCpu;       // where the tensors are
  int32_t device_index = 0;           // CUDA: which GPU
  DType out_dtype = DType::kFloat32;  // of out: kFloat32, kBFloat16 or kFloat16
  int32_t threads = 0;                // at most; 0: OpenMP's number
  bool accumulate = false;            // out becomes out + x; else x
  int64_t batch = 1, seqlen = 0, heads = 1, head_dim = 0;  // extents of x and out
  const float* x = nullptr;                                // [batch, seqlen, heads, head_dim]
  void* out = nullptr;                                     // [batch, seqlen, heads, head_dim]
  // Strides of the tensor of the same name; all zero: contiguous.
  Strides x_strides = {}, out_strides = {};
  void* stream = nullptr;  // CUDA: cudaStream_t

  // The same arguments for the C interface.
  [[nodiscard]] strobe_add_args c() const noexcept {
    strobe_add_args a = {};
    a.struct_size = sizeof a;
    a.device = static_cast<int32_t>(device);
    a.device_index = device_index;
    a.out_dtype = static_cast<int32_t>(out_dtype);
    a.threads = threads;
    a.accumulate = accumulate;
    a.batch = batch;
    a.seqlen = seqlen;
    a.heads = heads;
    a.head_dim = head_dim;
    a.x = x;
    a.out = out;
    a.x_strides = x_strides;
    a.out_strides = out_strides;
    a.stream = stream;
    return a;
  }
};

// Adds gradients that another device computed to those that are here, or rounds float32 gradients,
// without throwing. The sum is made in float32 and rounded once.
[[nodiscard]] inline Status try_add(const AddArgs& args) noexcept {
  const strobe_add_args a = args.c();
  return static_cast<Status>(strobe_add(&a));
}
// Adds or rounds gradients, as try_add(). Throws Error.
inline void add(const AddArgs& args) { internal::throw_unless_ok(try_add(args)); }

}  // namespace v0
}  // namespace strobe

#endif  // STROBE_MERGE_HPP_
