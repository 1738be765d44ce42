// Rows that are quantised, and read back: what strobe_quantize and strobe_dequantize do on GPUs,
// and an append to a quantised cache. A lane has eight neighbouring values, which it reads and
// writes at once where they lie aligned; a row has as many lanes of a warp as it needs, a power of
// two, and a block of 32 values has four. So a warp has some rows at a time, all of the same step
// of its walk.
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/quantised.h"
#include "core/workspace.h"
#include "cuda/cache/cache_update.cuh"
#include "cuda/cache/coded_row.cuh"
#include "cuda/cache/rotated_queries.h"
#include "cuda/cache/update_kernel.cuh"
#include "cuda/common/element.h"
#include "cuda/common/static_order.cuh"
#include "cuda/host/device_guard.h"
#include "cuda/host/device_pointer.h"
#include "cuda/host/dispatch.h"
#include "cuda/host/kernel_handle.h"
#include "cuda/host/machine.h"
#include "cuda/host/quantised_update.h"

namespace strobe::cuda {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kShare = 8;  // values of a lane: a row has 256 at most
constexpr int kLanesOfBlock = static_cast<int>(kBlockValues) / kShare;

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

// --- strobe_quantize and strobe_dequantize ---

/// Rows of the arguments of a launch, as far apart as those of a lane are.
struct ArgsRow {
  int64_t batch, row, head;

  STROBE_HOST_DEVICE static ArgsRow of(const QuantiseArgs& a, int64_t n) {
    return {n / a.heads / a.seqlen, n / a.heads % a.seqlen, n % a.heads};
  }
  /// The row that is `by` further on: divisions of 64 bits would take longer than the row.
  __device__ __forceinline__ void advance(const QuantiseArgs& a, const ArgsRow& by) {
    head += by.head, row += by.row, batch += by.batch;
    if (head >= a.heads) head -= a.heads, ++row;
    if (row >= a.seqlen) row -= a.seqlen, ++batch;
  }
  __device__ __forceinline__ int64_t offset(const strobe_strides& s) const {
    return batch * s.batch + row * s.seqlen + head * s.head;
  }
};
struct QuantiseParams {
  QuantiseArgs args;
  int32_t lanes;      // of a row
  ArgsRow step;       // from a lane's row to its next
  uint32_t* largest;  // [set_of(row)], of what scales are shared by; null where none are made
  int32_t group;      // heads that share a scale of heads

  /// Which of the scales that rows share a row has.
  __device__ __forceinline__ int64_t set_of(const ArgsRow& row) const {
    if (args.kv_scale == STROBE_KV_SCALE_TENSOR) return 0;
    const int64_t head = static_cast<int32_t>(row.head) / group;
    return args.kv_scale == STROBE_KV_SCALE_BATCH_HEAD ? row.batch * args.heads_kv + head : head;
  }
};

/// visit(row, is_there) for all rows of a lane, in each step of its warp.
template <typename Visit>
__device__ __forceinline__ void visit_rows(const QuantiseParams& p, const Visit& visit) {
  const QuantiseArgs& a = p.args;
  const int64_t rows = a.batch * a.seqlen * a.heads;
  const int of_warp = 32 / p.lanes;
  int64_t first = (int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x / 32)) * of_warp;
  if (first >= rows) return;
  const int own = lane_of_warp() / p.lanes;
  ArgsRow row = ArgsRow::of(a, first + own);
#pragma unroll 1
  for (; first < rows; first += int64_t{gridDim.x} * kWarps * of_warp) {
    visit(row, first + own < rows);
    row.advance(a, p.step);
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
/// Where this lane's values of a row are.
__device__ __forceinline__ char* values_at(const QuantiseArgs& a, const ArgsRow& row, int first) {
  const int64_t at = row.offset(a.x_strides) + first;
  return static_cast<char*>(const_cast<void*>(static_cast<const void*>(a.x))) +
         at * element_bytes(a.dtype);
}
__device__ __forceinline__ char* scale_at(const QuantiseParams& p, ArgsRow row) {
  const QuantiseArgs& a = p.args;
  row.head = static_cast<int32_t>(row.head) / p.group;
  return static_cast<char*>(a.scale) +
         (a.kv_scale_dtype == STROBE_FLOAT16 ? 2 : 4) * row.offset(a.scale_strides);
}

/// As rotate_by_hadamard of core/quantised.h, to the bit, by a row's lanes, all of which must call
/// it. n: values of the row.
__device__ __forceinline__ void rotate_by_lanes(float (&x)[kShare], int n) {
  float factor = 1.f;
#pragma unroll
  for (int half = 1; half < kShare; half *= 2) {
    if (half >= n) continue;
    factor *= 0.5f;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      if ((i & half) != 0) continue;
      const float sum = x[i] + x[i + half], difference = x[i] - x[i + half];
      x[i] = sum, x[i + half] = difference;
    }
  }
#pragma unroll 1
  for (int half = kShare; half < n; half *= 2) {
    factor *= 0.5f;
    const bool upper = (lane_of_warp() & half / kShare) != 0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, x[i], half / kShare);
      x[i] = upper ? other - x[i] : x[i] + other;
    }
  }
  factor = sqrtf(factor);
