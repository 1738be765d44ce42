// What a CUDA kernel is given: one struct by value, in constant memory, the same for every kernel
// of a direction.
#ifndef STROBE_CUDA_COMMON_PARAMS_H_
#define STROBE_CUDA_COMMON_PARAMS_H_

#include <cstdint>
#include <type_traits>

#include "core/cache.h"
#include "core/codes.h"
#include "core/packed_mask.h"
#include "core/philox.h"
#include "core/sequence.h"
#if STROBE_RANDOM_WALKS
#include "core/random_blocks.h"
#endif

namespace strobe::cuda {

/// [batch, seqlen, heads, dim], or [total, heads, dim] where the batch stride is 0. Strides in
/// elements.
struct Tensor {
  void* data;
  int64_t batch_stride, row_stride, head_stride;

  /// Elements from `data` to where a head's row begins.
  STROBE_INLINE constexpr int64_t element(int64_t batch, int64_t row, int64_t head) const {
    return batch * batch_stride + row * row_stride + head * head_stride;
  }
  /// The same memory with elements of a `parts`-th of the size, as zeros may be written.
  STROBE_INLINE constexpr Tensor divided(int32_t parts) const {
    return {data, parts * batch_stride, parts * row_stride, parts * head_stride};
  }
};

/// Types of a bias, as strobe_dtype numbers them.
inline constexpr int32_t kBiasFloat32 = 0, kBiasBfloat16 = 1, kBiasFloat16 = 2;

/// An additive bias [batch, head, query, key], or the gradient of one. Strides in elements, 0 along
/// the axes that it has once.
struct Bias {
  const void* data;  // null: there is none
  int64_t batch_stride, head_stride, row_stride, key_stride;
  int32_t type;
  int32_t batch, heads, rows, keys;  // entries along the axes; of a gradient 1: a sum over the axis

  STROBE_INLINE constexpr int32_t element_bytes() const { return type == kBiasFloat32 ? 4 : 2; }
};

struct CommonParams : Sequences {
  Tensor q, k, v;
  const float* alibi_slopes;   // null unless ALiBi
  int64_t alibi_batch_stride;  // 0 where slopes are per head
  const float* sinks;          // [heads]; null: none
  bool sinks_in_lse;           // whether lse has them
  Dropout dropout;
  int32_t heads_kv, group;   // group: query heads per key head
  int64_t total_q, total_k;  // rows of a batch entry; packed: of all sequences together
  int32_t head_dim, head_dim_v;
  float scale, softcap;
  float cap_log2, cap_power;  // of Score (score.cuh), from softcap: 0 without
#if STROBE_RANDOM_WALKS
  RandomBlocks random_blocks;  // that walks leave out (walks.h)
#endif
  Bias bias;
  const int32_t* mask;  // a mask as data, packed; null: none
  MaskLayout mask_layout;

  /// What the mask as data says of a head.
  STROBE_INLINE constexpr HeadMask head_mask(const SequenceRows& s, int64_t head) const {
    return HeadMask::of(mask, mask_layout, s, head);
  }
};

/// The scales of a float8 tensor: float32, of a sequence's key heads. Strides in elements, 0 along
/// an axis that shares them.
struct Float8Scales {
  const float* data;  // null: all are 1
  int64_t batch_stride, head_stride;

