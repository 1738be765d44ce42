#include "cuda/common/load.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/static_order.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/unused_rows.h"

namespace strobe::cuda {

namespace {

constexpr int kThreads = 256, kRows = 64;  // of a thread block

/// Zeros to rows [begin, end) of all heads; by a thread block, a warp to a row.
__device__ void write_zeros(const UnusedRows::Zeros& zeros, const SequenceRows& sequence,
                            int64_t first_row, int64_t begin, int64_t end) {
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  for (int32_t head = 0; head < zeros.heads; ++head) {
    const RowsView view = rows_view(zeros.tensor, static_cast<int32_t>(sequence.batch), first_row,
                                    head, end, zeros.dim);
    const bool aligned = view.aligned();
    const uint32_t zero[4] = {};
    for (int64_t row = begin + warp; row < end; row += kThreads / 32) {
      for (int column = 8 * lane; column < zeros.dim; column += 8 * 32)
        store_words(view.row(row), column, zeros.dim, aligned, zero);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    unused_rows_kernel(const __grid_constant__ UnusedRows p, uint32_t blocks) {
  const int64_t index = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  if (index >= int64_t{blocks} * p.sequences.batch) return;
  const SequenceRows sequence = p.sequences.sequence_rows(index / blocks);
  const int64_t from = index % blocks * kRows;
  // Those of the block's rows that are there and not in use.
  const auto unused = [&](int64_t used, int64_t rows) {
    return intersect({used, rows}, {from, from + kRows});
  };
  const Range queries = unused(sequence.seqlen_q, sequence.rows_q);
  write_zeros(p.queries, sequence, sequence.q_row, queries.begin, queries.end);
  if (p.lse) {
    for (int32_t head = 0; head < p.sequences.heads; ++head) {
      float* const lse = p.lse + sequence.lse_row + head * p.sequences.lse_head_stride;
      for (int64_t row = queries.begin + threadIdx.x; row < queries.end; row += kThreads)
        lse[row] = -infinity();
    }
  }
  const Range keys = unused(sequence.seqlen_k, sequence.rows_k);
  for (const UnusedRows::Zeros& zeros : p.keys)
    write_zeros(zeros, sequence, sequence.k_row, keys.begin, keys.end);
}

}  // namespace

cudaError_t launch_unused_rows(const UnusedRows& rows, const LaunchTarget& target) {
  const int64_t longest =
      max64(rows.sequences.seqlen_q, rows.keys[0].heads > 0 ? rows.sequences.seqlen_k : 0);
  int64_t blocks_of_a_sequence = ceil_div(longest, kRows);
  if (blocks_of_a_sequence == 0) return cudaSuccess;
  const GridSize grid = grid_for(blocks_of_a_sequence * rows.sequences.batch);
  auto blocks = static_cast<uint32_t>(blocks_of_a_sequence);
  static KernelHandle kernel(reinterpret_cast<const void*>(&unused_rows_kernel));
  void* args[] = {const_cast<UnusedRows*>(&rows), &blocks};
  return kernel.launch(dim3(grid.x, grid.y), kThreads, args, target);
}

}  // namespace strobe::cuda
