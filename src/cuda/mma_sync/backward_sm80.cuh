// FlashAttention-2's backward pass through mma.sync (arXiv:2307.08691, algorithm 2): compute
// capability 8.0 and newer.
//
//   thread block   takes work items one after the other. An item is tile_k keys of one key head,
//                  with the query heads of its group (or a part of them); a step of it is one tile
//                  of tile_q queries of one head
//   warps          two halves (backward_halves.cuh), each with the keys split 32 to a warp (and,
//                  where that leaves warps, the queries of the scores and the columns of the sum
//                  between them):
//                    weights     S^T = K Q^T,  P = exp2(S - lse),            dV += P^T dO
//                    gradients   dP^T = V dO^T, dS = P * (dP - delta),       dK += dS^T Q,
//                                dQ = dS K, added to the sum in global memory
//                  Scores are transposed, so that P^T and dS^T lie in registers as the A operands
//                  of dV and dK. Halves, because a warp's score tile may then be 32 x 64 instead of
//                  32 x 32 with the registers left beside dV or dK: shared memory, as fast here as
//                  the tensor cores, is read a fifth less; and because each half computes
//                  elementwise while the other multiplies. The weights half runs ahead, into the
//                  next item too; it copies everything and fetches the items.
//   shared memory  K (a ring of kKeyStages), V; Q with lse, dO with delta: rings of kStages
//                  exchange: P times 2^12 as fp16, in register order, from a warp of the first half
//                  to its fellow of the second (negative: dropped)
//                  dS [keys][queries]: for dQ
//                  weights [keys][queries]: only where queries are split
//                  the item's block, twice; the turns that are still to be passed on
//   barriers       full and empty of each ring, of V, of the exchange (per pair of warps), of dS,
//                  of the block; empty of weights: mbarriers, one arrival a warp for empty
//                  weights full, block filled: named barrier of the weights half
//
// Two more kernels: backward_pre.cuh before, backward_post.cuh after.
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_CUH_

#include "cuda/common/backward_order.cuh"
#include "cuda/common/backward_stages.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"
#include "cuda/host/rows.h"
#include "cuda/mma_sync/backward_block.cuh"
#include "cuda/mma_sync/backward_halves.cuh"

namespace strobe::cuda::sm80 {

// --- The kernel ---

// (A type for its template argument: nvcc 13's stubs cannot name a value of class type.)
template <typename Shape, bool kRules, bool kOrdered>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    backward_kernel(const __grid_constant__ BackwardParams p,
                    const __grid_constant__ BackwardScratch scratch,
                    const __grid_constant__ BackwardOrder order) {
  constexpr BackwardConfig kC = Shape::kConfig;
  extern __shared__ __align__(1024) char shared_bytes[];
  uint32_t shared = ptx::shared_address(shared_bytes);
  asm volatile("" : "+r"(shared));  // kept, not computed anew wherever it is needed
  const int half = static_cast<int>(threadIdx.x) >= Shape::kHalfThreads;
  const BackwardThread<kC, kRules, kOrdered> t(p, scratch, shared, half);
  if (threadIdx.x == 0) t.init_barriers_and_turns();
  __syncthreads();
  if (half == 0) {
    weights_half<kC, kRules, kOrdered>(t, order);
  } else {
    gradients_half<kC, kRules, kOrdered>(t, order);
  }
}

// --- Host ---

template <BackwardConfig kConfig>
constexpr LaunchShape backward_shape() {
  using Shape = BackwardShape<kConfig>;
  return {Shape::kThreads, Shape::kSharedBytes};
}

template <BackwardConfig kConfig>
BackwardScratch carve(Arena& arena, const BackwardSizes& sizes, void* dq) {
  return carve_backward(arena, sizes, kConfig.width, kConfig.tile_q, kConfig.tile_k,
                        BackwardShape<kConfig>::kHalfWarps, dq);
}

template <BackwardConfig kConfig>
void backward_carve(Arena& arena, const AttentionProblem& problem, BackwardParams& params) {
  Arena count;
  carve<kConfig>(count, sizes_of(problem), nullptr);
  params.workspace = arena.take<std::byte>(static_cast<int64_t>(count.used()));
}

template <BackwardConfig kConfig, bool kRules, bool kOrdered>
cudaError_t launch_backward_kernel(BackwardParams p, BackwardScratch scratch, BackwardOrder order,
                                   const LaunchTarget& target) {
  using Shape = BackwardShape<kConfig>;
  static KernelHandle kernel(
      reinterpret_cast<const void*>(&backward_kernel<Shape, kRules, kOrdered>),
      Shape::kSharedBytes);
  const auto blocks = static_cast<uint32_t>(
      min64(order.items, int64_t{target.multiprocessors} * Shape::kMinBlocks));
  void* args[] = {&p, &scratch, &order};
  return kernel.launch(dim3(blocks), Shape::kThreads, args, target);
}

template <BackwardConfig kConfig>
cudaError_t launch_backward(const BackwardParams& params, const LaunchTarget& target) {
  using Shape = BackwardShape<kConfig>;
  using T = typename Shape::T;
  BackwardParams p = params;
  Arena arena(p.workspace);
  BackwardScratch scratch = carve<kConfig>(arena, sizes_of(p), p.dq.data);
  BackwardOrder order = backward_order(p, kConfig.width, kConfig.tile_k);
  // Items are drawn in 32 bits, and each thread block draws one past the end.
  if (order.items > int64_t{UINT32_MAX} - 65536) return cudaErrorInvalidValue;

  using Stages = BackwardStages<T, kConfig.tile_q, kConfig.tile_k, kConfig.width, ExchangeForm>;
  cudaError_t error = Stages::launch_pre(p, scratch, Shape::kHalfWarps, target);
  if (error != cudaSuccess) return error;

  if (order.items > 0) {
    const bool rules = p.softcap > 0 || p.alibi_slopes || p.dropout.enabled();
    if (rules) {
      if constexpr (Shape::kHasRules) {
        error = launch_backward_kernel<kConfig, true, true>(p, scratch, order, target);
      } else {
        error = cudaErrorNotSupported;  // kernels.def says `plain`: the plan never does
      }
    } else if (p.deterministic) {
      error = launch_backward_kernel<kConfig, false, true>(p, scratch, order, target);
    } else {
      error = launch_backward_kernel<kConfig, false, false>(p, scratch, order, target);
    }
    if (error != cudaSuccess) return error;
  }
  return Stages::launch_post(p, scratch, order, target);
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_SM80_CUH_
