// Launches decode.cuh.
#ifndef STROBE_CUDA_DECODE_CACHED_SM80_LAUNCH_H_
#define STROBE_CUDA_DECODE_CACHED_SM80_LAUNCH_H_

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "core/arithmetic.h"
#include "core/workspace.h"
#include "cuda/cache/update_launch.h"
#include "cuda/common/config.h"
#include "cuda/common/stagger.cuh"
#include "cuda/decode/decode.cuh"
#include "cuda/host/instance.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda::sm80 {

template <CachedConfig kC>
using DecodeShapeOf = DecodeShape<kC.dtype, kC.width, kC.tile_q, kC.tile_k, kC.stages, kC.warps>;

template <CachedConfig kConfig>
constexpr LaunchShape cached_shape() {
  using Shape = DecodeShapeOf<kConfig>;
  return {Shape::kThreads, Shape::kSharedBytes};
}

/// How the keys are split, which depends on shapes and the device alone. (The nonce and the
/// pointers are set later.)
template <CachedConfig kConfig>
Division division_of(const CachedParams& p, int64_t multiprocessors, int64_t shared_bytes) {
  using Shape = DecodeShapeOf<kConfig>;
  // Chunks of a span, where its own number of units decides: enough for one sequence of a few heads
  // to fill a large device, and few enough that merging costs little.
  constexpr int64_t kFewestChunks = 16, kMostChunks = 128, kBlocksToFill = 256;
  const int64_t blocks =
      blocks_at_once(multiprocessors, shared_bytes, Shape::kSharedBytes, Shape::kMinBlocks);
  Division d{};
  d.heads_per_track = static_cast<int32_t>(ceil_div(p.heads_kv, blocks));
  d.tracks = static_cast<int32_t>(ceil_div(p.heads_kv, d.heads_per_track));
  // Rows of the longest sequence.
  const int64_t packed = min64(p.cache.seqlen_q, p.cache.most_q) * p.group;
  d.most_tiles = static_cast<int32_t>(max64(1, ceil_div(packed, Shape::kTileRows)));
  d.piece_rows = static_cast<int32_t>(min64(packed, Shape::kTileRows));
  const auto log2 = [](int32_t x) {
    int32_t shift = 0;
    while (1 << shift < x) ++shift;
    return shift;
  };
  static_assert((Shape::kTileRows & (Shape::kTileRows - 1)) == 0);
  static_assert((Shape::kUnit & (Shape::kUnit - 1)) == 0);
  d.cut = {p.group, log2(Shape::kTileRows), log2(Shape::kUnit), 0};
  if (p.batch_invariant) {
    const int64_t chunks = max64(kFewestChunks, min64(kMostChunks, kBlocksToFill / p.heads_kv));
    d.cut.most_chunks = static_cast<int32_t>(chunks);
  }
  const int64_t units =
      int64_t{p.cache.batch} * d.most_spans() * max64(1, ceil_div(p.cache.seqlen_k, Shape::kUnit));
  d.blocks = Divisor(static_cast<uint32_t>(max64(1, min64(blocks / d.tracks, units))));
  d.group = Divisor(static_cast<uint32_t>(p.group));
  return d;
}

/// Carves a division's part of the workspace.
template <CachedConfig kConfig>
void carve(Arena& arena, const CachedParams& p, Division& d) {
  const int64_t slots = int64_t{d.tracks} * d.slots_of_track(p.cache.batch);
  d.counters = arena.take<unsigned long long>(int64_t{d.tracks} * p.cache.batch * d.most_spans());
  d.piece_sums = arena.take<float2>(slots * d.piece_rows);
  d.piece_o = arena.take<float>(slots * d.piece_rows * kConfig.width);
}

template <CachedConfig kConfig>
CachedGrid cached_carve(const CachedParams& p, int64_t multiprocessors, int64_t shared_bytes) {
  Division d = division_of<kConfig>(p, multiprocessors, shared_bytes);
  const int64_t spans = int64_t{d.tracks} * p.cache.batch * d.most_spans();
  const int64_t units = max64(1, ceil_div(p.cache.seqlen_k, DecodeShapeOf<kConfig>::kUnit));
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t blocks = d.blocks.value;
  // Numbers of units, pieces and counters are of 32 bits.
  if (spans >= kMost / max64(units, max64(1, d.cut.most_chunks))) return {d.tracks, blocks, -1};
  Arena arena;
  carve<kConfig>(arena, p, d);
  if (turns_before(kConfig, p.cache.rotary_dim)) carve_queries(arena, p);
  return {d.tracks, blocks, static_cast<int64_t>(arena.used())};
}

