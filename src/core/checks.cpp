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
  constexpr const char* kNames[] = {"fp32", "bf16", "fp16", "float8 e4m3", "float8 e5m2"};
  static_assert(std::size(kNames) == STROBE_FLOAT8_E5M2 + 1);
  return static_cast<size_t>(dtype) < std::size(kNames) ? kNames[dtype] : "?";
}

Status invalid(std::string text) { return {STROBE_INVALID_ARGUMENT, std::move(text)}; }

Status check_integer(const char* name, int64_t got, int64_t low, int64_t high) {
  if (low <= got && got <= high) return {};
  return invalid(
      format("%s = %" PRId64 ", expected %" PRId64 " to %" PRId64, name, got, low, high));
}

Status check_strides(const char* name, const strobe_strides& s, int64_t batch, int64_t rows,
                     int64_t heads, int64_t dim, bool packed, bool output) {
  if (unset(s)) {  // contiguous, if that can be counted
    int64_t count = dim;
    for (const int64_t size : {heads, rows, packed ? 1 : batch}) {
      if (size > 0 && count > kMaxOffset / size) {
        return invalid(format("%s: %" PRId64 " x %" PRId64 " x %" PRId64 " x %" PRId64
                              " values, expected at most 2^58",
                              name, packed ? 1 : batch, rows, heads, dim));
      }
      count *= max64(size, 1);
    }
    return {};
  }
  if (s.dim != 1) {
    return invalid(format("%s.dim = %" PRId64 " elements, expected 1 (last dimension contiguous)",
                          name, s.dim));
  }
  struct Extent {
    int64_t size, stride;
    const char* dimension;  // its field of strobe_strides
  } extents[] = {
      {packed ? 1 : batch, s.batch, "batch"}, {rows, s.seqlen, "seqlen"}, {heads, s.head, "head"}};
  int64_t room = kMaxOffset;
  for (const Extent& e : extents) {
    if (e.size <= 1) continue;
    const int64_t magnitude = e.stride < 0 ? -(e.stride + 1) : e.stride;
    if (magnitude >= room / (e.size - 1)) {
      return invalid(format("%s.%s = %" PRId64 " elements with %" PRId64
                            " entries: offsets pass 2^58 elements",
                            name, e.dimension, e.stride, e.size));
    }
    room -= magnitude * (e.size - 1);
  }
  if (!output || batch == 0 || rows == 0 || heads == 0) return {};
  // An output must not overlap itself: with the dimensions sorted by stride, each step must clear
  // all that lies below.
  for (Extent& e : extents) e.stride = e.size <= 1 ? 0 : std::llabs(e.stride);
  std::sort(std::begin(extents), std::end(extents),
            [](const Extent& a, const Extent& b) { return a.stride < b.stride; });
  int64_t span = dim;
  for (const Extent& e : extents) {
    if (e.size <= 1) continue;
    if (e.stride < span) {
      return invalid(format("%s.%s = %" PRId64 " elements, expected at least %" PRId64
                            " (an output must not overlap itself)",
                            name, e.dimension, e.stride, span));
    }
    span += e.stride * (e.size - 1);
  }
  return {};
}

Status check_pointer(const char* name, const void* pointer, bool needed, int64_t alignment) {
  if (!pointer) return needed ? invalid(format("%s = NULL, expected a pointer", name)) : Status();
  if (reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(alignment) != 0) {
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
