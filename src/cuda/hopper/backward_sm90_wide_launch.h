// Launches the backward pass on Hopper for wide heads: the kernel of backward_sm90_wide.cuh between
// the others that the head of backward_sm90.cuh lists.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_LAUNCH_H_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_LAUNCH_H_

#include <cstddef>

#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/backward/order.cuh"
#include "cuda/backward/stages_launch.h"
#include "cuda/common/config.h"
#include "cuda/common/static_order.cuh"
#include "cuda/hopper/backward_launch.h"
#include "cuda/hopper/backward_sm90_wide.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda::sm90_wide {

/// The width of V may be less than that of K: 192 and 128 are a usual pair.
template <BackwardConfig c, Features kComputes>
using TraitsOf = WideTraits<c.dtype, c.width, c.width_v, kComputes.has(features::kScores)>;

template <BackwardConfig kConfig, Features kComputes>
constexpr LaunchShape backward_shape() {
  using Tr = TraitsOf<kConfig, kComputes>;
  static_assert(kConfig.tile_q == kQueries && kConfig.tile_k == kItemKeys);
  return {Tr::kThreads, sizeof(typename Tr::Shared)};
}

template <BackwardConfig kConfig>
BackwardScratch carve(Arena& arena, const BackwardSizes& sizes, void* dq) {
  return carve_backward(arena, sizes, kConfig.width, kConfig.tile_q, kConfig.tile_k, 0, dq,
                        backward_items(sizes, kConfig.tile_k) * kFlagWords);
}

template <BackwardConfig kConfig, Features kComputes>
void backward_carve(Arena& arena, const AttentionProblem& problem, BackwardParams& params) {
  Arena count;
  carve<kConfig>(count, sizes_of(problem), nullptr);
  params.workspace = arena.take<std::byte>(static_cast<int64_t>(count.used()));
}

/// The main kernel.
template <typename Tr>
cudaError_t launch_kernel(BackwardParams& p, BackwardScratch& scratch, BackwardOrder& order,
                          BackwardMaps& maps, const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&backward_kernel<Tr>),
                             sizeof(typename Tr::Shared));
  // Persistent: as many clusters as there is room for, or items.
  const auto blocks = static_cast<uint32_t>(
      kBlocks * min64(order.items, max64(1, target.multiprocessors / kBlocks)));
  void* args[] = {&p, &scratch, &order, &maps};
  return kernel.launch(dim3(blocks), Tr::kThreads, args, target, true);
}

template <BackwardConfig kConfig, Features kComputes>
cudaError_t launch_backward(const BackwardParams& params, const LaunchTarget& target) {
  using Tr = TraitsOf<kConfig, kComputes>;
  static_assert(!kComputes.has(features::kOrder), "its additions to dQ have no order");
  static_assert(kComputes.has(features::kSumsDq), "it writes no dQ but sums");
  BackwardParams p = params;
  Arena arena(p.workspace);
  BackwardScratch scratch = carve<kConfig>(arena, sizes_of(p), p.dq.data);
  BackwardOrder order = backward_order(p, kConfig.width, kConfig.tile_k);
  order.group = 1;  // key blocks of a head side by side, as in backward_sm90_launch.h
  // Items are drawn in 32 bits, and each cluster draws one past the end.
  if (order.items > int64_t{INT32_MAX} - 65536) return cudaErrorInvalidValue;
  // The other stages are the same kernels, whichever is the main one.
  using StageTraits =
      typename WideTraits<kConfig.dtype, kConfig.width, kConfig.width, false>::StageTraits;
  using Stages = BackwardStages<typename Tr::T, kQueries, kItemKeys, Tr::kWidth, StageTraits>;
  // Boxes of keys are of 64 rows too: a thread block of a pair reads half of an item.
  return sm90::launch_stages<kConfig, Stages>(
      p, scratch, order, order.items, 64, 0, target,
      [&](BackwardMaps& maps) { return launch_kernel<Tr>(p, scratch, order, maps, target); });
}

}  // namespace strobe::cuda::sm90_wide

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_LAUNCH_H_