#pragma unroll
  for (int i = 0; i < kShare; ++i) x[i] *= factor;
}
/// A lane's values as they are quantised: rotated, where that is wanted. All lanes must call it.
__device__ __forceinline__ void read_rotated(const QuantiseArgs& a, const void* from, int count,
                                             float (&x)[kShare]) {
  read_values(a.dtype, from, count, x);
  if (a.hadamard) rotate_by_lanes(x, static_cast<int>(a.head_dim));
}

/// The largest magnitudes, which begin as 0. A lane's rows are of one head where the grid's step is
/// a multiple of them, so that it adds its largest once; of one head of each sequence once.
__global__ void __launch_bounds__(kThreads, 8)
    largest_kernel(const __grid_constant__ QuantiseParams p) {
  const QuantiseArgs& a = p.args;
  const Part part = Part::of(p.lanes, static_cast<int>(a.head_dim));
  const bool several = a.kv_scale != STROBE_KV_SCALE_TENSOR;
  int64_t set = 0;
  uint32_t most = 0;
  const auto add = [&] {
    if (most > 0) atomicMax(p.largest + set, most);
  };
  visit_rows(p, [&](const ArgsRow& row, bool is_there) {
    if (several && is_there && p.set_of(row) != set) {
      add();
      set = p.set_of(row), most = 0;
    }
    float x[kShare];
    read_rotated(a, values_at(a, row, part.first), is_there ? part.count : 0, x);
    most = max(most, largest_of_lane(x));
  });
  most = largest_of_row(most, several ? p.lanes : 32);
  if (part.first == 0 && (several || lane_of_warp() == 0)) add();
}

__global__ void __launch_bounds__(kThreads, 8)
    quantise_kernel(const __grid_constant__ QuantiseParams p) {
  const QuantiseArgs& a = p.args;
  const Part part = Part::of(p.lanes, static_cast<int>(a.head_dim));
  const RowForm form{a.kv_dtype, a.kv_scale_dtype, a.scale_is_given == 0};
  const bool own_scales = has_scales(a.kv_dtype) && form.makes_scale && !p.largest;
  visit_rows(p, [&](const ArgsRow& row, bool is_there) {
    float x[kShare];
    read_rotated(a, values_at(a, row, part.first), is_there ? part.count : 0, x);
    uint32_t most = 0;
    if (own_scales) {
      most = largest_of_row(largest_of_lane(x), p.lanes);
    } else if (p.largest && is_there) {
      most = p.largest[p.set_of(row)];
    }
    // (Rows that share a scale all write it, and all the same.)
    quantise_by_lanes(form, x, part, static_cast<char*>(a.codes) + row.offset(a.codes_strides),
                      scale_at(p, row), most, is_there);
  });
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

__global__ void __launch_bounds__(kThreads, 8)
    dequantise_kernel(const __grid_constant__ QuantiseParams p) {
  const QuantiseArgs& a = p.args;
  const Part part = Part::of(p.lanes, static_cast<int>(a.head_dim));
  visit_rows(p, [&](const ArgsRow& row, bool is_there) {
    const int count = is_there ? part.count : 0;
    // (What has no values is a part of no row, or of one whose other lanes wait for this one
    // below.)
    if (count == 0 && !a.hadamard) return;
    float x[kShare] = {};
    if (count > 0) {
      dequantise_part(a.kv_dtype, a.kv_scale_dtype,
                      static_cast<const char*>(a.codes) + row.offset(a.codes_strides),
                      scale_at(p, row), part, x);
    }
    if (a.hadamard) rotate_by_lanes(x, static_cast<int>(a.head_dim));
    if (count > 0) write_values(a.dtype, values_at(a, row, part.first), count, x);
  });
}

// --- An append ---

/// What update_kernel.cuh asks of a kernel.
template <int kDtype>
struct QuantisedUpdateShape {
  using T = Element<kDtype>;
  static constexpr int kWarps = cuda::kWarps;
};

/// Writes all new keys and values to the cache. After the rotary embedding a value is float32: it
/// is rounded once, to its code, or to T where these are floats beside codes. A warp has a row.
template <typename T>
__device__ __forceinline__ void append_quantised(const CachedLaunchParams& p) {
  if (!p.k_new.data) return;
  const CachedSequences& c = p.cache;
  const QuantisedCache& q = p.quantised;
  const int64_t rows = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
  const int64_t first = int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x / 32);
#pragma unroll 1
  for (int64_t n = first; n < rows * p.heads_kv; n += int64_t{gridDim.x} * kWarps) {
    const int64_t row = n / p.heads_kv;
    const auto head = static_cast<int32_t>(n - row * p.heads_kv);
    visit_new_row(p, row, [&](const CachedRows& s, int64_t key, const KeyRows::Place& place) {
      const int64_t own = key - s.new_begin;
      const auto rotation = Rotation<T>::at(p, s.rotary_start + own);
      const auto write = [&](const Tensor& from, const Tensor& to, const RowScales& scales,
                             int32_t dtype, int dim, bool rotates) {
        const T* const x =
            static_cast<const T*>(from.data) + from.element(s.new_entry, s.new_row + own, head);
        const Part part = Part::of(32, dim);
        float values[kShare] = {};
#pragma unroll
        for (int i = 0; i < kShare; ++i) {
          const int d = part.first + i;
          if (i < part.count) values[i] = rotates ? rotation.exact(x, d) : static_cast<float>(x[d]);
        }
        char* const at = static_cast<char*>(to.data) + to.element(place.entry, place.row, head);
        if (!is_quantised(dtype)) {
          write_values(dtype, at + part.first * sizeof(T), part.count, values);
          return;
        }
        const RowForm form{dtype, scales.is_half ? STROBE_FLOAT16 : STROBE_FLOAT32,
                           q.has_row_scales != 0};
        const uint32_t largest = form.makes_scale ? largest_of_row(largest_of_lane(values), 32) : 0;
        quantise_by_lanes(form, values, part, at,
                          const_cast<char*>(scales.at(place.entry, place.row, head)), largest,
                          true);
      };
      write(p.k_new, p.k, q.k_scale, q.k_dtype, p.head_dim, true);
      write(p.v_new, p.v, q.v_scale, q.v_dtype, p.head_dim_v, false);
    });
  }
}

