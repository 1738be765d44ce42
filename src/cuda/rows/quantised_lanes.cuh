// A row that is quantised, or read back, by lanes of a warp. A lane has eight neighbouring values,
// which it reads and writes at once where they lie aligned; a row has as many lanes as it needs, a
// power of two, and a block of 32 values has four. So a warp has some rows at a time, all of the
// same step of its walk.
#ifndef STROBE_CUDA_ROWS_QUANTISED_LANES_CUH_
#define STROBE_CUDA_ROWS_QUANTISED_LANES_CUH_

#include <cstdint>

#include "core/problem.h"
#include "core/quantised.h"
#include "cuda/cache/coded_row.cuh"
#include "cuda/common/element.h"

namespace strobe::cuda {

inline constexpr int kThreads = 128, kWarps = kThreads / 32;
inline constexpr int kShare = 8;  // values of a lane: a row has 256 at most
inline constexpr int kLanesOfBlock = static_cast<int>(kBlockValues) / kShare;

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x % 32); }

/// A lane's part of its row of n values: its first, and how many it has.
struct Part {
  int lanes, first, count;  // lanes: of a row

  __device__ __forceinline__ static Part of(int lanes, int n) {
    const int first = lane_of_warp() % lanes * kShare;
    return {lanes, first, min(max(n - first, 0), kShare)};
  }
};

/// The bits of the largest magnitude of a row's lanes, NaN's where there is one: those are larger.
__device__ __forceinline__ uint32_t largest_of_row(uint32_t bits, int lanes) {
#pragma unroll 1
  for (int step = lanes / 2; step > 0; step /= 2)
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, step));
  return bits;
}
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
/// This lane's. Values beyond the row's end are 0.
__device__ __forceinline__ uint32_t largest_of_lane(const float (&x)[kShare]) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kShare; ++i) bits = max(bits, magnitude(x[i]));
  return bits;
}
/// The first of a block's values that are largest in magnitude, 0 where all are.
__device__ __forceinline__ float largest_of_block(const float (&x)[kShare]) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < kShare; ++i) largest = magnitude(x[i]) > magnitude(largest) ? x[i] : largest;
#pragma unroll
  for (int step = 1; step < kLanesOfBlock; step *= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, largest, step);
    const bool before = (lane_of_warp() & step) != 0;  // whether the other's values come first
    const uint32_t own = magnitude(largest), its = magnitude(other);
    if (its > own || (its == own && before)) largest = other;
  }
  return largest;
}

/// Stores the first `count` bytes of eight; at once, or two by two, where they lie aligned.
__device__ __forceinline__ void store_bytes(char* to, uint2 bytes, int count) {
  const auto address = reinterpret_cast<uintptr_t>(to);
  if (count == kShare && address % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = bytes;
  } else if (count == kShare && address % 2 == 0) {
    auto* const pairs = reinterpret_cast<uint16_t*>(to);
    pairs[0] = static_cast<uint16_t>(bytes.x), pairs[1] = static_cast<uint16_t>(bytes.x >> 16);
    pairs[2] = static_cast<uint16_t>(bytes.y), pairs[3] = static_cast<uint16_t>(bytes.y >> 16);
  } else {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      if (i < count) to[i] = static_cast<char>((i < 4 ? bytes.x : bytes.y) >> (8 * (i % 4)));
    }
  }
}
__device__ __forceinline__ uint2 load_bytes(const char* from, int count) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  uint2 bytes = make_uint2(0, 0);
  if (count == kShare && address % 8 == 0) {
    bytes = *reinterpret_cast<const uint2*>(from);
  } else if (count == kShare && address % 2 == 0) {
    const auto* const pairs = reinterpret_cast<const uint16_t*>(from);
    bytes.x = pairs[0] | uint32_t{pairs[1]} << 16;
    bytes.y = pairs[2] | uint32_t{pairs[3]} << 16;
  } else {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      if (i < count)
        (i < 4 ? bytes.x : bytes.y) |= uint32_t{static_cast<uint8_t>(from[i])} << (8 * (i % 4));
    }
  }
  return bytes;
}
/// Adds the i-th of a lane's eight codes.
__device__ __forceinline__ void put_code(uint2& codes, int i, int32_t code) {
  (i < 4 ? codes.x : codes.y) |= static_cast<uint32_t>(code & 255) << (8 * (i % 4));
}

