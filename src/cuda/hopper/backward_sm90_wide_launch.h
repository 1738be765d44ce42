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

/// width_v: that of c, or less for a V that is narrower than K: 192 and 128 are a usual pair.
template <BackwardConfig c, int width_v = c.width, bool kGeneral = false, bool kOrdered = false>
using TraitsOf = WideTraits<c.dtype, c.width, width_v, kGeneral, kOrdered>;

template <BackwardConfig kConfig>
constexpr LaunchShape backward_shape() {
  using Tr = TraitsOf<kConfig>;
  using Ordered = TraitsOf<kConfig, kConfig.width, false, true>;
  static_assert(kConfig.tile_q == kQueries && kConfig.tile_k == kItemKeys);
  return {Tr::kThreads, max64(sizeof(typename Tr::Shared), sizeof(typename Ordered::Shared))};
}

/// Counters of a query tile: each block of a pair has its own, where additions to dQ have an order.
template <typename Problem>
int32_t counters_of(const Problem& p) {
  return p.deterministic ? kBlocks : 0;
}

template <BackwardConfig kConfig>
BackwardScratch carve(Arena& arena, const BackwardSizes& sizes, int32_t counters) {
  return carve_backward(arena, sizes, kConfig.width, kConfig.tile_q, kConfig.tile_k, counters,
                        backward_items(sizes, kConfig.tile_k) * kFlagWords);
}

template <BackwardConfig kConfig>
void backward_carve(Arena& arena, const AttentionProblem& problem, BackwardParams& params) {
  Arena count;
  carve<kConfig>(count, sizes_of(problem), counters_of(problem));
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

/// The same, for plain scores or any, and for a V of at most 128 columns, where there are kernels
/// for that.
template <BackwardConfig kConfig, bool kOrdered, int kWidthV = kConfig.width>
cudaError_t launch_main(BackwardParams& p, BackwardScratch& scratch,
                        typename TraitsOf<kConfig, kWidthV, false, kOrdered>::Order& order,
                        BackwardMaps& maps, const LaunchTarget& target) {
  if constexpr (kConfig.width == 192 && kWidthV == 192) {
    if (p.head_dim_v <= 128)
      return launch_main<kConfig, kOrdered, 128>(p, scratch, order, maps, target);
  }
  using Plain = TraitsOf<kConfig, kWidthV, false, kOrdered>;
  using General = TraitsOf<kConfig, kWidthV, true, kOrdered>;
  return sm90::is_general(p) ? launch_kernel<General>(p, scratch, order, maps, target)
                             : launch_kernel<Plain>(p, scratch, order, maps, target);
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

template <BackwardConfig kConfig>
cudaError_t launch_backward(const BackwardParams& params, const LaunchTarget& target) {
  using Tr = TraitsOf<kConfig>;
  BackwardParams p = params;
  Arena arena(p.workspace);
  const int32_t counters = counters_of(p);
  BackwardScratch scratch = carve<kConfig>(arena, sizes_of(p), counters);
  BackwardOrder order = backward_order(p, kConfig.width, kConfig.tile_k);
  order.group = 1;  // key blocks of a head side by side, as in backward_sm90_launch.h
  // Items are drawn in 32 bits, and each cluster draws one past the end.
  if (order.items > int64_t{INT32_MAX} - 65536) return cudaErrorInvalidValue;
  OrderedBackwardOrder ordered{};
  if (p.deterministic) {
    ordered = in_order<kConfig>(p, order);
    scratch.descending = ordered.items_in_order.descending;
  }
  using Stages =
      BackwardStages<typename Tr::T, kQueries, kItemKeys, Tr::kWidth, typename Tr::StageTraits>;
  // Boxes of keys are of 64 rows too: a thread block of a pair reads half of an item.
  return sm90::launch_stages<kConfig, Stages>(
      p, scratch, order, order.items, 64, counters, target, [&](BackwardMaps& maps) {
        return p.deterministic ? launch_main<kConfig, true>(p, scratch, ordered, maps, target)
                               : launch_main<kConfig, false>(p, scratch, order, maps, target);
      });
}

}  // namespace strobe::cuda::sm90_wide

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_LAUNCH_H_
