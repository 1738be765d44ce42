// Every check of a problem and of launch arguments. A message names the argument, what was got and
// what was wanted.
#include <cinttypes>
#include <cmath>
#include <type_traits>

#include "core/checks.h"
#include "core/options.h"
#include "core/pointers.h"
#include "core/problem.h"
#include "core/validate_cache.h"
#include "core/validate_mask.h"
#include "core/workspace.h"

namespace strobe {

namespace {

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

// Of float8 attention, what no kernel does.
Status check_float8(const AttentionProblem& p) {
  const auto unsupported = [&](const std::string& what, const char* because) -> Status {
    return {STROBE_UNSUPPORTED, format("%s with dtype = %d (%s): %s", what.c_str(), p.dtype,
                                       dtype_name(p.dtype), because)};
  };
  if (p.dtype == STROBE_FLOAT8_E5M2) {
    return {STROBE_UNSUPPORTED,
            "dtype = 4 (float8 e5m2): no kernel takes queries of it, expected float8 e4m3 (k and v "
            "may be e5m2: kv_dtype), fp32, bf16 or fp16"};
  }
  if (p.direction == STROBE_BACKWARD) {
    return unsupported("direction backward",
                       "no kernel computes gradients from float8, expected bf16, fp16 or fp32");
  }
  if (p.kv_dtype != STROBE_SAME_DTYPE && !is_float8(p.kv_dtype)) {
    return unsupported(format("kv_dtype = %d (%s)", p.kv_dtype, dtype_name(p.kv_dtype)),
                       "beside float8 queries k and v are float8 e4m3 or e5m2");
  }
  const int32_t k_dtype = p.kv_dtype == STROBE_SAME_DTYPE ? p.dtype : p.kv_dtype;
  if (const int32_t v_dtype = v_dtype_of(p); p.v_dtype != STROBE_SAME_DTYPE && v_dtype != k_dtype) {
    return unsupported(format("v_dtype = %d (%s)", v_dtype, dtype_name(v_dtype)),
                       "beside float8 queries k and v have one dtype, expected -1 (that of k)");
  }
  if (p.rotary_dim != 0) {
    return unsupported(format("rotary_dim = %" PRId64, p.rotary_dim),
                       "codes that are rotated would have to be quantised anew, expected 0: rotate "
                       "before quantising");
  }
  return {};
}

// Refused here, so that no kernel has to know of quantised keys but in a cache.
Status check_kernels_dtype(const AttentionProblem& p) {
  if (has_float8_queries(p)) return check_float8(p);
  const struct {
    const char* name;
    int32_t got;
  } dtypes[] = {{"kv_dtype", p.kv_dtype}, {"v_dtype", static_cast<int32_t>(p.v_dtype)}};
  for (const auto& [name, got] : dtypes) {
    if (is_quantised(got) && p.cache == STROBE_CACHE_NONE) {
      return {STROBE_UNSUPPORTED,
              format("%s = %d (%s) with cache = 0 (none): no kernel takes quantised keys and "
                     "values but in a cache",
                     name, got, dtype_name(got))};
    }
    if (got != STROBE_SAME_DTYPE && got != p.dtype && !is_quantised(got)) {
      return {STROBE_UNSUPPORTED,
              format("%s = %d (%s): no kernel takes a dtype other than q's, which is %s%s", name,
                     got, dtype_name(got), dtype_name(p.dtype),
                     p.cache ? ", int8, float8, q8_0 and q4_0" : "")};
    }
  }
  return {};
}

// What k, v and out may be where that is not what q is.
Status check_dtypes(const AttentionProblem& p) {
  if (STROBE_FLOAT8_E5M2 < p.dtype && p.dtype <= STROBE_Q4_0) {
    return invalid(format("dtype = %d (%s), expected 0 to 4: %s is for caches (kv_dtype)", p.dtype,
                          dtype_name(p.dtype), dtype_name(p.dtype)));
  }
  STROBE_RETURN_IF_ERROR(check_integer("dtype", p.dtype, STROBE_FLOAT32, STROBE_FLOAT8_E5M2));
  STROBE_RETURN_IF_ERROR(check_integer("kv_dtype", p.kv_dtype, STROBE_SAME_DTYPE, STROBE_Q4_0));
  STROBE_RETURN_IF_ERROR(check_integer("v_dtype", p.v_dtype, STROBE_SAME_DTYPE, STROBE_Q4_0));
  // A backward pass reads out as a forward pass wrote it; gradients are its alone.
  const auto check_output = [&](const char* name, int32_t got, bool float32) -> Status {
    const bool same = got == STROBE_SAME_DTYPE || got == p.dtype;
    if (same || (got == STROBE_FLOAT32 && float32)) return {};
    return invalid(format("%s = %d (%s), expected -1 (that of q)%s", name, got, dtype_name(got),
                          float32 ? " or 0 (fp32)" : ""));
  };
  if (has_float8_queries(p)) {
    if (p.out_dtype > STROBE_FLOAT16) {
      return invalid(
          format("out_dtype = %d (%s) with dtype = %d (%s), expected -1 (bf16), 0 (fp32), "
                 "1 (bf16) or 2 (fp16)",
                 p.out_dtype, dtype_name(p.out_dtype), p.dtype, dtype_name(p.dtype)));
    }
    STROBE_RETURN_IF_ERROR(check_integer("out_dtype", p.out_dtype, -1, STROBE_FLOAT16));
  } else {
    STROBE_RETURN_IF_ERROR(check_output("out_dtype", p.out_dtype, true));
  }
  return check_output("grad_dtype", p.grad_dtype, p.direction == STROBE_BACKWARD);
}

// In words: a signed window's limit, or none.
std::string limit_text(const AttentionProblem& p, int64_t limit) {
  return p.window_signed && limit == STROBE_NO_LIMIT ? "none" : std::to_string(limit);
}

Status check_window(const AttentionProblem& p) {
  const struct {
    const char* name;
    int64_t got;
  } limits[] = {{"window_left", p.window_left}, {"window_right", p.window_right}};
  // Whoever gave the flag alone left both as they are where there is no window.
  if (p.window_signed && p.window_left == -1 && p.window_right == -1) {
    return invalid(
        "window_signed = 1 with window_left = -1 and window_right = -1, expected STROBE_NO_LIMIT "
        "where there is no limit: -1 is one then");
  }
  for (const auto& limit : limits) {
    if (!p.window_signed && limit.got < -1) {
      return invalid(format("%s = %" PRId64
                            ", expected -1 (no limit) or more, or window_signed = 1 "
                            "(limits of either sign)",
                            limit.name, limit.got));
    }
    // A query's interval of keys would be empty in the middle of its chunk.
    if (p.window_signed && limit.got < 0 && p.attention_chunk > 0) {
      return invalid(format("%s = %" PRId64 " with attention_chunk = %" PRId64
                            ", expected at least 0",
                            limit.name, limit.got, p.attention_chunk));
    }
  }
  const MaskRule rule = MaskRule::of(p);
  if (rule.is_limited_left() && rule.is_limited_right() && rule.window_left + rule.right() < 0) {
    return invalid(format("window_left = %s with window_right = %s%s, expected at least %" PRId64
                          ": no query would see a key",
                          limit_text(p, p.window_left).c_str(),
                          limit_text(p, p.window_right).c_str(), p.causal ? " and causal = 1" : "",
                          -rule.right()));
  }
  return {};
}

// What a bias and its gradient are, all but their strides.
Status check_bias(const AttentionProblem& p) {
  if (p.has_dbias && p.direction == STROBE_FORWARD) {
    return invalid("has_dbias = 1 with direction forward, expected direction backward");
  }
  if (p.has_dbias && !p.has_bias) {
    return invalid("has_dbias = 1 with has_bias = 0, expected has_bias = 1");
  }
  if (!p.has_bias) return {};
  STROBE_RETURN_IF_ERROR(
      check_integer("bias_dtype", p.bias_dtype, STROBE_SAME_DTYPE, STROBE_FLOAT16));
  const int32_t dtype = p.bias_dtype == STROBE_SAME_DTYPE ? p.dtype : p.bias_dtype;
  if (p.has_dbias && p.dbias_dtype != STROBE_SAME_DTYPE && p.dbias_dtype != dtype &&
      p.dbias_dtype != STROBE_FLOAT32) {
    return invalid(format("dbias_dtype = %d (%s), expected -1 (that of bias) or 0 (fp32)",
                          p.dbias_dtype, dtype_name(p.dbias_dtype)));
  }
  const struct {
    const char* name;
    int64_t got, full;
    const char* of;
  } extents[] = {{"bias_batch", p.bias_batch, p.batch, "batch"},
                 {"bias_heads", p.bias_heads, p.heads, "heads"},
                 {"bias_seqlen_q", p.bias_seqlen_q, p.seqlen_q, "seqlen_q"}};
  for (const auto& x : extents) {
    if (x.got == 0 || x.got == 1 || x.got == x.full) continue;
    return invalid(format("%s = %" PRId64 ", expected 1 (shared) or %" PRId64
                          " (%s), or 0 for the latter",
                          x.name, x.got, x.full, x.of));
  }
  return {};
}

// Where the problem lies in a larger one, for dropout.
Status check_dropout_place(const AttentionProblem& p) {
  const struct {
    const char* name;
    int64_t got;
  } fields[] = {{"dropout_first_query", p.dropout_first_query},
                {"dropout_first_key", p.dropout_first_key},
                {"dropout_first_head", p.dropout_first_head},
                {"dropout_heads", p.dropout_heads}};
  if (!(p.dropout_p > 0)) {
    for (const auto& field : fields) {
      if (field.got == 0) continue;
      return invalid(
          format("%s = %" PRId64 " with dropout_p = 0, expected 0", field.name, field.got));
    }
    return {};
  }
  const int64_t heads = p.dropout_heads ? p.dropout_heads : p.heads;
  if (heads < p.heads) {
    return invalid(format("dropout_heads = %" PRId64 ", expected at least heads = %" PRId64
                          ": a larger problem's",
                          heads, p.heads));
  }
  // The counter has them in 32 bits.
  if ((p.batch - 1) * heads + p.heads + p.dropout_first_head > kMaxLength) {
    return invalid(format("dropout_first_head = %" PRId64 " before %" PRId64
                          " sequences of %" PRId64 " heads, expected at most 2^31 - 1 together",
                          p.dropout_first_head, p.batch, heads));
  }
  return {};
}

Status check_options(const AttentionProblem& p) {
  Status first;
  for_each_option(p, [&](const Option& option, auto got) {
    if (first.ok()) first = check_option(option, got);
  });
  STROBE_RETURN_IF_ERROR(first);
  if (p.direction == STROBE_FORWARD) {
    const char* const found = p.has_dlse     ? "has_dlse"
                              : p.has_delta  ? "has_delta"
                              : p.accumulate ? "accumulate"
                              : p.has_dsinks ? "has_dsinks"
                                             : nullptr;
    if (found) {
      return invalid(format("%s = 1 with direction forward, expected direction backward", found));
    }
  }
  if (p.has_dlse && p.has_delta) {
    return invalid(
        "has_dlse = 1 with has_delta = 1, expected 0: a delta that is given has the "
        "gradient of lse in it");
  }
  if (!p.has_sinks && (p.sinks_outside_lse || p.has_dsinks)) {
    return invalid(format("%s = 1 with has_sinks = 0, expected has_sinks = 1",
                          p.has_dsinks ? "has_dsinks" : "sinks_outside_lse"));
  }
  STROBE_RETURN_IF_ERROR(check_dropout_place(p));
  STROBE_RETURN_IF_ERROR(check_bias(p));
  STROBE_RETURN_IF_ERROR(check_window(p));
  // What a query sees is one interval of keys.
  if (p.has_prefix && MaskRule::of(p).is_limited_left()) {
    return invalid(format("window_left = %" PRId64 " with has_prefix = 1, expected %s (no limit)",
                          p.window_left, p.window_signed ? "STROBE_NO_LIMIT" : "-1"));
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
  STROBE_RETURN_IF_ERROR(check_dtypes(p));
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
    if (!p.cache) STROBE_RETURN_IF_ERROR(check_integer("total_k", p.total_k, 0, kMaxLength));
  }
  STROBE_RETURN_IF_ERROR(check_options(p));
  STROBE_RETURN_IF_ERROR(check_cache(p));
  STROBE_RETURN_IF_ERROR(check_mask(p));

  const int64_t nq = p.varlen ? p.total_q : p.seqlen_q, nk = kv_rows(p);
  const int64_t heads_kv = p.heads_kv ? p.heads_kv : p.heads;
  const int64_t d = p.head_dim, dv = p.head_dim_v ? p.head_dim_v : d;
  const bool varlen = p.varlen != 0;
  STROBE_RETURN_IF_ERROR(check_strides("q", p.q, p.batch, nq, p.heads, d, varlen, false));
  const bool packed_k = varlen && !p.cache, appends = p.append != STROBE_APPEND_NONE;
  STROBE_RETURN_IF_ERROR(check_strides("k", p.k, kv_entries(p), nk, heads_kv,
                                       row_elements(p.kv_dtype, d), packed_k, appends));
  STROBE_RETURN_IF_ERROR(check_strides("v", p.v, kv_entries(p), nk, heads_kv,
                                       row_elements(v_dtype_of(p), dv), packed_k, appends));
  const bool backward = p.direction == STROBE_BACKWARD;
  if (p.has_bias) {
    const auto full = [](int64_t extent, int64_t all) { return extent ? extent : all; };
    const int64_t entries = full(p.bias_batch, p.batch), bias_heads = full(p.bias_heads, p.heads);
    const int64_t rows = full(p.bias_seqlen_q, p.seqlen_q);
    STROBE_RETURN_IF_ERROR(
        check_bias_strides("bias", p.bias, entries, bias_heads, rows, p.seqlen_k, false));
    if (p.has_dbias) {
      STROBE_RETURN_IF_ERROR(
          check_bias_strides("dbias", p.dbias, entries, bias_heads, rows, p.seqlen_k, true));
    }
  }
  STROBE_RETURN_IF_ERROR(check_strides("out", p.out, p.batch, nq, p.heads, dv, varlen, !backward));
  if (!backward) return check_kernels_dtype(p);
  STROBE_RETURN_IF_ERROR(check_strides("dout", p.dout, p.batch, nq, p.heads, dv, varlen, false));
  STROBE_RETURN_IF_ERROR(check_strides("dq", p.dq, p.batch, nq, p.heads, d, varlen, true));
  STROBE_RETURN_IF_ERROR(check_strides("dk", p.dk, p.batch, nk, heads_kv, d, varlen, true));
  STROBE_RETURN_IF_ERROR(check_strides("dv", p.dv, p.batch, nk, heads_kv, dv, varlen, true));
  return check_kernels_dtype(p);
}

namespace {

// Strides of a bias whose extents are known. Along an axis that it has once every index leads to
// the same element: with a stride of 0 kernels need not ask.
void settle_bias(const AttentionProblem& p, strobe_strides& s) {
  if (unset(s)) {
    const int64_t head = p.bias_seqlen_q * p.seqlen_k;
    s = {p.bias_heads * head, p.seqlen_k, head, 1};
  }
  if (p.bias_batch <= 1) s.batch = 0;
  if (p.bias_heads <= 1) s.head = 0;
  if (p.bias_seqlen_q <= 1) s.seqlen = 0;
  if (p.seqlen_k <= 1) s.dim = 1;
}

// Clears what describes tensors that the problem does not have: nobody has checked it, and it may
// be of any size.
void clear_unused(AttentionProblem& p) {
  if (!p.has_bias) {
    p.bias = {};
    p.bias_batch = p.bias_heads = p.bias_seqlen_q = 0;
  }
  if (!p.has_dbias) p.dbias = {};
  if (!p.has_q_scale) p.q_scale = {};
  if (p.direction == STROBE_FORWARD) p.dout = p.dq = p.dk = p.dv = {};
}

}  // namespace

void resolve_defaults(AttentionProblem& p) {
  clear_unused(p);
  if (p.heads_kv == 0) p.heads_kv = p.heads;
  if (p.head_dim_v == 0) p.head_dim_v = p.head_dim;
  if (p.dropout_p > 0 && p.dropout_heads == 0) p.dropout_heads = p.heads;
  if (p.kv_dtype == STROBE_SAME_DTYPE) p.kv_dtype = p.dtype;
  p.v_dtype = v_dtype_of(p);
  const int32_t float_dtype = has_float8_queries(p) ? STROBE_BFLOAT16 : p.dtype;
  if (p.out_dtype == STROBE_SAME_DTYPE) p.out_dtype = float_dtype;
  if (p.grad_dtype == STROBE_SAME_DTYPE) p.grad_dtype = p.dtype;
  if (p.cache == STROBE_CACHE_CONTIGUOUS) p.cache_batch = kv_entries(p);
  if (p.block_table_stride == 0) p.block_table_stride = p.pages_per_sequence;
  if (p.has_bias) {
    if (p.bias_dtype == STROBE_SAME_DTYPE) {
      p.bias_dtype = has_float8_queries(p) ? p.out_dtype : p.dtype;
    }
    if (p.dbias_dtype == STROBE_SAME_DTYPE) p.dbias_dtype = p.bias_dtype;
    if (p.bias_batch == 0) p.bias_batch = p.batch;
    if (p.bias_heads == 0) p.bias_heads = p.heads;
    if (p.bias_seqlen_q == 0) p.bias_seqlen_q = p.seqlen_q;
  }
  // No sequence is longer than all of them together, and a bound far above them would cost time
  // and workspace. Where they are extents of a bias, they stay what they are.
  const bool extent_q = p.has_bias && p.bias_seqlen_q == p.seqlen_q;
  if (p.varlen && !extent_q) p.seqlen_q = min64(p.seqlen_q, p.total_q);
  if (p.varlen && !p.cache && !p.has_bias) p.seqlen_k = min64(p.seqlen_k, p.total_k);
  const bool packed_new = p.append == STROBE_APPEND_PACKED;
  if (packed_new) p.seqlen_new = min64(p.seqlen_new, p.total_new);
  resolve_mask(p);
  if (std::isnan(p.scale)) p.scale = 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  const int64_t nq = p.varlen ? p.total_q : p.seqlen_q, nk = kv_rows(p);
  const auto settle = [&](strobe_strides& s, int64_t batch, int64_t rows, int64_t heads,
                          int64_t dim) {
    make_contiguous(s, rows, heads, dim);
    // The stride of a dimension with one entry means nothing, and kernels choose by strides: 0 is a
    // multiple of whatever they ask for. With batch_invariant a batch of one goes where a larger
    // one of its strides goes.
    if (batch <= 1 && !p.batch_invariant) s.batch = 0;
    if (rows <= 1) s.seqlen = 0;
    if (heads <= 1) s.head = 0;
  };
  const int64_t entries_q = p.varlen ? 1 : p.batch;
  const int64_t entries_k = p.varlen && !p.cache ? 1 : kv_entries(p);
  settle(p.q, entries_q, nq, p.heads, p.head_dim);
  settle(p.k, entries_k, nk, p.heads_kv, row_elements(p.kv_dtype, p.head_dim));
  settle(p.v, entries_k, nk, p.heads_kv, row_elements(v_dtype_of(p), p.head_dim_v));
  const auto settle_scale_of_heads = [&](strobe_strides& s) {
    settle(s, p.batch, 1, p.heads_kv, 1);
    s.dim = 0;
  };
  if (p.has_q_scale) settle_scale_of_heads(p.q_scale);
  const auto settle_scale = [&](Strides& s, int32_t kind) {
    if (kind == STROBE_KV_SCALE_ROW) {
      settle(s, entries_k, nk, p.heads_kv, 1);
    } else if (kind == STROBE_KV_SCALE_BATCH_HEAD) {
      settle_scale_of_heads(s);
    } else {
      s = {0, 0, kind != STROBE_KV_SCALE_HEAD ? 0 : s.head ? s.head : 1, 0};
    }
  };
  settle_scale(p.k_scale, scale_kind(p, p.kv_dtype));
  settle_scale(p.v_scale, scale_kind(p, v_dtype_of(p)));
  settle(p.out, entries_q, nq, p.heads, p.head_dim_v);
  settle(p.dout, entries_q, nq, p.heads, p.head_dim_v);
  settle(p.dq, entries_q, nq, p.heads, p.head_dim);
  settle(p.dk, entries_k, nk, p.heads_kv, p.head_dim);
  settle(p.dv, entries_k, nk, p.heads_kv, p.head_dim_v);
  if (p.has_bias) {
    for (strobe_strides* const s : {&p.bias, &p.dbias}) settle_bias(p, *s);
  }
  if (!p.append) return;
  const int64_t rows_new = packed_new ? p.total_new : p.seqlen_new;
  const int64_t entries_new = packed_new ? 1 : p.batch;
  settle(p.k_new, entries_new, rows_new, p.heads_kv, p.head_dim);
  settle(p.v_new, entries_new, rows_new, p.heads_kv, p.head_dim_v);
}

namespace {

// The values of the arrays that every launch may carry, where they lie in the CPU's memory.
template <typename Args>
Status check_arrays(const AttentionProblem& p, const Args& a) {
  const int32_t* const cu_q = p.varlen ? a.cu_seqlens_q : nullptr;
  const int32_t* const cu_k = p.varlen && !p.cache ? a.cu_seqlens_k : nullptr;
  if (cu_q) {
    STROBE_RETURN_IF_ERROR(
        check_cumulative("cu_seqlens_q", "q", cu_q, p.batch, p.total_q, p.seqlen_q));
  }
  if (cu_k) {
    STROBE_RETURN_IF_ERROR(
        check_cumulative("cu_seqlens_k", "k", cu_k, p.batch, p.total_k, p.seqlen_k));
  }
  const auto rows = [](const int32_t* cu, int64_t dense, int64_t b) {
    return cu ? int64_t{cu[b + 1]} - cu[b] : dense;
  };
  if (p.mask.kind != STROBE_MASK_NONE) {
    const auto* const mask = static_cast<const int32_t*>(a.mask);
    STROBE_RETURN_IF_ERROR(check_packed_mask(p, mask, cu_q, cu_k));
  }
  Status first;
  for_each_array(p, a, [&](const OptionArray& array, int32_t wanted, const int32_t* values) {
    for (int64_t b = 0; wanted && first.ok() && b < p.batch; ++b) {
      const int64_t most = array.most == OptionMost::kRowsQ   ? rows(cu_q, p.seqlen_q, b)
                           : array.most == OptionMost::kRowsK ? rows(cu_k, p.seqlen_k, b)
                                                              : Sequences::kFurthestPosition;
      if (array.least <= values[b] && values[b] <= most) continue;
      first = invalid(format("%s[%" PRId64 "] = %d, expected %" PRId64 " to %" PRId64, array.name,
                             b, values[b], array.least, most));
    }
  });
  return first;
}

// Outputs, the workspace among them, lie apart from all else.
template <typename Args>
Status check_memory(const AttentionProblem& p, size_t workspace_bytes, const Args& a) {
  Memory memory;
  for_each_argument(p, a, [&](const LaunchPointer& x) {
    if (x.used) memory.add(x.name, x.pointer, x.extents, x.written);
  });
  memory.add("workspace", a.workspace, Extents::contiguous(static_cast<int64_t>(workspace_bytes)),
             true);
  return memory.check();
}

// What all launches have in common: pointers, lengths, workspace.
template <typename Args>
Status check_launch(const AttentionProblem& p, size_t workspace_bytes, const Args& a) {
  STROBE_RETURN_IF_ERROR(first_wrong(p, a, [](const LaunchPointer& x) {
    if (x.pointer && !x.used && x.without) {
      return invalid(format("%s is given with %s, expected NULL%s", x.name, x.without, x.instead));
    }
    return check_pointer(x.name, x.pointer, x.needed, x.alignment);
  }));
  STROBE_RETURN_IF_ERROR(check_pointer("workspace", a.workspace, false, kWorkspaceAlignment));
  if (a.workspace && a.workspace_bytes < workspace_bytes) {
    return invalid(
        format("workspace_bytes = %zu, expected at least %zu", a.workspace_bytes, workspace_bytes));
  }
  return check_memory(p, workspace_bytes, a);
}

}  // namespace

Status check_args(const AttentionProblem& p, size_t workspace_bytes, const ForwardArgs& a) {
  return check_launch(p, workspace_bytes, a);
}
Status check_args(const AttentionProblem& p, size_t workspace_bytes, const BackwardArgs& a) {
  return check_launch(p, workspace_bytes, a);
}

Status check_numbers(const AttentionProblem& p, const ForwardArgs& a) {
  STROBE_RETURN_IF_ERROR(check_arrays(p, a));
  return p.cache ? check_cache_numbers(p, a) : Status();
}
Status check_numbers(const AttentionProblem& p, const BackwardArgs& a) {
  return check_arrays(p, a);
}

namespace {

// That there is a bias, and what it is, where it is not one of q's dtype for each pair.
std::string bias_text(const AttentionProblem& p) {
  if (!p.has_bias) return {};
  std::string s = ", bias";
  if (p.bias_dtype != STROBE_SAME_DTYPE && p.bias_dtype != p.dtype) {
    s += format(" %s", dtype_name(p.bias_dtype));
  }
  if (p.bias_batch == 1 && p.batch > 1) s += " of all sequences";
  if (p.bias_heads == 1 && p.heads > 1) s += " of all heads";
  if (p.bias_seqlen_q == 1 && p.seqlen_q > 1) s += " of all queries";
  return s;
}

}  // namespace

std::string to_string(const AttentionProblem& p) {
  std::string s = format("%s %s, batch %" PRId64 ", heads %" PRId64,
                         p.direction == STROBE_FORWARD ? "forward" : "backward",
                         dtype_name(p.dtype), p.batch, p.heads);
  if (p.heads_kv && p.heads_kv != p.heads) s += format("/%" PRId64, p.heads_kv);
  s += format(", seqlen %" PRId64, p.seqlen_q);
  if (p.seqlen_k != p.seqlen_q) s += format("/%" PRId64, p.seqlen_k);
  if (p.varlen && p.cache) {
    s += format(" at most, total %" PRId64, p.total_q);
  } else if (p.varlen) {
    s += format(" at most, total %" PRId64 "/%" PRId64, p.total_q, p.total_k);
  }
  s += format(", head_dim %" PRId64, p.head_dim);
  if (p.head_dim_v && p.head_dim_v != p.head_dim) s += format("/%" PRId64, p.head_dim_v);
  const auto or_of_q = [&](int32_t dtype) { return dtype == STROBE_SAME_DTYPE ? p.dtype : dtype; };
  const int32_t k_dtype = or_of_q(p.kv_dtype), v_dtype = or_of_q(v_dtype_of(p));
  if (k_dtype != v_dtype) {
    s += format(", k %s, v %s", dtype_name(k_dtype), dtype_name(v_dtype));
  } else if (k_dtype != p.dtype) {
    s += format(", k and v %s", dtype_name(k_dtype));
  }
  if (p.out_dtype != STROBE_SAME_DTYPE && p.out_dtype != p.dtype) {
    s += format(", out %s", dtype_name(p.out_dtype));
  }
  if (p.grad_dtype != STROBE_SAME_DTYPE && p.grad_dtype != p.dtype) {
    s += format(", gradients %s", dtype_name(p.grad_dtype));
  }
  s += bias_text(p);
  s += cache_text(p);
  s += mask_text(p);
  s += std::isnan(p.scale) ? ", scale 1/sqrt(head_dim)" : format(", scale %g", p.scale);
  for_each_option(p, [&](const Option& option, auto got) {
    const bool window = p.window_signed || p.window_left >= 0 || p.window_right >= 0;
    if (option.field == std::string("window_left") && window) {
      s += (p.window_signed ? ", signed window (" : ", window (") + limit_text(p, p.window_left) +
           ", " + limit_text(p, p.window_right) + ")";
    }
    if (!option.said || static_cast<double>(got) == option.otherwise) return;
    s += format(", %s", option.said);
    if (option.kind == OptionKind::kInteger) s += format(" %" PRId64, static_cast<int64_t>(got));
    if (option.kind == OptionKind::kReal) s += format(" %g", static_cast<double>(got));
  });
  return s;
}

std::string declines_without_cache(const AttentionProblem& p) {
  if (p.cache) {
    return format("cache = %d (%s), expected 0 (none): this kernel reads no KV cache", p.cache,
                  p.cache == STROBE_CACHE_PAGED ? "paged" : "contiguous");
  }
  if (p.direction == STROBE_FORWARD && p.out_dtype != p.dtype && !has_float8_queries(p)) {
    return format("out_dtype = %s, expected that of q, which is %s", dtype_name(p.out_dtype),
                  dtype_name(p.dtype));
  }
  return {};
}

}  // namespace strobe
