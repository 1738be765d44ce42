#include "cuda/host/tma_declines.h"

#include <cinttypes>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/element.h"

namespace strobe::cuda {

std::string tma_declines(const AttentionProblem& p) {
  const bool forward = p.direction == STROBE_FORWARD;
  // The backward kernel for wide heads draws its work items, 128 keys of a key head and a part of
  // its group each, in 32 bits.
  const int64_t most_items = int64_t{INT32_MAX} - 65536;
  const int64_t blocks_of_head = p.batch * ceil_div(p.seqlen_k, 128);
  if (!forward && max64(p.head_dim, p.head_dim_v) > 128 &&
      p.heads > most_items / max64(1, blocks_of_head)) {
    return format("batch * heads * seqlen_k / 128 = %" PRId64 " * %" PRId64 " * %" PRId64
                  ", expected at most %" PRId64,
                  p.batch, p.heads, ceil_div(p.seqlen_k, 128), most_items);
  }
  if (forward && p.head_dim_v % 8 != 0) {
    return format("head_dim_v = %" PRId64 ", expected a multiple of 8 (TMA writes 16-byte units)",
                  p.head_dim_v);
  }
  const int64_t rows_of_map_q = p.varlen ? p.total_q : p.seqlen_q;
  const int64_t rows_of_map_k = kv_rows(p);
  // With batch_invariant a batch of one must go where a larger one goes.
  const auto entries = [&](int64_t n) { return p.batch_invariant && n == 1 ? 2 : n; };
  const int64_t batch = p.varlen ? 1 : entries(p.batch);
  const int64_t batch_k = p.varlen && !p.cache ? 1 : entries(kv_entries(p));
  const int64_t unit = 16 / element_size(p.dtype);
  const struct {
    const char* name;
    const Strides& strides;
    int64_t rows, heads, batch, unit;
  } tensors[] = {
      {"q", p.q, rows_of_map_q, p.heads, batch, unit},
      {"k", p.k, rows_of_map_k, p.heads_kv, batch_k, unit},
      {"v", p.v, rows_of_map_k, p.heads_kv, batch_k, unit},
      // The backward pass reads dout by TMA, and writes nothing by it.
      {forward ? "out" : "dout", forward ? p.out : p.dout, rows_of_map_q, p.heads, batch, 8}};
  for (const auto& t : tensors) {
    const struct {
      const char* name;
      int64_t stride, length;
    } dims[] = {{"batch", t.strides.batch, t.batch},
                {"seqlen", t.strides.seqlen, t.rows},
                {"head", t.strides.head, t.heads}};
    for (const auto& dim : dims) {
      if (dim.length > 1 && (dim.stride <= 0 || dim.stride % t.unit != 0)) {
        return format("%s.%s = %" PRId64 " elements, expected a positive multiple of %" PRId64
                      " (TMA reads 16-byte units)",
                      t.name, dim.name, dim.stride, t.unit);
      }
    }
  }
  return {};
}

std::string bias_declines(const AttentionProblem& p) {
  if (!p.has_bias) return {};
  if (p.bias_dtype != p.dtype) {
    return format("bias_dtype = %s, expected that of q, %s", dtype_name(p.bias_dtype),
                  dtype_name(p.dtype));
  }
  constexpr int64_t kUnit = 8;
  const Strides& s = p.bias;
  if (s.dim != 1) {
    return format("bias.dim = %" PRId64 " elements, expected 1 (TMA reads 16-byte units)", s.dim);
  }
  const struct {
    const char* name;
    int64_t stride;
  } dims[] = {{"batch", s.batch}, {"head", s.head}, {"seqlen", s.seqlen}};
  for (const auto& [name, stride] : dims) {
    if (stride < 0 || stride % kUnit != 0) {
      return format("bias.%s = %" PRId64 " elements, expected a multiple of %" PRId64
                    " that is not negative (TMA reads 16-byte units)",
                    name, stride, kUnit);
    }
  }
  return {};
}

}  // namespace strobe::cuda
