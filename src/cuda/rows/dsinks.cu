#include "cuda/host/dsinks.h"
#include "cuda/host/kernel_handle.h"

namespace strobe::cuda {

namespace {

/// A head for each warp. A lane has every 32nd row of a sequence, and the lanes are added up as a
/// tree: the order is that of the rows alone.
__global__ void __launch_bounds__(32) dsinks_kernel(const __grid_constant__ BackwardParams p) {
  const auto head = static_cast<int32_t>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x);
  double sum = 0;
#pragma unroll 1
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const SequenceRows sequence = p.sequence_rows(batch);
    const float* const rows = p.sink_rows + sequence.lse_row + head * p.lse_head_stride;
#pragma unroll 8
    for (int64_t row = lane; row < sequence.seqlen_q; row += 32)
      sum += static_cast<double>(rows[row]);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane > 0) return;
  const double before = p.accumulates ? static_cast<double>(p.dsinks[head]) : 0;
  p.dsinks[head] = static_cast<float>(before + sum);
}

}  // namespace

cudaError_t launch_dsinks(const BackwardParams& params, const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&dsinks_kernel));
  void* args[] = {const_cast<BackwardParams*>(&params)};
  return kernel.launch(dim3(static_cast<unsigned>(params.heads)), 32, args, target);
}

}  // namespace strobe::cuda