template <int kDtype>
__global__ void __launch_bounds__(kThreads)
    quantised_update_kernel(const __grid_constant__ CachedLaunchParams p,
                            const __grid_constant__ Tensor rotated) {
  append_quantised<Element<kDtype>>(p);
  if (rotated.data) rotate_queries<QuantisedUpdateShape<kDtype>, true>(p, rotated);
}

// --- A cache unpacked ---

constexpr int kRowsOfStep = 8;        // of a sequence, that a warp has at a time
constexpr int64_t kZeroedUpTo = 128;  // rows: no kernel that attends reads a larger block of keys

/// K and V of every row in use, to the same row of the sequence's entry; each of the two may be
/// codes, or floats of the type that is written. A key that has no page is
/// NaN, and so is the result of every query that sees it. Behind the last key there are zeros up to
/// the end of a block, so that no product with what lay there is NaN.
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const __grid_constant__ CachedLaunchParams p, const __grid_constant__ Tensor k,
                  const __grid_constant__ Tensor v, int32_t dtype) {
  const CachedSequences cache = p.cache.of_all();
  const QuantisedCache& q = p.quantised;
  const int64_t of_sequence = ceil_div(cache.seqlen_k, kRowsOfStep);
  const int64_t steps = int64_t{cache.batch} * of_sequence;
#pragma unroll 1
  for (int64_t n = int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x / 32); n < steps;
       n += int64_t{gridDim.x} * kWarps) {
    const int64_t b = n / of_sequence;
    const CachedRows s = cache.sequence_rows(b);
    const int64_t first = (n - b * of_sequence) * kRowsOfStep - s.keys.first;  // a key's number
    const int64_t room = cache.seqlen_k - s.keys.first;
    const int64_t end = min64(room, round_up(s.seqlen_k, kZeroedUpTo));
    const auto unpack = [&](const Tensor& from, const RowScales& scales, int32_t from_dtype,
                            const Tensor& to, int32_t dim, bool nan_without_page) {
      int lanes = kLanesOfBlock;
      while (lanes * kShare < dim) lanes *= 2;
      const Part part = Part::of(lanes, dim);
      const int at_once = 32 / lanes;  // rows of heads
#pragma unroll 1
      for (int i = lane_of_warp() / lanes; i < kRowsOfStep * p.heads_kv; i += at_once) {
        const int64_t key = first + i / p.heads_kv;
        const int32_t head = i % p.heads_kv;
        if (key < 0 || key >= end || part.count == 0) continue;
        float x[kShare] = {};
        if (key < s.seqlen_k) {
          const KeyRows::Place place = s.keys.place(key);
          if (place.there) {
            const char* const row =
                static_cast<const char*>(from.data) + from.element(place.entry, place.row, head);
            if (is_quantised(from_dtype)) {
              dequantise_part(from_dtype, scales.is_half ? STROBE_FLOAT16 : STROBE_FLOAT32, row,
                              scales.at(place.entry, place.row, head), part, x);
            } else {
              read_values(from_dtype, row + part.first * element_bytes(from_dtype), part.count, x);
            }
          } else if (nan_without_page) {
#pragma unroll
            for (int j = 0; j < kShare; ++j) x[j] = __int_as_float(0x7fffffff);
          }
        }
        write_values(
            dtype,
            static_cast<uint16_t*>(to.data) + to.element(b, s.keys.first + key, head) + part.first,
            part.count, x);
      }
    };
    unpack(p.k, q.k_scale, q.k_dtype, k, p.head_dim, true);
    unpack(p.v, q.v_scale, q.v_dtype, v, p.head_dim_v, false);
  }
}

