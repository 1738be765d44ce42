// Every check of a problem and of launch arguments. A message names the argument, what was got and
// what was wanted.
#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <type_traits>

#include "core/options.h"
#include "core/problem.h"
#include "core/workspace.h"

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
  switch (dtype) {
    case STROBE_FLOAT32:
      return "fp32";
    case STROBE_BFLOAT16:
      return "bf16";
    case STROBE_FLOAT16:
      return "fp16";
    case STROBE_FLOAT8_E4M3:
      return "float8 e4m3";
    case STROBE_FLOAT8_E5M2:
      return "float8 e5m2";
  }
  return "?";
}

namespace {

using std::string;

Status invalid(string text) { return {STROBE_INVALID_ARGUMENT, std::move(text)}; }

Status check_integer(const char* name, int64_t got, int64_t low, int64_t high) {
  if (low <= got && got <= high) return {};
  return invalid(
      format("%s = %" PRId64 ", expected %" PRId64 " to %" PRId64, name, got, low, high));
}

// Row, key and head indices are 32-bit in the dropout counter and on the GPU.
constexpr int64_t kMaxLength = INT32_MAX;
// Offsets in bytes, sums of a few strides included, must stay far from the end of int64.
constexpr int64_t kMaxOffset = int64_t{1} << 58;

struct Extent {
  int64_t size, stride;
  const char* dimension;  // its field of strobe_strides
};

// True when `strides` were left at zero, which asks for a contiguous tensor.
bool unset(const Strides& s) { return s.batch == 0 && s.seqlen == 0 && s.head == 0 && s.dim == 0; }

Status check_strides(const char* name, const Strides& s, int64_t batch, int64_t rows, int64_t heads,
                     int64_t dim, bool varlen, bool output) {
  if (unset(s)) {  // contiguous, if that can be counted
    int64_t count = dim;
    for (const int64_t size : {heads, rows, varlen ? 1 : batch}) {
      if (size > 0 && count > kMaxOffset / size) {
        return invalid(format("%s: %" PRId64 " x %" PRId64 " x %" PRId64 " x %" PRId64
                              " values, expected at most 2^58",
                              name, varlen ? 1 : batch, rows, heads, dim));
      }
      count *= max64(size, 1);
    }
    return {};
  }
  if (s.dim != 1) {
    return invalid(format("%s.dim = %" PRId64 " elements, expected 1 (last dimension contiguous)",
                          name, s.dim));
  }
  Extent extents[] = {
      {varlen ? 1 : batch, s.batch, "batch"}, {rows, s.seqlen, "seqlen"}, {heads, s.head, "head"}};
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
    const int64_t magnitude = e.stride;
    if (magnitude < span) {
      return invalid(format("%s.%s = %" PRId64 " elements, expected at least %" PRId64
                            " (an output must not overlap itself)",
                            name, e.dimension, e.stride, span));
    }
    span = magnitude * (e.size - 1) + span;
  }
  return {};
}

Status check_flag(const char* name, int32_t got) { return check_integer(name, got, 0, 1); }

template <typename T>
Status check_option(const Option& option, T got) {
  if constexpr (std::is_integral_v<T>) {
    return check_integer(option.field, got, option.least, option.most);
  } else {
    // NaN asks for the default where that is NaN.
    const bool nan_too = std::isnan(option.otherwise);
    const bool good = std::isfinite(got) && got >= option.real_least && got < option.below;
    if (good || (nan_too && std::isnan(got))) return {};
    return invalid(format("%s = %g, expected %s%s", option.field, static_cast<double>(got),
                          option.wanted, nan_too ? ", or NaN for the default" : ""));
  }
}

// Refused here, so that no kernel has to know of elements of one byte.
Status check_kernels_dtype(const AttentionProblem& p) {
  if (p.dtype <= STROBE_FLOAT16) return {};
  return {STROBE_UNSUPPORTED,
          format("dtype = %d (%s): no kernel takes float8, expected fp32, bf16 or fp16", p.dtype,
                 dtype_name(p.dtype))};
}

Status check_options(const AttentionProblem& p) {
  Status first;
  for_each_option(p, [&](const Option& option, auto got) {
    if (first.ok()) first = check_option(option, got);
  });
  STROBE_RETURN_IF_ERROR(first);
  if (p.has_dlse && p.direction == STROBE_FORWARD) {
    return invalid("has_dlse = 1 with direction forward, expected direction backward");
  }
  // What a query sees is one interval of keys.
  if (p.has_prefix && p.window_left >= 0) {
    return invalid(format("window_left = %" PRId64 " with has_prefix = 1, expected -1 (no limit)",
                          p.window_left));
  }
  if (p.has_prefix && p.attention_chunk > 0) {
    return invalid(format("attention_chunk = %" PRId64 " with has_prefix = 1, expected 0 (off)",
                          p.attention_chunk));
  }
  return {};
}

}  // namespace

