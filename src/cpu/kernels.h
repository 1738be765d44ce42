// The interface between an instruction-set file and the rest of the CPU back end.
//
// launch.cpp, which is compiled for every CPU, owns the threads, the work items and their order. An
// instruction-set file holds the numerical work of one item only. It includes nothing that might
// emit a shared inline function there (core/macros.h says why).
#ifndef STROBE_CPU_KERNELS_H_
#define STROBE_CPU_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "core/packed_mask.h"
#include "core/philox.h"
#include "core/problem.h"
#include "core/sink.h"

namespace strobe::cpu {

/// The scales of a quantised tensor's rows, one for each row of each head of it; or for each key
/// head of each sequence (by_sequence), whatever entries the tensor has. Strides are 0 along axes
/// that share them.
struct Scales {
  std::byte* data = nullptr;                                  // null: there are none
  int64_t batch_stride = 0, row_stride = 0, head_stride = 0;  // in elements
  int32_t dtype = STROBE_FLOAT32;
  bool by_sequence = false;

  STROBE_INLINE int64_t bytes(int64_t elements) const { return elements * element_size(dtype); }
};

/// A tensor: [batch, seqlen, heads, dim], or [total, heads, dim] where the batch stride is 0.
/// Context::query_rows and key_rows tell where its rows lie.
struct Tensor {
  std::byte* data;
  int64_t batch_stride, row_stride, head_stride;  // in elements
  int32_t dtype;
  Scales scales{};

  /// Elements in bytes.
  STROBE_INLINE int64_t bytes(int64_t elements) const { return elements * element_size(dtype); }
  /// Bytes of a row of so many values.
  STROBE_INLINE int64_t run(int64_t values) const { return row_bytes(dtype, values); }
  /// Where a head's row begins.
  STROBE_INLINE std::byte* element(int64_t batch, int64_t row, int64_t head) const {
    return data + bytes(batch * batch_stride + row * row_stride + head * head_stride);
  }
};

/// The scales of a RowView's rows; places are its.
struct RowScales {
  std::byte* first;
  int64_t row_bytes, page_bytes;
  int32_t dtype;
};

/// The rows that one head of one sequence has in a tensor. Kernels ask here for every row that they
/// read or write, and add no strides themselves.
struct RowView {
  std::byte* first;
  int32_t dtype;           // of the elements
  int64_t row_bytes;       // from a row to the next
  int64_t page_bytes = 0;  // from a page to the next, where the rows lie in pages
  KeyRows keys{};          // has pages then
  RowScales scales{};

  STROBE_INLINE std::byte* row(int64_t i) const { return first + offset(i, page_bytes, row_bytes); }
  /// Where the scale of row i is, of a tensor that has scales.
  STROBE_INLINE std::byte* scale(int64_t i) const {
    return scales.first + offset(i, scales.page_bytes, scales.row_bytes);
  }
  /// The end of the run of rows from row i on that lie row_bytes apart: `end` at most.
  STROBE_INLINE int64_t run_end(int64_t i, int64_t end) const { return keys.run_end(i, end); }
  /// Rows i to i + kRows - 1, which do not lie in pages, without a multiplication for each.
  template <int kRows>
  STROBE_INLINE void rows(int64_t i, const std::byte* (&at)[kRows]) const {
    at[0] = row(i);
    for (int n = 1; n < kRows; ++n) at[n] = at[n - 1] + row_bytes;
  }

 private:
  STROBE_INLINE int64_t offset(int64_t i, int64_t page_stride, int64_t row_stride) const {
    if (!keys.pages) return i * row_stride;
    KeyRows::Place place = keys.place(i);
    // All pages were there when the launch began. Where the caller has changed a number since then,
    // the result is of no use, and any page will do.
    if (!place.there) place.entry = 0;
    return place.offset(page_stride, row_stride);
  }
};

/// The bias of one query: a value for each of its sequence's keys.
struct BiasRow {
  const std::byte* first;
  int64_t step;  // from a key to the next, in elements
  int32_t dtype;