namespace {

constexpr int64_t kBlocksEach = 16;  // of a multiprocessor: it waits for memory alone

// rows_each: that a thread block has at a time.
int64_t blocks_for(int64_t rows, int64_t rows_each, const LaunchTarget& target) {
  const int64_t most = max64(1, target.multiprocessors * kBlocksEach);
  return min64(ceil_div(rows, rows_each), most);
}
dim3 grid_of(int64_t blocks) { return {static_cast<unsigned>(blocks)}; }

Status launch_quantise(const QuantiseArgs& a, bool quantises) {
  STROBE_RETURN_IF_ERROR(check_device(a.device_index));
  STROBE_RETURN_IF_ERROR(check_device_pointer("x", a.x, a.device_index));
  STROBE_RETURN_IF_ERROR(check_device_pointer("codes", a.codes, a.device_index));
  STROBE_RETURN_IF_ERROR(check_device_pointer("scale", a.scale, a.device_index));
  const int64_t rows = a.batch * a.seqlen * a.heads;
  if (rows == 0) return {};
  const DeviceGuard guard(a.device_index);
  if (guard.error() != cudaSuccess) return cuda_status(guard.error(), "choosing the device");
  const DeviceProperties& device = machine().devices[static_cast<size_t>(a.device_index)];
  const auto stream = static_cast<cudaStream_t>(a.stream);
  const LaunchTarget target{stream, a.device_index, device.multiprocessors, device.shared_bytes};
  static KernelHandle dequantises(reinterpret_cast<const void*>(&dequantise_kernel));
  static KernelHandle measures(reinterpret_cast<const void*>(&largest_kernel));
  static KernelHandle kernel(reinterpret_cast<const void*>(&quantise_kernel));
  // Of heads that share a scale; rows and the tensor have theirs by strides.
  const bool of_heads = a.kv_scale == STROBE_KV_SCALE_HEAD;
  const bool of_both = a.kv_scale == STROBE_KV_SCALE_BATCH_HEAD;
  const int32_t group = of_heads || of_both ? static_cast<int32_t>(a.heads / a.heads_kv) : 1;
  QuantiseParams params{a, kLanesOfBlock, {}, nullptr, group};
  while (params.lanes * kShare < a.head_dim) params.lanes *= 2;
  const int64_t rows_each = int64_t{32} / params.lanes * kWarps;
  const int64_t blocks = blocks_for(rows, rows_each, target);
  // Where heads have scales, a multiple of what brings a lane back to the same head.
  const int64_t round = of_heads || of_both ? a.heads / std::gcd(a.heads, rows_each) : 1;
  const int64_t in_rounds = blocks > round ? blocks / round * round : blocks;
  params.step = ArgsRow::of(a, in_rounds * rows_each);
  const dim3 grid = grid_of(in_rounds);
  void* args[] = {static_cast<void*>(&params)};
  if (!quantises) {
    const cudaError_t error = dequantises.launch(grid, kThreads, args, target);
    return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
  }
  const bool shared = of_heads || of_both || a.kv_scale == STROBE_KV_SCALE_TENSOR;
  if (!shared || a.scale_is_given) {
    const cudaError_t error = kernel.launch(grid, kThreads, args, target);
    return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
  }
  const int64_t sets = of_both ? a.batch * a.heads_kv : of_heads ? a.heads_kv : 1;
  const size_t bytes = sizeof(uint32_t) * static_cast<size_t>(sets);
  cudaError_t error = cudaMallocAsync(&params.largest, bytes, stream);
  if (error != cudaSuccess) return cuda_status(error, "allocating room for magnitudes");
  error = cudaMemsetAsync(params.largest, 0, bytes, stream);
  if (error == cudaSuccess) error = measures.launch(grid, kThreads, args, target);
  if (error == cudaSuccess) error = kernel.launch(grid, kThreads, args, target);
  const cudaError_t freed = cudaFreeAsync(params.largest, stream);
  if (error == cudaSuccess) error = freed;
  return error == cudaSuccess ? Status() : cuda_status(error, "launching the kernel");
}

template <int kDtype>
cudaError_t launch_update(const CachedLaunchParams& p, const Tensor& rotated, int64_t rows,
                          const LaunchTarget& target) {
  static KernelHandle kernel(reinterpret_cast<const void*>(&quantised_update_kernel<kDtype>));
  void* args[] = {const_cast<CachedLaunchParams*>(&p), const_cast<Tensor*>(&rotated)};
  return kernel.launch(grid_of(blocks_for(rows, kWarps, target)), kThreads, args, target);
}

struct Unpacked {
  Tensor k, v, q;  // q: rotated, without data where it is not
};
Unpacked carve_unpacked(Arena& arena, const CachedUpdateParams& p) {
  const auto take = [&](int32_t dim) {
    Tensor t{};
    t.head_stride = round_up(dim, 8);
    t.row_stride = t.head_stride * p.heads_kv;
    t.batch_stride = t.row_stride * p.cache.seqlen_k;
    t.data = arena.take<uint16_t>(t.batch_stride * p.cache.batch);
    return t;
  };
  Unpacked to{take(p.head_dim), take(p.head_dim_v), {}};
  if (p.cache.rotary_dim > 0) to.q = carve_queries(arena, p);
  return to;
}

}  // namespace

