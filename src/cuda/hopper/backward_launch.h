// What the launches of the Hopper backward's kernels share: the maps of the tensors, and the stages
// around the main kernel.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_LAUNCH_H_
#define STROBE_CUDA_HOPPER_BACKWARD_LAUNCH_H_

#include <cstdint>

#include "core/arithmetic.h"
#include "cuda/backward/order.cuh"
#include "cuda/common/config.h"
#include "cuda/hopper/backward_sm90_layout.cuh"
#include "cuda/host/launch_target.h"
#include "cuda/host/tensor_map.h"

namespace strobe::cuda::sm90 {

/// The tensor maps of this thread's last launch of an instance of these tiles.
template <BackwardConfig kConfig>
BackwardMaps& last_maps() {
  thread_local BackwardMaps maps;
  return maps;
}

/// Query tiles that a key block visits, at most.
inline int64_t visited_tiles(const BackwardParams& p, int64_t tile_q, int64_t tile_k) {
  return most_visits(p.rule, tile_k, p.seqlen_q, tile_q);
}

/// Makes the tensor maps of a launch out of last_maps(): what is the same is not made again. A box
/// of K or V has key_rows rows.
template <BackwardConfig kConfig>
cudaError_t make_maps(const BackwardParams& p, uint32_t key_rows) {
  BackwardMaps& maps = last_maps<kConfig>();
  thread_local KeptTensorMap q, k, v, dout;
  using Rows = KeptTensorMap::Rows;
  const auto make = [&](KeptTensorMap& kept, CUtensorMap& map, const Tensor& t, Rows of,
                        int64_t dim) {
    return kept.make(map, p, t, of, dim, kConfig.dtype,
                     of == Rows::kKeys ? key_rows : static_cast<uint32_t>(kConfig.tile_q));
  };
  STROBE_RETURN_IF_CUDA_ERROR(make(q, maps.q, p.q, Rows::kQueries, p.head_dim));
  STROBE_RETURN_IF_CUDA_ERROR(make(k, maps.k, p.k, Rows::kKeys, p.head_dim));
  STROBE_RETURN_IF_CUDA_ERROR(make(v, maps.v, p.v, Rows::kKeys, p.head_dim_v));
  return make(dout, maps.dout, p.dout, Rows::kQueries, p.head_dim_v);
}

/// Launches the kernels of a backward pass: pre, the main kernel where it has items, what comes
/// right after it, post. counters: how many each query tile has. launch_main(maps) launches the
/// main kernel.
template <BackwardConfig kConfig, typename Stages, typename LaunchMain, typename LaunchNext>
cudaError_t launch_stages(BackwardParams& p, BackwardScratch& scratch, BackwardOrder& order,
                          int64_t items, uint32_t key_rows, int32_t counters,
                          const LaunchTarget& target, const LaunchMain& launch_main,
                          const LaunchNext& launch_next) {
  // Without queries the pointers of Q and dO may be null, and there is no tensor map of a null
  // pointer. dK and dV are zeros then.
  if (items > 0 && p.total_q > 0) {
    STROBE_RETURN_IF_CUDA_ERROR(make_maps<kConfig>(p, key_rows));
  }
  STROBE_RETURN_IF_CUDA_ERROR(Stages::launch_pre(p, scratch, counters, target));
  if (items > 0) {
    STROBE_RETURN_IF_CUDA_ERROR(launch_main(last_maps<kConfig>()));
  }
  STROBE_RETURN_IF_CUDA_ERROR(launch_next());
  return Stages::launch_post(p, scratch, order, target);
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_LAUNCH_H_
