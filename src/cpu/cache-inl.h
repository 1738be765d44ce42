// What a launch with a cache does besides attention: rotary embedding, and new keys and values.
#ifndef STROBE_CPU_CACHE_INL_H_
#define STROBE_CPU_CACHE_INL_H_

#include "cpu/elements-inl.h"

namespace strobe::cpu::STROBE_ISA {

/// Rotates a row of Q or K, which is float32, by the angles of a position.
static void rotate_row(const ForwardContext& c, int64_t position, float* row) {
  const int64_t half = c.problem.rotary_dim / 2;
  HWY_ALIGN float cosines[128 + kLanes], sines[128 + kLanes];
  for_dtype(
      c.problem.dtype, [&]<typename T>(T*) __attribute__((always_inline)) {
        row_to_float(reinterpret_cast<const T*>(c.rotary_cos) + position * half, half, cosines);
        row_to_float(reinterpret_cast<const T*>(c.rotary_sin) + position * half, half, sines);
      });
  const bool interleaved = c.problem.rotary_interleaved != 0;
  const int64_t step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
  for (int64_t n = 0; n < half; ++n) {
    const float x = row[n * step], y = row[n * step + other];
    row[n * step] = x * cosines[n] - y * sines[n];
    row[n * step + other] = y * cosines[n] + x * sines[n];
  }
}

/// Rows of Q as float32, rotated where the problem says so: to[queries.size()][stride], padded with
/// zeros to whole vectors.
STROBE_SIMD void load_query_rows(const ForwardContext& c, const SequenceRows& sequence,
                                 int64_t head, Range queries, float* to, int64_t stride) {
  load_input_rows(c.query_rows(c.q, sequence, head), queries, c.problem.head_dim, to, stride);
  if (c.problem.rotary_dim == 0) return;
  const CachedRows cached = c.sequences.sequence_rows(sequence.batch);
  for (int64_t i = queries.begin; i < queries.end; ++i, to += stride) {
    rotate_row(c, c.sequences.query_rotation(cached.rotary_start, i), to);
  }
}

/// A new key or value of a head, which is there as float32, the key rotated to its position, as
/// codes in a row of the cache.
STROBE_SIMD void append_quantised(const ForwardContext& c, const Tensor& t,
                                  const KeyRows::Place& place, int64_t head, const float* values,
                                  int64_t dim) {
  const AttentionProblem& p = c.problem;
  const Scales& scales = t.scales;
  const RowForm form{t.dtype, scales.dtype, p.kv_scale == STROBE_KV_SCALE_ROW};
  std::byte* const scale =
      scales.data + scales.bytes(place.offset(scales.batch_stride, scales.row_stride) +
                                 head * scales.head_stride);
  quantise_row(form, values, dim, t.element(place.entry, place.row, head), scale);
}

/// The new key or value at `from`, whose first `rotated` values are turned by the angles of a
/// position, in a row of the cache. What the cache has in the dtype in which it comes, floats or
/// codes, is copied.
static void append_row(const ForwardContext& c, const Tensor& t, const KeyRows::Place& place,
                       int64_t head, const std::byte* from, int32_t from_dtype, int64_t dim,
                       int64_t rotated, int64_t position) {
  std::byte* const to = t.element(place.entry, place.row, head);
  const bool copies = t.dtype == from_dtype;
  if (copies && rotated == 0) {
    __builtin_memcpy(to, from, static_cast<size_t>(t.run(dim)));
    return;
  }
  HWY_ALIGN float values[256 + kLanes];
  for_dtype(
      from_dtype, [&]<typename T>(T*) __attribute__((always_inline)) {
        const auto* const x = reinterpret_cast<const T*>(from);
        row_to_float(x, copies ? rotated : dim, values);
        if (rotated > 0) rotate_row(c, position, values);
        if (!copies) {
          append_quantised(c, t, place, head, values, dim);
          return;
        }
        row_from_float(values, 1, rotated, reinterpret_cast<T*>(to));
        __builtin_memcpy(reinterpret_cast<T*>(to) + rotated, x + rotated,
                         static_cast<size_t>(dim - rotated) * sizeof(T));
      });
}

static void append_keys(const ForwardContext& c, int64_t batch, Range keys) {
  const AttentionProblem& p = c.problem;
  const CachedRows s = c.sequences.sequence_rows(batch);
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    const KeyRows::Place place = s.keys.place(key);
    if (!place.there) continue;  // the caller has changed the page's number since it was checked
    const int64_t own = key - s.new_begin;
    const auto append = [&](const Tensor& from, const Tensor& to, int64_t head, int64_t dim,
                            int64_t rotated) {
      append_row(c, to, place, head, from.element(s.new_entry, s.new_row + own, head), from.dtype,
                 dim, rotated, s.rotary_start + own);
    };
    for (int64_t head = 0; head < p.heads_kv; ++head) {
      append(c.v_new, c.v, head, p.head_dim_v, 0);
      append(c.k_new, c.k, head, p.head_dim, p.rotary_dim);
    }
  }
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_CACHE_INL_H_
