// The gradient of a bias: a kernel of its own after the backward pass's, where it is asked for.
//
//   thread block   owns a piece of 64 x 64 of dbias, in registers, and goes through the tiles of
//                  queries and keys that share it, one after the other: the sequences where bias
//                  has one for all, their heads where it has one for all, and the tiles of queries
//                  where it has one row for all
//   warps          four, of 16 queries each. For a tile S = Q K^T, dP = dO V^T and
//                  dS = P * (dP - delta) by the score, which is what is added to the piece
//   shared memory  two stages of 64 columns of Q and K, or of dO and V: the next ones come while
//                  some are multiplied, by mma.sync (mma_sync/dbias_form.cuh) or by wgmma
//                  (hopper/dbias_form.cuh)
//
// The sums are in float32, in one order: sequences, heads, tiles of queries; where all queries
// share a row, the 16 lanes and warps that have its parts come last. No thread block adds to
// another's piece, so there are no atomics, and no bits that depend on the launch.
//
// Each pair is a dot product of its own here: what a masked or hidden pair holds reaches no other
// one, and nothing has to be computed again where something is infinite.
#ifndef STROBE_CUDA_BACKWARD_DBIAS_CUH_
#define STROBE_CUDA_BACKWARD_DBIAS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/backward/pre.cuh"
#include "cuda/backward/scratch.cuh"
#include "cuda/common/bias.cuh"
#include "cuda/common/dropout.cuh"
#include "cuda/common/hidden_pairs.cuh"
#include "cuda/common/load.cuh"
#include "cuda/common/params.h"
#include "cuda/common/score.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/common/tile_mask.h"
#include "cuda/common/walks.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"

namespace strobe::cuda {

/// Queries and keys of a piece.
inline constexpr int kDbiasTile = 64;
inline constexpr int kDbiasThreads = 128;

/// How many pieces a gradient has, and where one lies.
struct DbiasPiece {
  int32_t batch, head, row, key;  // of its first value

  STROBE_INLINE static constexpr int64_t count(const BackwardParams& p) {
    const Bias& d = p.dbias;
    return int64_t{d.batch} * d.heads * ceil_div(d.rows, kDbiasTile) *
           ceil_div(p.seqlen_k, kDbiasTile);
  }
  STROBE_INLINE static constexpr DbiasPiece of(const BackwardParams& p, int64_t index) {
    const Bias& d = p.dbias;
    const int64_t across = ceil_div(p.seqlen_k, kDbiasTile), down = ceil_div(d.rows, kDbiasTile);
    const int64_t of_head = index / across, plane = of_head / down;
    return {static_cast<int32_t>(plane / d.heads), static_cast<int32_t>(plane % d.heads),
            static_cast<int32_t>(of_head % down * kDbiasTile),
            static_cast<int32_t>(index % across * kDbiasTile)};
  }
};

/// The rows of a product A B^T.
struct DbiasFactors {
  RowsView a, b;
};

/// A tile of queries against the piece's keys, of one head of one sequence. mask: of the tile's
/// queries, which it counts from 0.
struct DbiasStep {
  int32_t batch, head, query, key;  // of its first pair
  const TileMask& mask;

  /// The tile's row, or that of its last query for one past it.
  __device__ __forceinline__ int32_t known(int32_t row) const {
    return min(row, mask.seqlen_q - 1);
  }
  /// Where the head's lse and delta have it.
  template <typename StageTraits>
  __device__ __forceinline__ int32_t place(int32_t row) const {
    const int32_t at = query + known(row);
    return StageTraits::kQuadOrder ? quad_order(at) : at;
  }
};

/// The products of a step, Q K^T and dO V^T, 64 columns at a time. Form: mma.sync's or wgmma's.
template <typename T, typename Form>
struct DbiasProduct {
  using Tile = SharedTile<kDbiasTile, 64>;
  static constexpr int kStages = 2;
  static constexpr int kSharedBytes = kStages * 2 * Tile::kBytes;

  uint32_t shared;

