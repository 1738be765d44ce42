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
#include "cuda/host/launch_time.h"
#include "cuda/host/merge_pieces.h"
#include "cuda/host/quantised_update.h"
#include "cuda/host/unite_lists.h"

namespace strobe::cuda::sm80 {

template <CachedConfig kC>
using DecodeShapeOf =
    DecodeShape<kC.dtype, kC.width, kC.tile_q, kC.tile_k, kC.stages, kC.warps, kC.kv_dtype>;

template <CachedConfig kConfig, Features kComputes>
constexpr LaunchShape cached_shape() {
  using Shape = DecodeShapeOf<kConfig>;
  return {Shape::kThreads, Shape::kSharedBytes};
}

/// Thread blocks that each span has for itself, where all spans are alike; 0: shares begin
/// anywhere. A thread block then never ends one span and begins another, for which its share may be
/// larger by what it would read in that time.
template <typename Shape>
int64_t blocks_of_span(const CachedParams& p, const Division& d) {
  constexpr int64_t kMostBytes = 160 << 10;
  constexpr int64_t kMostBytesOfTwo = 28 << 10;  // where a multiprocessor has two thread blocks
  if (kWalksAreLists || !p.sequences_alike || d.cut.chunked()) return 0;
  const int64_t blocks = d.blocks.value, spans = int64_t{p.cache.batch} * d.most_spans();
  if (spans == 0 || blocks < spans) return 0;
  const int64_t units = max64(1, ceil_div(p.cache.seqlen_k, Shape::kUnit)), own = blocks / spans;
  const int64_t more = ceil_div(units, own) - ceil_div(units * spans, blocks);
  const int64_t bytes = more * Shape::kUnit * 2 * (p.head_dim + p.head_dim_v);
  return bytes <= (Shape::kMinBlocks > 1 ? kMostBytesOfTwo : kMostBytes) ? own : 0;
}

/// How the keys are split, which depends on shapes and the device alone. (The nonce and the
/// pointers are set later.)
template <CachedConfig kConfig>
Division division_of(const CachedParams& p, int64_t multiprocessors, int64_t shared_bytes) {
  using Shape = DecodeShapeOf<kConfig>;
  static_assert(kChunkKeys % Shape::kUnit == 0);
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
  d.cut = {p.group, log2(Shape::kTileRows), log2(Shape::kUnit), 0, 0, 0};
  const int64_t spans = int64_t{p.cache.batch} * d.most_spans();
  const int64_t units = spans * max64(1, ceil_div(p.cache.seqlen_k, Shape::kUnit));
  d.blocks = Divisor(static_cast<uint32_t>(max64(1, min64(blocks / d.tracks, units))));
  if (p.batch_invariant) {
    const int64_t chunks = max64(1, ceil_div(p.cache.seqlen_k, kChunkKeys));
    d.cut.most_chunks = static_cast<int32_t>(chunks);
    d.cut.chunk_shift = log2(kChunkKeys / Shape::kUnit);
    // Bits do not depend on who has which chunks. Shares of whole spans need no place for chunks
    // and merge nothing; but those of long and short sequences differ, so that they are for where
    // there are many, as of prompts, or where the others would take too much memory.
    constexpr int64_t kTilesOfPrompt = 4, kMostBytes = 128 << 20;
    constexpr int64_t kMostCounted = (int64_t{1} << kCountBits) - 1;
    const int64_t bytes = d.tracks * spans * chunks * d.piece_rows * (4 * kConfig.width + 8);
    const bool many = d.most_tiles >= kTilesOfPrompt || bytes > kMostBytes;
    d.cut.whole_spans = chunks > kMostCounted || (spans >= d.blocks.value && many);
  }
  d.group = Divisor(static_cast<uint32_t>(p.group));
  d.of_span = Divisor(static_cast<uint32_t>(blocks_of_span<Shape>(p, d)));
  return d;
}

/// Whether a kernel of its own merges the pieces. Not those of few rows over a cache, whose lengths
/// the device alone knows: short ones have few pieces; nor where a cache's spans are many, of which
/// few are cut, and each of which the second kernel would look at. Nor those of kernels that may
/// update a cache.
template <CachedConfig kConfig, Features kComputes>
bool merges_apart(const CachedParams& p, const Division& d) {
  using Shape = DecodeShapeOf<kConfig>;
  const bool has_cache = !p.cache.cuts_lengths;
  constexpr Features kNever = features::kUpdates | features::kMask;
  constexpr int32_t kFewRows = 16, kManySpans = 4;  // a thread block
  if (kComputes.has(kNever) || d.cut.chunked()) return false;
  const int64_t keys = has_cache    ? p.cache.seqlen_k
                       : p.packed_q ? ceil_div(p.total_k, max64(1, p.cache.batch))
                                    : p.total_k;
  const int64_t units = max64(1, ceil_div(keys, Shape::kUnit));
  const int64_t spans = int64_t{p.cache.batch} * d.most_spans();
  if (has_cache && (d.piece_rows <= kFewRows || spans > kManySpans * int64_t{d.blocks.value}))
    return false;
  const int64_t pieces =
      pieces_of_span(units, ceil_div(spans * units, d.blocks.value), d.of_span.value);
  return merging_time(kConfig, d.piece_rows, pieces, true) <
         merging_time(kConfig, d.piece_rows, pieces, false);
}

/// Carves a division's part of the workspace.
template <CachedConfig kConfig, Features kComputes>
void carve(Arena& arena, const CachedParams& p, Division& d) {
  const int64_t slots = int64_t{d.tracks} * d.slots_of_track(p.cache.batch);
  const int64_t spans = int64_t{d.tracks} * p.cache.batch * d.most_spans();
  if (merges_apart<kConfig, kComputes>(p, d)) {
    d.open_spans = arena.take<OpenSpan>(spans);
  } else {
    d.counters = arena.take<unsigned long long>(spans);
  }
  d.piece_sums = arena.take<float2>(slots * d.piece_rows);
  d.piece_o = arena.take<float>(slots * d.piece_rows * kConfig.width);
}

template <CachedConfig kConfig, Features kComputes, bool kUpdatesBefore>
CachedGrid cached_carve(const CachedParams& p, int64_t multiprocessors, int64_t shared_bytes) {
  Division d = division_of<kConfig>(p, multiprocessors, shared_bytes);
  const int64_t spans = int64_t{d.tracks} * p.cache.batch * d.most_spans();
  const int64_t units = max64(1, ceil_div(p.cache.seqlen_k, DecodeShapeOf<kConfig>::kUnit));
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t blocks = d.blocks.value;
  // Numbers of units, pieces and counters are of 32 bits.
  CachedGrid grid{d.tracks,
                  blocks,
                  -1,
                  DecodeShapeOf<kConfig>::kUnit,
                  d.cut.most_chunks,
                  static_cast<int64_t>(d.of_span.value),
                  merges_apart<kConfig, kComputes>(p, d)};
  if (spans >= kMost / max64(units, max64(1, d.cut.most_chunks))) return grid;
  Arena arena;
  carve<kConfig, kComputes>(arena, p, d);
  if (kComputes.has(features::kMask)) carve_lists(arena, p);
  if (kUpdatesBefore && p.cache.rotary_dim > 0) carve_queries(arena, p);
  grid.workspace_bytes = static_cast<int64_t>(arena.used());
  return grid;
}

/// The kernel of an instance, and its parameters: those that only read, or also what is done to the
/// cache, or the lists of a mask. A kernel for plain scores has no attention chunks.
template <CachedConfig kConfig, Features kComputes>
struct DecodeKernel {
  using Shape = DecodeShapeOf<kConfig>;
  static constexpr bool kMask = kComputes.has(features::kMask);
  using Params =
      std::conditional_t<Shape::kQuantised, QuantisedParams,
                         std::conditional_t<kMask, MaskedParams,
                                            std::conditional_t<kComputes.has(features::kUpdates),
                                                               CachedUpdateParams, CachedParams>>>;
  static_assert(!(Shape::kQuantised || kMask) || !kComputes.has(features::kUpdates));
  static_assert(!(Shape::kQuantised && kMask));
  static constexpr bool kRule = kComputes.has(features::kScores);
  static constexpr bool kElements = kComputes.has(features::kAnyRows);
  static_assert(kRule == kComputes.has(features::kChunks));
  using OfKernel =
      std::conditional_t<kComputes.has(features::kChunks), Params, WithoutChunks<Params>>;
  static_assert(sizeof(WithoutChunks<Params>) == sizeof(Params));  // a launch copies its bytes

