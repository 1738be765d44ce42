// Rows that a sequence has but does not use: what both directions write to them.
#ifndef STROBE_CUDA_HOST_UNUSED_ROWS_H_
#define STROBE_CUDA_HOST_UNUSED_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/params.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

/// The tensors in which a launch has to fill rows that are not in use: with zeros, and lse with
/// -inf. Elements are of 16 bits: float32 counts as two.
struct UnusedRows {
  struct Zeros {
    Tensor tensor;
    int32_t heads, dim;
  };
  Sequences sequences;
  Zeros queries, keys[2];  // heads 0: no such tensor
  float* lse;              // null: not wanted
};

inline UnusedRows unused_rows_of(const ForwardParams& p) {
  const int32_t words = p.out_words();
  return {p, {p.out.divided(words), p.heads, words * p.head_dim_v}, {}, p.lse};
}
inline UnusedRows unused_rows_of(const BackwardParams& p) {
  const int32_t words = p.grad_words();
  return {p,
          {p.dq.divided(words), p.heads, words * p.head_dim},
          {{p.dk.divided(words), p.heads_kv, words * p.head_dim},
           {p.dv.divided(words), p.heads_kv, words * p.head_dim_v}},
          nullptr};
}

/// Whether a launch may have rows that are not in use, which have to be filled.
inline bool has_unused_rows(const ForwardParams& p) { return p.used_q != nullptr; }
inline bool has_unused_rows(const BackwardParams& p) {
  return p.Sequences::has_unused_rows() && !p.accumulates;
}

/// Fills them. It touches no row in use, so it may run before or after the kernels of the
/// direction.
cudaError_t launch_unused_rows(const UnusedRows& rows, const LaunchTarget& target);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_UNUSED_ROWS_H_