  __device__ __forceinline__ uint32_t tile(int stage, int which) const {
    return shared + static_cast<uint32_t>((2 * stage + which) * Tile::kBytes);
  }
  /// The columns from 64 * chunk on.
  __device__ __forceinline__ static RowsView columns(const RowsView& rows, int chunk) {
    return {rows.data + 128 * chunk, rows.stride_bytes, rows.rows, rows.dim - 64 * chunk};
  }
  __device__ __forceinline__ static void load(uint32_t to, const RowsView& rows, bool aligned,
                                              int32_t row) {
    const int thread = static_cast<int>(threadIdx.x);
    if constexpr (Form::kUnits) {
      load_units<kDbiasTile, 64, kDbiasThreads>(to, rows, row, thread);
    } else {
      load_tile<kDbiasTile, 64, kDbiasThreads>(to, rows, row, aligned, thread);
    }
  }
  /// The chunk's columns to the stage of the number-th of all chunks.
  __device__ __forceinline__ void load(const DbiasFactors& f, int32_t row_a, int32_t row_b,
                                       int chunk, int number) const {
    const int stage = number % kStages;
    load(tile(stage, 0), columns(f.a, chunk), f.a.aligned(), row_a);
    load(tile(stage, 1), columns(f.b, chunk), f.b.aligned(), row_b);
    ptx::cp_async_commit();
  }
  /// The warp's 16 rows of A times the 64 of B, of the one product and of the other, whose rows
  /// have so many columns. take(s) is called between the two. The first chunk of the second product
  /// is on its way while the last one of the first is multiplied. of_s(), of_dp(): their factors,
  /// asked for anew at each load, as they would take registers.
  template <typename OfS, typename OfDp, typename Take>
  __device__ __forceinline__ void run(const OfS& of_s, int32_t dim_s, const OfDp& of_dp,
                                      int32_t dim_dp, int32_t row_a, int32_t row_b,
                                      float (&s)[1][8][4], float (&dp)[1][8][4],
                                      const Take& take) const {
    const int first = (dim_s + 63) / 64, all = first + (dim_dp + 63) / 64;
    const auto load_dp = [&](int n) { load(of_dp(), row_a, row_b, n - first, n); };
    const auto load_chunk = [&](int n) {
      if (n < first) {
        load(of_s(), row_a, row_b, n, n);
      } else {
        load_dp(n);
      }
    };
    load_chunk(0);
    multiply_chunks(s, 0, first, all, load_chunk);
    take(s);
    multiply_chunks(dp, first, all, all, load_dp);
  }

 private:
  /// acc: the sum over chunks begin to end of all. Each loads the next one first.
  template <typename LoadChunk>
  __device__ __forceinline__ void multiply_chunks(float (&acc)[1][8][4], int begin, int end,
                                                  int all, const LoadChunk& load_chunk) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) acc[0][n][0] = acc[0][n][1] = acc[0][n][2] = acc[0][n][3] = 0.f;
#pragma unroll 1
    for (int chunk = begin; chunk < end; ++chunk) {
      if (chunk + 1 < all) {
        load_chunk(chunk + 1);
        ptx::cp_async_wait<1>();
      } else {
        ptx::cp_async_wait<0>();
      }
      Form::before_barrier();
      __syncthreads();
      Form::template add<T>(acc, tile(chunk % kStages, 0), tile(chunk % kStages, 1));
      __syncthreads();  // before the stage is loaded again
    }
  }
};

/// The bias of the lane's pairs of a step: loaded before the products, all at once, and looked at
/// after them.
struct EarlyBias {
  static constexpr bool kEarly = true;
  static constexpr int kSharedBytes = 0;

  uint32_t bits[8][2][2];  // [n][h]: a word of two 16-bit values, or two floats
  bool has_words;

