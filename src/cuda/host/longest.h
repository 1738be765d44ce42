// The longest sequence there may be.
#ifndef STROBE_CUDA_HOST_LONGEST_H_
#define STROBE_CUDA_HOST_LONGEST_H_

#include <cstdint>

#include "core/problem.h"

namespace strobe::cuda {

/// With varlen the caller's seqlen_q and seqlen_k are bounds, which may be anything up to 2^31 - 1
/// where the lengths, known to the device alone, are not. No sequence is longer than all together,
/// which is what grids, workspaces and the order of work go by.
STROBE_INLINE constexpr int64_t longest_q(const AttentionProblem& p) {
  return p.varlen ? min64(p.seqlen_q, p.total_q) : p.seqlen_q;
}
STROBE_INLINE constexpr int64_t longest_k(const AttentionProblem& p) {
  return p.varlen ? min64(p.seqlen_k, p.total_k) : p.seqlen_k;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_LONGEST_H_