/// A lane's values in units of a scale, as in_units() has them, but for some that are nearer to 0
/// than any code but its own: one division for all. With a reciprocal that is rounded to the
/// nearest, a quotient that is off by one or two units of its last place is right after two
/// corrections, where nothing leaves the range of float32; elsewhere each value is divided.
__device__ __forceinline__ void divide(const float (&x)[kShare], float scale,
                                       float (&units)[kShare]) {
  constexpr uint32_t kLeast = 0x21800000, kMost = 0x5d800000;  // 2^-60 and 2^60
  const uint32_t by = magnitude(scale);
  if (by >= kLeast && by < kMost && largest_of_lane(x) < kMost) {
    const float reciprocal = 1.f / scale;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      float q = x[i] * reciprocal;
      q = __fmaf_rn(reciprocal, __fmaf_rn(-scale, q, x[i]), q);
      q = __fmaf_rn(reciprocal, __fmaf_rn(-scale, q, x[i]), q);
      // Where it is 0 a correction has made the sign that of 0 - 0.
      const uint32_t sign = (__float_as_uint(x[i]) ^ __float_as_uint(scale)) & 0x80000000u;
      units[i] = __uint_as_float(magnitude(q) | sign);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kShare; ++i) units[i] = in_units(x[i], scale);
  }
}

/// As quantise_row of core/quantised.h, to the bit, by a row's lanes, all of which must call it.
/// to, scale: of the row; the scale is read or made as the form says; largest: of the values that
/// it is made for. The row is written if it is there.
__device__ __forceinline__ void quantise_by_lanes(const RowForm& form, const float (&x)[kShare],
                                                  const Part& part, char* to, char* scale,
                                                  uint32_t largest, bool is_there) {
  const int count = is_there ? part.count : 0;
  uint2 codes = make_uint2(0, 0);
  float units[kShare];
  if (has_scales(form.dtype)) {
    if (count == 0) return;
    float by;
    if (form.makes_scale) {
      by = scale_for(form.dtype, __uint_as_float(largest));
      if (form.scale_dtype == STROBE_FLOAT16) {
        const uint16_t half = half_from_float(by);
        if (part.first == 0) *reinterpret_cast<uint16_t*>(scale) = half;
        by = float_from_half(half);
      } else if (part.first == 0) {
        *reinterpret_cast<float*>(scale) = by;
      }
    } else {
      by = read_scale(form.scale_dtype, scale);
    }
    divide(x, by, units);
    if (form.dtype == STROBE_INT8) {
#pragma unroll
      for (int i = 0; i < kShare; ++i)
        put_code(codes, i, nearest_code(units[i], -kMostInt8, kMostInt8));
    } else if (form.dtype == STROBE_FLOAT8_E4M3) {
#pragma unroll
      for (int i = 0; i < kShare; ++i) put_code(codes, i, e4m3_from_float(units[i]));
    } else {
#pragma unroll
      for (int i = 0; i < kShare; ++i) put_code(codes, i, e5m2_from_float(units[i]));
    }
    store_bytes(to + part.first, codes, count);
    return;
  }
  const bool nibbles = form.dtype == STROBE_Q4_0;
  const int block = part.first / static_cast<int>(kBlockValues);
  const int of_block = lane_of_warp() % kLanesOfBlock;
  const uint16_t half = half_from_float(scale_for(form.dtype, largest_of_block(x)));
  divide(x, float_from_half(half), units);
  char* const at = to + block * (nibbles ? kQ4BlockBytes : kQ8BlockBytes);
  if (nibbles) {
    uint32_t own = 0;  // codes of four bits
#pragma unroll
    for (int i = 0; i < kShare; ++i)
      own |= static_cast<uint32_t>(nearest_code(units[i], -8, 7) + 8) << (4 * i);
    // A byte has a code of this lane and one of the lane that is half a block away: each of the two
    // writes four of their eight bytes.
    const uint32_t other = __shfl_xor_sync(0xffffffffu, own, kLanesOfBlock / 2);
    const bool upper = of_block >= kLanesOfBlock / 2;
    const int shift = upper ? 16 : 0;
    const uint32_t low = (upper ? other : own) >> shift, high = (upper ? own : other) >> shift;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      codes.x |= (low >> (4 * i) & 15) << (8 * i) | (high >> (4 * i) & 15) << (8 * i + 4);
    if (count == 0) return;
    char* const bytes =
        at + kBlockScaleBytes + of_block % (kLanesOfBlock / 2) * 8 + (upper ? 4 : 0);
    if (reinterpret_cast<uintptr_t>(bytes) % 2 == 0) {
      auto* const pairs = reinterpret_cast<uint16_t*>(bytes);
      pairs[0] = static_cast<uint16_t>(codes.x), pairs[1] = static_cast<uint16_t>(codes.x >> 16);
    } else {
      store_bytes(bytes, codes, 4);
    }
  } else {
    if (count == 0) return;
#pragma unroll
    for (int i = 0; i < kShare; ++i)
      put_code(codes, i, nearest_code(units[i], -kMostInt8, kMostInt8));
    store_bytes(at + kBlockScaleBytes + of_block * kShare, codes, count);
  }
  if (of_block == 0) store_bytes(at, make_uint2(half, 0), kBlockScaleBytes);
}

