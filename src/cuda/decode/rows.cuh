// A row of O on its way out: by a whole warp, each lane with some neighbouring columns.
#ifndef STROBE_CUDA_DECODE_ROWS_CUH_
#define STROBE_CUDA_DECODE_ROWS_CUH_

#include <cstdint>

#include "cuda/cache/cached_row.cuh"
#include "cuda/common/forward_pairwise.cuh"
#include "cuda/common/params.h"
#include "cuda/common/softmax.cuh"
#include "cuda/decode/layout.h"
#include "cuda/decode/pieces.cuh"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/opaque.h"

namespace strobe::cuda {

/// A row that is not finished: not divided by its sum. lane: columns kColumns * lane and following.
template <int kColumns>
struct OpenRow {
  float max = -infinity(), sum = 0.f, o[kColumns] = {};

  /// What a piece with this maximum counts for in a row with maximum `most`.
  __device__ __forceinline__ static float weight(float max, float most) {
    return exp2_fast(max - reference_of(most));
  }
  __device__ __forceinline__ void add(const float (&x)[kColumns], float w) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) o[i] = __fmaf_rn(x[i], w, o[i]);
  }
  /// Takes in what comes after, which has a maximum and a sum of its own. A part in which the row
  /// sees no key changes no bit, wherever it stands.
  __device__ __forceinline__ void append(const float (&x)[kColumns], float2 max_and_sum) {
    const float most = fmaxf(max, max_and_sum.x);
    const float own = weight(max, most), other = weight(max_and_sum.x, most);
    max = most;
    sum = __fmaf_rn(sum, own, __fmul_rn(max_and_sum.y, other));
#pragma unroll
    for (int i = 0; i < kColumns; ++i) o[i] = __fmaf_rn(o[i], own, __fmul_rn(x[i], other));
  }
};

/// kColumns floats, aligned to as many.
template <int kColumns>
__device__ __forceinline__ void read_columns(float (&x)[kColumns], const float* from) {
  if constexpr (kColumns == 2) {
    const float2 y = *reinterpret_cast<const float2*>(from);
    x[0] = y.x, x[1] = y.y;
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      const float4 y = *reinterpret_cast<const float4*>(from + i);
      x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    }
  }
}
/// The same of what other thread blocks have written: past L1.
template <int kColumns>
__device__ __forceinline__ void read_written(float (&x)[kColumns], const float* from) {
  if constexpr (kColumns == 2) {
    const float2 y = __ldcg(reinterpret_cast<const float2*>(from));
    x[0] = y.x, x[1] = y.y;
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; i += 4) {
      const float4 y = __ldcg(reinterpret_cast<const float4*>(from + i));
      x[i] = y.x, x[i + 1] = y.y, x[i + 2] = y.z, x[i + 3] = y.w;
    }
  }
}
template <int kColumns>
__device__ __forceinline__ void write_columns(float* to, const float (&x)[kColumns]) {
  if constexpr (kColumns == 2) {
    __stcg(reinterpret_cast<float2*>(to), make_float2(x[0], x[1]));
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; i += 4)
      __stcg(reinterpret_cast<float4*>(to + i), make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]));
  }
}

/// What rows on their way out depend on besides their span.
struct OutRule {
  bool rounds_scores;  // scores were rounded one by one, so that none is too large
  bool elements;       // out need not be made of whole 16-byte units
};

