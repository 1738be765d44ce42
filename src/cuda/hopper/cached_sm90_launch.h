// Launches forward_sm90.cuh for keys in a cache, where a sequence has many queries; and before it a
// kernel that appends and rotates, after it one for the sequences of the batch that have few.
#ifndef STROBE_CUDA_HOPPER_CACHED_SM90_LAUNCH_H_
#define STROBE_CUDA_HOPPER_CACHED_SM90_LAUNCH_H_

#include <cstddef>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/workspace.h"
#include "cuda/cache/update_launch.h"
#include "cuda/common/config.h"
#include "cuda/hopper/forward_sm90.cuh"
#include "cuda/hopper/forward_sm90_launch.h"
#include "cuda/host/instance.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"
#include "cuda/host/tensor_map.h"

namespace strobe::cuda::sm90 {

template <CachedConfig kConfig, Features kComputes>
constexpr LaunchShape cached_shape() {
  return forward_shape<kConfig, kComputes>();
}

/// Tiles of one head each: those of several heads are no more.
template <CachedConfig kConfig>
int64_t most_tiles(const CachedParams& p) {
  const int64_t most = int64_t{p.batch} * ceil_div(p.seqlen_q, kConfig.tile_q);
  return p.heads * (p.packed_q ? min64(most, p.total_q / kConfig.tile_q + p.batch) : most);
}

/// log2 of the heads of a tile, which has one mask and one walk (common/walks.h), and no slopes
/// where it has several.
inline int32_t pack_of_tiles(const CachedParams& p) {
  const bool apart = p.has_slopes || masks_differ_by_head() || walks_differ_by_head(p);
  return packed_heads_log2(p.group, apart);
}

/// carve_chunks for the tiles of these kernels, which hold several heads.
template <CachedConfig kConfig, Features kComputes>
void carve_tile_chunks(Arena& arena, CachedParams& p) {
  const int32_t pack = pack_of_tiles(p);
  const int64_t rows = int64_t{p.seqlen_q} << pack;
  const int64_t dense = int64_t{p.batch} * ceil_div(rows, kConfig.tile_q);
  const int64_t packed = (int64_t{p.total_q} << pack) / kConfig.tile_q + p.batch;
  const int64_t tiles = p.packed_q ? min64(dense, packed) : dense;
  carve_chunks<kConfig, kComputes>(arena, p, p.cache.seqlen_k, (p.heads >> pack) * tiles, rows);
}

template <CachedConfig kConfig, Features kComputes, bool kUpdatesBefore>
CachedGrid cached_carve(const CachedParams& p, int64_t multiprocessors, int64_t /*shared_bytes*/) {
  Arena arena;
  const int64_t tiles = most_tiles<kConfig>(p);
  take_workspace(arena, tiles);
  static_assert(kUpdatesBefore, "these kernels neither append nor rotate");
  if (p.cache.rotary_dim > 0) carve_queries(arena, p);
  CachedParams carved = p;
  carve_tile_chunks<kConfig, kComputes>(arena, carved);
  return {min64(tiles * carved.chunks.of_tile, multiprocessors), 1,
          static_cast<int64_t>(arena.used())};
}

/// What update_kernel.cuh asks for.
template <CachedConfig kConfig>
struct UpdateShape {
  using T = Element<kConfig.dtype>;
  static constexpr int kWidth = kConfig.width, kWarps = 8, kThreads = 32 * kWarps;
};

/// Null, since a launch always begins with this instance, which has to update the cache first. No
/// other instance calls it to attend alone.
template <CachedConfig kConfig, Features kComputes, bool kUpdatesBefore>
constexpr cudaError_t (*attend)(const CachedParams&, const LaunchTarget&) = nullptr;

template <CachedConfig kConfig, Features kComputes, bool kUpdatesBefore>
cudaError_t launch_cached(const CachedLaunchParams& params, const LaunchTarget& target,
                          const CachedInstance* for_few_queries) {
  constexpr auto kShape = cached_shape<kConfig, kComputes>();
  using Tr = TraitsOf<kConfig, kComputes>;
  Arena arena(params.workspace);
  take_workspace(arena, most_tiles<kConfig>(params));
  const UpdateBefore<UpdateShape<kConfig>> update(arena, params);
  TileParams p{update.attends(), pack_of_tiles(params)};
  carve_tile_chunks<kConfig, kComputes>(arena, p);
  CachedParams of_few_queries = p;
  if (for_few_queries) {
    p.cache.least_q = few_queries(p.group) + 1;
    of_few_queries.cache.most_q = few_queries(p.group);
    of_few_queries.workspace = arena.take<std::byte>(
        for_few_queries->carve(of_few_queries, target.multiprocessors, target.shared_bytes)
            .workspace_bytes);
  }
  const TileOrder tiles = tile_order<kConfig>(p, target, p.pack);
  OrderOf<Tr> order = order_of<kConfig, kComputes>(tiles, p);
  if (too_many(order)) return cudaErrorInvalidValue;

  // Kept from this thread's last launch. They are made before anything is launched, since that may
  // fail.
  thread_local CachedTensorMaps maps;
  thread_local KeptTensorMap q, k, v, out;
  using Rows = KeptTensorMap::Rows;
  constexpr auto kRows = static_cast<uint32_t>(kWarpgroupRows);
  const uint32_t heads = 1u << p.pack;
  STROBE_RETURN_IF_CUDA_ERROR(
      q.make(maps.q, p, p.q, Rows::kQueries, p.head_dim, kConfig.dtype, kRows, heads));
  const CachedSequences& c = p.cache;
  maps.boxes = KeyBoxes::make(kConfig.tile_k, c.table ? c.page_size.divisor : 0);
  const auto make = [&](KeptTensorMap& kept, CUtensorMap& map, const Tensor& t, int64_t dim) {
    const auto box_rows = static_cast<uint32_t>(maps.boxes.rows);
    // Without keys the pointers of K and V may be null, and there is no tensor map of a null
    // pointer. Nothing is loaded then, so Q's address does.
    if (c.seqlen_k == 0 || !t.data) {
      return kept.make(map, p.q.data, {dim, 1, 1, 1, 0, 0, 0, kConfig.dtype, box_rows});
    }
    return kept.make(map, t.data,
                     {dim, c.table ? c.page_size.divisor : c.seqlen_k, p.heads_kv,
                      c.table ? c.pool : c.cache_batch, t.batch_stride, t.row_stride, t.head_stride,
                      kConfig.dtype, box_rows});
  };
  STROBE_RETURN_IF_CUDA_ERROR(make(k, maps.k, p.k, p.head_dim));
  STROBE_RETURN_IF_CUDA_ERROR(make(v, maps.v, p.v, p.head_dim_v));
  if (Tr::kStagesO && !p.float_out) {
    STROBE_RETURN_IF_CUDA_ERROR(
        out.make(maps.out, p, p.out, Rows::kQueries, p.head_dim_v, kConfig.dtype, kRows, heads));
  }

  static KernelHandle kernel(
      reinterpret_cast<const void*>(&forward_kernel<Tr, kIsGeneral<kComputes>, false, TileParams>),
      kShape.shared_bytes);
  STROBE_RETURN_IF_CUDA_ERROR(update.launch(target));
  if (order.tiles.items > 0) {
    void* args[] = {&p, &maps, &order};
    STROBE_RETURN_IF_CUDA_ERROR(
        kernel.launch(dim3(blocks_of(tiles, p, target)), kShape.threads, args, target));
    STROBE_RETURN_IF_CUDA_ERROR((merge_chunks<kConfig, kComputes>(p, tiles, target)));
  }
  return for_few_queries ? for_few_queries->attend(of_few_queries, target) : cudaSuccess;
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_CACHED_SM90_LAUNCH_H_
