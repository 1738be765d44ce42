// Launches the backward pass on Hopper: the kernel of backward_sm90.cuh between the others that its
// head lists.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_LAUNCH_H_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_LAUNCH_H_

#include <cstddef>

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/walk.h"
#include "core/workspace.h"
#include "cuda/backward/dbias_launch.h"
#include "cuda/backward/order.cuh"
#include "cuda/backward/stages_launch.h"
#include "cuda/common/config.h"
#include "cuda/common/static_order.cuh"
#include "cuda/hopper/backward_launch.h"
#include "cuda/hopper/backward_sm90.cuh"
#include "cuda/hopper/dbias_form.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"
#include "cuda/host/tensor_map.h"

namespace strobe::cuda::sm90 {

/// Whether the main kernel writes dQ itself, in place of the one addition that each tile gets.
template <Features kComputes>
inline constexpr bool kStoresDqOf = !kComputes.has(features::kSumsDq);
/// Whether it goes through the lists of a mask as data: it then keeps an order of additions where
/// the launch asks for one.
template <Features kComputes>
inline constexpr bool kMaskOf = kComputes.has(features::kMask);
/// Whether additions to dQ have an order: where there are some.
template <Features kComputes>
inline constexpr bool kOrderedOf = kComputes.has(features::kOrder) && !kStoresDqOf<kComputes>;

template <BackwardConfig kConfig, Features kComputes>
using TraitsOfKernel =
    BackwardTraitsOf<kConfig, kOrderedOf<kComputes>, kComputes.has(features::kScores),
                     kStoresDqOf<kComputes>, kMaskOf<kComputes>, kComputes.has(features::kBias)>;

template <BackwardConfig kConfig, Features kComputes>
constexpr LaunchShape backward_shape() {
  using Tr = TraitsOfKernel<kConfig, kComputes>;
  return {Tr::kThreads, sizeof(typename Tr::Shared)};
}

/// Whether the main kernel sets sums of dQ to zero: their bytes, all heads together and of one
/// head.
constexpr bool items_zero_sums(int64_t all, int64_t head) {
  // Sums that are less than half of L2 stay there from the kernel before until they are added to,
  // and nothing would be won. In long sequences zeros are a small part of the work, and key blocks
  // that begin far from the last tile would have to wait for theirs.
  return all >= int64_t{32} << 20 && head <= int64_t{512} << 10;
}

/// The same of a problem, or of a launch's params.
template <BackwardConfig kConfig, Features kComputes, typename Problem>
bool items_zero(const Problem& p) {
  const BackwardSizes sizes = sizes_of(p);
  constexpr int64_t kRowBytes = int64_t{kConfig.width} * sizeof(float);
  return !kOrderedOf<kComputes> && !kStoresDqOf<kComputes> &&
         items_zero_sums(
             sizes.heads * scratch_tiles(sizes, kConfig.tile_q) * kConfig.tile_q * kRowBytes,
             ceil_div(sizes.seqlen_q, kConfig.tile_q) * kConfig.tile_q * kRowBytes);
}

/// Counters of a query tile: one, where additions to its dQ have an order, or wait for zeros.
template <BackwardConfig kConfig, Features kComputes, typename Problem>
int32_t counters_of(const Problem& p) {
  if (kMaskOf<kComputes>) return p.deterministic ? 1 : 0;
  return kOrderedOf<kComputes> || items_zero<kConfig, kComputes>(p) ? 1 : 0;
}

template <BackwardConfig kConfig, Features kComputes>
BackwardScratch carve(Arena& arena, const BackwardSizes& sizes, int32_t counters) {
  using Tr = TraitsOfKernel<kConfig, kComputes>;
  BackwardScratch scratch =
      carve_backward(arena, sizes, kConfig.width, kConfig.tile_q, kConfig.tile_k, counters,
                     backward_items(sizes, kConfig.tile_k) * Tr::kWarps, !kStoresDqOf<kComputes>,
                     kMaskOf<kComputes>);
  scratch.key_blocks = static_cast<uint32_t>(key_blocks(sizes, kConfig.tile_k));
  scratch.key_records = arena.take<typename Tr::Record>(scratch.key_blocks);
  return scratch;
}

template <BackwardConfig kConfig, Features kComputes>
void backward_carve(Arena& arena, const AttentionProblem& problem, BackwardParams& params) {
  Arena count;
  carve<kConfig, kComputes>(count, sizes_of(problem), counters_of<kConfig, kComputes>(problem));
  params.workspace = arena.take<std::byte>(static_cast<int64_t>(count.used()));
}

/// Thread blocks of the main kernel.
template <typename Tr>
uint32_t blocks_of(int64_t items, const LaunchTarget& target) {
  return static_cast<uint32_t>(Tr::kPersistent ? min64(items, target.multiprocessors) : items);
}

/// The main kernel. items: of its own kind.
template <typename Tr>
cudaError_t launch_kernel(BackwardParams& p, BackwardScratch& scratch, BackwardOrder& order,
                          typename Tr::Items items, int64_t count, BackwardMapsOf<Tr>& maps,
                          const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&backward_kernel<Tr>),
                             sizeof(typename Tr::Shared));
  const uint32_t blocks = blocks_of<Tr>(count, target);
  void* args[] = {&p, &scratch, &order, &items, &maps};
  return kernel.launch(dim3(blocks), Tr::kThreads, args, target, true);
}

