// What a warp computes where a tile has no more than eight rows and the cache is quantised: the
// products of warp.cuh, turned.
//
// An mma has 16 rows and 8 columns. With the queries as its rows, eight rows or fewer leave half of
// every product, and of every register of O and of the scores, to nobody. So keys are the rows of
// S^T = K Q^T, and dimensions those of O^T = V^T P^T: a product does for 16 keys (or dimensions)
// what took two, Q and O take half the registers, and a multiprocessor has room for more warps,
// which is what unpacking waits for.
//
//   K     comes from memory in the order in which an A fragment has it: what quantised_keys.cuh
//         says of ldmatrix and of the order of dimensions holds as it is
//   S^T   a lane has queries 2t and 2t + 1 of keys g and g + 8 of each 16 (g = lane / 4, t = lane %
//         4): a row's maximum is among the eight lanes of the same t
//   P^T   as the B operand has keys 2t and 2t + 1 of query g in a lane: movmatrix turns S^T to that
//   O^T   a lane has dimensions 2g and 2g + 1 of each 16, of queries 2t and 2t + 1
#ifndef STROBE_CUDA_DECODE_TURNED_WARP_CUH_
#define STROBE_CUDA_DECODE_TURNED_WARP_CUH_

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/score.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/decode/quantised_keys.cuh"
#include "cuda/decode/row_keys.cuh"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/movmatrix.h"
#include "cuda/ptx/opaque.h"

namespace strobe::cuda {

/// Products of a warp's eight rows with the keys and values of its tile.
template <typename Shape>
struct TurnedProducts {
  using T = typename Shape::T;
  using Codes = typename Shape::Codes;
  static constexpr int kKv = Shape::kKvDtype, kKeys = Shape::kKeys, kPairs = kKeys / 16;
  static constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>, kNibbles = kKv == kQ4Blocks;
  static constexpr bool kMayBeNan = kKv == kE4m3Codes;  // a code by itself
  static constexpr int kParts = Shape::kWidth / 16;     // of Q's and O's dimensions
  /// [n][i]: of key 16n + g, or 8 further on from i = 2 on, and of query 2t + i % 2.
  using Scores = float[kPairs][4];

