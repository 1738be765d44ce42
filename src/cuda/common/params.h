// What a CUDA kernel is given: one struct by value, in constant memory, the same for every kernel
// of a direction.
#ifndef STROBE_CUDA_COMMON_PARAMS_H_
#define STROBE_CUDA_COMMON_PARAMS_H_

#include <cstdint>

#include "core/mask.h"
#include "core/philox.h"

namespace strobe::cuda {

/// [batch, seqlen, heads, dim], or [total, heads, dim] where the batch stride is 0. Strides in
/// elements.
struct Tensor {
  void* data;
  int64_t batch_stride, row_stride, head_stride;
};

/// One sequence of the batch: its mask (hence its lengths), and where its rows begin in the tensors
/// and in lse.
struct Sequence {
  int64_t q_row, k_row;
  int64_t lse_row;  // of (batch, head 0, query 0)
  Mask mask;
};

struct CommonParams {
  const int32_t *cu_q, *cu_k;  // null unless varlen
  int32_t batch, heads;        // query heads
  int32_t seqlen_q, seqlen_k;  // varlen: of the longest sequence
  int64_t lse_head_stride;     // seqlen_q, or total_q
  MaskRule rule;
  Tensor q, k, v;
  const float* alibi_slopes;   // null unless ALiBi
  int64_t alibi_batch_stride;  // 0 where slopes are per head
  Dropout dropout;
  int32_t heads_kv, group;   // group: query heads per key head
  int64_t total_q, total_k;  // rows of a batch entry; varlen: of all sequences together
  int32_t head_dim, head_dim_v;
  float scale, softcap;
  float cap_log2, cap_power;  // of ScoreRule (score.cuh), from softcap: 0 without

  STROBE_INLINE Sequence sequence(int32_t b) const {
    if (!cu_q) {
      return {0, 0, int64_t{b} * heads * seqlen_q, Mask::make(rule, seqlen_q, seqlen_k)};
    }
    return {cu_q[b], cu_k[b], cu_q[b],
            Mask::make(rule, cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b])};
  }
};

struct ForwardParams : CommonParams {
  Tensor out;
  float* lse;  // null: not wanted
  void* workspace;
  int32_t batch_invariant;
};

struct BackwardParams : CommonParams {
  Tensor out, dout, dq, dk, dv;
  const float* lse;
  const float* dlse;  // null: none
  void* workspace;
  int32_t deterministic, batch_invariant;
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_PARAMS_H_
