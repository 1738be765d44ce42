// strobe_quantize and strobe_dequantize on GPUs, row after row by lanes (quantised_lanes.cuh).
#include <cstdint>
#include <numeric>

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/quantised.h"
#include "cuda/common/element.h"
#include "cuda/host/device_guard.h"
#include "cuda/host/device_pointer.h"
#include "cuda/host/dispatch.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/machine.h"
#include "cuda/host/row_blocks.h"
#include "cuda/rows/quantised_lanes.cuh"

namespace strobe::cuda {

/// Rows of the arguments of a launch, as far apart as those of a lane are.
struct ArgsRow {
  int64_t batch, row, head;

  STROBE_HOST_DEVICE static ArgsRow of(const QuantiseArgs& a, int64_t n) {
    return {n / a.heads / a.seqlen, n / a.heads % a.seqlen, n % a.heads};
  }
  /// The row that is `by` further on: divisions of 64 bits would take longer than the row.
  __device__ __forceinline__ void advance(const QuantiseArgs& a, const ArgsRow& by) {
    head += by.head, row += by.row, batch += by.batch;
    if (head >= a.heads) head -= a.heads, ++row;
    if (row >= a.seqlen) row -= a.seqlen, ++batch;
  }
  __device__ __forceinline__ int64_t offset(const strobe_strides& s) const {
    return batch * s.batch + row * s.seqlen + head * s.head;
  }
};
struct QuantiseParams {
  QuantiseArgs args;
  int32_t lanes;       // of a row
  ArgsRow step;        // from a lane's row to its next
  uint32_t* largest;   // [set_of(row)], of what scales are shared by; null where none are made
  int32_t group;       // heads that share a scale of heads
  int32_t row_blocks;  // with scales of rows: blocks of rows of a sequence

  /// Which of the scales that rows share a row has.
  __device__ __forceinline__ int64_t set_of(const ArgsRow& row) const {
    if (args.kv_scale == STROBE_KV_SCALE_TENSOR) return 0;
    const int64_t head = static_cast<int32_t>(row.head) / group;
    if (args.kv_scale == STROBE_KV_SCALE_HEAD) return head;
    if (args.kv_scale == STROBE_KV_SCALE_BATCH_HEAD) return row.batch * args.heads_kv + head;
    const int32_t block = static_cast<int32_t>(row.row) / static_cast<int32_t>(args.scale_rows);
    return (row.batch * row_blocks + block) * args.heads + head;
  }
};

/// visit(row, is_there) for all rows of a lane, in each step of its warp.
template <typename Visit>
__device__ __forceinline__ void visit_rows(const QuantiseParams& p, const Visit& visit) {
  const QuantiseArgs& a = p.args;
  const int64_t rows = a.batch * a.seqlen * a.heads;
  const int of_warp = 32 / p.lanes;
  int64_t first = (int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x / 32)) * of_warp;
  if (first >= rows) return;
  const int own = lane_of_warp() / p.lanes;
  ArgsRow row = ArgsRow::of(a, first + own);
#pragma unroll 1
  for (; first < rows; first += int64_t{gridDim.x} * kWarps * of_warp) {
    visit(row, first + own < rows);
    row.advance(a, p.step);
  }
}

/// Where this lane's values of a row are.
__device__ __forceinline__ char* values_at(const QuantiseArgs& a, const ArgsRow& row, int first) {
  const int64_t at = row.offset(a.x_strides) + first;
  return static_cast<char*>(const_cast<void*>(static_cast<const void*>(a.x))) +
         at * element_bytes(a.dtype);
}
__device__ __forceinline__ char* scale_at(const QuantiseParams& p, ArgsRow row) {
  const QuantiseArgs& a = p.args;
  row.head = static_cast<int32_t>(row.head) / p.group;
  return static_cast<char*>(a.scale) +
         (a.kv_scale_dtype == STROBE_FLOAT16 ? 2 : 4) * row.offset(a.scale_strides);
}

/// As rotate_by_hadamard of core/quantised.h, to the bit, by a row's lanes, all of which must call
/// it. n: values of the row. A block of its values has whole lanes, or is a part of one.
__device__ __forceinline__ void rotate_by_lanes(float (&x)[kShare], int n) {
  const int block = static_cast<int>(hadamard_block(n));
  float factor = 1.f;
#pragma unroll
  for (int half = 1; half < kShare; half *= 2) {
    if (half >= block) continue;
    factor *= 0.5f;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      if ((i & half) != 0) continue;
      const float sum = x[i] + x[i + half], difference = x[i] - x[i + half];
      x[i] = sum, x[i + half] = difference;
    }
  }
