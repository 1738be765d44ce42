#include "cuda/host/dsinks.h"
#include "cuda/host/kernel_handle.h"

namespace strobe::cuda {

constexpr int kThreads = 512, kWarps = kThreads / 32;

/// A head for each thread block. Its threads share the rows of a sequence, or its warps the
/// sequences where there are as many, and are added up as a tree: the order is that of the rows and
/// of the number of sequences alone. (In this namespace, since the emulator's shared memory is.)
__global__ void __launch_bounds__(kThreads)
    dsinks_kernel(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) char shared[];
  auto* const of_warp = reinterpret_cast<double*>(shared);
  const auto head = static_cast<int32_t>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int sharing = p.batch < kWarps ? kThreads : 32;
  double sum = 0;
#pragma unroll 1
  for (int64_t batch = thread / sharing; batch < p.batch; batch += kThreads / sharing) {
    const SequenceRows sequence = p.sequence_rows(batch);
    const float* const rows = p.sink_rows + sequence.lse_row + head * p.lse_head_stride;
#pragma unroll 8
    for (int64_t row = thread % sharing; row < sequence.seqlen_q; row += sharing)
      sum += static_cast<double>(rows[row]);
  }
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (thread % 32 == 0) of_warp[thread / 32] = sum;
  __syncthreads();
  if (thread > 0) return;
  sum = p.accumulates ? static_cast<double>(p.dsinks[head]) : 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warp[warp];
  p.dsinks[head] = static_cast<float>(sum);
}

cudaError_t launch_dsinks(const BackwardParams& params, const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&dsinks_kernel),
                             kWarps * sizeof(double));
  void* args[] = {const_cast<BackwardParams*>(&params)};
  return kernel.launch(dim3(static_cast<unsigned>(params.heads)), kThreads, args, target);
}

}  // namespace strobe::cuda