/// The maps of a launch with a bias: those of its other tensors, and that of the bias. (It has
/// keys, but need not have queries.)
inline cudaError_t add_bias_map(const BackwardParams& p, const BackwardMaps& others,
                                BiasBackwardMaps& maps) {
  thread_local KeptTensorMap kept;
  thread_local CUtensorMap map;
  STROBE_RETURN_IF_CUDA_ERROR(kept.make(map, p.bias, p.k.data, kBiasBoxRows));
  static_cast<BackwardMaps&>(maps) = others;
  maps.bias = map;
  return cudaSuccess;
}

/// The same, for plain scores or any.
template <BackwardConfig kConfig, Features kComputes>
cudaError_t launch_backward(const BackwardParams& params, const LaunchTarget& target) {
  using Tr = TraitsOfKernel<kConfig, kComputes>;
  BackwardParams p = params;
  Arena arena(p.workspace);
  const int32_t counters = counters_of<kConfig, kComputes>(p);
  BackwardScratch scratch = carve<kConfig, kComputes>(arena, sizes_of(p), counters);
  BackwardOrder order = backward_order(p, kConfig.width, kConfig.tile_k);
  order.group = 1;  // in whose order the flags of rows that are not finite lie
  // Key blocks of a head follow one another, since here none waits for another: side by side they
  // share the head's queries and sums of dQ in L2, which is worth 4 % at 16k keys.
  ItemOrder item_order{};
  item_order.tracks = static_cast<uint32_t>(p.heads_kv) * order.parts;
  item_order.parts = order.parts;
  item_order.heads_per_part = order.heads_per_part;
  item_order.records =
      p.cu_k ? scratch.key_blocks : static_cast<uint32_t>(ceil_div(p.seqlen_k, kConfig.tile_k));
  const int64_t items = order.items > 0 ? int64_t{scratch.key_blocks} * item_order.tracks : 0;
  if (items > INT32_MAX) return cudaErrorInvalidValue;
  item_order.items = static_cast<uint32_t>(items);
  // Under a mask as data ranks ascend with the keys, and so do key blocks where additions have an
  // order; else long ones may come first (MaskedItems).
  const OrderedItems ordered =
      kMaskOf<kComputes> && !p.deterministic
          ? OrderedItems::one_by_one(item_order)
          : OrderedItems::make(item_order, visited_tiles(p, kConfig.tile_q, kConfig.tile_k),
                               p.rule.later_see_more() && !kMaskOf<kComputes>,
                               p.batch_invariant != 0, 1);
  if constexpr (Tr::kOrdered) scratch.descending = ordered.descending;
  scratch.items_zero = items > 0 && counters > 0 && !Tr::kOrdered ? 1 : 0;
  // Where thread blocks wait for one another all items are drawn, else only those after the first
  // of each block.
  if (!Tr::kOrdered && !scratch.items_zero) scratch.first_ticket = blocks_of<Tr>(items, target);
  // The other stages are the same kernels, whichever is the main one.
  using Stages = BackwardStages<
      typename Tr::T, Tr::kTileQ, Tr::kTileK, Tr::kWidth,
      typename BackwardTraitsOf<kConfig, Tr::kMask, false, false, Tr::kMask>::StageTraits>;
  return launch_stages<kConfig, Stages>(
      p, scratch, order, items, kConfig.tile_k, counters, target,
      [&](BackwardMaps& maps) {
        if constexpr (Tr::kMask) {
          const auto masked = MaskedItems::make(ordered, p, kConfig.tile_k, p.deterministic != 0);
          return launch_kernel<Tr>(p, scratch, order, masked, items, maps, target);
        } else if constexpr (Tr::kOrdered) {
          return launch_kernel<Tr>(p, scratch, order, ordered, items, maps, target);
        } else if constexpr (Tr::kBias) {
          BiasBackwardMaps all;
          STROBE_RETURN_IF_CUDA_ERROR(add_bias_map(p, maps, all));
          return launch_kernel<Tr>(p, scratch, order, item_order, items, all, target);
        } else {
          return launch_kernel<Tr>(p, scratch, order, item_order, items, maps, target);
        }
      },
      [&] {
        if constexpr (kComputes.has(features::kDbias)) {
          return launch_dbias<typename Tr::T, DbiasForm, typename Tr::StageTraits>(
              p, scratch, kConfig.tile_q, target);
        } else {
          return cudaSuccess;
        }
      });
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_LAUNCH_H_
