#include "core/tuning_bucket.h"

#include <bit>
#include <cinttypes>
#include <cstdint>

#include "core/checks.h"
#include "core/problem.h"

namespace strobe {

namespace {

int64_t power_of_2(int64_t n) {
  return n <= 1 ? n : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n)));
}

// Whether some choices besides that of the rules keep what the problem is promised: a backward pass
// with other blocks or another kernel has other bits, and so has every other kernel; on CPUs blocks
// of queries have the same.
bool has_choices(const AttentionProblem& p) {
  if (p.direction == STROBE_BACKWARD) return !p.deterministic && !p.batch_invariant;
  return !p.batch_invariant || p.device == STROBE_CPU;
}

// Whether `strobe tune` has launches of such problems.
bool is_measured(const AttentionProblem& p) {
  const bool same_dtypes = p.kv_dtype == p.dtype && p.v_dtype == p.dtype &&
                           p.out_dtype == p.dtype &&
                           (p.direction == STROBE_FORWARD || p.grad_dtype == p.dtype);
  const bool has_numbers = p.has_seqused_q || p.has_q_position || p.has_prefix || p.has_leftpad ||
                           p.has_cache_batch_idx || (p.has_seqused_k && !p.cache);
  return same_dtypes && !has_numbers && !p.append && p.rotary_dim == 0 && !p.has_bias &&
         p.mask.kind == STROBE_MASK_NONE && !p.window_signed && !p.accumulate && !p.has_delta &&
         rows_q(p) > 0 && p.seqlen_k > 0;
}

}  // namespace

std::string tuning_bucket(const AttentionProblem& p, int threads) {
  if (!has_choices(p) || !is_measured(p)) return {};
  std::string s = format("%s %s head_dim %" PRId64 "/%" PRId64,
                         p.direction == STROBE_FORWARD ? "forward" : "backward",
                         dtype_name(p.dtype), p.head_dim, p.head_dim_v);
  const struct {
    bool is;
    const char* word;
  } words[] = {{p.causal != 0, " causal"},
               {p.window_left >= 0 || (p.window_right >= 0 && !p.causal), " window"},
               {p.attention_chunk > 0, " chunks"},
               {p.softcap > 0, " softcap"},
               {p.alibi != 0, " ALiBi"},
               {p.dropout_p > 0, " dropout"},
               {p.has_sinks != 0, " sinks"},
               {p.batch_invariant != 0, " batch-invariant"},
               {p.cache == STROBE_CACHE_CONTIGUOUS, " cache"}};
  for (const auto& [is, word] : words)
    if (is) s += word;
  if (p.cache == STROBE_CACHE_PAGED) s += format(" pages of %" PRId64, p.page_size);
  // Of heads the kernels see those of all sequences; how many share a key head counts for itself.
  s += format(", %" PRId64 " heads of %" PRId64, power_of_2(p.batch * p.heads_kv),
              p.heads / p.heads_kv);
  s += format(", %" PRId64 " x %" PRId64, power_of_2(p.seqlen_q), power_of_2(p.seqlen_k));
  if (p.varlen) s += format(" packed, %" PRId64, power_of_2(rows_q(p)));
  if (p.device == STROBE_CPU) s += format(", threads %d", threads);
  return s;
}

}  // namespace strobe