/// Divides by the sum, rounds, writes out and lse. Rows that are not finite, or whose scores were
/// too large (is_coarse), are computed again key by key.
template <typename T, int kColumns, typename Params>
__device__ __forceinline__ void finish(const Params& p, const Division& d, const Piece& piece,
                                       int32_t row, const OpenRow<kColumns>& open,
                                       const OutRule& rule) {
  const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;  // as in merge_pieces()
  const auto packed = static_cast<uint32_t>(piece.tile.first + row);
  const auto query = static_cast<int32_t>(d.group.divide(packed));
  const auto head = static_cast<int32_t>(packed - d.group.value * static_cast<uint32_t>(query));
  const Range keys = piece.mask.row(query - piece.first_query);
  bool some_key = OwnBlocks::of(p, piece.tile.batch, piece.tile.head + head, query).meet(keys);
  bool has_room = true, looks_again = false;
  if constexpr (kMasked<Params>) {
    SequenceRows rows{};
    rows.batch = piece.tile.batch;
    rows.q_row = piece.q_row;
    const HeadMask mask = p.head_mask(rows, piece.tile.head + head);
    has_room = !mask.there() || !mask.lacks_room(query);
    // (A sum that is not 0 has some key.)
    if (mask.there() && open.sum == 0.f) some_key = mask.sees_some(query, keys);
    // The bias may hide all of them.
    looks_again = p.bias.data && open.sum == 0.f && some_key;
  }
  RowResult result = finish_row(p, piece.tile.head + head, some_key, open.max, open.sum, 1.f);
  if (!piece.in_range || !has_room) result.factor = result.lse = __int_as_float(0x7fffffff);
  if (p.lse && lane == 0) {
    p.lse[piece.lse_row + (piece.tile.head + head) * p.lse_head_stride + query] = result.lse;
  }
  char* const out = piece.out + 2 * p.out_words() * p.out.element(0, query, head);
  const int column = kColumns * lane;
  const bool aligned = !rule.elements && column + kColumns <= p.head_dim_v;
  float x[kColumns], zero = 0.f;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) x[i] = open.o[i] * result.factor;
  if (p.float_out) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      zero = __fmaf_rn(x[i], 0.f, zero);
      if (column + i < p.head_dim_v) reinterpret_cast<float*>(out)[column + i] = x[i];
    }
  } else {
    uint32_t word[kColumns / 2], marks = 0;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      word[i] = ptx::pack<T>(x[2 * i], x[2 * i + 1]);
      marks = mark_not_finite<T>(marks, word[i]);
    }
    if (marked(marks)) zero = __int_as_float(0x7fffffff);
    auto* const to = reinterpret_cast<T*>(out) + column;
    if (aligned && kColumns == 2) {
      *reinterpret_cast<uint32_t*>(to) = word[0];
    } else if (aligned && kColumns == 4) {
      *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[kColumns / 4]);
    } else if (aligned) {
      *reinterpret_cast<uint4*>(to) =
          make_uint4(word[0], word[kColumns / 8], word[kColumns / 4], word[kColumns / 2 - 1]);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (column + i < p.head_dim_v)
          reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16));
      }
    }
  }
  const bool again = (!rule.rounds_scores && is_coarse(open.max)) ||
                     (zero != 0.f && result.factor == result.factor) ||
                     (looks_again && piece.in_range && has_room);
  if (__any_sync(0xffffffffu, again)) {
    __syncwarp();  // pairwise_cached_row writes the row by other lanes
    pairwise_cached_row<T>(p, piece.tile.batch, piece.tile.head + head, query);
  }
}

/// Merges the pieces of a span's rows, in order, and finishes them: each warp of the thread block
/// with a row, from first_row on, and every kStep-th after that. kFloats: of a lane, that are read
/// at a time: enough loads under way to cover the latency of L2, as far as there are registers for
/// them.
template <typename T, int kWidth, int kStep, int kFloats, typename Params>
__device__ __forceinline__ void merge_pieces(const Params& p, const Division& d, const Piece& now,
                                             int32_t first_row, const OutRule& rule) {
  constexpr int kColumns = LaneColumns<kWidth>::kCount;
  constexpr int kBatch = kFloats / kColumns < 16 ? kFloats / kColumns : 16;
  static_assert(32 % kBatch == 0);
  // Computed anew, with everything that depends on it, since registers are short while keys are
  // read.
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x)), lane = thread % 32;
  const bool has_columns = LaneColumns<kWidth>::are_there(lane);
  const TileRows tile = now.tile;
  const SpanPieces pieces = now.pieces;
  const int32_t count = pieces.count;
  const auto sums = [&](int32_t row, int32_t piece) {  // of this lane's piece
    return piece < count && row < tile.count
               ? __ldcg(d.piece_sums + int64_t{pieces.slot(piece)} * d.piece_rows + row)
               : make_float2(-infinity(), 0.f);
  };
  const auto o_of = [&](int32_t row, int32_t slot) {
    return reinterpret_cast<const char*>(d.piece_o + (int64_t{slot} * d.piece_rows + row) * kWidth +
                                         kColumns * lane);
  };
  // From piece to piece, but for the first. Opaque, as is the number of pieces that are left: in
  // uniform registers they would be three times as many instructions, for which a merge waits.
  const int32_t stride = ptx::opaque(pieces.step * d.piece_rows * kWidth * int32_t{sizeof(float)});
  float x[kBatch][kColumns];
  const auto read = [&](int32_t row, int32_t from) {  // O of the pieces from there on
    const int32_t left = ptx::opaque(count - from);
    const char* const other = o_of(row, pieces.second_slot + pieces.step * (from - 1));
    const char* const first = from == 0 ? o_of(row, pieces.first_slot) : other;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const char* const piece = j == 0 ? first : other + int64_t{stride} * j;
      if (has_columns && j < left) read_written(x[j], reinterpret_cast<const float*>(piece));
    }
  };
  int32_t row = first_row + thread / 32;
  float2 next = sums(row, lane);
