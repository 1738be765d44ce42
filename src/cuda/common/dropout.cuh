// Dropout's random bits in the layouts in which kernels hold weights. core/philox.h has the
// generator and says which bits are whose; a call of it serves eight neighbouring keys of a query.
// What each lane asks for is a constexpr function: tests/gpu/dropout_test.cpp plays all lanes on
// the CPU and holds the result against the CPU's mask.
#ifndef STROBE_CUDA_COMMON_DROPOUT_CUH_
#define STROBE_CUDA_COMMON_DROPOUT_CUH_

#include <cstdint>

#include "core/macros.h"
#include "core/philox.h"
#include "cuda/common/quad.cuh"
#include "cuda/ptx/movmatrix.h"

namespace strobe::cuda {

/// A call of the generator, relative to a block of weights: its query, and key / 8.
struct DropoutCall {
  uint32_t query, group;
};

/// Forward: of a 16 (queries) x 16 (keys) block, two neighbouring accumulators. The call number b =
/// lane % 4 serves query lane / 4 + 8 * (b / 2), keys 8 * (b % 2) on; after the quad has transposed
/// the words, word[b] has in its low and high half the bits of this lane's two columns, 2 * (lane %
/// 4) and the next, of that call's query and keys.
STROBE_INLINE constexpr DropoutCall dropout_call(int lane) {
  const auto b = static_cast<uint32_t>(lane % 4);
  return {static_cast<uint32_t>(lane / 4) + 8 * (b / 2), b % 2};
}

/// Backward: of four 8 (keys) x 8 (queries) blocks of transposed scores, queries 8 d on for block
/// d. Lane 4 s + c calls for query s of block c. Transposed within the quad, word[d] of that lane
/// is keys 2c and 2c + 1 of query s of block d; movmatrix then gives lane 4 s + c the bits of key
/// s, queries 2c (low half) and 2c + 1, of block d.
STROBE_INLINE constexpr DropoutCall dropout_call_transposed(int lane) {
  return {static_cast<uint32_t>(8 * (lane % 4) + lane / 4), 0};
}

/// Whether the even (low half) and the odd (high half) column of a word are kept.
STROBE_INLINE constexpr bool keep_low(const Dropout& d, uint32_t word) {
  return (word & 0xffffu) >= d.threshold;
}
STROBE_INLINE constexpr bool keep_high(const Dropout& d, uint32_t word) {
  return word >> 16 >= d.threshold;
}

/// A thread's weights of 64 queries and two keys as the bits of a word, 1 where a weight is
/// dropped: that of the i-th of eight accumulators, two neighbouring 8 (keys) x 8 (queries) blocks
/// and the two below them, of queries 16 j on.
STROBE_INLINE constexpr int dropped_bit(int j, int i) {
  const int row = i / 2 % 2, block = 2 * (j % 2) + i / 4, column = i % 2;
  return 16 * (j / 2 % 2) + 8 * row + 2 * block + column;
}
/// Those bits of queries 32 b to 32 b + 31 with the thread's key number `row`. word: of
/// dropout_call_transposed, transposed.
STROBE_INLINE constexpr uint32_t dropped_bits(const Dropout& dropout, const uint32_t (&word)[4],
                                              int b, int row) {
  uint32_t bits = 0;
  for (int d = 0; d < 4; ++d) {
    const int bit = dropped_bit(2 * b + d / 2, 4 * (d % 2) + 2 * row);
    if (!keep_low(dropout, word[d])) bits |= 1u << bit;
    if (!keep_high(dropout, word[d])) bits |= 2u << bit;
  }
  return bits;
}

/// Dropout::keep, which would put the four words into local memory to index them.
STROBE_INLINE constexpr bool keep_one(const Dropout& d, uint32_t batch_head, int64_t query,
                                      int64_t key) {
  const auto c = static_cast<uint32_t>(key);
  const Philox4 bits = d.bits(batch_head, static_cast<uint32_t>(query), c / 8);
  const uint32_t low = c & 2 ? bits.word[1] : bits.word[0];
  const uint32_t high = c & 2 ? bits.word[3] : bits.word[2];
  const uint32_t word = c & 4 ? high : low;
  return c & 1 ? keep_high(d, word) : keep_low(d, word);
}

#if defined(__CUDACC__)

/// The words of a block whose first query and key / 8 are `query` and `group`: see dropout_call.
__device__ __forceinline__ void dropout_words(const Dropout& dropout, uint32_t batch_head,
                                              uint32_t query, uint32_t group, int lane,
                                              uint32_t (&word)[4]) {
  const DropoutCall call = dropout_call(lane);
  const Philox4 mine = dropout.bits(batch_head, query + call.query, group + call.group);
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = mine.word[i];
  quad_transpose(word, lane);
}

/// Likewise: see dropout_call_transposed.
__device__ __forceinline__ void dropout_words_transposed(const Dropout& dropout,
                                                         uint32_t batch_head, uint32_t query,
                                                         uint32_t group, int lane,
                                                         uint32_t (&word)[4]) {
  const DropoutCall call = dropout_call_transposed(lane);
  const Philox4 mine = dropout.bits(batch_head, query + call.query, group + call.group);
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = mine.word[i];
  quad_transpose(word, lane);
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    word[d] = ptx::transpose_fragment(word[d]);
  }
}

#endif  // __CUDACC__

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_DROPOUT_CUH_