  /// That of a sequence's key head.
  STROBE_INLINE constexpr float of(int64_t batch, int64_t head_kv) const {
    return data ? data[batch * batch_stride + head_kv * head_stride] : 1.0f;
  }
};

/// Where Hopper's invariant rows leave what chunks of keys give them (hopper/key_chunks.h).
struct KeyChunks {
  float* parked = nullptr;  // null: no sequence is longer than a chunk
  float *piece_o = nullptr, *piece_sums = nullptr;
  int32_t of_tile = 1;     // pieces of a tile; 1: tiles are whole, and there are none
  int32_t piece_rows = 0;  // of a tile
  // Whether scores are rounded before a reference is taken off, as the general kernel does it: then
  // no reference is too coarse (is_coarse).
  bool rounded = false;
};

struct ForwardParams : CommonParams {
  Tensor out;
  float* lse;  // null: not wanted
  void* workspace;
  int32_t batch_invariant;
  int32_t float_out;  // out is float32
  // Of float8 attention; elements of q, k and v are bytes then.
  Float8Scales q_scale, k_scale, v_scale;
  int32_t half_out;  // out is fp16, else bf16, unless float_out
  int32_t e5m2_kv;   // k and v are e5m2, else e4m3
  KeyChunks chunks;

  /// Of float8 attention: what the q.k of a head's codes is multiplied by; NaN where a scale is not
  /// finite.
  STROBE_INLINE constexpr float score_factor(int64_t sequence, int32_t head) const {
    const int32_t head_kv = head / group;
    return usable_scale(q_scale.of(sequence, head_kv)) *
           usable_scale(k_scale.of(sequence, head_kv));
  }
  /// The same of O.
  STROBE_INLINE constexpr float value_factor(int64_t sequence, int32_t head) const {
    return usable_scale(v_scale.of(sequence, head / group));
  }

  /// Whether out is float32, and the 16-bit words of an element of out. kMay: false in kernels that
  /// never write float32 (features::kFloatOut): `float_out` is then not read.
  template <bool kMay = true>
  STROBE_INLINE constexpr bool writes_float() const {
    return kMay && float_out;
  }
  template <bool kMay = true>
  STROBE_INLINE constexpr int32_t out_words() const {
    return writes_float<kMay>() ? 2 : 1;
  }
};

/// Of keys in a cache. `cache` tells the sequences apart; of the base's own sequences only what is
/// said of queries holds.
struct CachedParams : ForwardParams {
  CachedSequences cache;
  // Also while a plan is made, which knows no arrays. sequences_alike: without a cache, and of each
  // there are the same numbers of queries and keys, with the same mask.
  // has_slopes: ALiBi's.
  bool packed_q, sequences_alike, has_slopes;

  STROBE_INLINE constexpr CachedSequence cached(int64_t b, int64_t head) const {
    return cache.sequence(b, head);
  }
  STROBE_INLINE constexpr CachedSequence cached_of_all_heads(int64_t b) const {
    return cache.sequence_of_all_heads(b);
  }
};

/// The same, and what is done to the cache besides reading it: kernels that only read take the base
/// alone. A kernel that could do it and finds it done, since another one of the launch went before
/// it, has null pointers here: it reads every key from the cache and takes queries as they are,
/// though `cache` still counts the new keys.
struct CachedUpdateParams : CachedParams {
  Tensor k_new, v_new;  // of each sequence, or packed, of as many rows as `cache` says
  const void *rotary_cos, *rotary_sin;  // [rotary_rows, rotary_dim / 2]
};

/// The scales of a quantised cache's rows: of a row, of a head, one for all, or of a head of the
/// sequence that reads the row, by which strides are 0. Strides in bytes. Without data where the
/// scales lie among the codes.
struct RowScales {
  const char* data;
  int64_t batch_stride, row_stride, head_stride;
  int32_t is_half;  // fp16, else float32
  // 0 unless sequences have scales of their own: several may read one entry, or page.
  int64_t sequence_stride;