  /// Of the tile's queries from `first` on, and its keys from `first_key` on. Queries and keys past
  /// the last take its bias. shared: where a form may keep it.
  __device__ __forceinline__ void load(const BiasPlane& bias, int32_t first, int32_t first_key,
                                       int32_t last_query, int32_t last_key, uint32_t /*shared*/) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int32_t key = first_key + 2 * (lane % 4);
    first += 16 * warp;
    const char* row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) row[h] = bias.row(min(first + lane / 4 + 8 * h, last_query));
    has_words = bias.has_words() && first_key + kDbiasTile - 1 <= last_key;
    if (has_words) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) bits[n][h][0] = BiasPlane::word(row[h], key + 8 * n);
      }
      return;
    }
    // No lambdas, here and in unpack: outside a template NVRTC takes them for the host's.
    if (bias.type == kBiasFloat32) {
      load_as<kBiasFloat32>(bias, row, key, last_key);
    } else if (bias.type == kBiasBfloat16) {
      load_as<kBiasBfloat16>(bias, row, key, last_key);
    } else {
      load_as<kBiasFloat16>(bias, row, key, last_key);
    }
  }
  /// Makes floats of words.
  __device__ __forceinline__ void unpack(int32_t type) {
    if (!has_words) return;
    if (type == kBiasBfloat16) {
      unpack_as<kBiasBfloat16>();
    } else {
      unpack_as<kBiasFloat16>();
    }
  }
  __device__ __forceinline__ float operator()(int n, int h, int e) const {
    return __uint_as_float(bits[n][h][e]);
  }

 private:
  template <int32_t kType>
  __device__ __forceinline__ void load_as(const BiasPlane& bias, const char* const (&row)[2],
                                          int32_t key, int32_t last_key) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = bias.value_as<kType>(row[h], min(key + 8 * n + e, last_key));
          bits[n][h][e] = __float_as_uint(x);
        }
      }
    }
  }
  template <int32_t kType>
  __device__ __forceinline__ void unpack_as() {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 x = BiasPlane::both<kType>(bits[n][h][0]);
        bits[n][h][0] = __float_as_uint(x.x);
        bits[n][h][1] = __float_as_uint(x.y);
      }
    }
  }
};

/// The same for 7.5, whose products take more instructions and leave no registers for it: each
/// value is loaded where it is wanted.
struct LateBias {
  static constexpr bool kEarly = false;
  static constexpr int kSharedBytes = 0;

  BiasPlane plane;
  const char* row[2];
  int32_t key, last_key;

  __device__ __forceinline__ void load(const BiasPlane& bias, int32_t first, int32_t first_key,
                                       int32_t last_query, int32_t last, uint32_t /*shared*/) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    plane = bias;
    first += 16 * warp;
    key = first_key + 2 * (lane % 4);
    last_key = last;
#pragma unroll
    for (int h = 0; h < 2; ++h) row[h] = bias.row(min(first + lane / 4 + 8 * h, last_query));
  }
  __device__ __forceinline__ void unpack(int32_t /*type*/) const {}
  __device__ __forceinline__ float operator()(int n, int h, int e) const {
    return plane.value(row[h], min(key + 8 * n + e, last_key));
  }
};

/// A bias of T whose rows begin at 16-byte units, as TMA wants it: a tile of it comes to shared
/// memory together with the first columns of Q and K, and to registers when it is looked at.
template <typename T>
struct TileOfBias {
  using Tile = SharedTile<kDbiasTile, kDbiasTile>;
  static constexpr bool kEarly = true;
  static constexpr int kSharedBytes = Tile::kBytes;
  static constexpr int32_t kType = std::is_same_v<T, __half> ? kBiasFloat16 : kBiasBfloat16;

  uint32_t shared;
  uint32_t words[4][4];  // of 16 keys each, as ldmatrix has them

  __device__ __forceinline__ void load(const BiasPlane& bias, int32_t first, int32_t first_key,
                                       int32_t last_query, int32_t last_key, uint32_t to) {
    shared = to;
    const RowsView rows{const_cast<char*>(bias.data) + first_key * bias.key_bytes, bias.row_bytes,
                        last_query + 1, last_key + 1 - first_key};
    load_units<kDbiasTile, kDbiasTile, kDbiasThreads>(to, rows, first,
                                                      static_cast<int>(threadIdx.x));
  }
  __device__ __forceinline__ void unpack(int32_t /*type*/) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const uint32_t rows = shared + static_cast<uint32_t>(16 * warp * Tile::kRowBytes +
                                                         Tile::fragment_offset(lane, 0));
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::ldmatrix(words[i], rows ^ static_cast<uint32_t>(32 * i));
  }
  __device__ __forceinline__ float operator()(int n, int h, int e) const {
    const float2 two = BiasPlane::both<kType>(words[n / 2][n % 2 * 2 + h]);
    return e ? two.y : two.x;
  }
};

