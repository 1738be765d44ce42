#include "core/merge.h"

#include <cinttypes>

#include "core/checks.h"
#include "core/merge_row.h"
#include "core/overlap.h"
#include "core/problem.h"

namespace strobe {

namespace {

// outs or lses: its part stride, which has to be there where the caller gave the others.
Status resolve_part(const char* name, const strobe_strides& strides, int64_t parts, int64_t count,
                    int64_t& part) {
  if (part != 0)
    return check_integer(name, part, -kMaxOffset / max64(parts, 1), kMaxOffset / max64(parts, 1));
  if (!unset(strides) && parts > 1 && count > 0) {
    return invalid(format("%s = 0 elements with strides given, expected a stride", name));
  }
  part = count;
  return {};
}

// Outputs lie apart from the parts, and from each other. args: resolved.
Status check_memory(const MergeArgs& a) {
  const auto extents = [&](int64_t parts, int64_t dim, const strobe_strides& s, int64_t part,
                           int64_t size) {
    return Extents::of(a.batch, a.seqlen_q, a.heads, dim, s, size, parts, part);
  };
  const int64_t d = a.head_dim_v, size = element_size(a.out_dtype);
  Memory memory;
  memory.add("outs", a.outs, extents(a.parts, d, a.outs_strides, a.outs_part, 4), false);
  memory.add("lses", a.lses, extents(a.parts, 1, a.lses_strides, a.lses_part, 4), false);
  memory.add("sinks", a.sinks, Extents::contiguous(4 * a.heads), false);
  memory.add("out", a.out, extents(1, d, a.out_strides, 0, size), true);
  memory.add("lse", a.lse, extents(1, 1, a.lse_strides, 0, 4), true);
  return memory.check();
}

}  // namespace

Status check_merge(MergeArgs& a) {
  STROBE_RETURN_IF_ERROR(check_integer("device", a.device, STROBE_CPU, STROBE_CUDA));
  STROBE_RETURN_IF_ERROR(
      check_integer("device_index", a.device_index, 0, a.device == STROBE_CPU ? 0 : 1023));
  STROBE_RETURN_IF_ERROR(check_integer("out_dtype", a.out_dtype, STROBE_FLOAT32, STROBE_FLOAT16));
  STROBE_RETURN_IF_ERROR(check_integer("threads", a.threads, 0, 65536));
  STROBE_RETURN_IF_ERROR(check_integer("parts", a.parts, 0, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("batch", a.batch, 0, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("seqlen_q", a.seqlen_q, 0, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("heads", a.heads, 0, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("head_dim_v", a.head_dim_v, 1, kMostMerged));
  // One row of lses for each head, one value for each query: the shape [batch, heads, seqlen_q, 1]
  // with its strides in the order of strobe_strides.
  for (strobe_strides* s : {&a.lses_strides, &a.lse_strides}) {
    if (!unset(*s)) s->dim = 1;
  }
  const struct {
    const char* name;
    const strobe_strides& strides;
    int64_t dim;
    bool output;
  } tensors[] = {{"outs_strides", a.outs_strides, a.head_dim_v, false},
                 {"lses_strides", a.lses_strides, 1, false},
                 {"out_strides", a.out_strides, a.head_dim_v, true},
                 {"lse_strides", a.lse_strides, 1, true}};
  for (const auto& t : tensors) {
    STROBE_RETURN_IF_ERROR(
        check_strides(t.name, t.strides, a.batch, a.seqlen_q, a.heads, t.dim, false, t.output));
  }
  const int64_t rows = a.batch * a.seqlen_q * a.heads;
  if (rows > 0 && a.parts > kMaxOffset / a.head_dim_v / rows) {
    return invalid(format("parts = %" PRId64 " of %" PRId64 " rows of %" PRId64
                          " values, expected at most 2^58 values",
                          a.parts, rows, a.head_dim_v));
  }
  STROBE_RETURN_IF_ERROR(
      resolve_part("outs_part", a.outs_strides, a.parts, rows * a.head_dim_v, a.outs_part));
  STROBE_RETURN_IF_ERROR(resolve_part("lses_part", a.lses_strides, a.parts, rows, a.lses_part));
  make_contiguous(a.outs_strides, a.seqlen_q, a.heads, a.head_dim_v);
  make_contiguous(a.out_strides, a.seqlen_q, a.heads, a.head_dim_v);
  for (strobe_strides* s : {&a.lses_strides, &a.lse_strides}) {
    if (unset(*s)) *s = {a.heads * a.seqlen_q, 1, a.seqlen_q, 1};
  }
  const bool some = rows > 0;
  STROBE_RETURN_IF_ERROR(check_pointer("outs", a.outs, some && a.parts > 0, 4));
  STROBE_RETURN_IF_ERROR(check_pointer("lses", a.lses, some && a.parts > 0, 4));
  STROBE_RETURN_IF_ERROR(check_pointer("sinks", a.sinks, false, 4));
  STROBE_RETURN_IF_ERROR(check_pointer("out", a.out, some, element_size(a.out_dtype)));
  STROBE_RETURN_IF_ERROR(check_pointer("lse", a.lse, false, 4));
  return check_memory(a);
}

}  // namespace strobe
