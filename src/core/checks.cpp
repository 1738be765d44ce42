#include "core/checks.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "core/arithmetic.h"
#include "core/problem.h"

namespace strobe {

std::string format(const char* text, ...) {
  va_list args;
  va_start(args, text);
  char buffer[512];
  const int length = std::vsnprintf(buffer, sizeof buffer, text, args);
  va_end(args);
  if (length < static_cast<int>(sizeof buffer)) return buffer;
  std::string result(static_cast<size_t>(length), '\0');
  va_start(args, text);
  std::vsnprintf(result.data(), result.size() + 1, text, args);
  va_end(args);
  return result;
}

const char* dtype_name(int32_t dtype) {
  constexpr const char* kNames[] = {"fp32",        "bf16", "fp16", "float8 e4m3",
                                    "float8 e5m2", "int8", "q8_0", "q4_0"};
  static_assert(std::size(kNames) == STROBE_Q4_0 + 1);
  return static_cast<size_t>(dtype) < std::size(kNames) ? kNames[dtype] : "?";
}

Status invalid(std::string text) { return {STROBE_INVALID_ARGUMENT, std::move(text)}; }

Status check_integer(const char* name, int64_t got, int64_t low, int64_t high) {
  if (low <= got && got <= high) return {};
  return invalid(
      format("%s = %" PRId64 ", expected %" PRId64 " to %" PRId64, name, got, low, high));
}

namespace {

// A dimension of a tensor that is checked, and its field of strobe_strides.
struct StridedDimension {
  int64_t size, stride;
  const char* name;
};

// Whether a contiguous tensor can be counted.
Status check_count(const char* name, const int64_t (&sizes)[4]) {
  int64_t count = 1;
  for (const int64_t size : sizes) {
    // (No division: a plan of a small problem is made in the time of some.)
    if (__builtin_mul_overflow(count, max64(size, 1), &count) || count > kMaxOffset) {
      return invalid(format("%s: %" PRId64 " x %" PRId64 " x %" PRId64 " x %" PRId64
                            " values, expected at most 2^58",
                            name, sizes[0], sizes[1], sizes[2], sizes[3]));
    }
  }
  return {};
}

// Dimensions that repeat runs of contiguous elements.
template <size_t kCount>
Status check_dimensions(const char* name, StridedDimension (&dimensions)[kCount], int64_t run,
                        bool output) {
  int64_t room = kMaxOffset;
  bool empty = false;
  for (const StridedDimension& d : dimensions) {
    empty |= d.size == 0;
    if (d.size <= 1) continue;
    const int64_t magnitude = d.stride < 0 ? -(d.stride + 1) : d.stride;
    if (magnitude >= room / (d.size - 1)) {
      return invalid(format("%s.%s = %" PRId64 " elements with %" PRId64
                            " entries: offsets pass 2^58 elements",
                            name, d.name, d.stride, d.size));
    }
    room -= magnitude * (d.size - 1);
  }
  if (!output || empty) return {};
  // An output must not overlap itself: with the dimensions sorted by stride, each step must clear
  // all that lies below.
  for (StridedDimension& d : dimensions) d.stride = d.size <= 1 ? 0 : std::llabs(d.stride);
  std::sort(
      std::begin(dimensions), std::end(dimensions),
      [](const StridedDimension& a, const StridedDimension& b) { return a.stride < b.stride; });
  int64_t span = run;
  for (const StridedDimension& d : dimensions) {
    if (d.size <= 1) continue;
    if (d.stride < span) {
      return invalid(format("%s.%s = %" PRId64 " elements, expected at least %" PRId64
                            " (an output must not overlap itself)",
                            name, d.name, d.stride, span));
    }
    span += d.stride * (d.size - 1);
  }
  return {};
}

}  // namespace

Status check_strides(const char* name, const strobe_strides& s, int64_t batch, int64_t rows,
                     int64_t heads, int64_t dim, bool packed, bool output) {
  const int64_t entries = packed ? 1 : batch;
  if (unset(s)) return check_count(name, {entries, rows, heads, dim});
  if (s.dim != 1) {
    return invalid(format("%s.dim = %" PRId64 " elements, expected 1 (last dimension contiguous)",
                          name, s.dim));
  }
  StridedDimension dimensions[] = {
      {entries, s.batch, "batch"}, {rows, s.seqlen, "seqlen"}, {heads, s.head, "head"}};
  return check_dimensions(name, dimensions, dim, output);
}

Status check_bias_strides(const char* name, const strobe_strides& s, int64_t batch, int64_t heads,
                          int64_t rows, int64_t keys, bool output) {
  if (unset(s)) return check_count(name, {batch, heads, rows, keys});
  StridedDimension dimensions[] = {{batch, s.batch, "batch"},
                                   {heads, s.head, "head"},
                                   {rows, s.seqlen, "seqlen"},
                                   {keys, s.dim, "dim"}};
  return check_dimensions(name, dimensions, 1, output);
}

Status check_scale_kind(const char* name, int32_t dtype, int32_t kv_scale, int32_t scale_dtype) {
  STROBE_RETURN_IF_ERROR(
      check_integer("kv_scale", kv_scale, STROBE_KV_SCALE_NONE, STROBE_KV_SCALE_BATCH_HEAD));
  if (has_scales(dtype)) {
    if (kv_scale == STROBE_KV_SCALE_NONE) {
      return invalid(
          format("kv_scale = 0 (none) with %s = %d (%s), expected 1 (tensor), 2 (head) or 3 (row)",
                 name, dtype, dtype_name(dtype)));
    }
  } else if (kv_scale != STROBE_KV_SCALE_NONE) {
    return invalid(format("kv_scale = %d with %s = %d (%s), expected 0 (none)", kv_scale, name,
                          dtype, dtype < 0 ? "that of q" : dtype_name(dtype)));
  }
  const bool may_be_half = kv_scale && kv_scale != STROBE_KV_SCALE_BATCH_HEAD;
  if (scale_dtype == STROBE_FLOAT32 || (may_be_half && scale_dtype == STROBE_FLOAT16)) return {};
  return invalid(format("kv_scale_dtype = %d, expected 0 (fp32)%s", scale_dtype,
                        may_be_half ? " or 2 (fp16)"
                        : kv_scale  ? " with kv_scale = 4 (of batch and head)"
                                    : " without a kv_scale"));
}

Status check_scale_strides(const char* name, strobe_strides s, int32_t kv_scale, int64_t entries,
                           int64_t rows, int64_t heads, bool output) {
  const struct {
    const char* axis;
    int64_t stride;
    bool differs;  // whether scales do along it
  } axes[] = {{"batch", s.batch, differ_by_entry(kv_scale)},
              {"seqlen", s.seqlen, kv_scale == STROBE_KV_SCALE_ROW},
              {"head", s.head, differ_by_head(kv_scale)}};
  for (const auto& axis : axes) {
    if (!axis.differs && axis.stride != 0) {
      return invalid(format("%s.%s = %" PRId64 " elements with kv_scale = %d, expected 0", name,
                            axis.axis, axis.stride, kv_scale));
    }
  }
  if (!differ_by_head(kv_scale) || (s.batch == 0 && s.seqlen == 0 && s.head == 0)) return {};
  s.dim = 1;
  return check_strides(name, s, differ_by_entry(kv_scale) ? entries : 1,
                       kv_scale == STROBE_KV_SCALE_ROW ? rows : 1, heads, 1, false,
                       output && differ_by_entry(kv_scale));
}

Status check_pointer(const char* name, const void* pointer, bool needed, int64_t alignment) {
  if (!pointer) return needed ? invalid(format("%s = NULL, expected a pointer", name)) : Status();
  // Alignments are powers of two.
  if ((reinterpret_cast<uintptr_t>(pointer) & static_cast<uintptr_t>(alignment - 1)) != 0) {
    return invalid(
        format("%s = %p, expected alignment to %" PRId64 " bytes", name, pointer, alignment));
  }
  return {};
}

Status check_cumulative(const char* name, const char* of, const int32_t* cu, int64_t batch,
                        int64_t total, int64_t longest) {
  if (cu[0] != 0) return invalid(format("%s[0] = %d, expected 0", name, cu[0]));
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = int64_t{cu[b + 1]} - cu[b];
    if (length < 0) {
      return invalid(format("%s[%" PRId64 "] = %d after %d, expected not to decrease", name, b + 1,
                            cu[b + 1], cu[b]));
    }
    if (length > longest && longest < total) {  // else the end is found to be wrong
      return invalid(format("%s: sequence %" PRId64 " has length %" PRId64
                            ", expected at most seqlen_%s = %" PRId64,
                            name, b, length, of, longest));
    }
  }
  // Rows past the end of the last sequence are nobody's, and no kernel reads them.
  if (cu[batch] > total) {
    return invalid(format("%s[%" PRId64 "] = %d, expected at most total_%s = %" PRId64, name, batch,
                          cu[batch], of, total));
  }
  return {};
}

}  // namespace strobe
