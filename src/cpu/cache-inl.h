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

/// The new key or value of a head, which is there as float32, the key rotated to its position, as
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

static void append_keys(const ForwardContext& c, int64_t batch, Range keys) {
  const AttentionProblem& p = c.problem;
  const CachedRows s = c.sequences.sequence_rows(batch);
  const int64_t dim = p.head_dim, rotated = p.rotary_dim;
  HWY_ALIGN float values[256 + kLanes];
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    const KeyRows::Place place = s.keys.place(key);
    if (!place.there) continue;  // the caller has changed the page's number since it was checked
    const int64_t row_new = s.new_row + key - s.new_begin;
    for (int64_t head = 0; head < p.heads_kv; ++head) {
      const std::byte* const from = c.k_new.element(s.new_entry, row_new, head);
      const std::byte* const v_from = c.v_new.element(s.new_entry, row_new, head);
      for_dtype(
          p.dtype, [&]<typename T>(T*) __attribute__((always_inline)) {
            if (is_quantised(c.v.dtype)) {
              row_to_float(reinterpret_cast<const T*>(v_from), p.head_dim_v, values);
              append_quantised(c, c.v, place, head, values, p.head_dim_v);
            } else {
              __builtin_memcpy(c.v.element(place.entry, place.row, head), v_from,
                               static_cast<size_t>(c.v.bytes(p.head_dim_v)));
            }
            if (is_quantised(c.k.dtype)) {
              row_to_float(reinterpret_cast<const T*>(from), dim, values);
              if (rotated > 0) rotate_row(c, s.rotary_start + key - s.new_begin, values);
              append_quantised(c, c.k, place, head, values, dim);
              return;
            }
            auto* const to = reinterpret_cast<T*>(c.k.element(place.entry, place.row, head));
            if (rotated > 0) {
              row_to_float(reinterpret_cast<const T*>(from), rotated, values);
              rotate_row(c, s.rotary_start + key - s.new_begin, values);
              row_from_float(values, 1, rotated, to);
            }
            __builtin_memcpy(to + rotated, reinterpret_cast<const T*>(from) + rotated,
                             static_cast<size_t>(dim - rotated) * sizeof(T));
          });
    }
  }
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_CACHE_INL_H_