  static_assert(!kMask || (kRule && kElements));
  template <typename AnyDivision>
  static constexpr auto kFunction = &decode_kernel<Shape, kRule, kElements, OfKernel, AnyDivision>;
};

/// A number that no other launch of the process has, of whichever instance: what one of them has
/// left in a workspace is not taken for another's. Odd, and spread out, so that no small number
/// that lies there by chance is one.
inline uint64_t next_nonce() {
  static std::atomic<uint64_t> launches;
  constexpr uint64_t kNonceBits = 64 - kCountBits;
  return (2 * launches.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9E3779B97F4A7C15u &
         ((uint64_t{1} << kNonceBits) - 1);
}

/// What a launch needs to know besides its parameters. arena: at the launch's part of the
/// workspace, and then past it.
template <CachedConfig kConfig, Features kComputes>
Division prepare_division(Arena& arena, const CachedParams& p, const LaunchTarget& target) {
  Division d = division_of<kConfig>(p, target.multiprocessors, target.shared_bytes);
  carve<kConfig, kComputes>(arena, p, d);
  d.nonce = next_nonce();
  return d;
}

/// Launches the main kernel, and the one that merges what it leaves. Of parameters that only read,
/// to a kernel that could do more: null pointers are what it has nothing to do for.
template <CachedConfig kConfig, Features kComputes, typename Params>
cudaError_t launch_kernel(const Params& p, Division& d, const LaunchTarget& target) {
  using Kernel = DecodeKernel<kConfig, kComputes>;
  const dim3 grid(static_cast<unsigned>(d.tracks), d.blocks.value);
  const auto launch_with = [&](const typename Kernel::Params& own, auto division) {
    constexpr auto kFunction = Kernel::template kFunction<decltype(division)>;
    static KernelHandle kernel(reinterpret_cast<const void*>(kFunction),
                               Kernel::Shape::kSharedBytes);
    static_cast<Division&>(division) = d;
    void* args[] = {const_cast<typename Kernel::Params*>(&own), &division};
    return kernel.launch(grid, Kernel::Shape::kThreads, args, target);
  };
  const auto launch = [&](const typename Kernel::Params& own) {
    if (d.cut.chunked()) {
      if constexpr (has_chunked_kernels(kConfig) && !Kernel::kMask)
        return launch_with(own, ChunkedDivision{});
      return cudaErrorInvalidValue;  // no plan takes such an instance
    }
    STROBE_RETURN_IF_CUDA_ERROR(launch_with(own, Division{}));
    if (!d.open_spans) return cudaSuccess;
    if constexpr (!Kernel::Shape::kQuantised)
      return launch_merge_pieces(own, d, kConfig, kComputes, target);
    return cudaErrorInvalidValue;  // tiles of quantised keys have few rows
  };
  if constexpr (std::is_base_of_v<typename Kernel::Params, Params>) {
    const typename Kernel::Params& own = p;
    return launch(own);
  } else {
    typename Kernel::Params own{};
    static_cast<Params&>(own) = p;
    return launch(own);
  }
}

template <CachedConfig kConfig, Features kComputes, bool kUpdatesBefore>
cudaError_t attend(const CachedParams& p, const LaunchTarget& target) {
  if constexpr (DecodeShapeOf<kConfig>::kQuantised || kComputes.has(features::kMask)) {
    return cudaErrorInvalidValue;  // no other instance goes before one for these keys
  } else {
    Arena arena(p.workspace);
    Division d = prepare_division<kConfig, kComputes>(arena, p, target);
    return launch_kernel<kConfig, kComputes>(p, d, target);
  }
}

/// Whether the rows of a quantised cache are made of the units that kernels of this shape copy.
template <typename Shape>
bool in_copied_units(const CachedLaunchParams& p) {
  const auto bits = [](const Tensor& t, int32_t bytes) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(t.data)) | t.batch_stride |
           t.row_stride | t.head_stride | bytes;
  };
  return ((bits(p.k, p.quantised.k_bytes) | bits(p.v, p.quantised.v_bytes)) &
          (Shape::Codes::kUnit - 1)) == 0;
}