/// Turns S of the warp's queries into their weights. One of a pair that is not seen is -0, which no
/// other is (nor has NaN a sign, as the exponential gives it): whatever dP holds there, nothing is
/// added (add_dscores). lse: the scratch's, of the
/// sequence's queries of this head. bits: those of the step's pair of a mask's blocks, where
/// StageTraits::kMask and it has some. kCap: the softcap that there is, or, without Form::kCopies,
/// kAny where it is not small. (kAny is right for all caps.) kWhole: all queries and keys of the
/// step are there and see each other, as far as the bias lets them.
template <typename Form, typename StageTraits, Cap kCap, bool kWhole, typename StepBias>
__device__ __forceinline__ void take_dbias_weights(const BackwardParams& p, const DbiasStep& step,
                                                   const StepBias& bias,
                                                   [[maybe_unused]] const uint32_t* bits,
                                                   const float* lse, float (&s)[1][8][4]) {
  constexpr bool kMask = StageTraits::kMask;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int32_t key = step.key + 2 * (lane % 4);
  const Score score = Score::of(p, step.batch, step.head);
  [[maybe_unused]] const float score_scale = p.scale * kLog2e;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t row_at = 16 * warp + lane / 4 + 8 * h, known = step.known(row_at);
    const float reference = lse[step.place<StageTraits>(row_at)];
    const Score::Row row{score, static_cast<float>(step.mask.position(known) - key)};
    // The keys that the query sees, from the lane's first one on.
    int32_t begin = 0, end = kDbiasTile;
    if constexpr (!kWhole) {
      const Range seen = step.mask.row(known);
      begin = static_cast<int32_t>(seen.begin) - key;
      end = row_at > known ? begin : static_cast<int32_t>(seen.end) - key;
    }
    uint32_t allowed[2];  // by the mask: of the row's keys, 32 from the lane's first one on
    if constexpr (kMask) {
      const auto block_q = static_cast<int32_t>(p.mask_layout.block_q);
      const auto block_k = static_cast<int32_t>(p.mask_layout.block_k);
      const int32_t at = (step.query + known) % block_q * (block_k / 32) + step.key % block_k / 32;
      allowed[0] = bits ? bits[at] >> 2 * (lane % 4) : ~uint32_t{0};
      allowed[1] = bits ? bits[at + 1] >> 2 * (lane % 4) : ~uint32_t{0};
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int at = 8 * n + e;
        const float b = bias(n, h, e);
        float& x = s[0][n][2 * h + e];
        float w;
        if constexpr (!Form::kAnyScores) {  // as the kernel before has it
          w = fmaf(b, kLog2e, fmaf(x, score_scale, -reference));
        } else if constexpr (Form::kCopies) {
          w = row.template value_and_derivative<kCap>(x, at).value;
        } else {
          constexpr bool kPrecise = kCap == Cap::kAny;
          w = row.template any_value_and_derivative<kPrecise>(x, at).value;
        }
        if constexpr (Form::kAnyScores) w = add_bias(w, b) - reference;
        // As weigh has it (mma_sync/backward_weights.cuh).
        x = exp2_fast(min_or_nan(w, StageTraits::kShift));
        if ((!kWhole && (at < begin || at >= end)) || b == -infinity()) x = -0.f;
        if (kMask && !(allowed[at / 32] >> at % 32 & 1)) x = -0.f;
      }
    }
  }
}

