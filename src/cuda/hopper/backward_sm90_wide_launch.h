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
using TraitsOf = WideTraits<c.dtype, c.width, c.width_v, kComputes.has(features::kScores),
                            kComputes.has(features::kOrder)>;

template <BackwardConfig kConfig, Features kComputes>
constexpr LaunchShape backward_shape() {
  using Tr = TraitsOf<kConfig, kComputes>;
  static_assert(kConfig.tile_q == kQueries && kConfig.tile_k == kItemKeys);
  return {Tr::kThreads, sizeof(typename Tr::Shared)};
}

/// Counters of a query tile: each block of a pair has its own, where additions to dQ have an order.
template <Features kComputes>
inline constexpr int32_t kCountersOf = kComputes.has(features::kOrder) ? kBlocks : 0;

template <BackwardConfig kConfig, Features kComputes>
BackwardScratch carve(Arena& arena, const BackwardSizes& sizes) {
  return carve_backward(arena, sizes, kConfig.width, kConfig.tile_q, kConfig.tile_k,
                        kCountersOf<kComputes>, backward_items(sizes, kConfig.tile_k) * kFlagWords);
}

template <BackwardConfig kConfig, Features kComputes>
void backward_carve(Arena& arena, const AttentionProblem& problem, BackwardParams& params) {
  Arena count;
  carve<kConfig, kComputes>(count, sizes_of(problem));
  params.workspace = arena.take<std::byte>(static_cast<int64_t>(count.used()));
}

/// The main kernel.
template <typename Tr>
cudaError_t launch_kernel(BackwardParams& p, BackwardScratch& scratch, typename Tr::Order& order,
                          BackwardMaps& maps, const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&backward_kernel<Tr>),
                             sizeof(typename Tr::Shared));
  // Persistent: as many clusters as there is room for, or items.
  const auto blocks = static_cast<uint32_t>(
      kBlocks * min64(order.items, max64(1, target.multiprocessors / kBlocks)));
  void* args[] = {&p, &scratch, &order, &maps};
  return kernel.launch(dim3(blocks), Tr::kThreads, args, target, true);
}

/// In which order a deterministic launch takes the items of `order`. The sequences of a packed
/// launch count as one batch entry.
template <BackwardConfig kConfig>
OrderedBackwardOrder in_order(const BackwardParams& p, const BackwardOrder& order) {
  sm90::ItemOrder items{};
  items.records = order.blocks * (p.cu_k ? static_cast<uint32_t>(p.batch) : 1);
  items.tracks = static_cast<uint32_t>(p.heads_kv) * order.parts;
  items.parts = order.parts;
  items.items = static_cast<uint32_t>(order.items);
  items.heads_per_part = order.heads_per_part;
  return {order, OrderedItems::make(items, sm90::visited_tiles(p, kConfig.tile_q, kConfig.tile_k),
                                    p.rule.later_see_more(), p.batch_invariant != 0, kBlocks)};
}

template <BackwardConfig kConfig, Features kComputes>
cudaError_t launch_backward(const BackwardParams& params, const LaunchTarget& target) {
  using Tr = TraitsOf<kConfig, kComputes>;
  static_assert(kComputes.has(features::kSumsDq), "it writes no dQ but sums");
  BackwardParams p = params;
  Arena arena(p.workspace);
  BackwardScratch scratch = carve<kConfig, kComputes>(arena, sizes_of(p));
  BackwardOrder order = backward_order(p, kConfig.width, kConfig.tile_k);
  order.group = 1;  // key blocks of a head side by side, as in backward_sm90_launch.h
  // Items are drawn in 32 bits, and each cluster draws one past the end.
  if (order.items > int64_t{INT32_MAX} - 65536) return cudaErrorInvalidValue;
  OrderedBackwardOrder ordered{};
  if constexpr (Tr::kOrdered) {
    ordered = in_order<kConfig>(p, order);
    scratch.descending = ordered.items_in_order.descending;
  }
  // The other stages are the same kernels, whichever is the main one.
  using StageTraits =
      typename WideTraits<kConfig.dtype, kConfig.width, kConfig.width, false, false>::StageTraits;
  using Stages = BackwardStages<typename Tr::T, kQueries, kItemKeys, Tr::kWidth, StageTraits>;
  // Boxes of keys are of 64 rows too: a thread block of a pair reads half of an item.
  return sm90::launch_stages<kConfig, Stages>(
      p, scratch, order, order.items, 64, kCountersOf<kComputes>, target,
      [&](BackwardMaps& maps) {
        if constexpr (Tr::kOrdered) {
          return launch_kernel<Tr>(p, scratch, ordered, maps, target);
        } else {
          return launch_kernel<Tr>(p, scratch, order, maps, target);
        }
      },
      [] { return cudaSuccess; });
}

}  // namespace strobe::cuda::sm90_wide

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_LAUNCH_H_
