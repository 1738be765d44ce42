// A sum over the threads of a block.
#ifndef STROBE_CUDA_COMMON_BLOCK_SUM_CUH_
#define STROBE_CUDA_COMMON_BLOCK_SUM_CUH_

namespace strobe::cuda {

/// Sum of what the threads before this one have, and of all. of_warps: shared memory, a number for
/// each warp. By all threads of the block.
template <typename T>
__device__ __forceinline__ T sum_before(T x, T* of_warps, T& all) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  T sum = x;
  for (int step = 1; step < 32; step *= 2) {
    const T lower = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += lower;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  T before = 0;
  all = 0;
  for (int n = 0; n < warps; ++n) {
    if (n < warp) before += of_warps[n];
    all += of_warps[n];
  }
  __syncthreads();  // before the next sum
  return before + sum - x;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_BLOCK_SUM_CUH_