/// Adds dS of a step to the lane's values of the piece. weights, dp: P and dP of the warp's
/// queries. delta: the scratch's, of the sequence's queries of this head. kDrops: whether there is
/// dropout, or, without Form::kCopies, false.
template <typename Form, typename StageTraits, bool kDrops>
__device__ __forceinline__ void add_dscores(const BackwardParams& p, const DbiasStep& step,
                                            const float* delta, const float (&weights)[1][8][4],
                                            const float (&dp)[1][8][4], float (&piece)[8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int32_t first = step.query + 16 * warp;
  const uint32_t batch_head = p.dropout.batch_head(step.batch, step.head);
  const bool drops = Form::kCopies ? kDrops : p.dropout.enabled();
  const float dp_scale = p.dropout.keep_scale / StageTraits::kScale;
  float subtract[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    subtract[h] = delta[step.place<StageTraits>(16 * warp + lane / 4 + 8 * h)];
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    uint32_t word[4];
    if (drops) {
      dropout_words(p.dropout, batch_head, static_cast<uint32_t>(first),
                    static_cast<uint32_t>(step.key + 16 * pair) / 8, lane, word);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int n = 2 * pair + i / 4, h = i / 2 % 2, e = i % 2;
      const float w = weights[0][n][2 * h + e];
      float gradient = dp[0][n][2 * h + e];
      if (drops) {
        const uint32_t bits = word[2 * h + n % 2];
        if (!(e ? keep_high(p.dropout, bits) : keep_low(p.dropout, bits))) gradient *= 0.f;
      }
      const float ds = w * fmaf(gradient, dp_scale, -subtract[h]);
      piece[n][2 * h + e] += __float_as_int(w) < 0 ? 0.f : ds;
    }
  }
}

/// The sum of a row's parts, which the lanes of a column and the warps have, to the lanes of warp 0
/// that have row 0. parts: shared memory, a float for each warp and key.
__device__ __forceinline__ void sum_rows(float (&piece)[8][4], float* parts) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float x = piece[n][e] + piece[n][2 + e];
#pragma unroll
      for (int step = 16; step >= 4; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
      if (lane < 4) parts[warp * kDbiasTile + 8 * n + 2 * lane + e] = x;
    }
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float* const x = parts + 8 * n + 2 * (lane % 4) + e;
      piece[n][e] = x[0] + x[kDbiasTile] + x[2 * kDbiasTile] + x[3 * kDbiasTile];
    }
  }
}

/// Writes the piece, zeros too: where no pair is seen the gradient is 0.
__device__ __forceinline__ void store_dbias(const BackwardParams& p, const DbiasPiece& at,
                                            const float (&piece)[8][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const Bias& d = p.dbias;
  const BiasPlane to = BiasPlane::of(d, at.batch, at.head);
  const bool are_words = to.has_words() && at.key + kDbiasTile <= p.seqlen_k;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int32_t row = at.row + 16 * warp + lane / 4 + 8 * h, key = at.key + 2 * (lane % 4);
    if (row >= d.rows) continue;
    // (No lambdas: see EarlyBias.)
    if (are_words) {
      char* const first = const_cast<char*>(to.row(row)) + 2 * int64_t{key};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float x = piece[n][2 * h], y = piece[n][2 * h + 1];
        *reinterpret_cast<uint32_t*>(first + 16 * n) =
            d.type == kBiasBfloat16 ? ptx::pack<__nv_bfloat16>(x, y) : ptx::pack<__half>(x, y);
      }
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n)
        to.put_two(row, key + 8 * n, p.seqlen_k, piece[n][2 * h], piece[n][2 * h + 1]);
    }
  }
}

