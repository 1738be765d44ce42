// FlashAttention-2's forward pass through mma.sync (arXiv:2307.08691, algorithm 1): compute
// capability 8.0 and newer.
//
//   thread block   kTileQ queries of one head; keys visited in ascending blocks of kTileK
//   warp           kRows of the queries, all keys: no reduction between warps. From head dimension
//                  192 on, where O of 32 rows is too much for a warp, two warps share the rows:
//                  each takes half of a step's keys for S and every other 16 columns of O, and they
//                  hand each other their weights through shared memory. (16 rows a warp instead
//                  would read K and V from shared memory at twice the rate, which then is the
//                  limit.)
//   registers      O (float32), row sums and references; Q as far as it fits beside them
//   shared memory  ring of two stages x (K tile, V tile), 16-bit, swizzled (tile.cuh)
//                  Q tile: in the ring's last stage until it is in registers, else of its own
//                  weights that two warps exchange
//                  limits: the keys that each row sees; TileInfo, TeamWalk: what a block's steps
//                  and the end need to know, kept here because registers are short
//   barriers       0: one __syncthreads per key block: its data has landed for all threads, and the
//                  stage of the block before is free for the copy of the next
//                  1 + team: two warps that share rows, once a step, for the exchange
//
// A block is worked off in steps of kStep keys, each in one of three ways (StepKind). kOnline is
// the textbook's: running maximum, rescaled O. It takes a warp's first steps, until every row has
// seen a key. Softmax does not change when what is subtracted is not the maximum, so from then on
// the maximum found so far stays as the row's reference, and kFull has nothing to compare, reduce
// or rescale: an FFMA, an EX2, an FADD and half a conversion per score; kMasked also looks at the
// row's limits. The true maximum is at least the reference, hence nothing that matters underflows.
// Overflow, when a later score exceeds the reference by more than the exponent has room for, is
// sticky: it leaves an inf or NaN in O or in the sum. That is looked at once, at the end, and the
// tile is then done again with kOnline alone. The second attempt also settles V's own infs and
// NaNs, which must not reach rows that do not see them (0 * inf in a masked step): there it works
// with zeros in their place and adds them to the rows that do see them at the end. Rows of O that
// are not finite before that, or whose scores were too large (is_coarse), are computed one by one
// (forward_pairwise.cuh), and so are those that it makes infinite: a weight may be 0, which times
// an infinity is NaN. (What a NaN is multiplied with does not matter: so that many of them cost
// little.)
//
// Two kernels per row of kernels.def: the plain one, and the general one, which knows softcap,
// ALiBi, dropout, scales that are not positive, and tensors not made of whole 16-byte units. Some
// rows have a third, the general one with what is data and of each pair (kBias): an additive bias
// (bias.cuh) and a mask (mask_visits.cuh), both read from global memory into the layout of the
// scores, the mask's bits a step's 32 keys at once. A row whose weights sum to 0 there is looked at
// pair by pair: all that the rule shows may be hidden.
#ifndef STROBE_CUDA_MMA_SYNC_FORWARD_SM80_CUH_
#define STROBE_CUDA_MMA_SYNC_FORWARD_SM80_CUH_

#include "cuda/common/config.h"
#include "cuda/common/hidden_pairs.cuh"
#include "cuda/common/load.cuh"
#include "cuda/common/mask_visits.cuh"
#include "cuda/common/params.h"
#include "cuda/common/rows_past_end.cuh"
#include "cuda/common/stagger.cuh"
#include "cuda/common/static_order.cuh"
#include "cuda/common/tile_mask.h"
#include "cuda/common/walks.h"
#include "cuda/mma_sync/forward_warp.cuh"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/opaque.h"
#include "cuda/ptx/thread_again.h"