/// What a lane's codes of the row at `from` stand for; scale: where the row's is, if the form has
/// any. q4_0's codes are 8 more than what is multiplied.
__device__ __forceinline__ void dequantise_part(int32_t kv_dtype, int32_t scale_dtype,
                                                const char* from, const char* scale,
                                                const Part& part, float (&x)[kShare]) {
  const int block = part.first / static_cast<int>(kBlockValues);
  const int of_block = lane_of_warp() % kLanesOfBlock;
  const bool nibbles = kv_dtype == STROBE_Q4_0;
  float by;
  uint2 codes;
  if (has_scales(kv_dtype)) {
    by = read_scale(scale_dtype, scale);
    codes = load_bytes(from + part.first, part.count);
  } else {
    const char* const at = from + block * (nibbles ? kQ4BlockBytes : kQ8BlockBytes);
    by = half_at(at);
    codes = load_bytes(
        at + kBlockScaleBytes + (nibbles ? of_block % (kLanesOfBlock / 2) : of_block) * kShare,
        kShare);
  }
  by = usable_scale(by);
  const int shift = of_block >= kLanesOfBlock / 2 ? 4 : 0;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const auto code = static_cast<uint8_t>((i < 4 ? codes.x : codes.y) >> (8 * (i % 4)));
    x[i] = by *
           (nibbles ? static_cast<float>((code >> shift & 15) - 8) : value_of_code(kv_dtype, code));
  }
}

/// A lane's values as they are in memory: eight floats, or pairs of two bytes in the first four.
__device__ __forceinline__ void read_values(int32_t dtype, const void* from, int count,
                                            float (&x)[kShare]) {
  const bool aligned = count == kShare && reinterpret_cast<uintptr_t>(from) % 16 == 0;
#pragma unroll
  for (int i = 0; i < kShare; ++i) x[i] = 0.f;
  if (dtype == STROBE_FLOAT32) {
    const auto* const floats = static_cast<const float*>(from);
    if (aligned) {
      const float4 low = *reinterpret_cast<const float4*>(floats);
      const float4 high = *reinterpret_cast<const float4*>(floats + 4);
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        if (i < count) x[i] = floats[i];
      }
    }
    return;
  }
  uint32_t pairs[kShare / 2] = {};
  if (aligned) {
    const uint4 all = *static_cast<const uint4*>(from);
    pairs[0] = all.x, pairs[1] = all.y, pairs[2] = all.z, pairs[3] = all.w;
  } else {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      if (i < count)
        pairs[i / 2] |= uint32_t{static_cast<const uint16_t*>(from)[i]} << (16 * (i % 2));
    }
  }
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const auto bits = static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2)));
    x[i] = dtype == kBfloat16 ? __uint_as_float(uint32_t{bits} << 16)
                              : static_cast<float>(__builtin_bit_cast(__half, bits));
  }
}
__device__ __forceinline__ void write_values(int32_t dtype, void* to, int count,
                                             const float (&x)[kShare]) {
  const bool aligned = count == kShare && reinterpret_cast<uintptr_t>(to) % 16 == 0;
  if (dtype == STROBE_FLOAT32) {
    auto* const floats = static_cast<float*>(to);
    if (aligned) {
      *reinterpret_cast<float4*>(floats) = make_float4(x[0], x[1], x[2], x[3]);
      *reinterpret_cast<float4*>(floats + 4) = make_float4(x[4], x[5], x[6], x[7]);
    } else {
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        if (i < count) floats[i] = x[i];
      }
    }
    return;
  }
  uint16_t bits[kShare];
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    bits[i] = dtype == kBfloat16 ? __builtin_bit_cast(uint16_t, Element<kBfloat16>(x[i]))
                                 : __builtin_bit_cast(uint16_t, Element<kFloat16>(x[i]));
  }
  if (aligned) {
    const auto pair = [&](int i) { return bits[i] | uint32_t{bits[i + 1]} << 16; };
    *static_cast<uint4*>(to) = make_uint4(pair(0), pair(2), pair(4), pair(6));
  } else {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      if (i < count) static_cast<uint16_t*>(to)[i] = bits[i];
    }
  }
}
__device__ __forceinline__ int element_bytes(int32_t dtype) {
  return dtype == STROBE_FLOAT32 ? 4 : 2;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_ROWS_QUANTISED_LANES_CUH_
