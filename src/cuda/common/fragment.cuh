// The elements of mma and wgmma accumulators that a thread holds: of each 16 x 8 block four values,
// two neighbours of row lane / 4 at column 2 (lane % 4), then two of the row 8 below.
#ifndef STROBE_CUDA_COMMON_FRAGMENT_CUH_
#define STROBE_CUDA_COMMON_FRAGMENT_CUH_

namespace strobe::cuda {

/// Calls visit(column, value) for the thread's elements of one of its two rows, in ascending
/// columns, which are counted from the thread's first one. half: 0, or 1 for the row 8 below.
template <int kBlocks, typename Value, typename Visit>
__device__ __forceinline__ void for_row(Value (&blocks)[kBlocks][4], int half, const Visit& visit) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) visit(8 * n + i, blocks[n][2 * half + i]);
  }
}
/// The same of a wgmma's accumulator, whose blocks lie one after the other.
template <int kCount, typename Value, typename Visit>
__device__ __forceinline__ void for_row(Value (&values)[kCount], int half, const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i)
    visit(i / 2 * 8 + i % 2, values[i / 2 * 4 + 2 * half + i % 2]);
}

/// Calls visit(half, column, value) for all four elements of a block.
template <typename Value, typename Visit>
__device__ __forceinline__ void for_block(Value (&block)[4], const Visit& visit) {
#pragma unroll
  for (int i = 0; i < 4; ++i) visit(i / 2, i % 2, block[i]);
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_FRAGMENT_CUH_
