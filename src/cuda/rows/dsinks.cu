#include "cuda/host/dsinks.h"
#include "cuda/host/kernel_handle.h"

namespace strobe::cuda {

namespace {

constexpr int kThreads = 256;

/// A head for each thread block. A thread has every kThreads-th row of a sequence; then the threads
/// are added up as a tree, so that the order is that of the rows alone.
__global__ void __launch_bounds__(kThreads)
    dsinks_kernel(const __grid_constant__ BackwardParams p) {
  const auto head = static_cast<int32_t>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  double sum = 0;
#pragma unroll 1
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const SequenceRows sequence = p.sequence_rows(batch);
    const float* const rows = p.sink_rows + sequence.lse_row + head * p.lse_head_stride;
#pragma unroll 1
    for (int64_t row = thread; row < sequence.seqlen_q; row += kThreads)
      sum += static_cast<double>(rows[row]);
  }
  extern __shared__ __align__(128) char shared[];
  auto* const sums = reinterpret_cast<double*>(shared);
  sums[thread] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  if (thread > 0) return;
  const double before = p.accumulates ? static_cast<double>(p.dsinks[head]) : 0;
  p.dsinks[head] = static_cast<float>(before + sums[0]);
}

}  // namespace

cudaError_t launch_dsinks(const BackwardParams& params, const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&dsinks_kernel), 8 * kThreads);
  void* args[] = {const_cast<BackwardParams*>(&params)};
  return kernel.launch(dim3(static_cast<unsigned>(params.heads)), kThreads, args, target);
}

}  // namespace strobe::cuda
