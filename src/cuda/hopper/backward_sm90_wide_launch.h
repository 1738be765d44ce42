// Launches the backward pass on Hopper for wide heads: backward_pre.cuh, backward_sm90_wide.cuh,
// backward_post.cuh.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_LAUNCH_H_
#define STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_LAUNCH_H_

#include <cstddef>

#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/common/backward_order.cuh"
#include "cuda/common/config.h"
#include "cuda/common/static_order.cuh"
#include "cuda/hopper/backward_sm90_wide.cuh"
#include "cuda/host/backward_sizes.h"
#include "cuda/host/backward_stages.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"
#include "cuda/host/tensor_map.h"

namespace strobe::cuda::sm90_wide {

template <BackwardConfig c>
using TraitsOf = WideTraits<c.dtype, c.width, c.width>;
/// The same for a V that is narrower than K: 192 and 128 are a usual pair.
template <BackwardConfig c>
using NarrowTraitsOf = WideTraits<c.dtype, c.width, 128>;

template <BackwardConfig kConfig>
constexpr LaunchShape backward_shape() {
  using Tr = TraitsOf<kConfig>;
  static_assert(kConfig.tile_q == kQueries && kConfig.tile_k == kItemKeys);
  return {Tr::kThreads, sizeof(typename Tr::Shared)};
}

template <BackwardConfig kConfig>
BackwardScratch carve(Arena& arena, const BackwardSizes& sizes, void* dq) {
  return carve_backward(arena, sizes, kConfig.width, kConfig.tile_q, kConfig.tile_k, 0, dq,
                        backward_items(sizes, kConfig.tile_k) * kFlagWords);
}

template <BackwardConfig kConfig>
void backward_carve(Arena& arena, const AttentionProblem& problem, BackwardParams& params) {
  Arena count;
  carve<kConfig>(count, sizes_of(problem), nullptr);
  params.workspace = arena.take<std::byte>(static_cast<int64_t>(count.used()));
}

/// The maps of this thread's last launch, with what differs. All boxes are 64 rows.
template <BackwardConfig kConfig>
cudaError_t make_maps(const BackwardParams& p, BackwardMaps& maps) {
  thread_local KeptTensorMap kept[4];
  const auto make_map = [&](int i, CUtensorMap& map, const Tensor& t, int64_t dim, int64_t rows,
                            int64_t heads) {
    return kept[i].make(map, t.data,
                        {dim, rows, heads, p.cu_q ? 1 : p.batch, t.batch_stride, t.row_stride,
                         t.head_stride, kConfig.dtype, 64});
  };
  cudaError_t error = make_map(0, maps.q, p.q, p.head_dim, p.total_q, p.heads);
  if (error != cudaSuccess) return error;
  error = make_map(1, maps.k, p.k, p.head_dim, p.total_k, p.heads_kv);
  if (error != cudaSuccess) return error;
  error = make_map(2, maps.v, p.v, p.head_dim_v, p.total_k, p.heads_kv);
  if (error != cudaSuccess) return error;
  return make_map(3, maps.dout, p.dout, p.head_dim_v, p.total_q, p.heads);
}

/// The main kernel.
template <typename Tr>
cudaError_t launch_main(BackwardParams& p, BackwardScratch& scratch, BackwardOrder& order,
                        BackwardMaps& maps, const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&backward_kernel<Tr>),
                             sizeof(typename Tr::Shared));
  // Persistent: as many clusters as there is room for, or items.
  const auto blocks = static_cast<uint32_t>(
      kBlocks * min64(order.items, max64(1, target.multiprocessors / kBlocks)));
  void* args[] = {&p, &scratch, &order, &maps};
  return kernel.launch(dim3(blocks), Tr::kThreads, args, target);
}

template <BackwardConfig kConfig>
cudaError_t launch_backward(const BackwardParams& params, const LaunchTarget& target) {
  using Tr = TraitsOf<kConfig>;
  // The plan sends none of these here.
  if (params.softcap > 0 || params.alibi_slopes || params.dropout.enabled() ||
      params.deterministic) {
    return cudaErrorNotSupported;
  }
  BackwardParams p = params;
  Arena arena(p.workspace);
  BackwardScratch scratch = carve<kConfig>(arena, sizes_of(p), p.dq.data);
  BackwardOrder order = backward_order(p, kConfig.width, kConfig.tile_k);
  order.group = 1;  // key blocks of a head side by side, as in backward_sm90_launch.h
  // Items are drawn in 32 bits, and each cluster draws one past the end.
  if (order.items > int64_t{INT32_MAX} - 65536) return cudaErrorInvalidValue;
  using Stages = BackwardStages<typename Tr::T, kQueries, kItemKeys, Tr::kWidth, typename Tr::Form>;
  cudaError_t error = cudaSuccess;
  thread_local BackwardMaps maps;
  // Without queries their pointers may be null, which a map takes amiss; dK and dV are zeros then.
  if (order.items > 0 && p.total_q > 0) {
    error = make_maps<kConfig>(p, maps);
    if (error != cudaSuccess) return error;
  }
  error = Stages::launch_pre(p, scratch, 0, target);
  if (error != cudaSuccess) return error;
  if (order.items > 0) {
    if constexpr (kConfig.width == 192) {
      error = p.head_dim_v <= 128
                  ? launch_main<NarrowTraitsOf<kConfig>>(p, scratch, order, maps, target)
                  : launch_main<Tr>(p, scratch, order, maps, target);
    } else {
      error = launch_main<Tr>(p, scratch, order, maps, target);
    }
    if (error != cudaSuccess) return error;
  }
  return Stages::launch_post(p, scratch, order, target);
}

}  // namespace strobe::cuda::sm90_wide

#endif  // STROBE_CUDA_HOPPER_BACKWARD_SM90_WIDE_LAUNCH_H_