  STROBE_INLINE const std::byte* at(int64_t key) const {
    return first + key * step * element_size(dtype);
  }
  /// Whether the value of a key is -inf, which hides the pair.
  STROBE_INLINE bool hides(int64_t key) const {
    if (dtype == STROBE_FLOAT32) {
      uint32_t bits;
      __builtin_memcpy(&bits, at(key), sizeof bits);
      return bits == 0xFF800000;
    }
    uint16_t bits;
    __builtin_memcpy(&bits, at(key), sizeof bits);
    return bits == (dtype == STROBE_BFLOAT16 ? 0xFF80 : 0xFC00);
  }
};

/// The additive bias of a launch, or the place of its gradient: [batch, head, query, key], with
/// strides of 0 along the axes that it has once.
struct Bias {
  std::byte* data;  // null: there is none
  Strides strides;
  int32_t dtype;

  STROBE_INLINE BiasRow row(int64_t batch, int64_t head, int64_t query) const {
    const int64_t at = batch * strides.batch + head * strides.head + query * strides.seqlen;
    return {data + at * element_size(dtype), strides.dim, dtype};
  }
  /// Whether it hides a pair that the mask does not.
  STROBE_INLINE bool hides(int64_t batch, int64_t head, int64_t query, int64_t key) const {
    return data && row(batch, head, query).hides(key);
  }
};

/// What both directions share.
struct Context {
  AttentionProblem problem;  // resolved
  Tensor q, k, v;
  CachedSequences sequences;  // without a cache the base alone
  const float* alibi_slopes;  // null unless ALiBi
  const float* sinks;         // [heads]; null: none
  bool sinks_in_lse;          // whether lse has them
  Bias bias;
  Dropout dropout;
  const int32_t* mask;  // a mask as data, packed; null: none
  MaskLayout mask_layout;
  int64_t tile_q, tile_k, block_q, block_k;  // the plan's

  STROBE_INLINE SequenceRows sequence_rows(int64_t batch) const {
    if (problem.cache) return sequences.sequence_rows(batch);
    return sequences.Sequences::sequence_rows(batch);
  }
  STROBE_INLINE Sequence sequence(int64_t batch, int64_t head) const {
    if (!problem.cache) return sequences.Sequences::sequence(batch, head);
    const CachedSequence s = sequences.sequence(batch, head);
    return {s, s.mask};
  }
  STROBE_INLINE Sequence sequence_of_all_heads(int64_t batch) const {
    static_assert(!masks_differ_by_head());
    return sequence(batch, 0);
  }
  /// What the mask as data says of a head.
  STROBE_INLINE HeadMask mask_of(const SequenceRows& s, int64_t head) const {
    return HeadMask::of(mask, mask_layout, s, head);
  }
  /// Query heads that share a key head, and the key head of a query head.
  STROBE_INLINE int64_t group() const { return problem.heads / problem.heads_kv; }
  STROBE_INLINE int64_t head_kv(int64_t head) const { return head / group(); }
  STROBE_INLINE float sink(int64_t head) const { return sink_of(sinks, head); }

  /// The rows of a sequence's queries in a tensor of q's shape: q, out or their gradients.
  STROBE_INLINE RowView query_rows(const Tensor& t, const SequenceRows& s, int64_t head) const {
    return scaled(rows(t, s.batch, s.q_row, head), t.scales, s.batch, head_kv(head));
  }
  /// The rows of a sequence's keys in a tensor of k's shape: k, v or their gradients.
  STROBE_INLINE RowView key_rows(const Tensor& t, const SequenceRows& s, int64_t head_kv) const {
    const RowView view = problem.cache
                             ? cached_rows(t, sequences.sequence_rows(s.batch).keys, head_kv)
                             : rows(t, s.batch, s.k_row, head_kv);
    return scaled(view, t.scales, s.batch, head_kv);
  }
  /// Place of a head's query 0 in lse, and in everything else with one value a query.
  STROBE_INLINE int64_t lse_index(const SequenceRows& s, int64_t head) const {
    return s.lse_row + head * sequences.lse_head_stride;
  }

