// What one instruction-set file gives to the CPU back end, and what it gets.
//
// Threads, work items and the order of them live in launch.cpp, compiled for every CPU. An
// instruction-set file has the numerical work of one item only, and includes nothing that might
// emit a shared inline function there.
#ifndef STROBE_CPU_KERNELS_H_
#define STROBE_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "core/philox.h"
#include "core/problem.h"

namespace strobe::cpu {

/// A tensor: [batch, seqlen, heads, dim], or [total, heads, dim] where the batch stride is 0.
struct Tensor {
  std::byte* data;
  int64_t batch_stride, row_stride, head_stride;  // in elements
  int64_t element_size;

  STROBE_INLINE std::byte* at(int64_t batch, int64_t row, int64_t head) const {
    return data + (batch * batch_stride + row * row_stride + head * head_stride) * element_size;
  }
};

/// What both directions share.
struct Context {
  AttentionProblem problem;  // resolved
  Tensor q, k, v;
  Sequences sequences;
  const float* alibi_slopes;  // null unless ALiBi
  Dropout dropout;
  int64_t tile_q, tile_k, block_q, block_k;  // the plan's

  STROBE_INLINE Sequence sequence(int64_t batch) const { return sequences.sequence(batch); }
  STROBE_INLINE float alibi_slope(int64_t batch, int64_t head) const {
    if (!alibi_slopes) return 0;
    return alibi_slopes[(problem.alibi == STROBE_ALIBI_PER_BATCH_HEAD ? batch * problem.heads : 0) +
                        head];
  }
};

struct ForwardContext : Context {
  Tensor out;
  float* lse;  // null: not wanted
};

/// Queries [q_begin, q_end) of one head.
struct ForwardItem {
  int64_t batch, head, q_begin, q_end;
};

/// Hands the float32 dQ of a query tile from one key block to the next, in ascending order of key
/// blocks, so that the sum is the same however many threads there are (launch.cpp).
struct BackwardContext : Context {
  Tensor out, dout, dq, dk, dv;
  const float* lse;
  const float* dlse;  // null: none
  float* delta;   // as lse: rowsum(dout * out) - dlse, made by backward_delta before any block runs
  float* dq_sum;  // [lse rows of (batch, head, query)][dq_stride] float32
  float *row_max, *row_sum;  // as lse: of the rows whose lse says too little (coarse-inl.h); AMX
                             // leaves them alone
  int64_t dq_stride;         // head_dim rounded up to a whole vector
  uint32_t* turn;      // [heads, turn_tiles]: key blocks that have added to the query tile's dQ
  int64_t turn_tiles;  // query tiles of all sequences together
};

/// Keys [k_begin, k_end) of one key head, with all query heads of its group. k_begin is a multiple
/// of block_k.
struct BackwardItem {
  int64_t batch, head_kv, k_begin, k_end;
};

/// Sizes that the kernel wants for a problem; launch.cpp splits the work by them.
struct Tiles {
  int64_t tile_q, tile_k;
  int64_t max_block;  // forward: queries of an item at most; backward: keys; a multiple of tile_q
                      // (tile_k backward)
};

struct InstructionSet {
  const char* name;  // "avx512"
  Tiles (*forward_tiles)(const AttentionProblem& problem);
  Tiles (*backward_tiles)(const AttentionProblem& problem);
  int64_t lanes;  // float32 values of a vector: dq_sum's rows are padded to it

  /// Bytes of scratch per thread; called with the context's tiles, blocks and problem filled in,
  /// pointers not.
  size_t (*forward_scratch)(const ForwardContext& context);
  size_t (*backward_scratch)(const BackwardContext& context);

  /// Writes out and lse of the item's rows.
  void (*forward_block)(const ForwardContext& context, const ForwardItem& item, std::byte* scratch);
  /// Writes delta of queries [q_begin, q_end), and zeros to dq rows of tiles that no key block
  /// visits.
  void (*backward_delta)(const BackwardContext& context, const ForwardItem& item,
                         std::byte* scratch);
  /// Writes dk and dv of the item's keys, adds to dq; whoever adds last to a query tile writes its
  /// dq.
  void (*backward_block)(const BackwardContext& context, const BackwardItem& item,
                         std::byte* scratch);

  /// Test hooks: exp2 and rounding as the kernels do them.
  void (*exp2)(const float* x, float* y, int64_t n);
  void (*to_float)(int32_t dtype, const void* x, float* y, int64_t n);
  void (*from_float)(int32_t dtype, const float* x, void* y, int64_t n);
};

}  // namespace strobe::cpu

#endif  // STROBE_CPU_KERNELS_H_