#pragma unroll 1
  for (int half = kShare; half < block; half *= 2) {
    factor *= 0.5f;
    const bool upper = (lane_of_warp() & half / kShare) != 0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, x[i], half / kShare);
      x[i] = upper ? other - x[i] : x[i] + other;
    }
  }
  factor = sqrtf(factor);
#pragma unroll
  for (int i = 0; i < kShare; ++i) x[i] *= factor;
}
/// A lane's values as they are quantised: rotated, where that is wanted. All lanes must call it.
__device__ __forceinline__ void read_rotated(const QuantiseArgs& a, const void* from, int count,
                                             float (&x)[kShare]) {
  read_values(a.dtype, from, count, x);
  if (a.hadamard) rotate_by_lanes(x, static_cast<int>(a.head_dim));
}

/// The largest magnitudes, which begin as 0. A lane's rows are of one head where the grid's step is
/// a multiple of them, so that it adds its largest once; of one head of each sequence once. Of
/// blocks of rows it has hardly two rows of one: a row's lanes bring their largest together first.
__global__ void __launch_bounds__(kThreads, 8)
    largest_kernel(const __grid_constant__ QuantiseParams p) {
  const QuantiseArgs& a = p.args;
  const Part part = Part::of(p.lanes, static_cast<int>(a.head_dim));
  const bool several = a.kv_scale != STROBE_KV_SCALE_TENSOR;
  const bool of_rows = a.kv_scale == STROBE_KV_SCALE_ROW;
  int64_t set = 0;
  uint32_t most = 0;
  const auto add = [&] {
    if (most > 0) atomicMax(p.largest + set, most);
  };
  visit_rows(p, [&](const ArgsRow& row, bool is_there) {
    if (several && is_there && p.set_of(row) != set) {
      add();
      set = p.set_of(row), most = 0;
    }
    float x[kShare];
    read_rotated(a, values_at(a, row, part.first), is_there ? part.count : 0, x);
    most = max(most, largest_of_lane(x));
    if (of_rows) most = largest_of_row(most, p.lanes);
    if (of_rows && part.first != 0) most = 0;
  });
  most = largest_of_row(most, several ? p.lanes : 32);
  if (part.first == 0 && (several || lane_of_warp() == 0)) add();
}

__global__ void __launch_bounds__(kThreads, 8)
    quantise_kernel(const __grid_constant__ QuantiseParams p) {
  const QuantiseArgs& a = p.args;
  const Part part = Part::of(p.lanes, static_cast<int>(a.head_dim));
  const RowForm form{a.kv_dtype, a.kv_scale_dtype, a.scale_is_given == 0};
  const bool own_scales = has_scales(a.kv_dtype) && form.makes_scale && !p.largest;
  visit_rows(p, [&](const ArgsRow& row, bool is_there) {
    float x[kShare];
    read_rotated(a, values_at(a, row, part.first), is_there ? part.count : 0, x);
    uint32_t most = 0;
    if (own_scales) {
      most = largest_of_row(largest_of_lane(x), p.lanes);
    } else if (p.largest && is_there) {
      most = p.largest[p.set_of(row)];
    }
    // (Rows that share a scale all write it, and all the same.)
    quantise_by_lanes(form, x, part, static_cast<char*>(a.codes) + row.offset(a.codes_strides),
                      scale_at(p, row), most, is_there);
  });
}

__global__ void __launch_bounds__(kThreads, 8)
    dequantise_kernel(const __grid_constant__ QuantiseParams p) {
  const QuantiseArgs& a = p.args;
  const Part part = Part::of(p.lanes, static_cast<int>(a.head_dim));
  visit_rows(p, [&](const ArgsRow& row, bool is_there) {
    const int count = is_there ? part.count : 0;
    // (What has no values is a part of no row, or of one whose other lanes wait for this one
    // below.)
    if (count == 0 && !a.hadamard) return;
    float x[kShare] = {};
    if (count > 0) {
      dequantise_part(a.kv_dtype, a.kv_scale_dtype,
                      static_cast<const char*>(a.codes) + row.offset(a.codes_strides),
                      scale_at(p, row), part, x);
    }
    if (a.hadamard) rotate_by_lanes(x, static_cast<int>(a.head_dim));
    if (count > 0) write_values(a.dtype, values_at(a, row, part.first), count, x);
  });
}

