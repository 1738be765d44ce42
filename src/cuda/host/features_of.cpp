#include "cuda/host/features_of.h"

#include "core/element.h"
#include "cuda/host/widened_queries.h"

namespace strobe::cuda {

namespace {

// Whether rows of `dim` elements of a dtype are made of whole 16-byte units wherever the first one
// lies at such a unit. packed: the batch stride is not used.
bool in_units(const Strides& s, bool packed, int64_t dim, int32_t dtype) {
  const int64_t elements = (packed ? 0 : s.batch) | s.seqlen | s.head | dim;
  return ((elements * element_size(dtype)) & 15) == 0;
}

// Of the forward pass: the backward's kernels ask each row where it lies.
bool rows_in_units(const AttentionProblem& p) {
  const bool packed_k = p.varlen && !p.cache, packed_new = p.append == STROBE_APPEND_PACKED;
  const int32_t narrow_out = has_float8_queries(p) ? STROBE_BFLOAT16 : p.dtype;
  if (!in_units(p.q, p.varlen, p.head_dim, p.dtype) ||
      !in_units(p.out, p.varlen, p.head_dim_v, narrow_out)) {
    return false;
  }
  // Kernels for a quantised cache take its rows wherever they lie, and read no new ones.
  if (has_quantised_cache(p)) return true;
  if (!in_units(p.k, packed_k, p.head_dim, p.dtype) ||
      !in_units(p.v, packed_k, p.head_dim_v, p.dtype)) {
    return false;
  }
  if (!p.append || p.seqlen_new == 0) return true;
  return in_units(p.k_new, packed_new, p.head_dim, p.dtype) &&
         in_units(p.v_new, packed_new, p.head_dim_v, p.dtype);
}

}  // namespace

Features features_of(const AttentionProblem& p, int64_t tile_k) {
  using namespace features;
  Features asked;
  const auto ask = [&](bool condition, Features feature) {
    if (condition) asked = asked | feature;
  };
  ask(p.softcap > 0, kSoftcap);
  ask(p.alibi != STROBE_ALIBI_NONE, kAlibi);
  ask(!(p.scale > 0), kAnyScale);
  ask(p.dropout_p > 0, kDropout);
  ask(p.has_seqused_q || p.has_seqused_k || p.has_q_position || p.has_prefix || p.cache, kUsedRows);
  ask(p.attention_chunk > 0, kChunks);
  ask(p.has_bias != 0, kBias);
  ask(p.has_dbias != 0, kDbias);
  ask(p.mask.kind != STROBE_MASK_NONE, kMask);
  if (p.direction == STROBE_BACKWARD) {
    const bool lengths_differ = p.varlen || p.has_seqused_k;
    // Gradients in float32, and those that are added to what is there, are made from the sum.
    const bool keeps_sums = p.grad_dtype != p.dtype || p.accumulate;
    ask(keeps_sums || !adds_once(p.seqlen_k, tile_k, p.batch_invariant, lengths_differ), kSumsDq);
    ask(p.deterministic != 0, kOrder);
  } else {
    ask(!rows_in_units(p), kAnyRows);
    // Of float8 attention out is of 16 bits or 32: which of the former, kernels are told.
    ask(p.out_dtype == STROBE_FLOAT32 && p.dtype != STROBE_FLOAT32, kFloatOut);
    // Of a mask as data no rows have the same bits as others, and float8's kernels take the maximum
    // of each block as they are.
    ask(p.batch_invariant && p.mask.kind == STROBE_MASK_NONE && !p.has_bias &&
            !has_float8_queries(p),
        kInvariantRows);
    ask((p.append && p.seqlen_new > 0) || p.rotary_dim > 0, kUpdates);
  }
  return asked;
}

AttentionProblem after_update(const AttentionProblem& p) {
  AttentionProblem after = p;
  after.append = STROBE_APPEND_NONE;
  after.seqlen_new = 0;
  if (p.rotary_dim > 0) {
    after.rotary_dim = 0;
    after.q.head = round_up(p.head_dim, 8);
    after.q.seqlen = after.q.head * p.heads;
    after.q.batch = after.q.seqlen * p.seqlen_q;
  }
  return after;
}

AttentionProblem after_unpacking(const AttentionProblem& p) {
  AttentionProblem after = after_update(p);
  after.kv_dtype = p.dtype;
  after.v_dtype = p.dtype;
  after.kv_scale = STROBE_KV_SCALE_NONE;
  after.kv_scale_dtype = STROBE_FLOAT32;
  after.k_scale = after.v_scale = {};
  after.cache = STROBE_CACHE_CONTIGUOUS;
  after.cache_batch = p.batch;
  after.has_cache_batch_idx = 0;
  after.pages = after.page_size = after.pages_per_sequence = after.block_table_stride = 0;
  const auto contiguous = [&](int64_t dim) -> Strides {
    const int64_t head = round_up(dim, 8), row = head * p.heads_kv;
    return {row * p.seqlen_k, row, head, 1};
  };
  after.k = contiguous(p.head_dim);
  after.v = contiguous(p.head_dim_v);
  return after;
}

AttentionProblem after_widening(const AttentionProblem& p) {
  AttentionProblem after = p;
  const auto contiguous = [&](int64_t dim) -> Strides {
    const int64_t head = WidenedQueries::width(dim), row = head * p.heads;
    return {row * p.seqlen_q, row, head, 1};
  };
  after.dtype = STROBE_BFLOAT16;
  after.q = contiguous(p.head_dim);
  after.has_q_scale = 0;
  after.q_scale = {};
  after.kv_scale = STROBE_KV_SCALE_BATCH_HEAD;
  after.kv_scale_dtype = STROBE_FLOAT32;
  after.k_scale = after.v_scale = {p.heads_kv, 0, 1, 0};
  if (WidenedQueries::rounds_out(p)) {
    after.out_dtype = STROBE_FLOAT32;
    after.out = contiguous(p.head_dim_v);
  }
  return after;
}

}  // namespace strobe::cuda