 private:
  STROBE_INLINE static RowView cached_rows(const Tensor& t, const KeyRows& keys, int64_t head) {
    if (!t.data) return {nullptr, t.dtype, 0};
    std::byte* const begin = t.element(0, 0, head);
    const int64_t entry = t.bytes(t.batch_stride), row = t.bytes(t.row_stride);
    const Scales& s = t.scales;
    RowScales scales{};
    if (!s.by_sequence) {
      scales = {s.data, s.bytes(s.row_stride), s.bytes(s.batch_stride), s.dtype};
    }
    if (scales.first) scales.first += s.bytes(head * s.head_stride);
    if (keys.pages) return {begin, t.dtype, row, entry, keys, scales};
    const KeyRows::Place first = keys.place(0);
    if (scales.first) scales.first += first.offset(scales.page_bytes, scales.row_bytes);
    return {begin + first.offset(entry, row), t.dtype, row, 0, {}, scales};
  }
  STROBE_INLINE static RowView rows(const Tensor& t, int64_t batch, int64_t row, int64_t head) {
    if (!t.data) return {nullptr, t.dtype, 0};  // a tensor without values: nothing of it is read
    return {t.element(batch, row, head), t.dtype, t.bytes(t.row_stride)};
  }
  /// The view with the scale that all of its rows share, where a sequence's key heads have scales.
  STROBE_INLINE static RowView scaled(RowView view, const Scales& s, int64_t batch,
                                      int64_t head_kv) {
    if (!s.by_sequence) return view;
    view.scales = {s.data + s.bytes(batch * s.batch_stride + head_kv * s.head_stride), 0, 0,
                   s.dtype};
    return view;
  }
};

struct ForwardContext : Context {
  int64_t most_decoded;  // InstructionSet::most_decoded
  Tensor out;
  float* lse;           // null: not wanted
  Tensor k_new, v_new;  // what is appended to the cache
  const std::byte *rotary_cos,
      *rotary_sin;  // [rotary_rows][rotary_dim / 2], in the problem's dtype
};

/// Queries [q_begin, q_end) of one head; all of them are in use.
struct ForwardItem {
  int64_t batch, head, q_begin, q_end;
};

struct BackwardContext : Context {
  Tensor out, dout, dq, dk, dv;
  Bias dbias;
  const float* lse;    // with the sinks, whatever the caller's is
  const float* dlse;   // null: none
  const float* delta;  // one value a query: rowsum(dout * out) - dlse
  float* made_delta;   // where backward_delta writes it before any backward_block runs; null: the
                       // caller gives it
  float* dq_sum;       // float32 [query][dq_stride], queries in lse's order: dQ so far
  float *row_max, *row_sum;  // one value a query, of the queries whose lse is large (kLargeLse);
                             // backward_delta makes them
  float* sink_weight;        // one value a query: the sink's weight in its row. backward_delta
                             // sets those of queries whose lse is large. Null: not wanted
  int64_t dq_stride;         // head_dim rounded up to a whole vector
  uint32_t* turn;  // [heads, turn_tiles]: key blocks that have added to the query tile's dQ; see
                   // turnstile.h
  int64_t turn_tiles;  // query tiles of all sequences together

  /// For the scores of `block` queries at a time as the forward pass computes them.
  STROBE_INLINE ForwardContext forward(int64_t block) const {
    ForwardContext f{};
    static_cast<Context&>(f) = *this;
    f.block_q = block;
    return f;
  }
};

/// Keys [k_begin, k_end) of one key head, with all query heads of its group; all of them are in
/// use. k_begin is a multiple of block_k.
struct BackwardItem {
  int64_t batch, head_kv, k_begin, k_end;
};

/// A piece of dbias that one thread computes: `rows` of a head of a batch entry, which are queries,
/// or row 0 where all queries share it. Along an axis that dbias has once, the index is 0 and the
/// piece is the sum over that axis.
struct DbiasItem {
  int64_t batch, head;
  Range rows, keys;
};
/// Rows and keys of a piece, from multiples of it on.
inline constexpr int64_t kDbiasTile = 64;

/// Sizes that the kernel wants for a problem; fill_plan.cpp splits the work by them.
struct Tiles {
  int64_t tile_q, tile_k;
  int64_t max_block;  // most queries (forward) or keys (backward) of an item; a multiple of tile_q
                      // (tile_k)
  // Forward: rows of the smallest part of a tile that may be an item, where there are threads for
  // two parts of each; a power of 2 of them make a tile. 0: tiles stay whole. A row's bits must not
  // depend on it.
  int64_t part_q = 0;
};

/// Part of the work on a decoded sequence (decode.h): some rows of some key heads, against some
/// blocks of keys.
struct DecodeItem {
  int64_t batch;
  Range heads;   // key heads
  Range rows;    // of each of them. Row n is query n / group, and head n % group of the group
  Range blocks;  // of kDecodeKeys keys

