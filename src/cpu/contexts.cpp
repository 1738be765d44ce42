#include "cpu/contexts.h"

#include <cstddef>
#include <type_traits>

#include "core/options.h"

namespace strobe::cpu {

namespace {

// packed: its sequences lie end to end, and the batch stride is not used.
Tensor tensor(const void* data, const Strides& s, bool packed, int32_t dtype) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), packed ? 0 : s.batch, s.seqlen, s.head,
          dtype};
}

Scales scales(const void* data, const Strides& s, int32_t dtype) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), s.batch, s.seqlen, s.head, dtype};
}
// Those of a sequence's key heads, in float8 attention. Null: all are 1.
Scales head_scales(const void* data, const Strides& s) {
  static const float one = 1;
  Scales made = data ? scales(data, s, STROBE_FLOAT32) : scales(&one, Strides{}, STROBE_FLOAT32);
  made.by_sequence = true;
  return made;
}

Bias bias(const void* data, const Strides& s, int32_t dtype) {
  return {static_cast<std::byte*>(const_cast<void*>(data)), s, dtype};
}

template <typename Args>
void fill_context(const Plan& plan, const Args& args, Context& c) {
  const AttentionProblem& p = plan.problem;
  c.problem = p;
  c.q = tensor(args.q, p.q, p.varlen, p.dtype);
  c.k = tensor(args.k, p.k, p.varlen && !p.cache, p.kv_dtype);
  c.v = tensor(args.v, p.v, p.varlen && !p.cache, v_dtype_of(p));
  static_cast<Sequences&>(c.sequences) = sequences_of(p, args);
  c.alibi_slopes = p.alibi ? args.alibi_slopes : nullptr;
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    if (has_float8_queries(p)) {
      c.q.scales = head_scales(args.q_scale, p.q_scale);
      c.k.scales = head_scales(args.k_scale, p.k_scale);
      c.v.scales = head_scales(args.v_scale, p.v_scale);
    } else {
      if (has_scales(c.k.dtype)) c.k.scales = scales(args.k_scale, p.k_scale, p.kv_scale_dtype);
      if (has_scales(c.v.dtype)) c.v.scales = scales(args.v_scale, p.v_scale, p.kv_scale_dtype);
    }
  }
  c.sinks = p.has_sinks ? args.sinks : nullptr;
  c.sinks_in_lse = !p.sinks_outside_lse;
  if (p.mask.kind != STROBE_MASK_NONE) {
    c.mask = static_cast<const int32_t*>(args.mask);
    c.mask_layout = MaskLayout::of(p);
  }
  if (p.has_bias) c.bias = bias(args.bias, p.bias, p.bias_dtype);
  c.dropout = Dropout::of(p, args.dropout_seed, args.dropout_offset);
  c.tile_q = plan.tile_q;
  c.tile_k = plan.tile_k;
  c.block_q = plan.block_q;
  c.block_k = plan.block_k;
}

}  // namespace

ForwardContext forward_context(const InstructionSet& isa, const Plan& plan,
                               const ForwardArgs& args) {
  ForwardContext c{};
  fill_context(plan, args, c);
  const AttentionProblem& p = plan.problem;
  c.most_decoded = isa.most_decoded(p);
  if (p.cache) c.sequences = cached_sequences_of(p, args);
  c.out = tensor(args.out, p.out, p.varlen, p.out_dtype);
  c.lse = args.lse;
  const bool packed = p.append == STROBE_APPEND_PACKED;
  c.k_new = tensor(args.k_new, p.k_new, packed, new_dtype_of(p));
  c.v_new = tensor(args.v_new, p.v_new, packed, new_dtype_of(p));
  c.rotary_cos = static_cast<const std::byte*>(args.rotary_cos);
  c.rotary_sin = static_cast<const std::byte*>(args.rotary_sin);
  return c;
}

BackwardContext backward_context(const Plan& plan, const BackwardArgs& args, int64_t lanes) {
  const AttentionProblem& p = plan.problem;
  BackwardContext c{};
  fill_context(plan, args, c);
  c.out = tensor(args.out, p.out, p.varlen, p.out_dtype);
  c.dout = tensor(args.dout, p.dout, p.varlen, p.dtype);
  c.dq = tensor(args.dq, p.dq, p.varlen, p.grad_dtype);
  c.dk = tensor(args.dk, p.dk, p.varlen, p.grad_dtype);
  c.dv = tensor(args.dv, p.dv, p.varlen, p.grad_dtype);
  if (p.has_dbias) c.dbias = bias(args.dbias, p.dbias, p.dbias_dtype);
  c.lse = args.lse;
  c.dlse = p.has_dlse && !p.has_sinks ? args.dlse : nullptr;  // else BackwardSinks takes it off
  c.delta = p.has_delta ? args.delta : nullptr;
  c.dq_stride = round_up(p.head_dim, lanes);
  c.turn_tiles =
      p.varlen ? p.total_q / plan.tile_q + p.batch : p.batch * ceil_div(p.seqlen_q, plan.tile_q);
  return c;
}

void carve(Arena& arena, BackwardContext& c) {
  const AttentionProblem& p = c.problem;
  const int64_t rows = rows_q(p) * p.heads;
  if (!p.has_delta) c.delta = c.made_delta = arena.take<float>(rows);
  c.row_max = arena.take<float>(rows);
  c.row_sum = arena.take<float>(rows);
  c.dq_sum = arena.take<float>(rows * c.dq_stride);
  c.turn = arena.take<uint32_t>(p.heads * c.turn_tiles);
}

}  // namespace strobe::cpu