/// Form: of the products, and which scores and biases there are. StageTraits: of the kernel before,
/// which has left lse and delta in the scratch. tile_q: of the scratch. With StageTraits::kMask
/// there is a mask as data, in whose blocks pieces and steps lie.
template <typename T, typename Form, typename StageTraits>
__global__ void __launch_bounds__(kDbiasThreads, Form::kMinBlocks)
    dbias_kernel(const __grid_constant__ BackwardParams p,
                 const __grid_constant__ BackwardScratch scratch, int64_t pieces, int32_t tile_q) {
  constexpr bool kMask = StageTraits::kMask;
  using StepBias = typename Form::template StepBias<T>;
  extern __shared__ __align__(1024) char shared_bytes[];
  const int64_t index = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  if (index >= pieces) return;
  const DbiasPiece at = DbiasPiece::of(p, index);
  const Bias& d = p.dbias;
  const bool one_row = d.rows == 1;
  const DbiasProduct<T, Form> product{ptx::shared_address(shared_bytes)};
  const Cap cap = Score::of(p, 0.f).cap();
  const int32_t batches = d.batch == 1 ? p.batch : 1, heads = d.heads == 1 ? p.heads : 1;
  float piece[8][4] = {};

#pragma unroll 1
  for (int32_t batch = at.batch; batch < at.batch + batches; ++batch) {
#pragma unroll 1
    for (int32_t head = at.head; head < at.head + heads; ++head) {
      const Sequence sequence = p.sequence(batch, head);
      const Mask& mask = sequence.mask;
      const auto seqlen_q = static_cast<int32_t>(mask.seqlen_q);
      if (at.key >= mask.seqlen_k) continue;
      const int32_t head_kv = head / p.group;
      const auto queries_of = [&](const Tensor& t, int32_t dim) {
        return rows_view(t, batch, sequence.q_row, head, mask.seqlen_q, dim);
      };
      const auto keys_of = [&](const Tensor& t, int32_t dim) {
        return rows_view(t, batch, sequence.k_row, head_kv, mask.seqlen_k, dim);
      };
      const int64_t first =
          (int64_t{head} * scratch.tiles + scratch_begin(p, tile_q, batch)) * tile_q;
      const int32_t end = one_row ? seqlen_q : min(seqlen_q, at.row + kDbiasTile);
#pragma unroll 1
      for (int32_t query = at.row; query < end; query += kDbiasTile) {
        PairBits pairs{};
        if constexpr (kMask) {
          const HeadMask of_head = p.head_mask(sequence, head);
          if (of_head.lacks_room(query)) {  // which keys it sees is not known
#pragma unroll
            for (int n = 0; n < 8; ++n) {
#pragma unroll
              for (int i = 0; i < 4; ++i) piece[n][i] = __int_as_float(0x7fffffff);
            }
            continue;
          }
          pairs = of_head.pair(query, at.key);
          if (!pairs.some) continue;
        }
        const TileMask own = mask.tile(query, kDbiasTile);
        const auto walk = key_walk(WalkLists::of(p, batch, head, query), own, {0, own.seqlen_q},
                                   int64_t{kDbiasTile});
        if (!walk.visits(at.key / kDbiasTile)) continue;
        [[maybe_unused]] const bool is_whole =
            !kMask && walk.is_full(walk.rank(at.key / kDbiasTile)) && own.seqlen_q == kDbiasTile &&
            at.key + kDbiasTile <= own.seqlen_k;
        float s[1][8][4], dp[1][8][4];
        StepBias bias;
        const auto load_bias = [&] {
          // (A packed sequence may be longer than the caller has said, and than the bias.)
          const int32_t rows = p.bias.row_stride ? min(seqlen_q, p.bias.rows) : seqlen_q;
          const int32_t keys = min(static_cast<int32_t>(mask.seqlen_k), p.bias.keys);
          bias.load(BiasPlane::of(p.bias, batch, head), query, at.key, rows - 1, keys - 1,
                    product.shared + DbiasProduct<T, Form>::kSharedBytes);
        };
        if constexpr (StepBias::kEarly) load_bias();
        const auto of_s = [&] {
          return DbiasFactors{queries_of(p.q, p.head_dim), keys_of(p.k, p.head_dim)};
        };
        const auto of_dp = [&] {
          return DbiasFactors{queries_of(p.dout, p.head_dim_v), keys_of(p.v, p.head_dim_v)};
        };
        const DbiasStep step{batch, head, query, at.key, own};
        const auto take_weights = [&](auto known, auto whole, float(&x)[1][8][4]) {
          take_dbias_weights<Form, StageTraits, decltype(known)::value, decltype(whole)::value>(
              p, step, bias, pairs.bits, scratch.lse + first, x);
        };
        const auto take = [&](float(&x)[1][8][4]) {
          if constexpr (!StepBias::kEarly) load_bias();
          bias.unpack(p.bias.type);
          using InPart = std::false_type;
          if constexpr (!Form::kAnyScores) {
            if (is_whole) {
              take_weights(CapConstant<Cap::kNone>(), std::true_type(), x);
            } else {
              take_weights(CapConstant<Cap::kNone>(), InPart(), x);
            }
          } else if (Form::kCopies && cap == Cap::kNone) {
            take_weights(CapConstant<Cap::kNone>(), InPart(), x);
          } else if (cap != Cap::kAny) {
            take_weights(CapConstant<Cap::kSmall>(), InPart(), x);
          } else {
            take_weights(CapConstant<Cap::kAny>(), InPart(), x);
          }
        };
        product.run(of_s, p.head_dim, of_dp, p.head_dim_v, query, at.key, s, dp, take);
        const float* const delta = scratch.delta + first;
        if (Form::kAnyScores && Form::kCopies && p.dropout.enabled()) {
          add_dscores<Form, StageTraits, true>(p, step, delta, s, dp, piece);
        } else {
          add_dscores<Form, StageTraits, false>(p, step, delta, s, dp, piece);
        }
      }
    }
  }
  if (one_row) sum_rows(piece, reinterpret_cast<float*>(shared_bytes));
  store_dbias(p, at, piece);
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_DBIAS_CUH_
