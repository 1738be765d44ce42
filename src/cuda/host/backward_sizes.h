// The sizes that decide the backward pass's scratch, of a problem.
#ifndef STROBE_CUDA_HOST_BACKWARD_SIZES_H_
#define STROBE_CUDA_HOST_BACKWARD_SIZES_H_

#include "core/problem.h"
#include "cuda/common/backward_scratch.cuh"

namespace strobe::cuda {

STROBE_INLINE constexpr BackwardSizes sizes_of(const AttentionProblem& p) {
  return {p.batch,
          p.heads,
          p.heads_kv,
          p.seqlen_q,
          p.seqlen_k,
          p.varlen != 0,
          p.total_q,
          rows_k(p),
          p.batch_invariant != 0,
          packed_bytes(p.varlen ? 1 : p.batch, p.varlen ? p.total_q : p.seqlen_q, p.heads,
                       p.head_dim, p.dq.batch, p.dq.seqlen, p.dq.head)};
}
}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_BACKWARD_SIZES_H_
