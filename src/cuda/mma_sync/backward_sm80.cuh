// FlashAttention-2's backward pass through mma.sync (arXiv:2307.08691, algorithm 2): compute
// capability 8.0 and newer.
//
//   thread block   takes work items one after the other. An item is tile_k keys of one key head,
//                  with the query heads of its group (or a part of them); a step of it is one tile
//                  of tile_q queries of one head
//   warps          two halves, each with the keys split 32 to a warp (and, where that leaves warps,
//                  the queries of the scores and the columns of the sum between them):
//                    weights     S^T = K Q^T,  P = exp2(S - lse),            dV += P^T dO
//                    gradients   dP^T = V dO^T, dS = P * (dP - delta),       dK += dS^T Q,
//                                dQ = dS K, added to the sum in global memory
//                  Scores are transposed, so that P^T and dS^T lie in registers as the A operands
//                  of dV and dK. There are halves because a warp's score tile may then be 32 x 64
//                  instead of 32 x 32 with the registers left beside dV or dK, so that shared
//                  memory, as fast here as the tensor cores, is read a fifth less; and because each
//                  half computes elementwise while the other multiplies. The weights half runs
//                  ahead, into the next item too; it copies everything and fetches the items.
//   shared memory  K and V; kStages of Q with lse and of dO with delta
//                  exchange: P times 2^12 as fp16, in register order, from a warp of the first half
//                  to its fellow of the second (negative: dropped; -inf: a bias hides the pair)
//                  dS [keys][queries]: for dQ
//                  weights [keys][queries]: only where queries are split
//                  records of two items; additions to dQ that are still to be reported
//                  with a mask as data: records of four steps, with their bits
//
// By file:
//   backward_layout.cuh     the numbers of an instance; where all lies in shared memory
//   backward_item.cuh       an item's record
//   backward_mask.cuh       an item's steps, and a step's pairs, under a mask as data
//   backward_thread.cuh     where a thread stands
//   backward_barriers.cuh   what waits for what
//   backward_copies.cuh     from global to shared memory
//   backward_products.cuh   the five products
//   backward_results.cuh    dQ, in which order; dK and dV
//   backward_weights.cuh, backward_gradients.cuh   the halves' loops
// Two more kernels: backward/pre.cuh before, backward/post.cuh after. And backward/dbias.cuh, where
// a bias wants its gradient.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_CUH_

#include "cuda/backward/order.cuh"
#include "cuda/mma_sync/backward_gradients.cuh"
#include "cuda/mma_sync/backward_layout.cuh"
#include "cuda/mma_sync/backward_thread.cuh"
#include "cuda/mma_sync/backward_weights.cuh"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/opaque.h"

namespace strobe::cuda::sm80 {

// --- The kernel ---

// (A type for its template argument: nvcc 13's stubs cannot name a value of class type.)
template <typename Shape, bool kGeneral, bool kOrdered, bool kBias>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    backward_kernel(const __grid_constant__ BackwardParams p,
                    const __grid_constant__ BackwardScratch scratch,
                    const __grid_constant__ BackwardOrder order) {
  extern __shared__ __align__(1024) char shared_bytes[];
  uint32_t shared = ptx::shared_address(shared_bytes);
  ptx::make_opaque(shared);  // kept, not computed anew wherever it is needed
  const int half = static_cast<int>(threadIdx.x) >= Shape::kHalfThreads;
  const BackwardThread<Shape, kGeneral, kOrdered, kBias> t(p, scratch, shared, half);
  if (threadIdx.x == 0) {
    t.barriers.init();
    clear_reports(t);
  }
  __syncthreads();
  if (half == 0) {
    weights_half(t, order);
  } else {
    gradients_half(t, order);
  }
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_CUH_