  /// Scores, times the keys' scales. q: B fragments of 16 dimensions each.
  __device__ __forceinline__ static void multiply_keys(Scores& s, const uint32_t (&q)[kParts][2],
                                                       uint32_t tile, uint32_t mantissa, int lane) {
    const uint32_t from =
        tile + static_cast<uint32_t>(Codes::at(lane % 8 + lane / 16 * 8, lane / 8 % 2));
    [[maybe_unused]] uint32_t nan = 0;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
      for (int c = 0; c < Codes::kChunks; c += 2) {
        uint32_t r[4];  // keys 0-7 of chunks c and c + 1, keys 8-15 of both
        ptx::ldmatrix(r, (from ^ 16u * c) + static_cast<uint32_t>(16 * n * Codes::kCodeBytes));
        if constexpr (kMayBeNan) {
          nan |= mark_nan_codes(r[0]) | mark_nan_codes(r[1]);
          nan |= mark_nan_codes(r[2]) | mark_nan_codes(r[3]);
        }
        if constexpr (!Codes::kBlocks) {
#pragma unroll
          for (int i = 0; i < 2; ++i) multiply_words(s[n], r[i], r[2 + i], q[c + i], mantissa);
        } else if constexpr (!kNibbles) {
          float of_block[4] = {};
#pragma unroll
          for (int i = 0; i < 2; ++i) multiply_words(of_block, r[i], r[2 + i], q[c + i], mantissa);
          add_block(s[n], of_block, tile, c / 2, 16 * n, lane);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float of_block[4] = {};
            multiply_nibbles<0>(of_block, r[i], r[2 + i], q[2 * (c + i)], mantissa);
            multiply_nibbles<4>(of_block, r[i], r[2 + i], q[2 * (c + i) + 1], mantissa);
            add_block(s[n], of_block, tile, c + i, 16 * n, lane);
          }
        }
      }
      if constexpr (!Codes::kBlocks) {
        const float low = scale_of(tile, 16 * n, lane), high = scale_of(tile, 16 * n + 8, lane);
        s[n][0] *= low, s[n][1] *= low, s[n][2] *= high, s[n][3] *= high;
      }
    }
    if constexpr (kMayBeNan) {
      if (__any_sync(0xffffffffu, (nan & kNanMark) != 0)) show_nan_keys(s, from, lane);
    }
  }

  /// Adds to O^T the values times weights and scales. Where a lane sees a code that is NaN,
  /// whatever its weight, its o[0][0] becomes NaN, and stays it.
  __device__ __forceinline__ static void multiply_values(float (&o)[kParts][4], const Scores& s,
                                                         uint32_t tile, uint32_t mantissa,
                                                         int lane) {
    // In fp16, which has scales in registers here, marks are not kept for longer than 16 keys.
    constexpr bool kKeepsMarks = kBf16;
    [[maybe_unused]] uint32_t nan = 0;
    [[maybe_unused]] const auto show = [&] {
      if ((nan & kNanMark) != 0) o[0][0] = __int_as_float(0x7fffffff);
    };
    const uint32_t from = tile + static_cast<uint32_t>(Codes::at(lane % 16, lane / 16));
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      if constexpr (!kKeepsMarks) nan = 0;
      Weights w;
      if constexpr (!Codes::kBlocks) w = weights_of(s[k], tile, 0, 16 * k, lane);
#pragma unroll
      for (int c = 0; c < Codes::kChunks; c += 2) {
        uint32_t r[4];  // chunk c of keys 0-7 and 8-15, and chunk c + 1 of both
        ptx::ldmatrix_trans(r,
                            (from ^ 16u * c) + static_cast<uint32_t>(16 * k * Codes::kCodeBytes));
        if constexpr (kMayBeNan) {
          nan |= mark_nan_codes(r[0]) | mark_nan_codes(r[1]);
          nan |= mark_nan_codes(r[2]) | mark_nan_codes(r[3]);
        }
        if constexpr (kKv == kQ8Blocks) w = weights_of(s[k], tile, c / 2, 16 * k, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t low = r[2 * i], high = r[2 * i + 1];
          if constexpr (!kNibbles) {
            add_values(o[c + i], w, unpack_word<T, kKv>(low, mantissa),
                       unpack_word<T, kKv>(high, mantissa));
          } else {
            w = weights_of(s[k], tile, c + i, 16 * k, lane);
            add_values(o[2 * (c + i)], w, unpack_nibbles<T, 0>(low, mantissa),
                       unpack_nibbles<T, 0>(high, mantissa));
            add_values(o[2 * (c + i) + 1], w, unpack_nibbles<T, 4>(low, mantissa),
                       unpack_nibbles<T, 4>(high, mantissa));
          }
        }
      }
      if constexpr (kMayBeNan && !kKeepsMarks) show();
    }
    if constexpr (kMayBeNan && kKeepsMarks) show();
  }

 private:
  /// Weights of 16 keys, as a B fragment; in fp16 also the scales of keys 2t and 2t + 1, and of
  /// those 8 further on.
  struct Weights {
    uint32_t b[2], scale[2];
  };

  // Adds the product of a part of Q with 16 keys, whose codes are in `low` (keys 0-7) and `high`.
  __device__ __forceinline__ static void multiply(float (&s)[4], const UnpackedWord& low,
                                                  const UnpackedWord& high,
                                                  const uint32_t (&q)[2]) {
    const uint32_t a[4] = {low.even, high.even, low.odd, high.odd};
    ptx::mma<T>(s, a, q[0], q[1]);
  }
  __device__ __forceinline__ static void multiply_words(float (&s)[4], uint32_t low, uint32_t high,
                                                        const uint32_t (&q)[2], uint32_t mantissa) {
    multiply(s, unpack_word<T, kKv>(low, mantissa), unpack_word<T, kKv>(high, mantissa), q);
  }
  template <int kShift>
  __device__ __forceinline__ static void multiply_nibbles(float (&s)[4], uint32_t low,
                                                          uint32_t high, const uint32_t (&q)[2],
                                                          uint32_t mantissa) {
    multiply(s, unpack_nibbles<T, kShift>(low, mantissa), unpack_nibbles<T, kShift>(high, mantissa),
             q);
  }

  /// Makes NaN of the scores of keys that have a code that is.
  __device__ __forceinline__ static void show_nan_keys(Scores& s, uint32_t from, int lane) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const NanMarks marks = NanMarks::read_again<Codes>(from, 16 * n);
      show_nan(s[n][0], s[n][1], marks.low, lane);
      show_nan(s[n][2], s[n][3], marks.high, lane);
    }
  }
  // The four lanes of a key have had its codes between them.
  __device__ __forceinline__ static void show_nan(float& s0, float& s1, uint32_t marks, int lane) {
    const uint32_t marked = __ballot_sync(0xffffffffu, (marks & kNanMark) != 0);
    if (marked >> (lane / 4 * 4) & 15) s0 = s1 = __int_as_float(0x7fffffff);
  }

  /// The scale of this lane's key of the eight from `key` on: of the row, or of a block of it.
  __device__ __forceinline__ static float scale_of(uint32_t tile, int key, int lane) {
    return ptx::load_shared_float(
        tile + static_cast<uint32_t>(Codes::kScalesOffset + 4 * (key + lane / 4)));
  }
  __device__ __forceinline__ static float scale_of_block(uint32_t tile, int block, int key,
                                                         int lane) {
    const int at = block * kKeys + key + lane / 4;
    const uint16_t bits =
        ptx::load_shared_half(tile + static_cast<uint32_t>(Codes::kScalesOffset + 2 * at));
    return static_cast<float>(__builtin_bit_cast(__half, bits));
  }
  __device__ __forceinline__ static void add_block(float (&s)[4], const float (&of_block)[4],
                                                   uint32_t tile, int block, int key, int lane) {
    const float low = scale_of_block(tile, block, key, lane);
    const float high = scale_of_block(tile, block, key + 8, lane);
    s[0] = __fmaf_rn(of_block[0], low, s[0]);
    s[1] = __fmaf_rn(of_block[1], low, s[1]);
    s[2] = __fmaf_rn(of_block[2], high, s[2]);
    s[3] = __fmaf_rn(of_block[3], high, s[3]);
  }

  // Weights of the 16 keys from `key` on. block: of a row.
  __device__ __forceinline__ static Weights weights_of(const float (&s)[4], uint32_t tile,
                                                       int block, int key, int lane) {
    Weights w{};
    float low = 1.f, high = 1.f;
    if constexpr (kBf16 && Codes::kBlocks) {
      low = scale_of_block(tile, block, key, lane);
      high = scale_of_block(tile, block, key + 8, lane);
    } else if constexpr (kBf16) {
      low = scale_of(tile, key, lane);
      high = scale_of(tile, key + 8, lane);
    } else {
      w.scale[0] = QuantisedKeys<Shape>::pair_of_scales(tile, block, key, lane);
      w.scale[1] = QuantisedKeys<Shape>::pair_of_scales(tile, block, key + 8, lane);
    }
    w.b[0] = ptx::transpose_fragment(ptx::pack<T>(s[0] * low, s[1] * low));
    w.b[1] = ptx::transpose_fragment(ptx::pack<T>(s[2] * high, s[3] * high));
    return w;
  }

  // Of 16 dimensions, of keys 0-7 and 8-15.
  __device__ __forceinline__ static void add_values(float (&o)[4], const Weights& w,
                                                    UnpackedWord low, UnpackedWord high) {
    if constexpr (!kBf16) {
      low.even = ptx::multiply_pair<T>(low.even, w.scale[0]);
      low.odd = ptx::multiply_pair<T>(low.odd, w.scale[0]);
      high.even = ptx::multiply_pair<T>(high.even, w.scale[1]);
      high.odd = ptx::multiply_pair<T>(high.odd, w.scale[1]);
    }
    const uint32_t a[4] = {low.even, low.odd, high.even, high.odd};
    ptx::mma<T>(o, a, w.b[0], w.b[1]);
  }
};

