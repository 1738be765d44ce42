#include "core/quantise.h"

#include <cinttypes>

#include "core/checks.h"
#include "core/element.h"
#include "core/overlap.h"
#include "core/problem.h"
#include "core/quantised.h"

namespace strobe {

namespace {

// The extents of the scales.
struct ScaleExtents {
  int64_t entries, rows, heads;

  static ScaleExtents of(const QuantiseArgs& a) {
    const bool of_rows = a.kv_scale == STROBE_KV_SCALE_ROW;
    return {differ_by_entry(a.kv_scale) ? a.batch : 1, of_rows ? a.seqlen : 1,
            of_rows                      ? a.heads
            : differ_by_head(a.kv_scale) ? a.heads_kv
                                         : 1};
  }
};

// The codes, the scales and the floats lie apart, but that two of them are read.
Status check_memory(const QuantiseArgs& a, bool quantises) {
  const ScaleExtents scales = ScaleExtents::of(a);
  Memory memory;
  memory.add(
      "x", a.x,
      Extents::of(a.batch, a.seqlen, a.heads, a.head_dim, a.x_strides, element_size(a.dtype)),
      !quantises);
  memory.add("codes", a.codes,
             Extents::of(a.batch, a.seqlen, a.heads, row_elements(a.kv_dtype, a.head_dim),
                         a.codes_strides, 1),
             quantises);
  memory.add("scale", a.scale,
             Extents::of(scales.entries, scales.rows, scales.heads, 1, a.scale_strides,
                         element_size(a.kv_scale_dtype)),
             quantises && !a.scale_is_given);
  return memory.check();
}

}  // namespace

Status check_quantise(QuantiseArgs& a, bool quantises) {
  STROBE_RETURN_IF_ERROR(check_integer("device", a.device, STROBE_CPU, STROBE_CUDA));
  STROBE_RETURN_IF_ERROR(
      check_integer("device_index", a.device_index, 0, a.device == STROBE_CPU ? 0 : 1023));
  STROBE_RETURN_IF_ERROR(check_integer("dtype", a.dtype, STROBE_FLOAT32, STROBE_FLOAT16));
  if (!is_quantised(a.kv_dtype)) {
    return invalid(
        format("kv_dtype = %d (%s), expected 3 (float8 e4m3), 4 (float8 e5m2), 5 (int8), 6 (q8_0) "
               "or 7 (q4_0)",
               a.kv_dtype, dtype_name(a.kv_dtype)));
  }
  STROBE_RETURN_IF_ERROR(check_scale_kind("kv_dtype", a.kv_dtype, a.kv_scale, a.kv_scale_dtype));
  STROBE_RETURN_IF_ERROR(check_flag("scale_is_given", a.scale_is_given));
  if (a.scale_is_given && a.kv_scale == STROBE_KV_SCALE_NONE) {
    return invalid("scale_is_given = 1 with kv_scale = 0 (none), expected 0");
  }
  STROBE_RETURN_IF_ERROR(check_integer("threads", a.threads, 0, 65536));
  const struct {
    const char* name;
    int64_t got;
  } extents[] = {{"batch", a.batch}, {"seqlen", a.seqlen}, {"heads", a.heads}};
  for (const auto& x : extents) {
    STROBE_RETURN_IF_ERROR(check_integer(x.name, x.got, 0, kMaxLength));
  }
  STROBE_RETURN_IF_ERROR(check_integer("head_dim", a.head_dim, 1, 256));
  if (has_blocks(a.kv_dtype) && a.head_dim % kBlockValues != 0) {
    return invalid(format("head_dim = %" PRId64
                          " with kv_dtype = %d (%s), expected a multiple of 32",
                          a.head_dim, a.kv_dtype, dtype_name(a.kv_dtype)));
  }
  if (a.heads_kv != 0) {
    STROBE_RETURN_IF_ERROR(check_integer("heads_kv", a.heads_kv, 1, kMaxLength));
    if (a.kv_scale != STROBE_KV_SCALE_HEAD && a.kv_scale != STROBE_KV_SCALE_BATCH_HEAD &&
        a.heads_kv != a.heads) {
      return invalid(format("heads_kv = %" PRId64 " with kv_scale = %d, expected 0, or scales of "
                            "heads: kv_scale 2 (head) or 4 (batch and head)",
                            a.heads_kv, a.kv_scale));
    }
    if (a.heads % a.heads_kv != 0) {
      return invalid(format("heads = %" PRId64 ", expected a multiple of heads_kv = %" PRId64,
                            a.heads, a.heads_kv));
    }
  } else {
    a.heads_kv = a.heads;
  }
  STROBE_RETURN_IF_ERROR(check_integer("hadamard", a.hadamard, 0, 1));
  if (a.hadamard && !can_rotate_by_hadamard(a.head_dim)) {
    return invalid(format("head_dim = %" PRId64
                          " with hadamard = 1, expected a power of two or a multiple of 16",
                          a.head_dim));
  }
  STROBE_RETURN_IF_ERROR(check_integer("scale_rows", a.scale_rows, 0, kMaxLength));
  if (a.scale_rows > 1 && (!quantises || a.scale_is_given || a.kv_scale != STROBE_KV_SCALE_ROW)) {
    return invalid(format("scale_rows = %" PRId64
                          " with kv_scale = %d and scale_is_given = %d, expected 0, or "
                          "strobe_quantize with kv_scale 3 (row) and scale_is_given 0",
                          a.scale_rows, a.kv_scale, a.scale_is_given));
  }
  const int64_t run = row_elements(a.kv_dtype, a.head_dim);
  STROBE_RETURN_IF_ERROR(check_strides("x_strides", a.x_strides, a.batch, a.seqlen, a.heads,
                                       a.head_dim, false, !quantises));
  STROBE_RETURN_IF_ERROR(check_strides("codes_strides", a.codes_strides, a.batch, a.seqlen, a.heads,
                                       run, false, quantises));
  const ScaleExtents scales = ScaleExtents::of(a);
  STROBE_RETURN_IF_ERROR(check_scale_strides("scale_strides", a.scale_strides, a.kv_scale,
                                             scales.entries, scales.rows, scales.heads,
                                             quantises && !a.scale_is_given));
  make_contiguous(a.x_strides, a.seqlen, a.heads, a.head_dim);
  make_contiguous(a.codes_strides, a.seqlen, a.heads, run);
  a.scale_strides.dim = 0;
  if (unset(a.scale_strides)) {
    if (a.kv_scale == STROBE_KV_SCALE_ROW) make_contiguous(a.scale_strides, a.seqlen, a.heads, 1);
    if (a.kv_scale == STROBE_KV_SCALE_HEAD) a.scale_strides.head = 1;
    if (a.kv_scale == STROBE_KV_SCALE_BATCH_HEAD) a.scale_strides = {a.heads_kv, 0, 1, 0};
  }
  const bool some = a.batch * a.seqlen * a.heads > 0, scaled = a.kv_scale != STROBE_KV_SCALE_NONE;
  STROBE_RETURN_IF_ERROR(check_pointer("x", a.x, some, element_size(a.dtype)));
  STROBE_RETURN_IF_ERROR(check_pointer("codes", a.codes, some, 1));
  if (a.scale && !scaled) {
    return invalid("scale is given with kv_scale = 0 (none), expected NULL");
  }
  STROBE_RETURN_IF_ERROR(
      check_pointer("scale", a.scale, some && scaled, element_size(a.kv_scale_dtype)));
  return check_memory(a, quantises);
}

}  // namespace strobe
