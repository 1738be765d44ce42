// Symbols are hidden, but these.
#pragma GCC visibility push(default)
#include "c_api.h"
#pragma GCC visibility pop

#include <algorithm>

#include "comparator.h"
#include "oracle.h"

namespace {

using oracle::Tensor;

Tensor Read(const double* data, int64_t rows, int64_t heads, int64_t dim) {
  Tensor t(rows, heads, dim);
  if (data) t.data.assign(data, data + t.data.size());
  return t;
}

void Write(const Tensor& t, double* to) {
  if (to) std::copy(t.data.begin(), t.data.end(), to);
}

oracle::Problem Convert(const oracle_problem& p) {
  oracle::Problem o;
  for (int64_t b = 0; b < p.sequence_count; ++b) {
    const oracle_sequence& s = p.sequences[b];
    o.sequences.push_back({s.q_begin, s.q_length, s.k_begin, s.k_length, {}, s.prefix});
    if (s.q_position != ORACLE_NO_POSITION) o.sequences.back().q_position = s.q_position;
  }
  o.heads = p.heads;
  o.heads_kv = p.heads_kv;
  o.head_dim = p.head_dim;
  o.head_dim_v = p.head_dim_v;
  o.causal = p.causal != 0;
  o.window_left = p.window_left;
  o.window_right = p.window_right;
  o.window_signed = p.window_signed != 0;
  o.attention_chunk = p.attention_chunk;
  o.scale = p.scale;
  o.softcap = p.softcap;
  if (p.slopes) o.slopes.assign(p.slopes, p.slopes + p.sequence_count * p.heads);
  if (p.sinks) o.sinks.assign(p.sinks, p.sinks + p.heads);
  o.sinks_outside_lse = p.sinks_outside_lse != 0;
  if (p.bias) {
    o.bias = Read(p.bias, p.bias_rows, p.bias_heads, p.bias_keys);
    o.bias_queries = p.bias_queries;
  }
  o.dropout_p = p.dropout_p;
  o.keep_rows = p.keep_rows;
  o.keep_columns = p.keep_columns;
  if (p.dropout_p > 0)
    o.keep.assign(p.keep, p.keep + p.sequence_count * p.heads * p.keep_rows * p.keep_columns);
  return o;
}

oracle::Cache Convert(const oracle_problem& p, const oracle_cache& c) {
  oracle::Cache o;
  for (int64_t b = 0; b < p.sequence_count; ++b) {
    const oracle_cached_sequence& s = c.sequences[b];
    const int64_t* const rows = c.rows + s.rows_begin;
    o.sequences.push_back(
        {s.leftpad, s.used, s.added, s.new_begin, s.rotary_start, {rows, rows + s.used + s.added}});
  }
  o.k = Read(c.k, c.k ? c.cache_rows : 0, p.heads_kv, p.head_dim);
  o.v = Read(c.v, c.v ? c.cache_rows : 0, p.heads_kv, p.head_dim_v);
  o.k_new = Read(c.k_new, c.k_new ? c.new_rows : 0, p.heads_kv, p.head_dim);
  o.v_new = Read(c.v_new, c.v_new ? c.new_rows : 0, p.heads_kv, p.head_dim_v);
  o.cosines = Read(c.cosines, c.positions, 1, c.pairs);
  o.sines = Read(c.sines, c.positions, 1, c.pairs);
  o.interleaved = c.interleaved != 0;
  return o;
}

bool Wrong(const oracle_problem& p) { return p.struct_size != sizeof p; }
bool Wrong(const oracle_problem& p, const oracle_cache& c) {
  return Wrong(p) || c.struct_size != sizeof c;
}

}  // namespace

