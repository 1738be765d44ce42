#include "cuda/host/fill_params.h"

#include "core/element.h"
#include "cuda/common/softcap.h"
#include "cuda/host/features_of.h"

namespace strobe::cuda {

namespace {

// packed: its sequences lie end to end, and the batch stride is not used.
Tensor tensor(const void* data, const Strides& s, bool packed) {
  return {const_cast<void*>(data), packed ? 0 : s.batch, s.seqlen, s.head};
}

Bias bias(const AttentionProblem& p, const void* data, const Strides& s, int32_t dtype) {
  static_assert(kBiasFloat32 == STROBE_FLOAT32 && kBiasBfloat16 == STROBE_BFLOAT16 &&
                kBiasFloat16 == STROBE_FLOAT16);
  const auto number = [](int64_t n) { return static_cast<int32_t>(n); };
  return {data,
          s.batch,
          s.head,
          s.seqlen,
          s.dim,
          dtype,
          number(p.bias_batch),
          number(p.bias_heads),
          number(p.bias_seqlen_q),
          number(p.seqlen_k)};
}

template <typename Args>
void fill_common(const AttentionProblem& p, const Args& a, CommonParams& c) {
  static_cast<Sequences&>(c) = sequences_of(p, a);
  const bool packed_k = p.varlen && !p.cache;  // a cache is not packed where queries are
  c.q = tensor(a.q, p.q, p.varlen);
  c.k = tensor(a.k, p.k, packed_k);
  c.v = tensor(a.v, p.v, packed_k);
  c.alibi_slopes = p.alibi ? a.alibi_slopes : nullptr;
  c.alibi_batch_stride = p.alibi == STROBE_ALIBI_PER_BATCH_HEAD ? p.heads : 0;
  c.sinks = p.has_sinks ? a.sinks : nullptr;
  c.sinks_in_lse = !p.sinks_outside_lse;
  c.dropout = Dropout::of(p, a.dropout_seed, a.dropout_offset);
  c.heads_kv = static_cast<int32_t>(p.heads_kv);
  c.group = static_cast<int32_t>(p.heads / p.heads_kv);
  c.total_q = p.varlen ? p.total_q : p.seqlen_q;
  c.total_k = p.varlen ? p.total_k : p.seqlen_k;
  c.head_dim = static_cast<int32_t>(p.head_dim);
  c.head_dim_v = static_cast<int32_t>(p.head_dim_v);
  c.scale = p.scale;
  c.softcap = p.softcap;
  const SoftcapConstants cap = SoftcapConstants::make(p.scale, p.softcap);
  c.cap_log2 = cap.cap_log2;
  c.cap_power = cap.cap_power;
#if STROBE_RANDOM_WALKS
  c.random_blocks = strobe_random_blocks;
#endif
  c.bias = p.has_bias ? bias(p, a.bias, p.bias, p.bias_dtype) : Bias{};
  if (p.mask.kind != STROBE_MASK_NONE) {
    c.mask = static_cast<const int32_t*>(a.mask);
    c.mask_layout = MaskLayout::of(p);
  }
}

Float8Scales head_scales(const void* data, const Strides& s) {
  return {static_cast<const float*>(data), s.batch, s.head};
}

}  // namespace

void fill_params(const AttentionProblem& p, const ForwardArgs& a, ForwardParams& f) {
  fill_common(p, a, f);
  f.q_scale = f.k_scale = f.v_scale = {};
  f.half_out = p.out_dtype == STROBE_FLOAT16;
  f.e5m2_kv = p.kv_dtype == STROBE_FLOAT8_E5M2;
  if (p.has_q_scale) f.q_scale = head_scales(a.q_scale, p.q_scale);
  if (p.kv_scale == STROBE_KV_SCALE_BATCH_HEAD) {
    f.k_scale = head_scales(a.k_scale, p.k_scale);
    f.v_scale = head_scales(a.v_scale, p.v_scale);
  }
  f.out = tensor(a.out, p.out, p.varlen);
  f.lse = a.lse;
  f.batch_invariant = p.batch_invariant;
  f.float_out = p.out_dtype == STROBE_FLOAT32;
}

namespace {

// A problem without a cache as one with it: the keys of all sequences are the entries of a
// contiguous cache; packed ones are rows of one entry, of which a sequence leaves out what is
// before it.
void make_cached(AttentionProblem& p, ForwardArgs& a) {
  p.cache = STROBE_CACHE_CONTIGUOUS;
  p.cache_batch = p.batch;
  if (!p.varlen) return;
  p.k.batch = p.v.batch = 0;
  p.seqlen_k = p.total_k;
  p.has_leftpad = p.has_seqused_k = 1;
  a.leftpad = a.cu_seqlens_k;
  a.seqused_k = a.cu_seqlens_k ? a.cu_seqlens_k + 1 : nullptr;
}

}  // namespace

void fill_params(const AttentionProblem& p, const ForwardArgs& a, CachedUpdateParams& d) {
  if (!p.cache) {
    AttentionProblem cached = p;
    ForwardArgs args = a;
    make_cached(cached, args);
    fill_params(cached, args, d);
    d.cache.cuts_lengths = true;
    // (The lists of a mask as data are a sequence's and head's own.)
    constexpr Features kDiffer = features::kUsedRows | features::kMask;
    d.sequences_alike = !p.varlen && !features_of(p, 0).has(kDiffer);
    return;
  }
  fill_params(p, a, static_cast<ForwardParams&>(d));
  d.cache = cached_sequences_of(p, a);
  static_cast<Sequences&>(d) = d.cache;
  d.packed_q = p.varlen;
  d.has_slopes = p.alibi != STROBE_ALIBI_NONE;
  if (p.append) {
    const bool packed = p.append == STROBE_APPEND_PACKED;  // which queries need not be
    d.k_new = tensor(a.k_new, p.k_new, packed);
    d.v_new = tensor(a.v_new, p.v_new, packed);
  }
  if (p.rotary_dim > 0) {
    d.rotary_cos = a.rotary_cos;
    d.rotary_sin = a.rotary_sin;
  }
}

namespace {

// dtype: of what has the scales.
RowScales scales(const AttentionProblem& p, int32_t dtype, const void* data, const Strides& s) {
  if (scale_kind(p, dtype) == STROBE_KV_SCALE_NONE) return {};
  const int64_t size = element_size(p.kv_scale_dtype), batch = size * s.batch;
  const bool of_sequence = p.kv_scale == STROBE_KV_SCALE_BATCH_HEAD;
  return {static_cast<const char*>(data),     of_sequence ? 0 : batch,
          of_sequence ? 0 : size * s.seqlen,  size * s.head,
          p.kv_scale_dtype == STROBE_FLOAT16, of_sequence ? batch : 0};
}

}  // namespace

void fill_params(const AttentionProblem& p, const ForwardArgs& a, CachedLaunchParams& d) {
  fill_params(p, a, static_cast<CachedUpdateParams&>(d));
  if (!has_quantised_cache(p)) return;
  QuantisedCache& c = d.quantised;
  c.k_dtype = p.kv_dtype;
  c.v_dtype = v_dtype_of(p);
  c.k_scale = scales(p, c.k_dtype, a.k_scale, p.k_scale);
  c.v_scale = scales(p, c.v_dtype, a.v_scale, p.v_scale);
  c.k_bytes = static_cast<int32_t>(row_bytes(c.k_dtype, p.head_dim));
  c.v_bytes = static_cast<int32_t>(row_bytes(c.v_dtype, p.head_dim_v));
  d.k = d.k.divided(static_cast<int32_t>(element_size(c.k_dtype)));
  d.v = d.v.divided(static_cast<int32_t>(element_size(c.v_dtype)));
  c.has_row_scales = p.kv_scale == STROBE_KV_SCALE_ROW;
}

void fill_params(const AttentionProblem& p, const BackwardArgs& a, BackwardParams& b) {
  fill_common(p, a, b);
  b.out = tensor(a.out, p.out, p.varlen);
  b.dout = tensor(a.dout, p.dout, p.varlen);
  b.dq = tensor(a.dq, p.dq, p.varlen);
  b.dk = tensor(a.dk, p.dk, p.varlen);
  b.dv = tensor(a.dv, p.dv, p.varlen);
  b.lse = a.lse;
  b.dlse = p.has_dlse ? a.dlse : nullptr;
  b.deterministic = p.deterministic;
  b.batch_invariant = p.batch_invariant;
  b.delta = p.has_delta ? a.delta : nullptr;
  b.float_grads = p.grad_dtype == STROBE_FLOAT32;
  b.accumulates = p.accumulate;
  b.float_out = p.out_dtype == STROBE_FLOAT32;
  b.dsinks = p.has_dsinks ? a.dsinks : nullptr;
  b.dbias = p.has_dbias ? bias(p, a.dbias, p.dbias, p.dbias_dtype) : Bias{};
}

void take_rows(Arena& arena, const AttentionProblem& p, BackwardParams& b) {
  if (p.has_dsinks) b.sink_rows = arena.take<float>(rows_q(p) * p.heads);
}

}  // namespace strobe::cuda
