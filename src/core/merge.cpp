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

bool alike(const strobe_strides& a, const strobe_strides& b) {
  return a.batch == b.batch && a.seqlen == b.seqlen && a.head == b.head;
}

// The parts of outs or lses, and out or lse; strides are resolved.
struct Side {
  const char *parts_name, *name;
  const float* parts;
  const void* result;
  strobe_strides parts_strides, strides;
  int64_t part, dim;  // from a part to the next; columns of a row
  int64_t size;       // of an element of the result

  // Which part the result is written over, if it lies exactly there: a row is read before it is
  // written, by whoever writes it. -1: none.
  int64_t in_place(const MergeArgs& a) const {
    if (result == nullptr || size != 4 || !alike(parts_strides, strides)) return -1;
    const auto begin = reinterpret_cast<uintptr_t>(parts), at = reinterpret_cast<uintptr_t>(result);
    const auto bytes = static_cast<int64_t>(at - begin);
    if (bytes == 0) return a.parts > 0 ? 0 : -1;
    const int64_t step = 4 * part;
    if (step == 0 || bytes % step != 0 || bytes / step < 0 || bytes / step >= a.parts) return -1;
    return bytes / step;
  }
  void add_to(Memory& memory, const MergeArgs& a) const {
    const auto add_parts = [&](int64_t begin, int64_t end) {
      memory.add(
          parts_name, parts + begin * part,
          Extents::of(a.batch, a.seqlen_q, a.heads, dim, parts_strides, 4, end - begin, part),
          false);
    };
    const int64_t over = in_place(a);
    if (over < 0) {
      add_parts(0, a.parts);
    } else {
      add_parts(0, over);
      add_parts(over + 1, a.parts);
    }
    memory.add(name, result, Extents::of(a.batch, a.seqlen_q, a.heads, dim, strides, size), true);
  }
};

// Outputs lie apart from the parts, but for the one that they are written over, and from each
// other. args: resolved.
Status check_memory(const MergeArgs& a) {
  Memory memory;
  const Side out{"outs",      "out",          a.outs,
                 a.out,       a.outs_strides, a.out_strides,
                 a.outs_part, a.head_dim_v,   element_size(a.out_dtype)};
  const Side lse{"lses", "lse", a.lses, a.lse, a.lses_strides, a.lse_strides, a.lses_part, 1, 4};
  out.add_to(memory, a);
  lse.add_to(memory, a);
  memory.add("sinks", a.sinks, Extents::contiguous(4 * a.heads), false);
  return memory.check();
}

// What merges and additions have in common.
template <typename Args>
Status check_place(const Args& a) {
  STROBE_RETURN_IF_ERROR(check_integer("device", a.device, STROBE_CPU, STROBE_CUDA));
  STROBE_RETURN_IF_ERROR(
      check_integer("device_index", a.device_index, 0, a.device == STROBE_CPU ? 0 : 1023));
  STROBE_RETURN_IF_ERROR(check_integer("out_dtype", a.out_dtype, STROBE_FLOAT32, STROBE_FLOAT16));
  return check_integer("threads", a.threads, 0, 65536);
}

}  // namespace

Status check_merge(MergeArgs& a) {
  STROBE_RETURN_IF_ERROR(check_place(a));
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

Status check_add(AddArgs& a) {
  STROBE_RETURN_IF_ERROR(check_place(a));
  STROBE_RETURN_IF_ERROR(check_integer("accumulate", a.accumulate, 0, 1));
  STROBE_RETURN_IF_ERROR(check_integer("batch", a.batch, 0, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("seqlen", a.seqlen, 0, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("heads", a.heads, 0, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("head_dim", a.head_dim, 1, kMostMerged));
  STROBE_RETURN_IF_ERROR(check_strides("x_strides", a.x_strides, a.batch, a.seqlen, a.heads,
                                       a.head_dim, false, false));
  STROBE_RETURN_IF_ERROR(check_strides("out_strides", a.out_strides, a.batch, a.seqlen, a.heads,
                                       a.head_dim, false, true));
  make_contiguous(a.x_strides, a.seqlen, a.heads, a.head_dim);
  make_contiguous(a.out_strides, a.seqlen, a.heads, a.head_dim);
  const bool some = a.batch * a.seqlen * a.heads > 0;
  const int64_t size = element_size(a.out_dtype);
  STROBE_RETURN_IF_ERROR(check_pointer("x", a.x, some, 4));
  STROBE_RETURN_IF_ERROR(check_pointer("out", a.out, some, size));
  Memory memory;
  const auto extents = [&](const strobe_strides& strides, int64_t element) {
    return Extents::of(a.batch, a.seqlen, a.heads, a.head_dim, strides, element);
  };
  memory.add("x", a.x, extents(a.x_strides, 4), false);
  memory.add("out", a.out, extents(a.out_strides, size), true);
  return memory.check();
}

}  // namespace strobe
