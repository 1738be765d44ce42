// What is done to float8 queries, and to their cache, before the kernels that read it.
#ifndef STROBE_CUDA_HOST_WIDENED_QUERIES_H_
#define STROBE_CUDA_HOST_WIDENED_QUERIES_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/arithmetic.h"
#include "core/problem.h"
#include "core/workspace.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

/// Float8 queries over a cache have no kernel of their own: bf16 holds each of their codes, and the
/// kernels for bf16 queries over a quantised cache do the rest (after_widening in features_of.h).
STROBE_INLINE constexpr bool widens_queries(const AttentionProblem& p) {
  return has_float8_queries(p) && p.cache != STROBE_CACHE_NONE;
}

/// What such a launch has in the workspace for itself. p: what the caller asks for.
struct WidenedQueries {
  uint16_t* q;               // bf16 [batch, seqlen_q, heads, width], or [total_q, heads, width]
  float *k_scale, *v_scale;  // [batch, heads_kv]: q's scale times k's; v's
  float* out;                // where out is fp16, which no kernel for bf16 writes; else null

  STROBE_INLINE static constexpr int64_t width(int64_t dim) { return round_up(dim, 8); }
  STROBE_INLINE static constexpr int64_t rows(const AttentionProblem& p) {
    return p.heads * (p.varlen ? p.total_q : p.batch * p.seqlen_q);
  }
  STROBE_INLINE static constexpr bool rounds_out(const AttentionProblem& p) {
    return p.out_dtype == STROBE_FLOAT16;
  }
  static WidenedQueries take(Arena& arena, const AttentionProblem& p) {
    WidenedQueries w{};
    w.q = arena.take<uint16_t>(rows(p) * width(p.head_dim));
    w.k_scale = arena.take<float>(p.batch * p.heads_kv);
    w.v_scale = arena.take<float>(p.batch * p.heads_kv);
    if (rounds_out(p)) w.out = arena.take<float>(rows(p) * width(p.head_dim_v));
    return w;
  }
};

/// Writes the queries and the scales, and new keys and values to the cache.
cudaError_t launch_widening(const AttentionProblem& p, const ForwardArgs& args,
                            const WidenedQueries& to, const LaunchTarget& target);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_WIDENED_QUERIES_H_