namespace {

Status launch_quantise(const QuantiseArgs& a, bool quantises) {
  STROBE_RETURN_IF_ERROR(check_device(a.device_index));
  const int64_t rows = a.batch * a.seqlen * a.heads;
  if (rows == 0) return {};
  STROBE_RETURN_IF_ERROR(check_device_pointer("x", a.x, a.device_index));
  STROBE_RETURN_IF_ERROR(check_device_pointer("codes", a.codes, a.device_index));
  STROBE_RETURN_IF_ERROR(check_device_pointer("scale", a.scale, a.device_index));
  const DeviceGuard guard(a.device_index);
  if (guard.error() != cudaSuccess) return cuda_status(guard.error(), "choosing the device");
  const DeviceProperties& device = machine().devices[static_cast<size_t>(a.device_index)];
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const LaunchTarget target{stream, a.device_index, device.multiprocessors, device.shared_bytes};
  static KernelHandle dequantises(reinterpret_cast<const void*>(&dequantise_kernel));
  static KernelHandle measures(reinterpret_cast<const void*>(&largest_kernel));
  static KernelHandle kernel(reinterpret_cast<const void*>(&quantise_kernel));
  // Of heads that share a scale; rows and the tensor have theirs by strides.
  const bool of_heads = a.kv_scale == STROBE_KV_SCALE_HEAD;
  const bool of_both = a.kv_scale == STROBE_KV_SCALE_BATCH_HEAD;
  const bool of_rows = a.kv_scale == STROBE_KV_SCALE_ROW;
  const int32_t group = of_heads || of_both ? static_cast<int32_t>(a.heads / a.heads_kv) : 1;
  const bool shared = makes_shared_scales(a);
  const int64_t row_blocks = shared && of_rows ? ceil_div(a.seqlen, a.scale_rows) : 1;
  QuantiseParams params{a, kLanesOfBlock, {}, nullptr, group, static_cast<int32_t>(row_blocks)};
  while (params.lanes * kShare < a.head_dim) params.lanes *= 2;
  const int64_t rows_each = int64_t{32} / params.lanes * kWarps;
  const int64_t blocks = blocks_for(rows, rows_each, target);
  // Where heads have scales, a multiple of what brings a lane back to the same head.
  const int64_t round = of_heads || of_both ? a.heads / std::gcd(a.heads, rows_each) : 1;
  const int64_t in_rounds = blocks > round ? blocks / round * round : blocks;
  params.step = ArgsRow::of(a, in_rounds * rows_each);
  const dim3 grid = grid_of(in_rounds);
  void* args[] = {static_cast<void*>(&params)};
  if (!quantises) {
    const cudaError_t error = dequantises.launch(grid, kThreads, args, target);
    return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
  }
  if (!shared) {
    const cudaError_t error = kernel.launch(grid, kThreads, args, target);
    return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
  }
  const int64_t sets = of_both    ? a.batch * a.heads_kv
                       : of_heads ? a.heads_kv
                       : of_rows  ? a.batch * row_blocks * a.heads
                                  : 1;
  const size_t bytes = sizeof(uint32_t) * static_cast<size_t>(sets);
  cudaError_t error = cudaMallocAsync(&params.largest, bytes, stream);
  if (error != cudaSuccess) return cuda_status(error, "allocating room for magnitudes");
  error = cudaMemsetAsync(params.largest, 0, bytes, stream);
  if (error == cudaSuccess) error = measures.launch(grid, kThreads, args, target);
  if (error == cudaSuccess) error = kernel.launch(grid, kThreads, args, target);
  const cudaError_t freed = cudaFreeAsync(params.largest, stream);
  if (error == cudaSuccess) error = freed;
  return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
}

}  // namespace

Status quantise(const QuantiseArgs& a) { return launch_quantise(a, true); }
Status dequantise(const QuantiseArgs& a) { return launch_quantise(a, false); }

}  // namespace strobe::cuda
