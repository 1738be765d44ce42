// Products with the keys and values of a quantised cache, by a warp whose team has no other.
//
// A code becomes a 16-bit value in registers, exactly, and tensor cores multiply that. Scales go
// where they are few:
//
//   K   a score is multiplied by its key's scale, in float32; of blocks, the sum over a block's
//       32 dimensions by the block's, before it is added to the others
//   V   in bf16 the weights of a row are multiplied by the keys' scales before they are rounded,
//   for
//       each block anew. In fp16 those products would leave the range: there the values are
//       multiplied
//
// ldmatrix takes two bytes for one of its elements: of K a lane gets four neighbouring dimensions
// of a key, of V two dimensions of two keys. So element 2t of a fragment, 2t + 1, 2t + 8 and 2t + 9
// are dimensions 4t, 4t + 2, 4t + 1 and 4t + 3 of 16: Q is stored in that order (place_query), and
// O is written back in its own (DecodeWarp::leave).
#ifndef STROBE_CUDA_DECODE_QUANTISED_KEYS_CUH_
#define STROBE_CUDA_DECODE_QUANTISED_KEYS_CUH_

#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/common/unpack.cuh"
#include "cuda/decode/layout.h"
#include "cuda/ptx/ldmatrix.h"
#include "cuda/ptx/mma.h"
#include "cuda/ptx/packed.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda {

/// Stores eight values of a row of Q, the dimensions from 8 * chunk on, at the shared address
/// `row`.
__device__ __forceinline__ void place_query(uint32_t row, int chunk, const uint32_t (&w)[4]) {
  const uint32_t to = row + static_cast<uint32_t>(chunk / 2 * 32 + chunk % 2 * 8);
  ptx::store_shared(to, __byte_perm(w[0], w[1], 0x5410));
  ptx::store_shared(to + 4, __byte_perm(w[2], w[3], 0x5410));
  ptx::store_shared(to + 16, __byte_perm(w[0], w[1], 0x7632));
  ptx::store_shared(to + 20, __byte_perm(w[2], w[3], 0x7632));
}

/// Whether a lane has codes that are NaN (bits of kNanMark) among its codes of eight keys, and of
/// the eight after them.
struct NanMarks {
  uint32_t low = 0, high = 0;

  /// Of the keys from `key` on. from: where the lane's codes of the tile's first keys are read.
  /// They are read once more where there are any: registers for which keys they were are short
  /// while keys are multiplied.
  template <typename Codes>
  __device__ __forceinline__ static NanMarks read_again(uint32_t from, int key) {
    NanMarks marks;
#pragma unroll 1
    for (int c = 0; c < Codes::kChunks; c += 2) {
      uint32_t r[4];
      ptx::ldmatrix(r, (from ^ 16u * c) + static_cast<uint32_t>(key * Codes::kCodeBytes));
      marks.low |= mark_nan_codes(r[0]) | mark_nan_codes(r[1]);
      marks.high |= mark_nan_codes(r[2]) | mark_nan_codes(r[3]);
    }
    return marks;
  }
};

template <typename Shape>
struct QuantisedKeys {
  using T = typename Shape::T;
  using Codes = typename Shape::Codes;
  static constexpr int kKv = Shape::kKvDtype, kKeys = Shape::kKeys, kPairs = kKeys / 16;
  static constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>, kNibbles = kKv == kQ4Blocks;
  static constexpr bool kMayBeNan = kKv == kE4m3Codes;  // a code by itself
  using Scores = float[kKeys / 8][4];