namespace strobe::cuda::sm80 {

/// What a configuration leaves open, and was settled by measurement (docs/log/2026-11.md).
struct ForwardTuning {
  int step;        // keys whose scores are in registers at once
  int kept;        // k-steps (16 columns) of Q whose fragments stay in registers
  int split;       // warps that share rows: 1 or 2
  int min_blocks;  // per multiprocessor: bounds the registers
};

STROBE_INLINE constexpr ForwardTuning forward_tuning(const ForwardConfig& c) {
  const int step = c.tile_k < 64 ? c.tile_k : 64;
  if (c.width > 128) return {step, 0, c.tile_q / c.warps == 16 && c.warps == 8 ? 2 : 1, 1};
  if (c.width > 64) return {32, 0, 1, 2};
  // Short tiles of keys are for short sequences, where a third block on a multiprocessor covers for
  // the others' beginnings and ends.
  return c.tile_k > 64 ? ForwardTuning{64, 4, 1, 2} : ForwardTuning{32, 0, 1, 3};
}

/// The general kernel's: softcap, ALiBi and dropout want registers too.
STROBE_INLINE constexpr ForwardTuning general_tuning(const ForwardConfig& c) {
  ForwardTuning t = forward_tuning(c);
  if (t.split == 1 && t.step > 32) t.step = 32;
  if (t.min_blocks > 2) t.min_blocks = 2;
  return t;
}

/// The kernel's with a bias, whose values want registers as well.
STROBE_INLINE constexpr ForwardTuning bias_tuning(const ForwardConfig& c) {
  ForwardTuning t = general_tuning(c);
  t.min_blocks = 1;
  return t;
}

/// Adds V's infs and NaNs to the tile's rows of the output that see them: what the second attempt's
/// loop has left out. Where a row becomes infinite, its weights have still to be looked at. One
/// thread per column.
template <typename Shape, bool kBias>
__device__ __forceinline__ void add_nonfinite(const ForwardParams& p, const TileInfo& tile) {
  using T = typename Shape::T;
  const Sequence sequence = p.sequence(tile.batch, tile.head);
  const Mask& mask = sequence.mask;
  const RowsView v = tile.v;
  const Range queries{tile.begin, min64(tile.begin + Shape::kTileQ, mask.seqlen_q)};
  const RowWalk keys = keys_one_by_one(WalkLists::of(p, tile.batch, tile.head), mask, queries);
  const HiddenPairs hidden = kBias ? HiddenPairs::of(p, sequence, tile.head) : HiddenPairs{};
  for (int column = threadIdx.x; column < v.dim; column += Shape::kThreads) {
    Range done{0, 0};  // rows that are NaN already
    for (int64_t place = keys.begin; place < keys.end; ++place) {
      const int64_t key = keys.block(place);
      const T value = *reinterpret_cast<const T*>(v.row(key) + 2 * column);
      if (isfinite(static_cast<float>(value))) continue;
      const Range rows = intersect(mask.q_range({key, key + 1}), queries);
      for (int64_t row = rows.begin; row < rows.end; ++row) {
        // The rows between two that are NaN may be none where pairs are hidden.
        if (!kBias && done.contains(row)) {
          row = done.end - 1;
          continue;
        }
        if (kBias && hidden.hides(static_cast<int32_t>(row), static_cast<int32_t>(key))) continue;
        const OutRow<T> out{tile.out.row(row), p.writes_float()};
        out.put(column, out[column] + static_cast<float>(value));
      }
      if (isnan(static_cast<float>(value)) && !rows.empty()) {
        const bool joined = rows.begin <= done.end && done.begin <= rows.end;
        done = joined ? Range{min64(rows.begin, done.begin), max64(rows.end, done.end)} : rows;
      }
    }
  }
}

/// Copies a block's rows of K or V, kRowsAtOnce at a time. source: this thread's place in the first
/// of them. rows, columns: that there are from there on.
template <typename Shape, bool kAllRowsExist>
__device__ __forceinline__ void copy_block(uint32_t to, RowsView::Walk source, int rows,
                                           int columns) {
  using KTile = typename Shape::KTile;
  constexpr int kRowsAtOnce = Shape::kThreads / KTile::kChunks;
  static_assert(Shape::kTileK % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
#pragma unroll
  for (int i = 0; i < Shape::kTileK; i += kRowsAtOnce) {
#pragma unroll
    for (int panel = 0; panel < KTile::kPanels; ++panel) {
      ptx::cp_async_16_if(
          to + static_cast<uint32_t>(panel * KTile::kPanelBytes + i * KTile::kRowBytes),
          source.row + panel * KTile::kRowBytes,
          (kAllRowsExist || i < rows) && panel * KTile::kPanel < columns);
    }
    source.next();
  }
}

template <typename Shape, bool kGeneral, bool kBias>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kMinBlocks)
    forward_kernel(const __grid_constant__ ForwardParams p, const StaticOrder order,
                   const Stagger stagger) {
  using T = typename Shape::T;
  using KTile = typename Shape::KTile;
  using Visits = typename Shape::Visits;
  constexpr int kTileQ = Shape::kTileQ, kTileK = Shape::kTileK, kThreads = Shape::kThreads;

  extern __shared__ __align__(1024) char shared_bytes[];
  const uint32_t ring = ptx::shared_address(shared_bytes);
  const int thread = threadIdx.x;
  auto* const limits = reinterpret_cast<int2*>(shared_bytes + Shape::kLimitsOffset);
  auto* const team_walks = reinterpret_cast<TeamWalk*>(shared_bytes + Shape::kTeamWalksOffset);
  auto* const info = reinterpret_cast<TileInfo*>(shared_bytes + Shape::kInfoOffset);
  constexpr bool kMayBeMasked = kBias && !kWalksAreLists;
  auto* const visits = reinterpret_cast<Visits*>(shared_bytes + Shape::kVisitsOffset);
  const auto is_masked = [&] { return kMayBeMasked && p.mask != nullptr; };
  // Goes through the mask's lists, since warp 0 works out the teams' keys meanwhile.
  const auto finds_visits = [&] { return ptx::thread_again() == kThreads - 1; };
  const int64_t index = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  if (index >= order.items) return;
  stagger.wait(index);

  static_assert(kGeneral || !kBias);
  Warp<Shape, kGeneral, kBias> w{p, *info, limits, ring};
  w.stand_at(thread);

  // --- Copies: this thread's part of a block of K and V ---
  const auto copy_next = [&](uint32_t stage, int32_t block, const RowsView& k, const RowsView& v) {
    if constexpr (kGeneral) {
      load_tile<kTileK, Shape::kWidth, kThreads>(stage, k, block * kTileK, k.aligned(), thread);
      load_tile<kTileK, Shape::kWidth, kThreads>(stage + KTile::kBytes, v, block * kTileK,
                                                 v.aligned(), thread);
    } else {
      // Addresses are computed anew for each block: that costs little here, and to keep them would
      // cost registers.
      const int self = ptx::thread_again();
      const int chunk = self % KTile::kChunks, first_row = self / KTile::kChunks;
      constexpr int kRowsAtOnce = kThreads / KTile::kChunks;
      const auto walk = [&](const RowsView& view, const Tensor& t) {
        const RowsView rows{view.data, 2 * t.row_stride, view.rows, view.dim};
        RowsView::Walk source = rows.from(int64_t{block} * kTileK + first_row, kRowsAtOnce);
        source.row += 16 * chunk;
        return source;
      };
      const RowsView::Walk k_source = walk(k, p.k), v_source = walk(v, p.v);
      const uint32_t k_to = stage + static_cast<uint32_t>(KTile::offset(first_row, 8 * chunk));
      const uint32_t v_to = k_to + KTile::kBytes;
      const int k_columns = p.head_dim - 8 * chunk, v_columns = p.head_dim_v - 8 * chunk;
      const int32_t left = k.rows - block * kTileK;
      if (left >= kTileK) {
        copy_block<Shape, true>(k_to, k_source, 0, k_columns);
        copy_block<Shape, true>(v_to, v_source, 0, v_columns);
      } else {
        copy_block<Shape, false>(k_to, k_source, left - first_row, k_columns);
        copy_block<Shape, false>(v_to, v_source, left - first_row, v_columns);
      }
    }
    ptx::cp_async_commit();
  };

  // --- Which queries, which keys they see; Q and the first block on their way ---
  {
    const WorkItem item = order.item(index);
    const Sequence sequence = p.sequence(item.batch, item.head);
    const auto seqlen_q = static_cast<int32_t>(sequence.mask.seqlen_q);
    const auto seqlen_k = static_cast<int32_t>(sequence.mask.seqlen_k);
    const int32_t begin = item.tile * kTileQ;
    if (p.cu_q && item.batch == p.batch - 1) {  // the last sequence's thread blocks
      constexpr int kWarps = kThreads / 32;
      const int64_t block = int64_t{item.tile} * p.heads + item.head;
      clear_past_end(p, {block * kWarps + thread / 32, int64_t{order.tiles} * p.heads * kWarps});
    }
    if (begin >= seqlen_q) return;  // a shorter sequence than the longest
    const TileMask mask = sequence.mask.tile(begin, kTileQ);
    const RowsView q = rows_view(p.q, item.batch, sequence.q_row, item.head, seqlen_q, p.head_dim);
    load_tile<kTileQ, Shape::kWidth, kThreads>(ring + Shape::kQOffset, q, begin,
                                               kGeneral ? q.aligned() : true, thread);
    ptx::cp_async_commit();
    const auto head_kv =
        static_cast<int32_t>(order.kv_group.divide(static_cast<uint32_t>(item.head)));
    const RowsView k = rows_view(p.k, item.batch, sequence.k_row, head_kv, seqlen_k, p.head_dim);
    const RowsView v = rows_view(p.v, item.batch, sequence.k_row, head_kv, seqlen_k, p.head_dim_v);
    // What some of the rows from `first` on see, in blocks of `size` keys.
    // (Without a mask its arithmetic is left out: it would take a tenth of the time of a block of
    // few keys.)
    const bool limited = !p.rule.hides_nothing();
    const Range all{0, seqlen_k};
    const auto walk = [&](int32_t first, int32_t count, int32_t size) {
      const Range rows{min(first, mask.seqlen_q), min(first + count, mask.seqlen_q)};
      using Walk = IntervalWalk<int32_t>;
      if (limited) return key_walk(mask, rows, size);
      return rows.empty() ? Walk{} : Walk::of(all, all, size);
    };
    WalkOf<int32_t> blocks;
    if constexpr (kWalksAreLists) {
      blocks = key_walk(WalkLists::of(p, item.batch, item.head, begin), mask,
                        Range{0, min(kTileQ, mask.seqlen_q)}, int64_t{kTileK});
    } else {
      blocks = walk(0, kTileQ, kTileK);
    }
    if (is_masked()) {
      if (thread == kThreads - 1) {
        visits->start(p.head_mask(sequence, item.head), begin, seqlen_q, blocks.begin, blocks.end);
      }
      __syncthreads();
      blocks.begin = visits->visits[0].block;
    }
    const bool some_block = !blocks.empty();
    const auto write_info = [&] {
      if (thread != kThreads - 1) return;  // warp 0 works out the teams' keys meanwhile
      *info = {k,
               v,
               rows_view(p.out, item.batch, sequence.q_row, item.head, seqlen_q, p.head_dim_v,
                         2 * p.out_words()),
               p.lse ? p.lse + sequence.lse_row + item.head * p.lse_head_stride + begin : nullptr,
               item.batch,
               item.head,
               begin,
               blocks.blocks(),
               mask.position(0),
               kGeneral ? alibi_slope_log2(p, item.batch, item.head) : 0.f,
               0,
               kGeneral ? p.dropout.batch_head(item.batch, item.head) : 0};
    };
    if (some_block) copy_next(ring, blocks.block(blocks.begin), k, v);
    write_info();
    if (thread < Shape::kTeams) {
      const IntervalWalk<int32_t> steps = walk(thread * Shape::kRows, Shape::kRows, Shape::kStep);
      team_walks[thread] = {steps.in_rows(Shape::kStep)};
    }
    // Rows past the end take the limits of the last row, so that no block is masked because of
    // them. Nothing of them is written.
    for (int i = thread; i < kTileQ; i += kThreads) {
      Range keys = limited ? mask.row(min(i, mask.seqlen_q - 1)) : all;
      if constexpr (kWalksAreLists) {
        if (!blocks.meets(keys, kTileK)) keys = Range{0, 0};
      }
      limits[i] = make_int2(static_cast<int>(keys.begin), static_cast<int>(keys.end));
    }
    if constexpr (Shape::kKept > 0) {
      if (some_block) ptx::cp_async_wait<1>();
    }
  }
  __syncthreads();
  // Under a mask as data the loop goes from visit to visit, and a place is one in shared memory.
  const auto block_at = [&](int32_t place) {
    return is_masked() ? visits->visits[place].block : info->walk.block(place);
  };
  const auto is_there = [&](int32_t place) {
    return (is_masked() ? visits->visits[place].block : place) < info->walk.end;
  };
  const auto after = [&](int32_t place) { return is_masked() ? Visits::after(place) : place + 1; };
  int32_t place = is_masked() ? 0 : info->walk.begin;
  if constexpr (Shape::kKept > 0) {
    if (is_there(place)) w.keep_q();
  }

  // --- Loop over the walk's places; a second attempt where the first one overflowed ---
  bool careful = false;
  // Whether the loop's next turn computes. The second attempt begins with one that does not: it
  // only has the first block copied again.
  bool computes = true;
  uint32_t stage = ring;
  for (;;) {
    w.clear();
    bool have_references = false;
#pragma unroll 1
    for (; is_there(place); place = after(place)) {
      const uint32_t next = 2 * ring + Shape::kStageBytes - stage;
      if (computes) {
        ptx::cp_async_wait<0>();
        __syncthreads();
      }
      if (const int32_t next_place = after(place); is_there(next_place)) {
        copy_next(next, block_at(next_place), info->k, info->v);
        if constexpr (kBias) {
          if (p.bias.data) w.prefetch_bias(block_at(next_place) * kTileK);
        }
      }
      if (!computes) {
        computes = true;
        stage = next;
        continue;
      }
      if (is_masked() && finds_visits()) {
        visits->find_after(Visits::after(place));
      }
      if (careful) {
        bool found = false;
        auto* const values =
            reinterpret_cast<uint16_t*>(shared_bytes + (stage - ring) + KTile::kBytes);
#pragma unroll 1
        for (int i = thread; i < KTile::kBytes / 2; i += kThreads) {
          constexpr uint16_t kExponent = std::is_same_v<T, __half> ? 0x7c00 : 0x7f80;
          if ((values[i] & kExponent) == kExponent) values[i] = 0, found = true;
        }
        if (__syncthreads_or(found) && ptx::thread_again() == 0) info->v_nonfinite = 1;
      }
      int team = w.team;
#if __CUDA_ARCH__ < 900  // from the rows, which the loop needs anyhow: ptxas would spill it
      team = ptx::opaque(team * Shape::kRows) / Shape::kRows;
#endif
      const TeamWalk steps = team_walks[team];
      uint32_t k_rows = stage;
      const int32_t block = block_at(place), key_end = (block + 1) * kTileK;
#pragma unroll 1
      for (int32_t key = block * kTileK; key < key_end; key += Shape::kStep) {
        const uint32_t v_rows = k_rows + KTile::kBytes;
        int32_t listed = MaskVisit::kFull;
        if (is_masked()) listed = visits->part(place, w.team * Shape::kRows, key);
        const bool all = steps.is_full(key) && listed == MaskVisit::kFull;
        // (!steps.has(key) says the same, and costs ptxas the registers that there are not.)
        if (key >= steps.end || key + Shape::kStep <= steps.begin || listed == MaskVisit::kHidden) {
        } else if (!have_references) {
          w.template step<StepKind::kOnline>(k_rows, v_rows, key, all, listed);
          have_references = !careful && w.have_references();
        } else if (all) {
          w.template step<StepKind::kFull>(k_rows, v_rows, key, true, listed);
        } else {
          w.template step<StepKind::kMasked>(k_rows, v_rows, key, false, listed);
        }
        k_rows += Shape::kStep * KTile::kRowBytes;
      }
      stage = next;
    }
    w.sum_lanes();
    // Where there was no block, the copy of Q may still be under way, and a thread must not end
    // before its copies have.
    ptx::cp_async_wait<0>();
    if (!__syncthreads_or(!careful && !w.all_finite())) break;
    careful = true, computes = false;
    place = info->walk.begin - 1;
    stage = ring + Shape::kStageBytes;
    if (is_masked()) {
      place = Visits::kBeforeFirst;
      if (finds_visits()) visits->restart();
      __syncthreads();
    }
  }

  // --- O / sum and lse ---
  w.stand_at(ptx::thread_again());  // anew: ptxas would spill it around the loop
  const int rows_from = w.team * Shape::kRows;
  float* const lse = info->lse ? info->lse + rows_from : nullptr;
  bool suspect = p.writes_float()
                     ? w.template finish<float>(info->out, info->begin + rows_from, lse)
                     : w.template finish<T>(info->out, info->begin + rows_from, lse);
#pragma unroll 1
  for (Suspects which = Suspects::kNotFinite;; which = Suspects::kInfinite) {
    if (__syncthreads_or(suspect)) {
      pairwise_rows<T, kGeneral, false, kBias, Shape::kScaled>(
          p, {-1, info->batch, info->head, info->begin}, static_cast<int>(threadIdx.x / 32),
          kThreads / 32, kTileQ, which);
    }
    if (!info->v_nonfinite || which == Suspects::kInfinite) break;
    __syncthreads();
    add_nonfinite<Shape, kBias>(p, *info);
    suspect = true;
  }
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_FORWARD_SM80_CUH_