Status check_problem(const AttentionProblem& p) {
  STROBE_RETURN_IF_ERROR(check_integer("direction", p.direction, STROBE_FORWARD, STROBE_BACKWARD));
  STROBE_RETURN_IF_ERROR(check_integer("dtype", p.dtype, STROBE_FLOAT32, STROBE_FLOAT8_E5M2));
  STROBE_RETURN_IF_ERROR(check_integer("device", p.device, STROBE_CPU, STROBE_CUDA));
  STROBE_RETURN_IF_ERROR(
      check_integer("device_index", p.device_index, 0, p.device == STROBE_CPU ? 0 : 1023));
  STROBE_RETURN_IF_ERROR(check_integer("batch", p.batch, 1, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("seqlen_q", p.seqlen_q, 0, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("seqlen_k", p.seqlen_k, 0, kMaxLength));
  STROBE_RETURN_IF_ERROR(check_integer("heads", p.heads, 1, kMaxLength));
  // 0 asks for the default here; whoever gave another number reads of those that are allowed.
  if (p.heads_kv != 0) {
    STROBE_RETURN_IF_ERROR(check_integer("heads_kv", p.heads_kv, 1, kMaxLength));
  }
  if (p.heads_kv > 0 && p.heads % p.heads_kv != 0) {
    return invalid(format("heads = %" PRId64 ", expected a multiple of heads_kv = %" PRId64,
                          p.heads, p.heads_kv));
  }
  // The dropout counter holds batch * heads + head in 32 bits, and grids count them.
  if (p.batch > kMaxLength / p.heads) {
    return invalid(format("batch * heads = %" PRId64 " * %" PRId64 ", expected at most 2^31 - 1",
                          p.batch, p.heads));
  }
  STROBE_RETURN_IF_ERROR(check_integer("head_dim", p.head_dim, 1, 256));
  if (p.head_dim_v != 0) {
    STROBE_RETURN_IF_ERROR(check_integer("head_dim_v", p.head_dim_v, 1, 256));
  }
  STROBE_RETURN_IF_ERROR(check_flag("varlen", p.varlen));
  if (p.varlen) {
    STROBE_RETURN_IF_ERROR(check_integer("total_q", p.total_q, 0, kMaxLength));
    STROBE_RETURN_IF_ERROR(check_integer("total_k", p.total_k, 0, kMaxLength));
  }
  STROBE_RETURN_IF_ERROR(check_options(p));

  const int64_t nq = p.varlen ? p.total_q : p.seqlen_q, nk = p.varlen ? p.total_k : p.seqlen_k;
  const int64_t heads_kv = p.heads_kv ? p.heads_kv : p.heads;
  const int64_t d = p.head_dim, dv = p.head_dim_v ? p.head_dim_v : d;
  const bool varlen = p.varlen != 0;
  STROBE_RETURN_IF_ERROR(check_strides("q", p.q, p.batch, nq, p.heads, d, varlen, false));
  STROBE_RETURN_IF_ERROR(check_strides("k", p.k, p.batch, nk, heads_kv, d, varlen, false));
  STROBE_RETURN_IF_ERROR(check_strides("v", p.v, p.batch, nk, heads_kv, dv, varlen, false));
  const bool backward = p.direction == STROBE_BACKWARD;
  STROBE_RETURN_IF_ERROR(check_strides("out", p.out, p.batch, nq, p.heads, dv, varlen, !backward));
  if (!backward) return check_kernels_dtype(p);
  STROBE_RETURN_IF_ERROR(check_strides("dout", p.dout, p.batch, nq, p.heads, dv, varlen, false));
  STROBE_RETURN_IF_ERROR(check_strides("dq", p.dq, p.batch, nq, p.heads, d, varlen, true));
  STROBE_RETURN_IF_ERROR(check_strides("dk", p.dk, p.batch, nk, heads_kv, d, varlen, true));
  STROBE_RETURN_IF_ERROR(check_strides("dv", p.dv, p.batch, nk, heads_kv, dv, varlen, true));
  return check_kernels_dtype(p);
}

void resolve_defaults(AttentionProblem& p) {
  if (p.heads_kv == 0) p.heads_kv = p.heads;
  if (p.head_dim_v == 0) p.head_dim_v = p.head_dim;
  if (p.varlen) {
    // No sequence is longer than all of them together, and a bound far above them would cost time
    // and workspace.
    p.seqlen_q = min64(p.seqlen_q, p.total_q);
    p.seqlen_k = min64(p.seqlen_k, p.total_k);
  }
  if (std::isnan(p.scale)) p.scale = 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  const int64_t nq = p.varlen ? p.total_q : p.seqlen_q, nk = p.varlen ? p.total_k : p.seqlen_k;
  const auto contiguous = [](Strides& s, int64_t rows, int64_t heads, int64_t dim) {
    if (unset(s)) s = {rows * heads * dim, heads * dim, dim, 1};
  };
  contiguous(p.q, nq, p.heads, p.head_dim);
  contiguous(p.k, nk, p.heads_kv, p.head_dim);
  contiguous(p.v, nk, p.heads_kv, p.head_dim_v);
  contiguous(p.out, nq, p.heads, p.head_dim_v);
  contiguous(p.dout, nq, p.heads, p.head_dim_v);
  contiguous(p.dq, nq, p.heads, p.head_dim);
  contiguous(p.dk, nk, p.heads_kv, p.head_dim);
  contiguous(p.dv, nk, p.heads_kv, p.head_dim_v);
}

namespace {

Status check_pointer(const char* name, const void* pointer, bool needed, int64_t alignment) {
  if (!pointer) return needed ? invalid(format("%s = NULL, expected a pointer", name)) : Status();
  if (reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(alignment) != 0) {
    return invalid(
        format("%s = %p, expected alignment to %" PRId64 " bytes", name, pointer, alignment));
  }
  return {};
}

Status check_workspace(const void* workspace, size_t got, size_t wanted) {
  if (!workspace) return {};
  if (reinterpret_cast<uintptr_t>(workspace) % kWorkspaceAlignment != 0) {
    return invalid(
        format("workspace = %p, expected alignment to %zu bytes", workspace, kWorkspaceAlignment));
  }
  if (got < wanted)
    return invalid(format("workspace_bytes = %zu, expected at least %zu", got, wanted));
  return {};
}

Status check_lengths(const char* name, const int32_t* cu, int64_t batch, int64_t total,
                     int64_t longest) {
  if (cu[0] != 0) return invalid(format("%s[0] = %d, expected 0", name, cu[0]));
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = int64_t{cu[b + 1]} - cu[b];
    if (length < 0) {
      return invalid(format("%s[%" PRId64 "] = %d after %d, expected not to decrease", name, b + 1,
                            cu[b + 1], cu[b]));
    }
    if (length > longest && longest < total) {  // else the sum is found to be wrong
      return invalid(format("%s: sequence %" PRId64 " has length %" PRId64
                            ", expected at most seqlen_%c = %" PRId64,
                            name, b, length, name[11], longest));
    }
  }
  // A row that no sequence owns would be left unwritten.
  if (cu[batch] != total) {
    return invalid(format("%s[%" PRId64 "] = %d, expected total_%c = %" PRId64, name, batch,
                          cu[batch], name[11], total));
  }
  return {};
}

// An array of one number a sequence, `wanted` by the problem.
Status check_numbers(const AttentionProblem& p, const OptionArray& array, const int32_t* values,
                     int32_t wanted, const int32_t* cu_q, const int32_t* cu_k) {
  STROBE_RETURN_IF_ERROR(check_pointer(array.name, values, wanted != 0, 4));
  if (!wanted || p.device != STROBE_CPU) return {};
  const auto rows = [&](const int32_t* cu, int64_t dense, int64_t b) {
    return p.varlen ? int64_t{cu[b + 1]} - cu[b] : dense;
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t most = array.most == OptionMost::kRowsQ   ? rows(cu_q, p.seqlen_q, b)
                         : array.most == OptionMost::kRowsK ? rows(cu_k, p.seqlen_k, b)
                                                            : Sequences::kFurthestPosition;
    if (array.least <= values[b] && values[b] <= most) continue;
    return invalid(format("%s[%" PRId64 "] = %d, expected %" PRId64 " to %" PRId64, array.name, b,
                          values[b], array.least, most));
  }
  return {};
}

// The arguments that both directions have.
template <typename Args>
Status check_common(const AttentionProblem& p, size_t workspace_bytes, const Args& a) {
  const int64_t align = element_size(p.dtype);
  const bool some_q = rows_q(p) > 0, some_k = rows_k(p) > 0;
  STROBE_RETURN_IF_ERROR(check_pointer("q", a.q, some_q, align));
  STROBE_RETURN_IF_ERROR(check_pointer("k", a.k, some_k, align));
  STROBE_RETURN_IF_ERROR(check_pointer("v", a.v, some_k, align));
  STROBE_RETURN_IF_ERROR(check_pointer("out", a.out, some_q, align));
  STROBE_RETURN_IF_ERROR(check_pointer("lse", a.lse, false, 4));
  STROBE_RETURN_IF_ERROR(
      check_pointer("alibi_slopes", a.alibi_slopes, p.alibi != STROBE_ALIBI_NONE, 4));
  STROBE_RETURN_IF_ERROR(check_pointer("cu_seqlens_q", a.cu_seqlens_q, p.varlen, 4));
  STROBE_RETURN_IF_ERROR(check_pointer("cu_seqlens_k", a.cu_seqlens_k, p.varlen, 4));
  if (p.varlen && p.device == STROBE_CPU) {
    STROBE_RETURN_IF_ERROR(
        check_lengths("cu_seqlens_q", a.cu_seqlens_q, p.batch, p.total_q, p.seqlen_q));
    STROBE_RETURN_IF_ERROR(
        check_lengths("cu_seqlens_k", a.cu_seqlens_k, p.batch, p.total_k, p.seqlen_k));
  }
  Status first;
  for_each_array(p, a, [&](const OptionArray& array, int32_t wanted, const int32_t* values) {
    if (first.ok()) first = check_numbers(p, array, values, wanted, a.cu_seqlens_q, a.cu_seqlens_k);
  });
  STROBE_RETURN_IF_ERROR(first);
  return check_workspace(a.workspace, a.workspace_bytes, workspace_bytes);
}

}  // namespace

Status check_args(const AttentionProblem& p, size_t workspace_bytes, const ForwardArgs& a) {
  return check_common(p, workspace_bytes, a);
}

Status check_args(const AttentionProblem& p, size_t workspace_bytes, const BackwardArgs& a) {
  const int64_t align = element_size(p.dtype);
  const bool some_q = rows_q(p) > 0, some_k = rows_k(p) > 0;
  STROBE_RETURN_IF_ERROR(check_pointer("lse", a.lse, some_q, 4));
  STROBE_RETURN_IF_ERROR(check_pointer("dout", a.dout, some_q, align));
  STROBE_RETURN_IF_ERROR(check_pointer("dlse", a.dlse, some_q && p.has_dlse, 4));
  STROBE_RETURN_IF_ERROR(check_pointer("dq", a.dq, some_q, align));
  STROBE_RETURN_IF_ERROR(check_pointer("dk", a.dk, some_k, align));
  STROBE_RETURN_IF_ERROR(check_pointer("dv", a.dv, some_k, align));
  return check_common(p, workspace_bytes, a);
}

std::string to_string(const AttentionProblem& p) {
  string s = format("%s %s, batch %" PRId64 ", heads %" PRId64,
                    p.direction == STROBE_FORWARD ? "forward" : "backward", dtype_name(p.dtype),
                    p.batch, p.heads);
  if (p.heads_kv && p.heads_kv != p.heads) s += format("/%" PRId64, p.heads_kv);
  s += format(", seqlen %" PRId64, p.seqlen_q);
  if (p.seqlen_k != p.seqlen_q) s += format("/%" PRId64, p.seqlen_k);
  if (p.varlen) s += format(" at most, total %" PRId64 "/%" PRId64, p.total_q, p.total_k);
  s += format(", head_dim %" PRId64, p.head_dim);
  if (p.head_dim_v && p.head_dim_v != p.head_dim) s += format("/%" PRId64, p.head_dim_v);
  s += std::isnan(p.scale) ? string(", scale 1/sqrt(head_dim)") : format(", scale %g", p.scale);
  for_each_option(p, [&](const Option& option, auto got) {
    if (option.field == string("window_left") && (p.window_left >= 0 || p.window_right >= 0)) {
      s += format(", window (%" PRId64 ", %" PRId64 ")", p.window_left, p.window_right);
    }
    if (!option.said || static_cast<double>(got) == option.otherwise) return;
    s += format(", %s", option.said);
    if (option.kind == OptionKind::kInteger) s += format(" %" PRId64, static_cast<int64_t>(got));
    if (option.kind == OptionKind::kReal) s += format(" %g", static_cast<double>(got));
  });
  return s;
}

}  // namespace strobe
