// Rows that are quantised, and read back: what strobe_quantize and strobe_dequantize do on GPUs,
// and an append to a quantised cache. A warp has a row, each lane some of its values: i, i + 32,
// ... So a lane has one value of each block.
#include <type_traits>

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/quantised.h"
#include "cuda/cache/cache_update.cuh"
#include "cuda/cache/coded_row.cuh"
#include "cuda/cache/update_kernel.cuh"
#include "cuda/common/element.h"
#include "cuda/common/static_order.cuh"
#include "cuda/host/device_guard.h"
#include "cuda/host/device_pointer.h"
#include "cuda/host/dispatch.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/machine.h"
#include "cuda/host/quantised_update.h"

namespace strobe::cuda {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kShare = 8;  // values of a lane: a row has 256 at most

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x % 32); }

/// The bits of the largest magnitude of a warp's, NaN's where there is one: those are larger.
__device__ __forceinline__ uint32_t largest_of_warp(uint32_t bits) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, step));
  return bits;
}
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
/// This lane's of a row; 0 beyond its n values.
__device__ __forceinline__ uint32_t largest_of_lane(const float (&x)[kShare], int n) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    if (lane_of_warp() + 32 * i < n) bits = max(bits, magnitude(x[i]));
  }
  return bits;
}

/// As quantise_row of core/quantised.h, to the bit, by a warp. scale: of the row, which is read or
/// made as the form says; largest: of the values that it is made for.
__device__ __forceinline__ void quantise_by_warp(const RowForm& form, const float (&x)[kShare],
                                                 int n, char* to, char* scale, uint32_t largest) {
  const int lane = lane_of_warp();
  if (has_scales(form.dtype)) {
    float by;
    if (form.makes_scale) {
      by = scale_for(form.dtype, __uint_as_float(largest));
      if (form.scale_dtype == STROBE_FLOAT16) {
        const uint16_t half = half_from_float(by);
        if (lane == 0) *reinterpret_cast<uint16_t*>(scale) = half;
        by = float_from_half(half);
      } else if (lane == 0) {
        *reinterpret_cast<float*>(scale) = by;
      }
    } else {
      by = read_scale(form.scale_dtype, scale);
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int d = lane + 32 * i;
      if (d >= n) continue;
      const float units = strobe::in_units(x[i], by);
      to[d] = static_cast<char>(form.dtype == STROBE_INT8
                                    ? nearest_code(units, -kMostInt8, kMostInt8)
                                    : static_cast<int32_t>(e4m3_from_float(units)));
    }
    return;
  }
  const bool nibbles = form.dtype == STROBE_Q4_0;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    if (32 * i >= n) break;
    const uint32_t own = magnitude(x[i]), most = largest_of_warp(own);
    const int first = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, own == most))) - 1;
    const float value = __shfl_sync(0xffffffffu, x[i], first);
    const uint16_t half = half_from_float(scale_for(form.dtype, value));
    const float units = strobe::in_units(x[i], float_from_half(half));
    char* const block = to + i * (nibbles ? kQ4BlockBytes : kQ8BlockBytes);
    if (lane < 2) block[lane] = static_cast<char>(half >> (8 * lane));
    if (nibbles) {
      const int32_t code = nearest_code(units, -8, 7) + 8;
      const int32_t upper = __shfl_sync(0xffffffffu, code, (lane + 16) % 32);
      if (lane < 16) block[2 + lane] = static_cast<char>(code | upper << 4);
    } else {
      block[2 + lane] = static_cast<char>(nearest_code(units, -kMostInt8, kMostInt8));
    }
  }
}

// --- strobe_quantize and strobe_dequantize ---

/// A row of the arguments of a launch.
struct ArgsRow {
  int64_t batch, row, head;

  __device__ __forceinline__ static ArgsRow of(const QuantiseArgs& a, int64_t n) {
    return {n / a.heads / a.seqlen, n / a.heads % a.seqlen, n % a.heads};
  }
  __device__ __forceinline__ int64_t offset(const strobe_strides& s) const {
    return batch * s.batch + row * s.seqlen + head * s.head;
  }
};
__device__ __forceinline__ float value_at(int32_t dtype, const void* x, int64_t at) {
  if (dtype == STROBE_FLOAT32) return static_cast<const float*>(x)[at];
  if (dtype == kBfloat16) return static_cast<float>(static_cast<const Element<kBfloat16>*>(x)[at]);
  return static_cast<float>(static_cast<const Element<kFloat16>*>(x)[at]);
}
__device__ __forceinline__ void read_row(const QuantiseArgs& a, const ArgsRow& row,
                                         float (&x)[kShare]) {
  const int64_t first = row.offset(a.x_strides);
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int d = lane_of_warp() + 32 * i;
    x[i] = d < a.head_dim ? value_at(a.dtype, a.x, first + d) : 0.f;
  }
}
__device__ __forceinline__ int64_t first_row() {
  return int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x / 32);
}
__device__ __forceinline__ int64_t rows_at_once() { return int64_t{gridDim.x} * kWarps; }