/// As DecodeWarp, of which it has the members that decode.cuh calls; for scores without a rule.
template <typename Shape>
struct TurnedWarp {
  using T = typename Shape::T;
  using Products = TurnedProducts<Shape>;
  using Scores = typename Products::Scores;
  static constexpr int kKeys = Shape::kKeys, kParts = Products::kParts, kPairs = Products::kPairs;

  float o[kParts][4];
  float reference[2], sum[2];  // of rows 2t and 2t + 1; sum: this lane's part
  uint32_t q[kParts][2];
  RowKeys keys[2];
  uint32_t mantissa;  // kMantissaOf

  template <typename Params>
  __device__ __forceinline__ void begin(const Params& p, const Division& d, const Piece& piece,
                                        int /*slice*/, float2* /*score_rows*/) {
    // Computed anew, since registers are short while keys are read.
    const int lane = ptx::opaque(static_cast<int>(threadIdx.x)) % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      reference[h] = -infinity();
      sum[h] = 0.f;
      // A row that is not there sees what the last one does: else it would hide keys in each tile.
      const int row = min(2 * (lane % 4) + h, piece.tile.count - 1);
      keys[h] = RowKeys::of(p, piece, TileRow::of(d, piece.tile, row));
    }
  }

  __device__ __forceinline__ void take_queries(uint32_t q_tile, int /*slice*/) {
    const auto lane = static_cast<int>(threadIdx.x % 32);
    mantissa = kMantissaOf<T, Shape::kKvDtype>;
    ptx::make_opaque(mantissa);
    const uint32_t from = q_tile + static_cast<uint32_t>(lane % 8 * Shape::kPitch + lane / 8 * 16);
#pragma unroll
    for (int k = 0; k < kParts; k += 2) {
      uint32_t r[4];
      ptx::ldmatrix(r, from + 32 * k);
      q[k][0] = r[0], q[k][1] = r[1], q[k + 1][0] = r[2], q[k + 1][1] = r[3];
#pragma unroll
      for (int i = 0; i < 4; ++i) o[k][i] = o[k + 1][i] = 0.f;
    }
  }

  __device__ __forceinline__ void step(const CachedParams& p, uint32_t k_tile, uint32_t v_tile,
                                       int32_t key0, const float2* /*score_rows*/) {
    const auto lane = static_cast<int>(threadIdx.x % 32);
    QuantisedKeys<Shape>::order(k_tile, lane);
    QuantisedKeys<Shape>::order(v_tile, lane);
    __syncwarp();
    Scores s;
    Products::multiply_keys(s, q, k_tile, mantissa, lane);
    const float scale =
        Score::of(p, 0.f).scale_log2;  // of constants: they cost less than registers
    const bool all = keys[0].see_all(key0, kKeys) && keys[1].see_all(key0, kKeys);
    if (!__all_sync(0xffffffffu, all)) hide(s, key0 + lane / 4, key0);
    raise_references(s, scale);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float subtract = reference_of(reference[h]);
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
#pragma unroll
        for (int i = h; i < 4; i += 2) {
          s[n][i] = exp2_fast(fmaf(s[n][i], scale, -subtract));
          sum[h] += s[n][i];
        }
      }
    }
    Products::multiply_values(o, s, v_tile, mantissa, lane);
  }

  template <typename RowAt>
  __device__ __forceinline__ void leave(const RowAt& row_at, float2* sums, int thread,
                                        int32_t count) {
    const int lane = thread % 32;
    // Where a value's code is NaN, all rows of the tile show it, and are computed again from their
    // own keys.
    if (Products::kMayBeNan && __any_sync(0xffffffffu, o[0][0] != o[0][0]))
      o[0][0] = o[0][1] = o[0][2] = o[0][3] = __int_as_float(0x7fffffff);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = over_keys(sum[h], [](float a, float b) { return a + b; });
      const int row = 2 * (lane % 4) + h;
      if (row >= count) continue;
      if (lane / 4 == 0) sums[row] = make_float2(reference[h], total);
      float* const to = row_at(row) + 2 * (lane / 4);
#pragma unroll
      for (int n = 0; n < kParts; ++n)
        *reinterpret_cast<float2*>(to + 16 * n) = make_float2(o[n][h], o[n][2 + h]);
    }
  }

 private:
  // Of the eight lanes that have a row's keys between them.
  template <typename Combine>
  __device__ __forceinline__ static float over_keys(float x, const Combine& combine) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
  }

  /// Sets the scores of keys that a row does not see to -inf. own: this lane's first key, of those
  /// from key0 on, which are of one block.
  __device__ __forceinline__ void hide(Scores& s, int32_t own, int32_t key0) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool visited = keys[h].own.have(key0);
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
#pragma unroll
        for (int i = h; i < 4; i += 2) {
          if (!visited || !keys[h].see(own + 16 * n + i / 2 * 8)) s[n][i] = -infinity();
        }
      }
    }
  }

  /// The running maxima, and what they make of O and the sums. Most tiles raise none, which needs
  /// no exchange between the lanes of a row to be found out.
  __device__ __forceinline__ void raise_references(const Scores& s, float scale) {
    float max[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max[h] = fmaxf(s[0][h], s[0][2 + h]);
#pragma unroll
      for (int n = 1; n < kPairs; ++n) max[h] = fmaxf(max[h], fmaxf(s[n][h], s[n][2 + h]));
      max[h] = fmaxf(max[h] * scale, reference[h]);
    }
    if (!__any_sync(0xffffffffu, max[0] != reference[0] || max[1] != reference[1])) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      max[h] = over_keys(max[h], [](float a, float b) { return fmaxf(a, b); });
      const float alpha = exp2_fast(reference[h] - reference_of(max[h]));
      reference[h] = max[h];
      sum[h] *= alpha;
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        o[n][h] *= alpha;
        o[n][2 + h] *= alpha;
      }
    }
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_TURNED_WARP_CUH_