  /// Of a team's K or V: rows of blocks that have landed are put in order. A __syncwarp must
  /// follow. lane: its key's.
  __device__ __forceinline__ static void order(uint32_t tile, int lane) {
    if constexpr (Codes::kBlocks) {
      constexpr int kWords = (Codes::kRowBytes + 3) / 4, kOfBlock = kNibbles ? 4 : 8;
      static_assert(Codes::kRowPitch % 4 == 0);
      uint32_t w[kWords];
      const uint32_t row = tile + static_cast<uint32_t>(lane * Codes::kRowPitch);
      if constexpr (Codes::kUnit == 8) {
#pragma unroll
        for (int i = 0; i < kWords; i += 2) {
          const auto two = ptx::load_shared_wide<uint2>(row + 4 * i);
          w[i] = two.x, w[i + 1] = two.y;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) w[i] = ptx::load_shared(row + 4 * i);
      }
      __syncwarp();  // others' rows have been read as well
      const uint32_t to = tile + static_cast<uint32_t>(Codes::at(lane, 0));
      const uint32_t scales = tile + static_cast<uint32_t>(Codes::kScalesOffset + 2 * lane);
#pragma unroll
      for (int b = 0; b < Codes::kBlocksOfRow; ++b) {
        const int begin = b * (2 + 4 * kOfBlock), codes = begin + 2;  // bytes
        const auto scale = static_cast<uint16_t>(w[begin / 4] >> (begin % 4 * 8));
        // One that is not finite makes NaN of all values.
        const bool finite = (scale & 0x7c00) != 0x7c00;
        ptx::store_shared_half(scales + 2 * kKeys * b, finite ? scale : uint16_t{0x7fff});
        uint32_t code[kOfBlock];
#pragma unroll
        for (int i = 0; i < kOfBlock; ++i) {
          const int at = codes / 4 + i;
          code[i] = codes % 4 == 0 ? w[at] : __byte_perm(w[at], w[at + 1], 0x5432);
        }
#pragma unroll
        for (int c = 0; c < kOfBlock / 4; ++c) {
          const uint32_t chunk[4] = {code[4 * c], code[4 * c + 1], code[4 * c + 2],
                                     code[4 * c + 3]};
          ptx::store_shared_words(to ^ 16u * (b * (kOfBlock / 4) + c), chunk);
        }
      }
    }
  }

