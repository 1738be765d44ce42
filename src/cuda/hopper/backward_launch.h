// What the launches of the Hopper backward's kernels share: the refusal of what none of them
// computes, the maps of the tensors, and the stages around the main kernel.
#ifndef STROBE_CUDA_HOPPER_BACKWARD_LAUNCH_H_
#define STROBE_CUDA_HOPPER_BACKWARD_LAUNCH_H_

#include <cstdint>

#include "cuda/common/backward_order.cuh"
#include "cuda/common/config.h"
#include "cuda/hopper/backward_sm90_layout.cuh"
#include "cuda/host/launch_target.h"
#include "cuda/host/tensor_map.h"

namespace strobe::cuda::sm90 {

/// The plan sends none of these to Hopper's kernels.
inline bool is_declined(const BackwardParams& p) {
  return p.softcap > 0 || p.alibi_slopes || p.dropout.enabled();
}

/// The maps of this thread's last launch, with what differs. A box of K or V has key_rows rows.
template <BackwardConfig kConfig>
cudaError_t make_maps(const BackwardParams& p, uint32_t key_rows, BackwardMaps& maps) {
  thread_local KeptTensorMap kept[4];
  const auto make_map = [&](int i, CUtensorMap& map, const Tensor& t, int64_t dim, int64_t rows,
                            int64_t heads, uint32_t box_rows) {
    return kept[i].make(map, t.data,
                        {dim, rows, heads, p.cu_q ? 1 : p.batch, t.batch_stride, t.row_stride,
                         t.head_stride, kConfig.dtype, box_rows});
  };
  cudaError_t error = make_map(0, maps.q, p.q, p.head_dim, p.total_q, p.heads, kConfig.tile_q);
  if (error != cudaSuccess) return error;
  error = make_map(1, maps.k, p.k, p.head_dim, p.total_k, p.heads_kv, key_rows);
  if (error != cudaSuccess) return error;
  error = make_map(2, maps.v, p.v, p.head_dim_v, p.total_k, p.heads_kv, key_rows);
  if (error != cudaSuccess) return error;
  return make_map(3, maps.dout, p.dout, p.head_dim_v, p.total_q, p.heads, kConfig.tile_q);
}

/// Pre, the main kernel where it has items, post. counters: of each query tile.
/// launch_main(maps) launches the main kernel.
template <BackwardConfig kConfig, typename Stages, typename LaunchMain>
cudaError_t launch_stages(BackwardParams& p, BackwardScratch& scratch, BackwardOrder& order,
                          int64_t items, uint32_t key_rows, int32_t counters,
                          const LaunchTarget& target, const LaunchMain& launch_main) {
  cudaError_t error = cudaSuccess;
  thread_local BackwardMaps maps;
  // Without queries their pointers may be null, which a map takes amiss; dK and dV are zeros then.
  if (items > 0 && p.total_q > 0) {
    error = make_maps<kConfig>(p, key_rows, maps);
    if (error != cudaSuccess) return error;
  }
  error = Stages::launch_pre(p, scratch, counters, target);
  if (error != cudaSuccess) return error;
  if (items > 0) {
    error = launch_main(maps);
    if (error != cudaSuccess) return error;
  }
  return Stages::launch_post(p, scratch, order, target);
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_BACKWARD_LAUNCH_H_