int32_t oracle_attention(const oracle_problem* problem) {
  const oracle_problem& p = *problem;
  if (Wrong(p)) return 1;
  const oracle::Problem o = Convert(p);
  const Tensor q = Read(p.q, p.rows_q, p.heads, p.head_dim),
               k = Read(p.k, p.rows_k, p.heads_kv, p.head_dim),
               v = Read(p.v, p.rows_k, p.heads_kv, p.head_dim_v),
               dout = Read(p.dout, p.rows_q, p.heads, p.head_dim_v),
               dlse = Read(p.dlse, p.rows_q, p.heads, 1);
  const Tensor* const dlse_or_none = p.dlse ? &dlse : nullptr;
  if (p.arithmetic != ORACLE_FLOAT64) {
    const oracle::Plain plain =
        oracle::PlainAttention(o, static_cast<oracle::DType>(p.arithmetic), q, k, v,
                               p.dout ? &dout : nullptr, dlse_or_none, p.noise_seed);
    Write(plain.out, p.out);
    if (!p.dout) return 0;
    Write(plain.dq, p.dq);
    Write(plain.dk, p.dk);
    Write(plain.dv, p.dv);
    Write(plain.dsinks, p.dsinks);
    Write(plain.dbias, p.dbias);
    return 0;
  }
  const oracle::ForwardResult forward = oracle::Forward(o, q, k, v);
  Write(forward.out, p.out);
  Write(forward.lse, p.lse);
  Write(forward.size, p.size);
  if (!p.dout) return 0;
  const oracle::BackwardResult backward = oracle::Backward(o, q, k, v, dout, dlse_or_none);
  Write(backward.dq, p.dq);
  Write(backward.dk, p.dk);
  Write(backward.dv, p.dv);
  Write(backward.dsinks, p.dsinks);
  Write(backward.dbias, p.dbias);
  return 0;
}

int32_t oracle_visible(const oracle_problem* problem, int64_t sequence, uint8_t* seen) {
  if (Wrong(*problem)) return 1;
  const oracle::Problem o = Convert(*problem);
  const oracle::Sequence& s = o.sequences[static_cast<size_t>(sequence)];
  std::fill_n(seen, s.q_length * s.k_length, uint8_t{0});
  for (int64_t i = 0; i < s.q_length; ++i) {
    for (const int64_t j : oracle::VisibleKeys(o, sequence, 0, i)) seen[i * s.k_length + j] = 1;
  }
  return 0;
}

void oracle_dropout_mask(int64_t batch, int64_t heads, int64_t rows, int64_t columns,
                         float dropout_p, uint64_t seed, uint64_t offset, uint8_t* keep) {
  const auto mask = oracle::DropoutMask(batch, heads, rows, columns, dropout_p, seed, offset);
  std::copy(mask.begin(), mask.end(), keep);
}

int32_t oracle_append(const oracle_problem* problem, const oracle_cache* cache, double* k,
                      double* v) {
  if (Wrong(*problem, *cache)) return 1;
  const oracle::Appended found = oracle::Append(Convert(*problem, *cache));
  Write(found.k, k);
  Write(found.v, v);
  return 0;
}

int32_t oracle_gather(const oracle_problem* problem, const oracle_cache* cache,
                      oracle_sequence* sequences, double* q, double* k, double* v) {
  if (Wrong(*problem, *cache)) return 1;
  const oracle_problem& p = *problem;
  const oracle::Gathered found =
      oracle::Gather(Convert(p), Convert(p, *cache), Read(p.q, p.rows_q, p.heads, p.head_dim));
  for (int64_t b = 0; b < p.sequence_count; ++b) {
    sequences[b] = p.sequences[b];
    sequences[b].k_begin = found.problem.sequences[static_cast<size_t>(b)].k_begin;
    sequences[b].k_length = found.problem.sequences[static_cast<size_t>(b)].k_length;
  }
  Write(found.q, q);
  Write(found.k, k);
  Write(found.v, v);
  return 0;
}

void oracle_merge(int64_t parts, int64_t rows, int64_t heads, int64_t dim, const double* outs,
                  const double* lses, const double* sinks, double* out, double* lse) {
  std::vector<Tensor> all_outs, all_lses;
  for (int64_t n = 0; n < parts; ++n) {
    all_outs.push_back(Read(outs + n * rows * heads * dim, rows, heads, dim));
    all_lses.push_back(Read(lses + n * rows * heads, rows, heads, 1));
  }
  std::vector<double> of_heads;
  if (sinks) of_heads.assign(sinks, sinks + heads);
  const oracle::ForwardResult merged = oracle::Merge(all_outs, all_lses, of_heads);
  Write(merged.out, out);
  Write(merged.lse, lse);
}