  /// Scores of the warp's rows with the keys of K's tile, times the keys' scales. q: the fragments
  /// of Q; mantissa: kMantissaOf, which is kept in a register.
  template <int kK>
  __device__ __forceinline__ static void multiply_keys(Scores& s, const uint32_t (&q)[kK][4],
                                                       uint32_t tile, uint32_t mantissa, int lane) {
    const uint32_t from =
        tile + static_cast<uint32_t>(Codes::at(lane % 8 + lane / 16 * 8, lane / 8 % 2));
    [[maybe_unused]] uint32_t nan = 0;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      float(&low)[4] = s[2 * n], (&high)[4] = s[2 * n + 1];
      low[0] = low[1] = low[2] = low[3] = 0.f;
      high[0] = high[1] = high[2] = high[3] = 0.f;
#pragma unroll
      for (int c = 0; c < Codes::kChunks; c += 2) {
        uint32_t r[4];
        ptx::ldmatrix(r, (from ^ 16u * c) + static_cast<uint32_t>(16 * n * Codes::kCodeBytes));
        if constexpr (kMayBeNan) {
          nan |= mark_nan_codes(r[0]) | mark_nan_codes(r[1]);
          nan |= mark_nan_codes(r[2]) | mark_nan_codes(r[3]);
        }
        if constexpr (!Codes::kBlocks) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply(low, q[c + i], unpack_word<T, kKv>(r[i], mantissa));
            multiply(high, q[c + i], unpack_word<T, kKv>(r[2 + i], mantissa));
          }
        } else if constexpr (!kNibbles) {
          float of_low[4] = {}, of_high[4] = {};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            multiply(of_low, q[c + i], unpack_word<T, kKv>(r[i], mantissa));
            multiply(of_high, q[c + i], unpack_word<T, kKv>(r[2 + i], mantissa));
          }
          add_block(low, of_low, tile, c / 2, 16 * n, lane);
          add_block(high, of_high, tile, c / 2, 16 * n + 8, lane);
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float of_low[4] = {}, of_high[4] = {};
            multiply(of_low, q[2 * (c + i)], unpack_nibbles<T, 0>(r[i], mantissa));
            multiply(of_low, q[2 * (c + i) + 1], unpack_nibbles<T, 4>(r[i], mantissa));
            multiply(of_high, q[2 * (c + i)], unpack_nibbles<T, 0>(r[2 + i], mantissa));
            multiply(of_high, q[2 * (c + i) + 1], unpack_nibbles<T, 4>(r[2 + i], mantissa));
            add_block(low, of_low, tile, c + i, 16 * n, lane);
            add_block(high, of_high, tile, c + i, 16 * n + 8, lane);
          }
        }
      }
    }
    if constexpr (!Codes::kBlocks) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const float2 scale = scales_of(tile, 8 * n, lane);
        s[n][0] *= scale.x, s[n][1] *= scale.y, s[n][2] *= scale.x, s[n][3] *= scale.y;
      }
    }
    if constexpr (kMayBeNan) {
      if (__any_sync(0xffffffffu, (nan & kNanMark) != 0)) show_nan_keys(s, from, lane);
    }
  }

  /// Adds to O the values of V's tile, times weights and scales. Where a lane sees a code that is
  /// NaN, whatever its weight, its o[0][0] becomes NaN, and stays it.
  template <int kN>
  __device__ __forceinline__ static void multiply_values(float (&o)[kN][4], const Scores& s,
                                                         uint32_t tile, uint32_t mantissa,
                                                         int lane) {
    [[maybe_unused]] uint32_t nan = 0;
    const uint32_t from = tile + static_cast<uint32_t>(Codes::at(lane % 16, lane / 16));
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      Weights w;
      if constexpr (!Codes::kBlocks) w = weights_of(s, tile, 0, k, lane);
#pragma unroll
      for (int c = 0; c < Codes::kChunks; c += 2) {
        uint32_t r[4];
        ptx::ldmatrix_trans(r,
                            (from ^ 16u * c) + static_cast<uint32_t>(16 * k * Codes::kCodeBytes));
        if constexpr (kMayBeNan) {
          nan |= mark_nan_codes(r[0]) | mark_nan_codes(r[1]);
          nan |= mark_nan_codes(r[2]) | mark_nan_codes(r[3]);
        }
        if constexpr (kKv == kQ8Blocks) w = weights_of(s, tile, c / 2, k, lane);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (!kNibbles) {
            add_values(o[2 * (c + i)], o[2 * (c + i) + 1], w,
                       unpack_word<T, kKv>(r[2 * i], mantissa),
                       unpack_word<T, kKv>(r[2 * i + 1], mantissa));
          } else {
            w = weights_of(s, tile, c + i, k, lane);
            add_values(o[4 * (c + i)], o[4 * (c + i) + 1], w,
                       unpack_nibbles<T, 0>(r[2 * i], mantissa),
                       unpack_nibbles<T, 0>(r[2 * i + 1], mantissa));
            add_values(o[4 * (c + i) + 2], o[4 * (c + i) + 3], w,
                       unpack_nibbles<T, 4>(r[2 * i], mantissa),
                       unpack_nibbles<T, 4>(r[2 * i + 1], mantissa));
          }
        }
      }
    }
    if constexpr (kMayBeNan) {
      if ((nan & kNanMark) != 0) o[0][0] = __int_as_float(0x7fffffff);
    }
  }

  /// Scales of this lane's two keys of the eight from `key` on, 2t and 2t + 1, in T. block: of a
  /// row.
  __device__ __forceinline__ static uint32_t pair_of_scales(uint32_t tile, int block, int key,
                                                            int lane) {
    if constexpr (Codes::kBlocks) {
      return halves_of(tile, block, key, lane);
    } else {
      const float2 scale = scales_of(tile, key, lane);
      return ptx::pack<T>(scale.x, scale.y);
    }
  }

 private:
  /// Weights of 16 keys, as a fragment; in fp16 their scales, of keys 2t and 2t + 1, and of those 8
  /// further on.
  struct Weights {
    uint32_t a[4], scale[2];
  };

  /// Makes NaN of the scores of keys that have a code that is.
  __device__ __forceinline__ static void show_nan_keys(Scores& s, uint32_t from, int lane) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const NanMarks marks = NanMarks::read_again<Codes>(from, 16 * n);
      show_nan(s[2 * n], marks.low, lane);
      show_nan(s[2 * n + 1], marks.high, lane);
    }
  }
  // Four lanes have had a key's codes between them, and its scores are in other lanes.
  __device__ __forceinline__ static void show_nan(float (&s)[4], uint32_t marks, int lane) {
    const uint32_t marked = __ballot_sync(0xffffffffu, (marks & kNanMark) != 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (marked >> (4 * (2 * (lane % 4) + i % 2)) & 15) s[i] = __int_as_float(0x7fffffff);
    }
  }

  __device__ __forceinline__ static void multiply(float (&s)[4], const uint32_t (&q)[4],
                                                  const UnpackedWord& k) {
    ptx::mma<T>(s, q, k.even, k.odd);
  }

  /// Scales of this lane's two keys of the eight from `key` on. block: of a row.
  __device__ __forceinline__ static uint32_t halves_of(uint32_t tile, int block, int key,
                                                       int lane) {
    return ptx::load_shared(
        tile +
        static_cast<uint32_t>(Codes::kScalesOffset + 2 * (block * kKeys + key + 2 * (lane % 4))));
  }
  __device__ __forceinline__ static float2 scales_of(uint32_t tile, int key, int lane) {
    return ptx::load_shared_pair(
        tile + static_cast<uint32_t>(Codes::kScalesOffset + 4 * (key + 2 * (lane % 4))));
  }
  __device__ __forceinline__ static float2 as_floats(uint32_t halves) {
    __half2 pair;
    memcpy(&pair, &halves, sizeof pair);
    return __half22float2(pair);
  }

  __device__ __forceinline__ static void add_block(float (&s)[4], const float (&of_block)[4],
                                                   uint32_t tile, int block, int key, int lane) {
    const float2 scale = as_floats(halves_of(tile, block, key, lane));
    s[0] = __fmaf_rn(of_block[0], scale.x, s[0]);
    s[1] = __fmaf_rn(of_block[1], scale.y, s[1]);
    s[2] = __fmaf_rn(of_block[2], scale.x, s[2]);
    s[3] = __fmaf_rn(of_block[3], scale.y, s[3]);
  }

  __device__ __forceinline__ static Weights weights_of(const Scores& s, uint32_t tile, int block,
                                                       int k, int lane) {
    const auto &low = s[2 * k], &high = s[2 * k + 1];
    if constexpr (kBf16) {
      float2 of_low, of_high;
      if constexpr (Codes::kBlocks) {
        of_low = as_floats(halves_of(tile, block, 16 * k, lane));
        of_high = as_floats(halves_of(tile, block, 16 * k + 8, lane));
      } else {
        of_low = scales_of(tile, 16 * k, lane);
        of_high = scales_of(tile, 16 * k + 8, lane);
      }
      return {{ptx::pack<T>(low[0] * of_low.x, low[1] * of_low.y),
               ptx::pack<T>(low[2] * of_low.x, low[3] * of_low.y),
               ptx::pack<T>(high[0] * of_high.x, high[1] * of_high.y),
               ptx::pack<T>(high[2] * of_high.x, high[3] * of_high.y)},
              {}};
    } else {
      Weights w{{ptx::pack<T>(low[0], low[1]), ptx::pack<T>(low[2], low[3]),
                 ptx::pack<T>(high[0], high[1]), ptx::pack<T>(high[2], high[3])},
                {}};
#pragma unroll
      for (int h = 0; h < 2; ++h) w.scale[h] = pair_of_scales(tile, block, 16 * k + 8 * h, lane);
      return w;
    }
  }

  /// Of 16 dimensions, of keys 0-7 and 8-15: to O of the even ones and of the odd ones.
  __device__ __forceinline__ static void add_values(float (&even)[4], float (&odd)[4],
                                                    const Weights& w, UnpackedWord low,
                                                    UnpackedWord high) {
    if constexpr (!kBf16) {
      low.even = ptx::multiply_pair<T>(low.even, w.scale[0]);
      low.odd = ptx::multiply_pair<T>(low.odd, w.scale[0]);
      high.even = ptx::multiply_pair<T>(high.even, w.scale[1]);
      high.odd = ptx::multiply_pair<T>(high.odd, w.scale[1]);
    }
    ptx::mma<T>(even, w.a, low.even, high.even);
    ptx::mma<T>(odd, w.a, low.odd, high.odd);
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_DECODE_QUANTISED_KEYS_CUH_