/// The largest magnitudes of what scales are shared by: largest[head], or [0], which begin as 0.
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const __grid_constant__ QuantiseArgs a, uint32_t* largest) {
  const int64_t rows = a.batch * a.seqlen * a.heads;
  for (int64_t n = first_row(); n < rows; n += rows_at_once()) {
    const ArgsRow row = ArgsRow::of(a, n);
    float x[kShare];
    read_row(a, row, x);
    const uint32_t most = largest_of_warp(largest_of_lane(x, static_cast<int>(a.head_dim)));
    uint32_t* const shared = largest + (a.kv_scale == STROBE_KV_SCALE_HEAD ? row.head : 0);
    if (lane_of_warp() == 0 && most > 0) atomicMax(shared, most);
  }
}

/// largest: null where each row makes its own scale, or scales are given.
__global__ void __launch_bounds__(kThreads)
    quantise_kernel(const __grid_constant__ QuantiseArgs a, const uint32_t* largest) {
  const int64_t rows = a.batch * a.seqlen * a.heads;
  const int n = static_cast<int>(a.head_dim);
  const RowForm form{a.kv_dtype, a.kv_scale_dtype, a.scale_is_given == 0};
  const int size = a.kv_scale_dtype == STROBE_FLOAT16 ? 2 : 4;
  for (int64_t row = first_row(); row < rows; row += rows_at_once()) {
    const ArgsRow own = ArgsRow::of(a, row);
    float x[kShare];
    read_row(a, own, x);
    // (Rows that share a scale all write it, and all the same.)
    const uint32_t most = largest ? largest[a.kv_scale == STROBE_KV_SCALE_HEAD ? own.head : 0]
                          : has_scales(a.kv_dtype) ? largest_of_warp(largest_of_lane(x, n))
                                                   : 0;
    quantise_by_warp(form, x, n, static_cast<char*>(a.codes) + own.offset(a.codes_strides),
                     static_cast<char*>(a.scale) + size * own.offset(a.scale_strides), most);
  }
}

__global__ void __launch_bounds__(kThreads)
    dequantise_kernel(const __grid_constant__ QuantiseArgs a) {
  const int64_t rows = a.batch * a.seqlen * a.heads;
  const int32_t is_half = a.kv_scale_dtype == STROBE_FLOAT16;
  for (int64_t n = first_row(); n < rows; n += rows_at_once()) {
    const ArgsRow own = ArgsRow::of(a, n);
    const auto* const scale = static_cast<const char*>(a.scale);
    const CodedRow row = CodedRow::at(
        a.kv_dtype, static_cast<const char*>(a.codes) + own.offset(a.codes_strides),
        {scale, 0, 0, 0, is_half}, scale + (is_half ? 2 : 4) * own.offset(a.scale_strides));
    const int64_t first = own.offset(a.x_strides);
    float x[kShare];
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int d = lane_of_warp() + 32 * i;
      if (d < a.head_dim) x[i] = row[d];
    }
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int d = lane_of_warp() + 32 * i;
      if (d >= a.head_dim) continue;
      if (a.dtype == STROBE_FLOAT32) {
        static_cast<float*>(a.x)[first + d] = x[i];
      } else if (a.dtype == kBfloat16) {
        static_cast<Element<kBfloat16>*>(a.x)[first + d] = Element<kBfloat16>(x[i]);
      } else {
        static_cast<Element<kFloat16>*>(a.x)[first + d] = Element<kFloat16>(x[i]);
      }
    }
  }
}

// --- An append ---

/// What update_kernel.cuh asks of a kernel.
template <int kDtype>
struct QuantisedUpdateShape {
  using T = Element<kDtype>;
  static constexpr int kWarps = cuda::kWarps;
};

/// Writes all new keys and values to the cache. After the rotary embedding a value is float32: it
/// is rounded once, to its code.
template <typename T>
__device__ __forceinline__ void append_quantised(const CachedLaunchParams& p) {
  if (!p.k_new.data) return;
  const CachedSequences& c = p.cache;
  const QuantisedCache& q = p.quantised;
  const int lane = lane_of_warp();
  const int64_t rows = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
#pragma unroll 1
  for (int64_t n = first_row(); n < rows * p.heads_kv; n += rows_at_once()) {
    const int64_t row = n / p.heads_kv;
    const auto head = static_cast<int32_t>(n - row * p.heads_kv);
    visit_new_row(p, row, [&](const CachedRows& s, int64_t key, const KeyRows::Place& place) {
      const int64_t own = key - s.new_begin;
      const auto rotation = Rotation<T>::at(p, s.rotary_start + own);
      const auto quantise = [&](const Tensor& from, const Tensor& to, const RowScales& scales,
                                int dim, bool rotates) {
        const T* const x =
            static_cast<const T*>(from.data) + from.element(s.new_entry, s.new_row + own, head);
        float values[kShare] = {};
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const int d = lane + 32 * i;
          if (d < dim) values[i] = rotates ? rotation.exact(x, d) : static_cast<float>(x[d]);
        }
        const RowForm form{q.kv_dtype, scales.is_half ? STROBE_FLOAT16 : STROBE_FLOAT32,
                           q.has_row_scales != 0};
        const uint32_t largest =
            form.makes_scale ? largest_of_warp(largest_of_lane(values, dim)) : 0;
        quantise_by_warp(form, values, dim,
                         static_cast<char*>(to.data) + to.element(place.entry, place.row, head),
                         const_cast<char*>(scales.at(place.entry, place.row, head)), largest);
      };
      quantise(p.k_new, p.k, q.k_scale, p.head_dim, true);
      quantise(p.v_new, p.v, q.v_scale, p.head_dim_v, false);
    });
  }
}