template <CachedConfig kConfig, Features kComputes, bool kUpdatesBefore>
cudaError_t launch_cached(const CachedLaunchParams& p, const LaunchTarget& target,
                          const CachedInstance* /*for_few_queries*/) {
  Arena arena(p.workspace);
  Division d = prepare_division<kConfig, kComputes>(arena, p, target);
  if constexpr (DecodeShapeOf<kConfig>::kQuantised) {
    static_assert(kUpdatesBefore);
    Tensor rotated{};
    if (p.cache.rotary_dim > 0) rotated = carve_queries(arena, p);
    const int64_t rotated_rows = rotated.data ? query_rows(p) : 0;
    STROBE_RETURN_IF_CUDA_ERROR(
        launch_quantised_update(p, rotated, rotated_rows, kConfig.dtype, target));
    QuantisedParams attends{};
    static_cast<CachedParams&>(attends) = p;
    attends.quantised = p.quantised;
    attends.quantised.in_units = in_copied_units<DecodeShapeOf<kConfig>>(p);
    if (rotated.data) attends.q = rotated;
    return launch_kernel<kConfig, kComputes>(attends, d, target);
  } else if constexpr (kComputes.has(features::kMask)) {
    static_assert(kUpdatesBefore);
    MaskedParams attends{};
    attends.span_lists = carve_lists(arena, p);
    const UpdateBefore<DecodeShapeOf<kConfig>> update(arena, p);
    STROBE_RETURN_IF_CUDA_ERROR(update.launch(target));
    STROBE_RETURN_IF_CUDA_ERROR(launch_unite_lists(p, attends.span_lists, target));
    static_cast<CachedParams&>(attends) = update.attends();
    attends.span_lists.in_units =
        in_units(p.k, p.head_dim) && in_units(p.v, p.head_dim_v) && in_units(p.out, p.head_dim_v);
    return launch_kernel<kConfig, kComputes>(attends, d, target);
  } else if constexpr (kUpdatesBefore) {
    const UpdateBefore<DecodeShapeOf<kConfig>> update(arena, p);
    STROBE_RETURN_IF_CUDA_ERROR(update.launch(target));
    return launch_kernel<kConfig, kComputes>(update.attends(), d, target);
  } else {
    return launch_kernel<kConfig, kComputes>(p, d, target);
  }
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_DECODE_CACHED_SM80_LAUNCH_H_
