// The products of the backward pass through mma.sync, each a warp's part: S^T = K Q^T and
// dP^T = V dO^T (scores), dV += P^T dO and dK += dS^T Q (accumulate), dQ = dS K (multiply_dq).
// Where an operand may hold an infinity or a NaN under a mask, accumulate and multiply_dq touch
// pairs that the mask allows alone (multiply_seen).
#ifndef STROBE_CUDA_MMA_SYNC_BACKWARD_PRODUCTS_CUH_
#define STROBE_CUDA_MMA_SYNC_BACKWARD_PRODUCTS_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/backward/math.cuh"
#include "cuda/backward/seen_queries.cuh"
#include "cuda/common/bias.cuh"
#include "cuda/common/tile_mask.h"
#include "cuda/mma_sync/backward_thread.cuh"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda::sm80 {

/// acc = A B^T of the warp's keys against its queries: S^T or dP^T. keys, queries: the tiles A and
/// B; near_end: of multiply.
template <typename Thread, int kM, int kN, typename NearEnd>
__device__ __forceinline__ void scores(const Thread& t, float (&acc)[kM][kN][4], uint32_t keys,
                                       uint32_t queries, const NearEnd& near_end) {
  using KTile = typename Thread::KTile;
  using QTile = typename Thread::QTile;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) acc[m][n][0] = acc[m][n][1] = acc[m][n][2] = acc[m][n][3] = 0.f;
  }
  const typename Thread::Place me = t.place();
  keys += static_cast<uint32_t>(me.key_row() * KTile::kRowBytes) + me.part_a();
  queries += static_cast<uint32_t>(me.query() * QTile::kRowBytes) + me.part_b();
  multiply<typename Thread::T, Thread::kConfig.width / 16, Thread::Shape::kAhead>(
      acc,
      [&](int slice, uint32_t(&a)[kM][4]) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          ptx::ldmatrix(a[m], block_address<KTile>(keys, 16 * m, 16 * slice));
        }
      },
      [&](int slice, int pair, uint32_t(&b)[4]) {
        ptx::ldmatrix(b, block_address<QTile>(queries, 16 * pair, 16 * slice));
      },
      near_end);
}

/// Whether a bias or a mask as data hides a pair of the item's sequence. q, k: the query in the
/// step's tile, and the key among the item's. For where it is rare: nothing is kept.
template <typename Thread>
__device__ __forceinline__ bool is_hidden(const Thread& t, int32_t head, int32_t query, int32_t key,
                                          [[maybe_unused]] int q, [[maybe_unused]] int k) {
  if constexpr (Thread::kMask) {
    if ((t.allowed(t.step_bits(), k, q) >> q % 32 & 1) == 0) return true;
    if (!Thread::kBias || !t.p.bias.data) return false;
  }
  if constexpr (Thread::kBias) {
    const int32_t batch = t.record_int(offsetof(ItemRecord, batch));
    return BiasPlane::of(t.p.bias, batch, head).hides(query, key);
  }
  return false;
}

/// The warp's P or dS, packed, to the tile [key][query] at `at`.
template <typename Thread, int kM, int kPairs>
__device__ __forceinline__ void store_scores(const Thread& t, int at,
                                             const uint32_t (&value)[kM][kPairs][4]) {
  using ScoreTile = typename Thread::ScoreTile;
  const typename Thread::Place me = t.place();
  const uint32_t rows = t.shared + static_cast<uint32_t>(at + me.key_row() * ScoreTile::kRowBytes);
  const uint32_t base = rows + me.score_part_a();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      store_block<ScoreTile>(rows, 16 * m, me.query() + 16 * pair, me.lane(), base, value[m][pair]);
    }
  }
}

/// sum += A B over the tile's queries: dV or dK. A is P or dS of the warp's keys: `values`, or the
/// score tile at values_at where other warps have some of its queries. B: the tile `rows` of dO or
/// Q. seen_only: touch pairs that mask and bias allow alone; q_begin: the tile's first query, of
/// this head.
template <typename Thread, int kM, int kSumN, int kPairs>
__device__ __forceinline__ void accumulate(const Thread& t, float (&sum)[kM][kSumN][4],
                                           const uint32_t (&values)[kM][kPairs][4], int values_at,
                                           uint32_t rows, bool seen_only, int32_t q_begin,
                                           int32_t head) {
  using Shape = typename Thread::Shape;
  using T = typename Thread::T;
  using QTile = typename Thread::QTile;
  using ScoreTile = typename Thread::ScoreTile;
  constexpr int kSlices = Thread::kConfig.tile_q / 16;
  const typename Thread::Place me = t.place();
  const uint32_t from = t.shared +
                        static_cast<uint32_t>(values_at + me.key_row() * ScoreTile::kRowBytes) +
                        me.score_part_a();
  const auto load_a = [&](int slice, uint32_t(&a)[kM][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if constexpr (Shape::kSplit) {
        ptx::ldmatrix(a[m], block_address<ScoreTile>(from, 16 * m, 16 * slice));
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = values[m][slice][i];
      }
    }
  };
  if (seen_only) {
    const typename Thread::Place me = t.fresh_place();
    const int lane = me.lane(), column = me.column();
    const SeenQueries<2 * kM> seen(t.seen_limits(me, 0), q_begin);
    multiply_seen<T, kSlices, !Shape::kSplit>(
        sum, lane, load_a,
        [&](int k, int n) {
          return ptx::load_shared(
              rows + static_cast<uint32_t>(QTile::offset(k, column + 8 * n) + 4 * (lane % 4)));
        },
        [&](int r, int q) {
          if (!Thread::kHides || !seen(r, q)) return seen(r, q);
          const int32_t key = t.record_int(offsetof(ItemRecord, key_begin)) + me.key_row();
          return !is_hidden(t, head, q_begin + q, key + 8 * r + lane / 4, q,
                            me.key_row() + 8 * r + lane / 4);
        });
    return;
  }
  int first = me.column();
  rows += me.part_a();
  if constexpr (Shape::kColumns % QTile::kPanel == 0) {
    rows += static_cast<uint32_t>(QTile::block_offset(0, first));
    first = 0;
  }
  multiply<T, kSlices, Shape::kAhead>(
      sum, load_a,
      [&](int slice, int pair, uint32_t(&b)[4]) {
        ptx::ldmatrix_trans(b, block_address<QTile>(rows, 16 * slice, first + 16 * pair));
      },
      [] {});
}