  /// That of a head's row, of an entry or a page, as this sequence reads it.
  STROBE_INLINE constexpr const char* at(int64_t sequence, int64_t entry, int64_t row,
                                         int64_t head) const {
    return data + sequence * sequence_stride + entry * batch_stride + row * row_stride +
           head * head_stride;
  }
};

/// What is known of a quantised cache besides where it is. Its strides count bytes, also those of
/// keys or values that are floats beside codes of the others: these have been unpacked before a
/// kernel attends.
struct QuantisedCache {
  RowScales k_scale, v_scale;
  int32_t k_dtype, v_dtype;  // strobe_dtype
  int32_t k_bytes, v_bytes;  // of a row
  int32_t has_row_scales;    // which an append makes
  int32_t in_units;          // whether rows are made of units that kernels copy (decode/layout.h)
};

/// Of a quantised cache that nothing is done to but reading it.
struct QuantisedParams : CachedParams {
  QuantisedCache quantised;
};
template <typename Params>
inline constexpr bool kQuantised = std::is_base_of_v<QuantisedParams, Params>;

/// The lists of a mask as data that the tiles of a key head go through (decode/listed_keys.h): the
/// mask's own, where the query heads of a key head have one list; else unions of theirs, which a
/// kernel has made before (rows/unite_lists.cu). An entry is a block of keys, and for each of the
/// heads that a union is of (of the mask's own: once) the place of the block's bits.
struct SpanLists {
  const int32_t *lists, *entries;  // null without a mask
  MaskLayout numbers;              // of the lists: its heads are those that have lists of their own
  int32_t width;                   // words of an entry
  int32_t log2_k;                  // of block_k
  int32_t in_units;                // whether rows of k, v and out are made of whole 16-byte units

  STROBE_INLINE constexpr BlockLists of(int64_t batch, int64_t head_kv, int64_t q_row) const {
    return {lists,           entries,         width,
            numbers.block_q, numbers.block_k, numbers.first_q(batch, head_kv, q_row),
            numbers.capacity};
  }
};

/// Of keys in a cache under a mask as data, with a bias, or both.
struct MaskedParams : CachedParams {
  SpanLists span_lists;
};
template <typename Params>
inline constexpr bool kMasked = std::is_base_of_v<MaskedParams, Params>;

/// What a launch may be given: the same, of a cache of either kind, and what is done to it.
struct CachedLaunchParams : CachedUpdateParams {
  QuantisedCache quantised;
};

/// What a tile of queries holds: of each query `2^pack` neighbouring query heads, which share a key
/// head and a mask, one row each. Row r is query r >> pack, head r % 2^pack of the tile's.
struct TileParams : CachedParams {
  int32_t pack;

  STROBE_INLINE constexpr int32_t query(int32_t row) const { return row >> pack; }
  STROBE_INLINE constexpr int32_t head(int32_t row) const { return row & ((1 << pack) - 1); }
};

/// CachedParams or CachedUpdateParams in a launch without attention chunks. Kernels are three
/// quarters as long then: a launch with cold caches reads its code from memory.
template <typename Params>
struct WithoutChunks : Params {
  STROBE_INLINE constexpr CachedSequence cached(int64_t b, int64_t head) const {
    return this->cache.without_chunks().sequence(b, head);
  }
  STROBE_INLINE constexpr CachedSequence cached_of_all_heads(int64_t b) const {
    return this->cache.without_chunks().sequence_of_all_heads(b);
  }
};

struct BackwardParams : CommonParams {
  Tensor out, dout, dq, dk, dv;
  const float* lse;
  const float* dlse;  // null: none
  void* workspace;
  int32_t deterministic, batch_invariant;
  const float* delta;  // rowsum(dout * out) - dlse, laid out as lse; null: made from out
  float* dsinks;       // [heads]; null: not wanted
  float* sink_rows;    // what each row in use adds to dsinks, laid out as lse; null without dsinks
  int32_t float_grads, accumulates;  // dq, dk and dv are float32; are added to
  int32_t float_out;                 // out is float32
  Bias dbias;

  /// Whether the gradients come from float32 sums, which the kernels after the main one turn into
  /// what the caller wants; else the main kernel may write them.
  STROBE_INLINE constexpr bool keeps_sums() const { return float_grads || accumulates; }
  /// 16-bit words of an element of dq, dk and dv.
  STROBE_INLINE constexpr int32_t grad_words() const { return float_grads ? 2 : 1; }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_PARAMS_H_
