#include <type_traits>

#include "core/arithmetic.h"
#include "core/merge_row.h"
#include "core/problem.h"
#include "core/sink.h"
#include "cuda/common/element.h"
#include "cuda/common/static_order.cuh"
#include "cuda/host/device_guard.h"
#include "cuda/host/device_pointer.h"
#include "cuda/host/dispatch.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kShare = kMostMerged / 32;  // columns of a lane: i, i + 32, ...

/// One row of one head, by a warp; as on the CPU (cpu/merge.cpp), and of the same parts
/// (core/merge_row.h).
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeArgs a) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t row =
      (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);
  if (row >= a.batch * a.seqlen_q * a.heads) return;
  const int64_t b = row / a.heads / a.seqlen_q, i = row / a.heads % a.seqlen_q, h = row % a.heads;
  const auto at = [&](const strobe_strides& s) { return b * s.batch + i * s.seqlen + h * s.head; };
  const float* const lses = a.parts > 0 ? a.lses + at(a.lses_strides) : nullptr;
  const float* const outs = a.parts > 0 ? a.outs + at(a.outs_strides) : nullptr;
  const auto lse_of = [&](int64_t n) { return merged_lse(lses[n * a.lses_part]); };
  float largest = lse_of_no_keys();
  for (int64_t n = lane; n < a.parts; n += 32) largest = fmaxf(largest, lse_of(n));
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  const float sink = sink_of(a.sinks, h);
  largest = fmaxf(largest, sink);  // which passes over NaN
  float of_sink = 0.f;
  if (sink != lse_of_no_keys()) of_sink = sink == largest ? 1.f : expf(sink - largest);
  float sum = of_sink;
  for (int64_t n = 0; n < a.parts; ++n) {
    const float lse = lse_of(n);
    if (lse != lse_of_no_keys()) sum += expf(lse - largest);
  }
  MergedColumns<kShare> merged;
#pragma unroll
  for (int k = 0; k < kShare; ++k) {
    merged.clear(k);
    if (of_sink > 0.f) merged.add(k, of_sink, 0.f);
  }
  for (int64_t n = 0; n < a.parts; ++n) {
    const float lse = lse_of(n);
    if (lse == lse_of_no_keys()) continue;
    const float weight = expf(lse - largest) / sum;
    if (weight == 0.f) continue;
    const float* const part = outs + n * a.outs_part;
#pragma unroll
    for (int k = 0; k < kShare; ++k) {
      const int column = lane + 32 * k;
      if (column < a.head_dim_v) merged.add(k, weight, part[column]);
    }
  }
  const bool empty = sum == 0.f;
  const int64_t out = at(a.out_strides);
#pragma unroll
  for (int k = 0; k < kShare; ++k) {
    const int column = lane + 32 * k;
    if (column >= a.head_dim_v) break;
    const float y = merged.average(k);
    if (a.out_dtype == STROBE_FLOAT32) {
      static_cast<float*>(a.out)[out + column] = y;
    } else if (a.out_dtype == kBfloat16) {
      static_cast<Element<kBfloat16>*>(a.out)[out + column] = Element<kBfloat16>(y);
    } else {
      static_cast<Element<kFloat16>*>(a.out)[out + column] = Element<kFloat16>(y);
    }
  }
  __syncwarp();  // lse may be one of lses, which all lanes have read by now
  if (a.lse && lane == 0) a.lse[at(a.lse_strides)] = empty ? lse_of_no_keys() : largest + logf(sum);
}

/// One row of one head, by a warp.
__global__ void __launch_bounds__(kThreads) add_kernel(const __grid_constant__ AddArgs a) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t row =
      (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * kWarps + static_cast<int>(threadIdx.x / 32);
  if (row >= a.batch * a.seqlen * a.heads) return;
  const int64_t b = row / a.heads / a.seqlen, i = row / a.heads % a.seqlen, h = row % a.heads;
  const auto at = [&](const strobe_strides& s) { return b * s.batch + i * s.seqlen + h * s.head; };
  const float* const x = a.x + at(a.x_strides);
  const int64_t first = at(a.out_strides);
  const auto add_to = [&](auto* out) {
    using T = std::remove_pointer_t<decltype(out)>;
#pragma unroll 4
    for (int column = lane; column < a.head_dim; column += 32) {
      float sum = x[column];
      if (a.accumulate) sum += static_cast<float>(out[first + column]);
      out[first + column] = T(sum);
    }
  };
  if (a.out_dtype == STROBE_FLOAT32) {
    add_to(static_cast<float*>(a.out));
  } else if (a.out_dtype == kBfloat16) {
    add_to(static_cast<Element<kBfloat16>*>(a.out));
  } else {
    add_to(static_cast<Element<kFloat16>*>(a.out));
  }
}

// Launches a kernel with a warp for each row; there are some.
template <typename Args>
Status launch_rows(KernelHandle& kernel, const Args& a, int64_t rows) {
  const DeviceGuard guard(a.device_index);
  if (guard.error() != cudaSuccess) return cuda_status(guard.error(), "choosing the device");
  const DeviceProperties& device = machine().devices[static_cast<size_t>(a.device_index)];
  const LaunchTarget target{static_cast<cudaStream_t>(a.stream), a.device_index,
                            device.multiprocessors, device.shared_bytes};
  const GridSize grid = grid_for(ceil_div(rows, kWarps));
  void* args[] = {const_cast<Args*>(&a)};
  const cudaError_t error = kernel.launch(dim3(grid.x, grid.y), kThreads, args, target);
  return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
}

}  // namespace

Status merge(const MergeArgs& a) {
  STROBE_RETURN_IF_ERROR(check_device(a.device_index));
  const int64_t rows = a.batch * a.seqlen_q * a.heads;
  if (rows == 0) return {};
  if (a.parts > 0) {
    STROBE_RETURN_IF_ERROR(check_device_pointer("outs", a.outs, a.device_index));
    STROBE_RETURN_IF_ERROR(check_device_pointer("lses", a.lses, a.device_index));
  }
  STROBE_RETURN_IF_ERROR(check_device_pointer("sinks", a.sinks, a.device_index));
  STROBE_RETURN_IF_ERROR(check_device_pointer("out", a.out, a.device_index));
  STROBE_RETURN_IF_ERROR(check_device_pointer("lse", a.lse, a.device_index));
  static KernelHandle kernel(reinterpret_cast<const void*>(&merge_kernel));
  return launch_rows(kernel, a, rows);
}

Status add(const AddArgs& a) {
  STROBE_RETURN_IF_ERROR(check_device(a.device_index));
  const int64_t rows = a.batch * a.seqlen * a.heads;
  if (rows == 0) return {};
  STROBE_RETURN_IF_ERROR(check_device_pointer("x", a.x, a.device_index));
  STROBE_RETURN_IF_ERROR(check_device_pointer("out", a.out, a.device_index));
  static KernelHandle kernel(reinterpret_cast<const void*>(&add_kernel));
  return launch_rows(kernel, a, rows);
}

}  // namespace strobe::cuda