/// Whether this thread's part of the item's keys holds an infinity or a NaN.
template <typename Thread>
__device__ __forceinline__ bool keys_nonfinite(const Thread& t) {
  constexpr uint32_t kExponent =
      std::is_same_v<typename Thread::T, __nv_bfloat16> ? 0x7f80u : 0x7c00u;
  bool found = false;
  for (int i = 16 * t.fresh_place().thread; i < Thread::KTile::kBytes;
       i += 16 * Thread::Shape::kHalfThreads) {
    uint32_t x[4];
    ptx::load_shared_words(t.k_tile() + static_cast<uint32_t>(i), x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      found |= (x[j] & kExponent) == kExponent || (x[j] >> 16 & kExponent) == kExponent;
    }
  }
  return found;
}

/// dq += dS K of the warp's queries and kPass columns, from `pass` on. seen_only, q_begin, head: as
/// in accumulate.
template <typename Thread, int kPassN>
__device__ __forceinline__ void multiply_dq(const Thread& t, float (&dq)[2][kPassN][4], int pass,
                                            bool seen_only, int32_t q_begin, int32_t head) {
  using Shape = typename Thread::Shape;
  using T = typename Thread::T;
  using KTile = typename Thread::KTile;
  using ScoreTile = typename Thread::ScoreTile;
  constexpr int kSlices = Thread::kConfig.tile_k / 16;
  const typename Thread::Place me = t.place();
  const uint32_t ds = t.shared + static_cast<uint32_t>(Shape::kDsAt) + me.score_part_b();
  uint32_t keys = t.k_tile();
  int first = me.dq_column();
  first += pass;
  if constexpr (Shape::kPass % KTile::kPanel == 0) {
    keys += static_cast<uint32_t>(KTile::block_offset(0, first));
    first = 0;
  }
  const int row = me.dq_row();
  const auto load_a = [&](int slice, uint32_t(&a)[2][4]) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      ptx::ldmatrix_trans(a[m], block_address<ScoreTile>(ds, 16 * slice, row + 16 * m));
    }
  };
  if (seen_only) {
    const typename Thread::Place me = t.fresh_place();
    const int lane = me.lane(), row = me.dq_row();
    const ItemRecord& b = t.record(t.item());
    // In 32 bits: a division in 64, which chunks take, is a call, and registers are spilled for it.
    const TileMask mask = b.mask.tile(q_begin, Thread::kConfig.tile_q);
    int32_t begin[4], end[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int32_t i = row + lane / 4 + 8 * r;
      const Range seen = i < mask.seqlen_q ? mask.row(i) : Range{0, 0};
      begin[r] = static_cast<int32_t>(seen.begin) - b.key_begin;
      end[r] = static_cast<int32_t>(seen.end) - b.key_begin;
    }
    multiply_seen<T, kSlices, false>(
        dq, lane, load_a,
        [&](int k, int n) {
          return ptx::load_shared(
              keys + static_cast<uint32_t>(KTile::offset(k, first + 8 * n) + 4 * (lane % 4)));
        },
        [&](int r, int k) {
          return begin[r] <= k && k < end[r] &&
                 !is_hidden(t, head, q_begin + row + lane / 4 + 8 * r, b.key_begin + k,
                            row + lane / 4 + 8 * r, k);
        });
    return;
  }
  keys += me.part_a();
  multiply<T, kSlices, Shape::kAhead>(
      dq, load_a,
      [&](int slice, int pair, uint32_t(&b)[4]) {
        ptx::ldmatrix_trans(b, block_address<KTile>(keys, 16 * slice, first + 16 * pair));
      },
      [] {});
}

}  // namespace strobe::cuda::sm80

#endif  // STROBE_CUDA_MMA_SYNC_BACKWARD_PRODUCTS_CUH_