template <int kDtype>
__global__ void __launch_bounds__(kThreads)
    quantised_update_kernel(const __grid_constant__ CachedLaunchParams p,
                            const __grid_constant__ Tensor rotated) {
  append_quantised<Element<kDtype>>(p);
  if (rotated.data) rotate_queries<QuantisedUpdateShape<kDtype>, true>(p, rotated);
}

namespace {

constexpr int64_t kBlocksEach = 16;  // of a multiprocessor: it waits for memory alone

dim3 blocks_for(int64_t rows, const LaunchTarget& target) {
  const int64_t most = max64(1, target.multiprocessors * kBlocksEach);
  return {static_cast<unsigned>(min64(ceil_div(rows, kWarps), most))};
}

Status launch_quantise(const QuantiseArgs& a, bool quantises) {
  STROBE_RETURN_IF_ERROR(check_device(a.device_index));
  STROBE_RETURN_IF_ERROR(check_device_pointer("x", a.x, a.device_index));
  STROBE_RETURN_IF_ERROR(check_device_pointer("codes", a.codes, a.device_index));
  STROBE_RETURN_IF_ERROR(check_device_pointer("scale", a.scale, a.device_index));
  const int64_t rows = a.batch * a.seqlen * a.heads;
  if (rows == 0) return {};
  const DeviceGuard guard(a.device_index);
  if (guard.error() != cudaSuccess) return cuda_status(guard.error(), "choosing the device");
  const DeviceProperties& device = machine().devices[static_cast<size_t>(a.device_index)];
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const LaunchTarget target{stream, a.device_index, device.multiprocessors, device.shared_bytes};
  static KernelHandle dequantises(reinterpret_cast<const void*>(&dequantise_kernel));
  static KernelHandle measures(reinterpret_cast<const void*>(&largest_kernel));
  static KernelHandle kernel(reinterpret_cast<const void*>(&quantise_kernel));
  auto* const own = const_cast<QuantiseArgs*>(&a);
  const dim3 blocks = blocks_for(rows, target);
  if (!quantises) {
    void* args[] = {own};
    const cudaError_t error = dequantises.launch(blocks, kThreads, args, target);
    return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
  }
  const bool of_heads = a.kv_scale == STROBE_KV_SCALE_HEAD;
  const bool shared = of_heads || a.kv_scale == STROBE_KV_SCALE_TENSOR;
  uint32_t* largest = nullptr;
  void* args[] = {own, static_cast<void*>(&largest)};
  if (!shared || a.scale_is_given) {
    const cudaError_t error = kernel.launch(blocks, kThreads, args, target);
    return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
  }
  const size_t bytes = sizeof(uint32_t) * static_cast<size_t>(of_heads ? a.heads : 1);
  cudaError_t error = cudaMallocAsync(&largest, bytes, stream);
  if (error != cudaSuccess) return cuda_status(error, "allocating room for magnitudes");
  error = cudaMemsetAsync(largest, 0, bytes, stream);
  if (error == cudaSuccess) error = measures.launch(blocks, kThreads, args, target);
  if (error == cudaSuccess) error = kernel.launch(blocks, kThreads, args, target);
  const cudaError_t freed = cudaFreeAsync(largest, stream);
  if (error == cudaSuccess) error = freed;
  return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
}

template <int kDtype>
cudaError_t launch_update(const CachedLaunchParams& p, const Tensor& rotated, int64_t rows,
                          const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&quantised_update_kernel<kDtype>));
  void* args[] = {const_cast<CachedLaunchParams*>(&p), const_cast<Tensor*>(&rotated)};
  return kernel.launch(blocks_for(rows, target), kThreads, args, target);
}

}  // namespace

Status quantise(const QuantiseArgs& a) { return launch_quantise(a, true); }
Status dequantise(const QuantiseArgs& a) { return launch_quantise(a, false); }

cudaError_t launch_quantised_update(const CachedLaunchParams& p, const Tensor& rotated,
                                    int64_t rotated_rows, int dtype, const LaunchTarget& target) {
  const CachedSequences& c = p.cache;
  const int64_t fresh = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
  const int64_t rows = max64(fresh * p.heads_kv, rotated_rows);
  if (rows == 0) return cudaSuccess;
  return dtype == kBfloat16 ? launch_update<kBfloat16>(p, rotated, rows, target)
                            : launch_update<kFloat16>(p, rotated, rows, target);
}

}  // namespace strobe::cuda