/// The kernels with these parameters: one for plain scores without attention chunks, one for all
/// others.
template <typename Shape, typename Params>
KernelHandle& decode_handle(bool general) {
  static_assert(sizeof(WithoutChunks<Params>) == sizeof(Params));  // a launch copies its bytes
  static KernelHandle kernels[] = {
      KernelHandle(
          reinterpret_cast<const void*>(&decode_kernel<Shape, false, false, WithoutChunks<Params>>),
          Shape::kSharedBytes),
      KernelHandle(reinterpret_cast<const void*>(&decode_kernel<Shape, true, false, Params>),
                   Shape::kSharedBytes)};
  return kernels[general];
}
/// The one kernel of a shape for tensors of any alignment, whether it appends and rotates or not;
/// instances that leave that to a kernel of its own take the parameters of those that only read.
template <CachedConfig kConfig>
using ElementsParams =
    std::conditional_t<updates_before(kConfig), CachedParams, CachedUpdateParams>;
template <CachedConfig kConfig>
KernelHandle& elements_handle() {
  using Shape = DecodeShapeOf<kConfig>;
  static KernelHandle kernel(
      reinterpret_cast<const void*>(&decode_kernel<Shape, true, true, ElementsParams<kConfig>>),
      Shape::kSharedBytes);
  return kernel;
}

/// What a launch needs to know besides its parameters. arena: at the launch's part of the
/// workspace, and then past it.
template <CachedConfig kConfig>
Division prepare_division(Arena& arena, const CachedParams& p, const LaunchTarget& target) {
  Division d = division_of<kConfig>(p, target.multiprocessors, target.shared_bytes);
  carve<kConfig>(arena, p, d);
  static std::atomic<uint64_t> launches;
  // Odd, each once; spread out, so that no small number that lies there by chance is one.
  constexpr uint64_t kNonceBits = 64 - kCountBits;
  d.nonce = (2 * launches.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9E3779B97F4A7C15u &
            ((uint64_t{1} << kNonceBits) - 1);
  return d;
}

/// Launches the kernel that takes these parameters, all that there are. new_elements: of new keys.
template <CachedConfig kConfig, typename Params>
cudaError_t launch_kernel(const Params& p, Division& d, const LaunchTarget& target,
                          bool new_elements) {
  using Shape = DecodeShapeOf<kConfig>;
  const bool elements = !in_units(p.q, p.head_dim) || !in_units(p.k, p.head_dim) ||
                        !in_units(p.v, p.head_dim_v) || !in_units(p.out, p.head_dim_v);
  const bool general =
      p.softcap != 0.f || p.alibi_slopes || !(p.scale > 0.f) || p.cache.rule.attention_chunk > 0;
  const dim3 grid(static_cast<unsigned>(d.tracks), d.blocks.value);
  if (elements || new_elements) {
    ElementsParams<kConfig> own{};  // of parameters that only read, nothing new: null pointers
    static_cast<Params&>(own) = p;
    void* args[] = {&own, &d};
    return elements_handle<kConfig>().launch(grid, Shape::kThreads, args, target);
  }
  void* args[] = {const_cast<Params*>(&p), &d};
  return decode_handle<Shape, Params>(general).launch(grid, Shape::kThreads, args, target);
}

template <CachedConfig kConfig>
cudaError_t attend(const CachedParams& p, const LaunchTarget& target, bool elements) {
  Arena arena(p.workspace);
  Division d = prepare_division<kConfig>(arena, p, target);
  return launch_kernel<kConfig>(p, d, target, elements);
}

template <CachedConfig kConfig>
cudaError_t launch_cached(const CachedUpdateParams& p, const LaunchTarget& target,
                          const CachedInstance* /*for_few_queries*/) {
  Arena arena(p.workspace);
  Division d = prepare_division<kConfig>(arena, p, target);
  const CachedParams& reads_alone = p;
  if (!updates(p)) return launch_kernel<kConfig>(reads_alone, d, target, false);
  if constexpr (!updates_before(kConfig)) {
    return launch_kernel<kConfig>(p, d, target, new_elements(p));
  } else {
    const UpdateBefore<DecodeShapeOf<kConfig>> update(arena, p);
    STROBE_RETURN_IF_CUDA_ERROR(update.launch(target));
    return launch_kernel<kConfig>(update.attends(), d, target, false);
  }
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_DECODE_CACHED_SM80_LAUNCH_H_
