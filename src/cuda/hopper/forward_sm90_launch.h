// Launches forward_sm90.cuh.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_LAUNCH_H_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_LAUNCH_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/common/config.h"
#include "cuda/hopper/chunk_sums.cuh"
#include "cuda/hopper/forward_sm90.cuh"
#include "cuda/hopper/key_chunks.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"
#include "cuda/host/tensor_map.h"

namespace strobe::cuda::sm90 {

template <ForwardConfig kConfig, Features kComputes>
constexpr LaunchShape forward_shape() {
  using Tr = TraitsOf<kConfig, kComputes>;
  return {Tr::kThreads, sizeof(typename Tr::Shared)};
}

/// Whether the kernel is the general one: softcap and ALiBi change scores one by one; a scale that
/// is not positive turns their order round.
template <Features kComputes>
inline constexpr bool kIsGeneral = kComputes.has(features::kScores);

/// Takes room for a Workspace of so many tiles.
inline std::byte* take_workspace(Arena& arena, int64_t tiles) {
  return arena.take<std::byte>(static_cast<int64_t>(offsetof(Workspace, suspects)) +
                               tiles * static_cast<int64_t>(sizeof(SuspectTile)));
}

/// Takes room for what kernels leave of chunks of keys, and decides whether thread blocks share the
/// chunks of a tile; no bit depends on that. p: with all sizes, so that a plan and its launches
/// decide alike. keys: of the longest sequence. tiles: at most so many, of at most `rows` rows.
template <ForwardConfig kConfig, Features kComputes>
void carve_chunks(Arena& arena, ForwardParams& p, int64_t keys, int64_t tiles, int64_t rows) {
  p.chunks = {};
  using Tr = TraitsOf<kConfig, kComputes>;
  if constexpr (Tr::kChunked) {
    constexpr int64_t kBlocks = chunk_blocks(kConfig.tile_k);
    const int64_t chunks = ceil_div(keys, kBlocks * kConfig.tile_k);
    // The general kernel also takes rows that may have other bits.
    if (!p.batch_invariant || chunks <= 1 || tiles == 0) return;
    constexpr int64_t kFloats = Parked<kConfig.width>::kFloats;
    p.chunks.parked = arena.take<float>(kMostParked * Tr::kWarpgroups * kFloats);
    // The blocks that one thread block goes through one after the other; to put pieces together
    // takes as long as some blocks do. As if each GPU had so many multiprocessors, so that nobody
    // needs to know it.
    constexpr int64_t kMultiprocessors = 132, kMerging = 6, kMostBytes = int64_t{128} << 20;
    const int64_t seen = ceil_div(p.rule.most_seen(kConfig.tile_q, keys), kConfig.tile_k);
    const int64_t met = min64(chunks, seen / kBlocks + 2);
    const int64_t whole = ceil_div(tiles, kMultiprocessors) * seen;
    const int64_t shared =
        ceil_div(tiles * met, kMultiprocessors) * min64(kBlocks, seen) + kMerging;
    const int64_t piece_rows = min64(rows, kConfig.tile_q), pieces = tiles * chunks;
    const int64_t bytes = pieces * piece_rows * (kConfig.width + 2) * 4;
    if (kWalksAreLists || shared >= whole || bytes > kMostBytes) return;
    p.chunks.of_tile = static_cast<int32_t>(chunks);
    p.chunks.rounded = kIsGeneral<kComputes>;
    p.chunks.piece_rows = static_cast<int32_t>(piece_rows);
    p.chunks.piece_sums = arena.take<float>(2 * pieces * piece_rows);
    p.chunks.piece_o = arena.take<float>(pieces * piece_rows * kConfig.width);
  }
}

template <ForwardConfig kConfig, Features kComputes>
void forward_carve(Arena& arena, const AttentionProblem& p, ForwardParams& params) {
  const int64_t tiles = p.varlen ? p.total_q / kConfig.tile_q + p.batch
                                 : ceil_div(p.seqlen_q, kConfig.tile_q) * p.batch;
  params.workspace = take_workspace(arena, tiles * p.heads);
  carve_chunks<kConfig, kComputes>(arena, params, p.seqlen_k, tiles * p.heads, p.seqlen_q);
}

/// The order of a kernel, from that of the tiles.
template <ForwardConfig kConfig, Features kComputes>
OrderOf<TraitsOf<kConfig, kComputes>> order_of(const TileOrder& tiles, const ForwardParams& p) {
  using Tr = TraitsOf<kConfig, kComputes>;
  if constexpr (Tr::kMasked) {
    return MaskedTileOrder::make(tiles, p, kConfig.tile_q);
  } else if constexpr (Tr::kBias) {
    return BiasTileOrder::make(tiles, p, kConfig.tile_q);
  } else if constexpr (Tr::kChunked) {
    return {tiles, Divisor(static_cast<uint32_t>(p.chunks.of_tile))};
  } else {
    return tiles;
  }
}
/// Thread blocks of the main kernel.
inline unsigned blocks_of(const TileOrder& tiles, const ForwardParams& p,
                          const LaunchTarget& target) {
  const int64_t blocks = min64(tiles.tiles.items * p.chunks.of_tile, target.multiprocessors);
  return static_cast<unsigned>(p.chunks.parked ? min64(blocks, kMostParked) : blocks);
}

/// Puts pieces together, where the main kernel has left some.
template <ForwardConfig kConfig, Features kComputes, typename Params>
cudaError_t merge_chunks(const Params& p, const TileOrder& tiles, const LaunchTarget& target) {
  if constexpr (TraitsOf<kConfig, kComputes>::kChunked) {
    if (p.chunks.of_tile <= 1) return cudaSuccess;
    using Tr = TraitsOf<kConfig, features::kInvariantRows>;  // one kernel for both variants
    static KernelHandle kernel(reinterpret_cast<const void*>(&merge_chunks_kernel<Tr, Params>), 0);
    TileOrder order = tiles;
    order.fixed = true;
    const dim3 grid(static_cast<unsigned>(tiles.tiles.items),
                    static_cast<unsigned>(ceil_div(p.chunks.piece_rows, kMergingWarps)));
    void* args[] = {const_cast<Params*>(&p), &order};
    return kernel.launch(grid, 32 * kMergingWarps, args, target);
  }
  return cudaSuccess;
}

/// The order of a launch's tiles, and how they are handed out. pack: log2 of the heads of a tile.
template <ForwardConfig kConfig>
TileOrder tile_order(const ForwardParams& params, const LaunchTarget& target, int32_t pack) {
  using Tr = TraitsOf<kConfig, features::kNothing>;  // the sizes of tiles are those of all
  CommonParams p = params;
  p.heads >>= pack;
  p.group >>= pack;
  const int32_t tile_q = kConfig.tile_q >> pack;
  TileOrder order{StaticOrder::make(p, tile_q), TileRule::make(p.rule), false, 0, nullptr, {}};
  if (p.cu_q) {  // a sequence has one tile at most that is not full
    order.tiles.items = min64(order.tiles.items, p.heads * (p.total_q / tile_q + p.batch));
  }
  constexpr int kFixedTiles = 4;  // of a thread block
  order.fixed = !p.sequences_differ() && order.tiles.items <= kFixedTiles * target.multiprocessors;
  static std::atomic<uint32_t> launches;
  // Odd, each once; spread out, so that no small number that lies there by chance is one.
  order.nonce = (2 * launches.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9E3779B1u;
  order.counter = &static_cast<Workspace*>(params.workspace)->tile_counter;
  order.stagger =
      Stagger::make(p, order.tiles.items, target.multiprocessors,
                    2 * Tr::kWarpgroups * Tr::QTile::kBytes + 2 * Tr::KTile::kBytes, tile_q);
  return order;
}

/// Tiles are counted in 32 bits.
inline bool too_many(const TileOrder& order) { return order.tiles.items > INT32_MAX / 2; }

template <ForwardConfig kConfig, Features kComputes>
cudaError_t launch_forward(const ForwardParams& p, const LaunchTarget& target) {
  constexpr auto kShape = forward_shape<kConfig, kComputes>();
  using Tr = TraitsOf<kConfig, kComputes>;
  const TileOrder tiles = tile_order<kConfig>(p, target, 0);
  OrderOf<Tr> order = order_of<kConfig, kComputes>(tiles, p);
  if (order.tiles.items == 0) return cudaSuccess;
  if (too_many(order)) return cudaErrorInvalidValue;

  // Kept from this thread's last launch: most launches differ from it in addresses alone.
  thread_local MapsOf<Tr, ForwardParams> maps;
  thread_local KeptTensorMap q, k, v, out;
  using Rows = KeptTensorMap::Rows;
  const auto make = [&](KeptTensorMap& kept, CUtensorMap& map, const Tensor& t, Rows of,
                        int64_t dim, int32_t dtype = kConfig.dtype) {
    return kept.make(map, p, t, of, dim, dtype,
                     static_cast<uint32_t>(of == Rows::kKeys ? kConfig.tile_k : kWarpgroupRows));
  };
  STROBE_RETURN_IF_CUDA_ERROR(make(q, maps.q, p.q, Rows::kQueries, p.head_dim));
  // Without keys the pointers of K and V may be null, and there is no tensor map of a null pointer.
  // Nothing is loaded then, so Q's address does.
  const bool keys = p.total_k > 0;
  STROBE_RETURN_IF_CUDA_ERROR(make(k, maps.k, keys ? p.k : p.q, Rows::kKeys, p.head_dim));
  STROBE_RETURN_IF_CUDA_ERROR(make(v, maps.v, keys ? p.v : p.q, Rows::kKeys, p.head_dim_v));
  if (Tr::kStagesO && !p.float_out) {
    const int32_t dtype = !Tr::kFloat8 ? kConfig.dtype : p.half_out ? kFloat16 : kBfloat16;
    STROBE_RETURN_IF_CUDA_ERROR(make(out, maps.out, p.out, Rows::kQueries, p.head_dim_v, dtype));
  }

  if constexpr (Tr::kBias) {
    thread_local KeptTensorMap bias;
    STROBE_RETURN_IF_CUDA_ERROR(bias.make(maps.bias, p.bias, p.q.data, kWarpgroupRows));
  }

  // Most launches have plain scores, all rows in use, and out in 16 bits. The kernel for these is a
  // sixth shorter than the one for sequences of any kind, which shows where sequences are short,
  // since a launch reads its code from memory.
  constexpr bool kAllRowsUsed = !kComputes.has(features::kSequences);
  static_assert(kComputes.has(features::kFloatOut) == !kAllRowsUsed);
  static KernelHandle kernel(
      reinterpret_cast<const void*>(
          &forward_kernel<Tr, kIsGeneral<kComputes>, kAllRowsUsed, ForwardParams>),
      kShape.shared_bytes);
  void* args[] = {const_cast<ForwardParams*>(&p), &maps, &order};
  STROBE_RETURN_IF_CUDA_ERROR(
      kernel.launch(dim3(blocks_of(tiles, p, target)), kShape.threads, args, target));
  return merge_chunks<kConfig, kComputes>(p, tiles, target);
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_LAUNCH_H_