int64_t unpacked_bytes(const CachedUpdateParams& p) {
  Arena arena;
  carve_unpacked(arena, p);
  return static_cast<int64_t>(arena.used());
}

cudaError_t launch_unpacked(const CachedInstance& instance, const CachedLaunchParams& p,
                            const LaunchTarget& target, const CachedInstance* for_few_queries) {
  Arena arena(p.workspace);
  Unpacked to = carve_unpacked(arena, p);
  const int32_t dtype = instance.config.dtype;
  STROBE_RETURN_IF_CUDA_ERROR(
      launch_quantised_update(p, to.q, to.q.data ? query_rows(p) : 0, dtype, target));
  const int64_t rows = int64_t{p.cache.batch} * ceil_div(p.cache.seqlen_k, kRowsOfStep);
  if (rows > 0) {
    static KernelHandle kernel(reinterpret_cast<const void*>(&unpack_kernel));
    int32_t to_dtype = dtype;
    void* args[] = {const_cast<CachedLaunchParams*>(&p), &to.k, &to.v, &to_dtype};
    STROBE_RETURN_IF_CUDA_ERROR(
        kernel.launch(grid_of(blocks_for(rows, kWarps, target)), kThreads, args, target));
  }
  // As a launch of its own over another cache, which finds everything done. The cache still counts
  // the new keys, and knows which positions are out of range.
  CachedLaunchParams attends = p;
  attends.workspace = arena.take<std::byte>(0);
  attends.k = to.k;
  attends.v = to.v;
  if (to.q.data) attends.q = to.q;
  attends.k_new = attends.v_new = {};
  attends.rotary_cos = attends.rotary_sin = nullptr;
  attends.quantised = {};
  attends.cache.table = attends.cache.entries = nullptr;
  attends.cache.cache_batch = attends.cache.batch;
  return instance.launch(attends, target, for_few_queries);
}

Status quantise(const QuantiseArgs& a) { return launch_quantise(a, true); }
Status dequantise(const QuantiseArgs& a) { return launch_quantise(a, false); }

cudaError_t launch_quantised_update(const CachedLaunchParams& p, const Tensor& rotated,
                                    int64_t rotated_rows, int dtype, const LaunchTarget& target) {
  const CachedSequences& c = p.cache;
  const int64_t fresh = c.cu_new ? c.total_new : int64_t{c.batch} * c.rows_new;
  const int64_t rows = max64(fresh * p.heads_kv, rotated_rows);
  if (rows == 0) return cudaSuccess;
  return dtype == kBfloat16 ? launch_update<kBfloat16>(p, rotated, rows, target)
                            : launch_update<kFloat16>(p, rotated, rows, target);
}

}  // namespace strobe::cuda