#pragma unroll 1
  for (; row < tile.count; row += kStep) {
    const float2 first = next;
    // Loaded while this row's pieces are weighed: the first pieces of its O, and the next row's
    // sums.
    read(row, 0);
    next = sums(row + kStep, lane);
    OpenRow<kColumns> open;
    open.max = first.x;
#pragma unroll 1
    for (int32_t piece = lane + 32; piece < count; piece += 32)
      open.max = fmaxf(open.max, sums(row, piece).x);
    for (int step = 16; step > 0; step /= 2)
      open.max = fmaxf(open.max, __shfl_xor_sync(0xffffffffu, open.max, step));
    float weight = 0.f;  // of this lane's piece
#pragma unroll 1
    for (int32_t from = 0; from < count; from += kBatch) {
      if (from % 32 == 0) {
        const float2 mine = from == 0 ? first : sums(row, from + lane);
        weight = OpenRow<kColumns>::weight(mine.x, open.max);
        float sum = mine.y * weight;
        for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        open.sum += sum;
      }
      if (from > 0) read(row, from);
      const int32_t left = ptx::opaque(count - from);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float w = __shfl_sync(0xffffffffu, weight, j);
        if (has_columns && j < left) open.add(x[j], w);
      }
      weight = __shfl_sync(0xffffffffu, weight, lane + kBatch);  // of the next pieces
    }
    finish<T, kColumns>(p, d, now, row, open, rule);
  }
}

/// The same for the chunks of a span (shares.h), one after the other: a row's result does not
/// depend on how many there are before and behind those that it sees.
template <typename T, int kWidth, int kStep, typename Params>
__device__ __forceinline__ void append_pieces(const Params& p, const Division& d, const Piece& now,
                                              const OutRule& rule) {
  constexpr int kColumns = LaneColumns<kWidth>::kCount, kBatch = kColumns > 4 ? 2 : 4;
  // As in merge_pieces().
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x)), lane = thread % 32;
  const SpanPieces pieces = now.pieces;
#pragma unroll 1
  for (int32_t row = thread / 32; row < now.tile.count; row += kStep) {
    OpenRow<kColumns> open;
#pragma unroll 1
    for (int32_t from = 0; from < pieces.count; from += kBatch) {
      float x[kBatch][kColumns];
      float2 sums[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (from + j >= pieces.count) continue;
        const int64_t at = int64_t{pieces.slot(from + j)} * d.piece_rows + row;
        sums[j] = __ldcg(d.piece_sums + at);
        if (LaneColumns<kWidth>::are_there(lane)) {
          read_written(x[j], d.piece_o + at * kWidth + kColumns * lane);
        } else {
          for (float& nothing : x[j]) nothing = 0.f;
        }
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (from + j < pieces.count) open.append(x[j], sums[j]);
    }
    finish<T, kColumns>(p, d, now, row, open, rule);
  }
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_ROWS_CUH_
