// Sequences of few queries: decoding, where the time is that of reading K and V from memory.
//
// The query heads that share a key head, times the few queries, are packed as rows, so that each
// key and value is read once for all of them. The keys are cut into blocks of kDecodeKeys, at
// multiples of that in the sequence. Each block's weights and O are computed on their own, against
// the block's own maximum, and merged with its neighbour's along a binary tree over the numbers of
// the blocks: blocks 0 and 1, 2 and 3; then 0-1 and 2-3. The tree does not depend on who computes
// which part of it, so that bits depend neither on the threads nor on the rest of the batch. An
// item computes a subtree, and the item that ends last among those of a sequence merges their
// results.
//
// With batch_invariant a row has the bits that a tile of queries (forward-inl.h) gives it: a score
// is one sum over ascending dimensions, a sum of weights one over ascending keys, codes are
// multiplied by their scales first, and the leaves of the tree are chunks of blocks (key_tree.h).
#ifndef STROBE_CPU_DECODE_H_
#define STROBE_CPU_DECODE_H_

#include "cpu/kernels.h"
#include "cpu/key_tree.h"

namespace strobe::cpu {

/// How the rows of a problem are cut into items, and what an item needs.
struct DecodeShape {
  int64_t rows;                 // of a key head: the queries that a sequence may have, times group
  int64_t heads;                // key heads of an item
  int64_t item_rows;            // of each of its key heads
  int64_t head_sets, row_sets;  // that the heads, and the rows of a head, are cut into
  int64_t dim, dim_v;           // padded to the kernel's width
  int64_t levels;               // of the tree over the keys that a sequence may have
  int32_t k_dtype, v_dtype;     // of K and of V as they are multiplied

  STROBE_INLINE int64_t sets() const { return head_sets * row_sets; }
  /// The item of one set, without its batch and its blocks. sequence_rows: as many rows as each of
  /// its key heads has.
  STROBE_INLINE DecodeItem item(int64_t set, int64_t heads_kv, int64_t sequence_rows) const {
    const int64_t head = set / row_sets * heads, row = set % row_sets * item_rows;
    return {0,
            {head, min64(head + heads, heads_kv)},
            {row, min64(row + item_rows, sequence_rows)},
            {0, 0}};
  }
  /// Rounded up, so that each is aligned where they lie one behind the other.
  STROBE_INLINE int64_t partial_floats() const {
    return round_up(heads * item_rows * (dim_v + 2), 16);
  }
  STROBE_INLINE Partial partial(float* at) const {
    const int64_t n = heads * item_rows;
    return {at, at + n * dim_v, at + n * dim_v + n};
  }
};

/// Whether the CPU multiplies pairs of bf16 numbers and adds them in float32 (AVX512_BF16) faster
/// than it converts and multiplies them. Intel's cores with AMX take two cycles for a vector.
bool has_fast_bf16_products();
/// Whether the CPU drops the fetch of a line whose page it has not translated.
bool drops_fetches();

/// Rows of an item. Q, O and the tree of 64 rows of 128 values stay in L2.
inline constexpr int64_t kDecodeRows = 64;

/// So many queries of a sequence are decoded by every instruction set.
inline constexpr int64_t kAlwaysDecoded = 8;

/// most_queries: InstructionSet::most_decoded. width, leaf_blocks: as in DecodeKernel.
STROBE_INLINE DecodeShape decode_shape(const AttentionProblem& p, int64_t most_queries,
                                       int64_t width, int64_t leaf_blocks) {
  DecodeShape s{};
  s.rows = min64(p.seqlen_q, most_queries) * (p.heads / p.heads_kv);
  s.item_rows = max64(1, min64(s.rows, kDecodeRows));
  // Where a row of the cache holds all heads side by side, an item takes several, so that it reads
  // memory in the order in which it lies.
  const auto is_row = [](const auto& t) {
    return max64(t.head, -t.head) < max64(t.seqlen, -t.seqlen);
  };
  const bool side_by_side = is_row(p.k) && is_row(p.v);
  s.heads = side_by_side ? max64(1, min64(p.heads_kv, kDecodeRows / s.item_rows)) : 1;
  s.head_sets = ceil_div(p.heads_kv, s.heads);
  s.row_sets = max64(1, ceil_div(s.rows, s.item_rows));
  s.dim = round_up(p.head_dim, width);
  s.dim_v = round_up(p.head_dim_v, width);
  const auto multiplied = [&](int32_t dtype) {
    return p.batch_invariant && is_quantised(dtype) ? STROBE_FLOAT32 : dtype;
  };
  s.k_dtype = multiplied(p.kv_dtype);
  s.v_dtype = multiplied(v_dtype_of(p));
  s.levels = KeyTree::levels(ceil_div(p.seqlen_k, kDecodeKeys * leaf_blocks));
  return s;
}

/// The blocks of keys that some query of a sequence sees.
STROBE_INLINE Range decode_blocks(const Mask& mask) {
  const Range keys = mask.kv_range({0, mask.seqlen_q});
  if (keys.empty()) return {0, 0};
  return {keys.begin / kDecodeKeys, ceil_div(keys.end, kDecodeKeys)};
}

}  // namespace strobe::cpu

#endif  // STROBE_CPU_DECODE_H_