  STROBE_INLINE int64_t row_count() const { return heads.size() * rows.size(); }
};

/// What blocks of keys give an item's rows, [key head][row]: O before its division, the scores'
/// maximum and the sum of the weights.
struct Partial {
  float* out;  // [rows][dim_v of DecodeShape], in an order of the dimensions that is the kernel's
  float *max, *sum;
};

/// Decoding in one instruction set.
struct DecodeKernel {
  int64_t width;  // rows are padded to multiples of it
  /// Blocks of kDecodeKeys keys of a leaf of its tree, a power of 2.
  int64_t (*leaf_blocks)(const AttentionProblem& problem);
  size_t (*scratch)(const ForwardContext& context);  // bytes for each thread
  /// The tree of the item's blocks, into `result`. Null: they are all that the sequence's queries
  /// see, and out and lse are written.
  void (*blocks)(const ForwardContext& context, const DecodeItem& item, const Partial* result,
                 std::byte* scratch);
  /// left takes right in.
  void (*merge)(const ForwardContext& context, const DecodeItem& item, const Partial& left,
                const Partial& right);
  /// Writes out and lse, where the item's blocks are all that the sequence's queries see.
  void (*finish)(const ForwardContext& context, const DecodeItem& item, const Partial& result,
                 std::byte* scratch);
};

struct InstructionSet {
  const char* name;  // "avx512"
  Tiles (*forward_tiles)(const AttentionProblem& problem);
  Tiles (*backward_tiles)(const AttentionProblem& problem);
  int64_t lanes;  // float32 values of a vector: dq_sum's rows are padded to it

  /// Bytes of scratch that each thread needs. The context has its tiles, blocks and problem; its
  /// pointers are not filled in.
  size_t (*forward_scratch)(const ForwardContext& context);
  size_t (*backward_scratch)(const BackwardContext& context);

  /// Writes out and lse of the item's queries.
  void (*forward_block)(const ForwardContext& context, const ForwardItem& item, std::byte* scratch);
  /// Writes delta of the item's queries, and what else the blocks need of them.
  void (*backward_delta)(const BackwardContext& context, const ForwardItem& item,
                         std::byte* scratch);
  /// Writes dk and dv of the item's keys and adds to the dQ of the queries that see them. The item
  /// that adds last to a query tile writes the tile's dq. All in the problem's grad_dtype, added to
  /// what is there where the problem says so.
  void (*backward_block)(const BackwardContext& context, const BackwardItem& item,
                         std::byte* scratch);

  /// For tests: exp2 and the conversions as the kernels do them.
  void (*exp2)(const float* x, float* y, int64_t n);
  void (*to_float)(int32_t dtype, const void* x, float* y, int64_t n);
  void (*from_float)(int32_t dtype, const float* x, void* y, int64_t n);

  /// Writes the new keys of a sequence, [new_begin, ...) as CachedRows counts them, to the
  /// cache. Null: the instruction set knows no cache.
  void (*append)(const ForwardContext& context, int64_t batch, Range keys);

  /// Null: its forward kernel takes all sequences.
  const DecodeKernel* (*decode)(const AttentionProblem& problem);

  /// Writes a piece of dbias, when backward_delta has seen all queries. It computes the scores of
  /// all sequences, heads and queries that share the piece again, in the order of their indices:
  /// the sums need no memory besides, and nobody waits. Null: the instruction set has no dbias.
  void (*dbias_block)(const BackwardContext& context, const DbiasItem& item, std::byte* scratch);

  /// The most queries of a sequence that `decode` takes: with more of them forward_block is faster.
  int64_t (*most_decoded)(const AttentionProblem& problem);
};

}  // namespace strobe::cpu

#endif  // STROBE_CPU_KERNELS_H_
