// Launches decode.cuh.
#ifndef STROBE_CUDA_DECODE_DECODE_SM80_LAUNCH_H_
#define STROBE_CUDA_DECODE_DECODE_SM80_LAUNCH_H_

#include <atomic>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/workspace.h"
#include "cuda/common/config.h"
#include "cuda/common/stagger.cuh"
#include "cuda/decode/decode.cuh"
#include "cuda/decode/update_kernel.cuh"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/launch_target.h"
#include "cuda/host/rows.h"

namespace strobe::cuda::sm80 {

template <DecodeConfig kC>
using DecodeShapeOf = DecodeShape<kC.dtype, kC.width, kC.tile_q, kC.tile_k, kC.stages, kC.warps>;

template <DecodeConfig kConfig>
constexpr LaunchShape decode_shape() {
  using Shape = DecodeShapeOf<kConfig>;
  return {Shape::kThreads, Shape::kSharedBytes};
}

/// How the keys are split: a function of shapes and the device. (`alike`, `nonce` and pointers
/// aside.)
template <DecodeConfig kConfig>
Division division_of(const DecodeParams& p, int64_t multiprocessors, int64_t shared_bytes) {
  using Shape = DecodeShapeOf<kConfig>;
  // Of a span, where its own number of units decides: enough to fill a large device with one
  // sequence of some heads, few enough that merging is no burden.
  constexpr int64_t kFewestChunks = 16, kMostChunks = 128, kBlocksToFill = 256;
  const int64_t blocks =
      blocks_at_once(multiprocessors, shared_bytes, Shape::kSharedBytes, Shape::kMinBlocks);
  Division d{};
  d.heads_per_column = static_cast<int32_t>(ceil_div(p.heads_kv, blocks));
  d.columns = static_cast<int32_t>(ceil_div(p.heads_kv, d.heads_per_column));
  const int64_t packed = int64_t{p.cache.seqlen_q} * p.group;  // rows of the longest sequence
  d.most_tiles = static_cast<int32_t>(max64(1, ceil_div(packed, Shape::kTileRows)));
  d.piece_rows = static_cast<int32_t>(min64(packed, Shape::kTileRows));
  const auto log2 = [](int32_t x) {
    int32_t shift = 0;
    while (1 << shift < x) ++shift;
    return shift;
  };
  static_assert((Shape::kTileRows & (Shape::kTileRows - 1)) == 0);
  static_assert((Shape::kUnit & (Shape::kUnit - 1)) == 0);
  d.rule = {p.group, log2(Shape::kTileRows), log2(Shape::kUnit), 0};
  if (p.batch_invariant) {
    const int64_t chunks = max64(kFewestChunks, min64(kMostChunks, kBlocksToFill / p.heads_kv));
    d.rule.most_chunks = static_cast<int32_t>(chunks);
  }
  const int64_t units =
      int64_t{p.cache.batch} * d.most_spans() * max64(1, ceil_div(p.cache.seqlen_k, Shape::kUnit));
  d.blocks = static_cast<int32_t>(max64(1, min64(blocks / d.columns, units)));
  d.group = Divisor(static_cast<uint32_t>(p.group));
  return d;
}

/// Carves a division's part of the workspace.
template <DecodeConfig kConfig>
void carve(Arena& arena, const DecodeParams& p, Division& d) {
  const int64_t slots = int64_t{d.columns} * d.slots_of_column(p.cache.batch);
  d.counters = arena.take<unsigned long long>(int64_t{d.columns} * p.cache.batch * d.most_spans());
  d.piece_sums = arena.take<float2>(slots * d.piece_rows);
  d.piece_o = arena.take<float>(slots * d.piece_rows * kConfig.width);
}

/// Rows of Q, of all heads.
inline int64_t query_rows(const DecodeParams& p) {
  return (p.packed_q ? 1 : p.cache.batch) * p.total_q * p.heads_kv * p.group;
}

/// The queries after the rotary embedding, where a kernel of its own turns them; else no data.
template <DecodeConfig kConfig>
Tensor carve_queries(Arena& arena, const DecodeParams& p) {
  Tensor t{};
  if (!turns_before(kConfig, p.cache.rotary_dim)) return t;
  t.head_stride = round_up(p.head_dim, 8);
  t.row_stride = t.head_stride * p.heads_kv * p.group;
  t.batch_stride = p.packed_q ? 0 : t.row_stride * p.total_q;
  t.data = arena.take<uint16_t>(query_rows(p) * t.head_stride);
  return t;
}

template <DecodeConfig kConfig>
DecodeGrid decode_carve(const DecodeParams& p, int64_t multiprocessors, int64_t shared_bytes) {
  Division d = division_of<kConfig>(p, multiprocessors, shared_bytes);
  const int64_t spans = int64_t{d.columns} * p.cache.batch * d.most_spans();
  const int64_t units = max64(1, ceil_div(p.cache.seqlen_k, DecodeShapeOf<kConfig>::kUnit));
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t blocks = int64_t{d.columns} * d.blocks;
  // Numbers of units, pieces and counters are of 32 bits.
  if (spans >= kMost / max64(units, max64(1, d.rule.most_chunks))) return {blocks, -1};
  Arena arena;
  carve<kConfig>(arena, p, d);
  carve_queries<kConfig>(arena, p);
  return {blocks, static_cast<int64_t>(arena.used())};
}

/// The kernels with these parameters: for plain scores without chunks, for all, and for tensors of
/// any alignment.
template <typename Shape, typename Params>
KernelHandle& decode_handle(bool rule, bool elements) {
  static_assert(sizeof(WithoutChunks<Params>) == sizeof(Params));  // a launch copies its bytes
  static KernelHandle kernels[] = {
      KernelHandle(
          reinterpret_cast<const void*>(&decode_kernel<Shape, false, false, WithoutChunks<Params>>),
          Shape::kSharedBytes),
      KernelHandle(reinterpret_cast<const void*>(&decode_kernel<Shape, true, false, Params>),
                   Shape::kSharedBytes),
      KernelHandle(reinterpret_cast<const void*>(&decode_kernel<Shape, true, true, Params>),
                   Shape::kSharedBytes)};
  return kernels[elements ? 2 : rule];
}

/// What runs first where decode_handle's kernels neither append nor turn.
template <typename Shape>
KernelHandle& update_handle(bool elements) {
  static KernelHandle kernels[] = {
      KernelHandle(reinterpret_cast<const void*>(&update_kernel<Shape, false>)),
      KernelHandle(reinterpret_cast<const void*>(&update_kernel<Shape, true>))};
  return kernels[elements];
}

template <DecodeConfig kConfig>
cudaError_t launch_decode(const DecodeUpdateParams& p, const LaunchTarget& target) {
  using Shape = DecodeShapeOf<kConfig>;
  Division d = division_of<kConfig>(p, target.multiprocessors, target.shared_bytes);
  Arena arena(p.workspace);
  carve<kConfig>(arena, p, d);
  const CachedSequences& c = p.cache;
  d.alike = !(c.cu_q || c.used_q || c.used_k || c.q_position || c.prefix || c.leftpad ||
              c.entries || c.cu_new || c.rotary_position);
  if (d.alike) d.units = d.rule.of(c.sequence(0).mask, d.heads_per_column);
  static std::atomic<uint64_t> launches;
  // Odd, each once; spread out, so that no small number that lies there by chance is one.
  constexpr uint64_t kNonceBits = 64 - kCountBits;
  d.nonce = (2 * launches.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9E3779B97F4A7C15u &
            ((uint64_t{1} << kNonceBits) - 1);
  const auto in_units = [](const Tensor& t, int32_t dim) {
    const auto address = reinterpret_cast<uintptr_t>(t.data);
    return address % 16 == 0 && ((t.batch_stride | t.row_stride | t.head_stride | dim) & 7) == 0;
  };
  const bool elements = !in_units(p.q, p.head_dim) || !in_units(p.k, p.head_dim) ||
                        !in_units(p.v, p.head_dim_v) || !in_units(p.out, p.head_dim_v);
  const bool rule =
      p.softcap != 0.f || p.alibi_slopes || !(p.scale > 0.f) || c.rule.attention_chunk > 0;
  const dim3 grid(static_cast<unsigned>(d.columns) * static_cast<unsigned>(d.blocks));
  const bool appends = c.rows_new > 0;
  const bool new_elements =
      appends && (!in_units(p.k_new, p.head_dim) || !in_units(p.v_new, p.head_dim_v));
  const DecodeParams* reads_alone = &p;
  [[maybe_unused]] DecodeParams of_turned;
  if (appends || c.rotary_dim > 0) {
    if constexpr (kConfig.width <= kWidestUpdate) {
      void* args[] = {const_cast<DecodeUpdateParams*>(&p), &d};
      return decode_handle<Shape, DecodeUpdateParams>(rule, elements || new_elements)
          .launch(grid, Shape::kThreads, args, target);
    } else {
      Tensor turned = carve_queries<kConfig>(arena, p);
      void* args[] = {const_cast<DecodeUpdateParams*>(&p), &turned};
      const int64_t new_rows = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
      const int64_t rows = max64(new_rows * p.heads_kv, turned.data ? query_rows(p) : 0);
      constexpr int64_t kBlocksEach =
          16;  // of a multiprocessor: this kernel waits for memory alone
      const int64_t most = max64(1, target.multiprocessors * kBlocksEach);
      const dim3 blocks(static_cast<unsigned>(min64(ceil_div(rows, Shape::kWarps), most)));
      if (rows > 0) {
        STROBE_RETURN_IF_CUDA_ERROR(update_handle<Shape>(elements || new_elements)
                                        .launch(blocks, Shape::kThreads, args, target));
      }
      if (turned.data) {
        of_turned = p;
        of_turned.q = turned;
        reads_alone = &of_turned;
      }
    }
  }
  void* args[] = {const_cast<DecodeParams*>(reads_alone), &d};
  return decode_handle<Shape, DecodeParams>(rule, elements)
      .launch(grid, Shape::kThreads, args, target);
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_DECODE_DECODE_SM80_LAUNCH_H_
