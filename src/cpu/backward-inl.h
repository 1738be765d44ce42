// FlashAttention-2's backward pass in float32, for one instruction set (arXiv:2307.08691, algorithm
// 2).
//
// Layout. An item owns a block of keys; keys lie along the vector lanes of the score tiles. For
// each tile of queries and each group of 64 keys of the block
//
//     S  [queries][keys] = Q [queries][head_dim] K^T        P = exp(S - lse)
//     dP [queries][keys] = dO[queries][dim_v]    V^T        dS = P * (dP - delta)
//     dV [keys][dim_v]    += P^T  dO
//     dK [keys][head_dim] += dS^T Q
//     dQ [queries][head_dim] += dS K
//
// K^T and V^T are made once per item; everything else is read as it lies in memory, a transposed P
// or dS included, for the micro-kernel broadcasts single elements of its left operand. dQ crosses
// items: see turnstile.h.
#ifndef STROBE_CPU_BACKWARD_INL_H_
#define STROBE_CPU_BACKWARD_INL_H_

#include "cpu/coarse-inl.h"
#include "cpu/gemm-inl.h"
#include "cpu/score-inl.h"

namespace strobe::cpu::STROBE_ISA {

constexpr int64_t kBackwardTileQ = 64;
constexpr int64_t kBackwardTileK = 64;  // P and dS take 16 KB each
// Keys of an item at head_dim 64. K, V, their transposes, dK and dV of a block should live in L2:
// 655 KB at 512, fine on every CPU with AVX-512 (1 MB and more), while others may have 512 KB.
#if HWY_TARGET == HWY_AVX3
constexpr int64_t kBackwardBlock = 512;
#else
constexpr int64_t kBackwardBlock = 256;
#endif

static Tiles backward_tiles(const AttentionProblem& p) {
  const int64_t block = p.head_dim + p.head_dim_v > 256   ? kBackwardBlock / 4
                        : p.head_dim + p.head_dim_v > 128 ? kBackwardBlock / 2
                                                          : kBackwardBlock;
  return {kBackwardTileQ, kBackwardTileK, block};
}

struct BackwardScratch {
  float *k, *kt, *vt, *dk, *dv;  // of the block
  float *q, *dout, *dq;          // of the query tile
  float *p, *ds;                 // [tile_q][tile_k]
};

STROBE_SIMD BackwardScratch carve_backward(Arena& arena, const BackwardContext& c) {
  const AttentionProblem& p = c.problem;
  const int64_t d = round_up(p.head_dim, kLanes), dv = round_up(p.head_dim_v, kLanes);
  const int64_t block = round_up(c.block_k, kBackwardTileK);
  BackwardScratch s;
  s.k = arena.take<float>(block * d);
  s.kt = arena.take<float>(p.head_dim * block);
  s.vt = arena.take<float>(p.head_dim_v * block);
  s.dk = arena.take<float>(block * d);
  s.dv = arena.take<float>(block * dv);
  s.q = arena.take<float>(kBackwardTileQ * d);
  s.dout = arena.take<float>(kBackwardTileQ * dv);
  s.dq = arena.take<float>(kBackwardTileQ * d);
  s.p = arena.take<float>(kBackwardTileQ * kBackwardTileK);
  s.ds = arena.take<float>(kBackwardTileQ * kBackwardTileK);
  return s;
}

static size_t backward_scratch(const BackwardContext& context) {
  Arena arena;
  carve_backward(arena, context);
  const size_t own = arena.used(), coarse = coarse_scratch(context);
  return own > coarse ? own : coarse;
}

static void backward_delta(const BackwardContext& c, const ForwardItem& item, std::byte* scratch) {
  const AttentionProblem& p = c.problem;
  const Sequence sequence = c.sequence(item.batch);
  const int64_t at = sequence.lse_row + item.head * c.sequences.lse_head_stride;
  find_row_sums(c, item, scratch);
  const hn::ScalableTag<double> f64;
  const hn::Rebind<float, decltype(f64)> half;
  const auto kHalf = static_cast<int64_t>(hn::Lanes(f64));
  const int64_t width = round_up(p.head_dim_v, kLanes);
  HWY_ALIGN float out[256 + kLanes], dout[256 + kLanes];
  for_dtype(
      p.dtype, [&]<typename T>(T*) __attribute__((always_inline)) {
        for (int64_t q = item.q_begin; q < item.q_end; ++q) {
          const int64_t row = sequence.q_row + q;
          row_to_float(reinterpret_cast<const T*>(c.out.at(item.batch, row, item.head)),
                       p.head_dim_v, out);
          row_to_float(reinterpret_cast<const T*>(c.dout.at(item.batch, row, item.head)),
                       p.head_dim_v, dout);
          // In float64: what delta is off by, the gradients of all keys of the row have in common,
          // and in dQ it meets the sum of the keys, which is far larger than their differences.
          const auto product = [&](int64_t i, auto sum) __attribute__((always_inline)) {
            return hn::MulAdd(hn::PromoteTo(f64, hn::Load(half, out + i)),
                              hn::PromoteTo(f64, hn::Load(half, dout + i)), sum);
          };
          auto even = hn::Zero(f64), odd = hn::Zero(f64);
          int64_t i = 0;
          for (; i + 2 * kHalf <= width; i += 2 * kHalf) {
            even = product(i, even);
            odd = product(i + kHalf, odd);
          }
          if (i < width) even = product(i, even);
          const double dlse = c.dlse ? static_cast<double>(c.dlse[at + q]) : 0;
          c.delta[at + q] =
              static_cast<float>(hn::GetLane(hn::SumOfLanes(f64, hn::Add(even, odd))) - dlse);
        }
      });
  HWY_ALIGN float zeros[256 + kLanes] = {};
  for (int64_t q = item.q_begin; q < item.q_end; q += kBackwardTileQ) {
    const Range tile{q, min64(q + kBackwardTileQ, item.q_end)};
    if (!sequence.mask.kv_range(tile).empty()) continue;
    for (int64_t r = tile.begin; r < tile.end; ++r) {
      store_row(c.dq, p.dtype, item.batch, item.head, sequence.q_row + r, p.head_dim, zeros, 1);
    }
  }
}

/// P and dS of one row: `width` scores s and dP in (whole vectors), both overwritten. `seen`: keys
/// of the tile that the query sees.
template <bool kPlain, bool kMasked>
static void backward_row(const BackwardContext& c, const ScoreRule& rule, uint32_t batch_head,
                         int64_t query, int64_t position, int64_t key_begin, Range seen,
                         const RowSoftmax& softmax, float delta, int64_t width, float* s,
                         float* dp) {
  const VF reference = set(softmax.reference), vdelta = set(delta * softmax.divisor);
  for (int64_t j = 0; j < width; j += kLanes) {
    VF score = load(s + j), grad = load(dp + j);
    VF tanh = hn::Zero(f32);
    // Scaled before lse is taken away, as forward does: a row's one large weight is exactly 1
    // again.
    score = hn::Mul(score, set(softmax.factor));
    if constexpr (!kPlain) {
      if (!rule.plain) {
        const VF key = hn::Iota(f32, static_cast<float>(key_begin - position + j));
        score = apply_rule(rule, score, hn::Abs(key), tanh);
      }
    }
    VF p = exp2(hn::Sub(score, reference), softmax.unit);
    VF dropped = p;
    if constexpr (!kPlain) {
      if (rule.dropout) {
        // Eight keys to a call of the generator; here every lane makes its own, as dropout is
        // rarely trained on a CPU.
        const VU column = hn::Iota(u32, static_cast<uint32_t>(key_begin + j));
        const VPhilox bits =
            philox(c.dropout, hn::Set(u32, batch_head), hn::Set(u32, static_cast<uint32_t>(query)),
                   hn::ShiftRight<3>(column));
        const auto bit1 = hn::TestBit(column, hn::Set(u32, 2)),
                   bit2 = hn::TestBit(column, hn::Set(u32, 4));
        const VU word = hn::IfThenElse(bit2, hn::IfThenElse(bit1, bits.word[3], bits.word[2]),
                                       hn::IfThenElse(bit1, bits.word[1], bits.word[0]));
        const VU half =
            hn::IfThenElse(hn::TestBit(column, hn::Set(u32, 1)), hn::ShiftRight<16>(word),
                           hn::And(word, hn::Set(u32, 0xFFFF)));
        const auto keep = keep_lanes(c.dropout, half);
        // Multiplied, not chosen: a NaN that is dropped stays one, as in plain attention.
        const VF scale = hn::IfThenElseZero(keep, set(c.dropout.keep_scale));
        dropped = hn::Mul(p, scale);
        grad = hn::Mul(grad, scale);
      }
    }
    VF ds = hn::Mul(p, hn::Sub(grad, vdelta));
    if constexpr (!kPlain) {
      if (rule.softcap > 0) ds = hn::Mul(ds, hn::NegMulAdd(tanh, tanh, set(1)));
    }
    if constexpr (kMasked) {
      const VI key = hn::Iota(i32, static_cast<int32_t>(j));
      const auto lanes = hn::RebindMask(
          f32, hn::And(hn::Gt(key, hn::Set(i32, static_cast<int32_t>(seen.begin - 1))),
                       hn::Gt(hn::Set(i32, static_cast<int32_t>(seen.end)), key)));
      dropped = hn::IfThenElseZero(lanes, dropped);
      ds = hn::IfThenElseZero(lanes, ds);
    }
    store(dropped, s + j);
    store(ds, dp + j);
  }
}

/// The three products for a tile where an operand holds an infinity or a NaN and some pairs are
/// masked: only pairs that the mask allows are touched, so that 0 * NaN reaches nobody else. Rounds
/// as gemm does.
static void accumulate_seen_only(const BackwardContext& c, const Sequence& sequence, Range queries,
                                 Range keys, const BackwardScratch& s, int64_t q_tile,
                                 int64_t key_offset, float* dq) {
  const AttentionProblem& p = c.problem;
  const Mask& mask = sequence.mask;
  const int64_t d = round_up(p.head_dim, kLanes), dv = round_up(p.head_dim_v, kLanes);
  const auto pair = [&](int64_t query, int64_t key) {
    return (query - q_tile) * kBackwardTileK + key - keys.begin;
  };
  // row[e] += sum over the queries that see `key` of weight * other[query][e]
  const auto add_over_queries = [&](const float* weights, const float* other, int64_t width,
                                    int64_t key, float* row) {
    for (int64_t e = 0; e < width; e += kLanes) {
      VF sum = hn::Zero(f32);
      for (int64_t i = queries.begin; i < queries.end; ++i) {
        if (!mask.allows(i, key)) continue;
        sum = hn::MulAdd(set(weights[pair(i, key)]), load(other + (i - q_tile) * width + e), sum);
      }
      store(hn::Add(load(row + e), sum), row + e);
    }
  };
  for (int64_t key = keys.begin; key < keys.end; ++key) {
    const int64_t row = key_offset + key - keys.begin;
    add_over_queries(s.p, s.dout, dv, key, s.dv + row * dv);
    add_over_queries(s.ds, s.q, d, key, s.dk + row * d);
  }
  for (int64_t i = queries.begin; i < queries.end; ++i) {
    const Range seen = intersect(mask.row(i), keys);
    float* const row = dq + (i - q_tile) * d;
    for (int64_t e = 0; e < d; e += kLanes) {
      VF sum = hn::Zero(f32);
      for (int64_t key = seen.begin; key < seen.end; ++key) {
        const int64_t k_row = key_offset + key - keys.begin;
        sum = hn::MulAdd(set(s.ds[pair(i, key)]), load(s.k + k_row * d + e), sum);
      }
      store(hn::Add(load(row + e), sum), row + e);
    }
  }
}

/// One tile of queries against one group of keys of the block: the step of the algorithm.
static void backward_step(const BackwardContext& c, const ScoreRule& rule, const Sequence& sequence,
                          int64_t head, Range tile, Range keys, int64_t k_begin, bool nonfinite,
                          const BackwardScratch& s) {
  const AttentionProblem& p = c.problem;
  const Mask& mask = sequence.mask;
  const Range queries = intersect(mask.q_range(keys), tile);
  if (queries.empty()) return;
  const int64_t d = round_up(p.head_dim, kLanes), dv = round_up(p.head_dim_v, kLanes);
  const int64_t block = round_up(c.block_k, kBackwardTileK);
  const int64_t n = queries.size(), r0 = queries.begin - tile.begin,
                key_offset = keys.begin - k_begin;
  // Lanes past the last key count as masked.
  const bool masked = !mask.full_range(queries).contains(keys) || keys.size() < kBackwardTileK;

  const float* const q = s.q + r0 * d;
  const float* const dout = s.dout + r0 * dv;
  float* const weights = s.p + r0 * kBackwardTileK;
  float* const ds = s.ds + r0 * kBackwardTileK;
  const int64_t vectors = ceil_div(keys.size(), kLanes);
  gemm<Old::kDrop>({q, d, 1, s.kt + key_offset, block, weights, kBackwardTileK}, n, vectors,
                   p.head_dim);
  gemm<Old::kDrop>({dout, dv, 1, s.vt + key_offset, block, ds, kBackwardTileK}, n, vectors,
                   p.head_dim_v);

  const auto batch_head = static_cast<uint32_t>(sequence.batch * p.heads + head);
  const int64_t lse_at = sequence.lse_row + head * c.sequences.lse_head_stride;
  const bool plain = rule.plain && !rule.dropout;
  const auto run = plain ? (masked ? backward_row<true, true> : backward_row<true, false>)
                         : (masked ? backward_row<false, true> : backward_row<false, false>);
  for (int64_t i = queries.begin; i < queries.end; ++i) {
    Range seen = intersect(mask.row(i), keys);
    seen = {seen.begin - keys.begin, seen.end - keys.begin};
    const int64_t r = i - tile.begin;
    run(c, rule, batch_head, i, mask.position(i), keys.begin, seen,
        row_softmax(c, rule, lse_at + i), c.delta[lse_at + i], vectors * kLanes,
        s.p + r * kBackwardTileK, s.ds + r * kBackwardTileK);
  }
  if (masked && nonfinite) {
    accumulate_seen_only(c, sequence, queries, keys, s, tile.begin, key_offset, s.dq);
    return;
  }
  gemm<Old::kAdd>({weights, 1, kBackwardTileK, dout, dv, s.dv + key_offset * dv, dv}, keys.size(),
                  dv / kLanes, n);
  gemm<Old::kAdd>({ds, 1, kBackwardTileK, q, d, s.dk + key_offset * d, d}, keys.size(), d / kLanes,
                  n);
  gemm<Old::kAdd>({ds, kBackwardTileK, 1, s.k + key_offset * d, d, s.dq + r0 * d, d}, n, d / kLanes,
                  keys.size());
}

/// Adds the tile's dQ to the sum over key blocks; the last to add writes the result.
STROBE_SIMD void hand_over_dq(const BackwardContext& c, const Sequence& sequence, int64_t head,
                              Range tile, Visit turn, float* dq) {
  const AttentionProblem& p = c.problem;
  const int64_t d = c.dq_stride;
  float* const sum =
      c.dq_sum + (sequence.lse_row + head * c.sequences.lse_head_stride + tile.begin) * d;
  const int64_t n = tile.size() * d;
  if (!turn.first) {
    uint32_t* const counter = turn_of(c, sequence.batch, head, tile.begin);
    wait_turn(counter, turn.order);
#if !STROBE_BREAK_KERNEL_DQ
    for (int64_t i = 0; i < n; i += kLanes) store(hn::Add(load(sum + i), load(dq + i)), dq + i);
#endif
  }
  if (turn.last) {
    for (int64_t r = 0; r < tile.size(); ++r) {
      store_row(c.dq, p.dtype, sequence.batch, head, sequence.q_row + tile.begin + r, p.head_dim,
                dq + r * d, p.scale);
    }
    return;
  }
  for (int64_t i = 0; i < n; i += kLanes) store(load(dq + i), sum + i);
  pass_turn(turn_of(c, sequence.batch, head, tile.begin), turn.order);
}

static void backward_block(const BackwardContext& c, const BackwardItem& item, std::byte* scratch) {
  const AttentionProblem& p = c.problem;
  Arena arena(scratch);
  const BackwardScratch s = carve_backward(arena, c);
  const Sequence sequence = c.sequence(item.batch);
  const int64_t d = round_up(p.head_dim, kLanes), dv = round_up(p.head_dim_v, kLanes);
  const int64_t block = round_up(c.block_k, kBackwardTileK), keys = item.k_end - item.k_begin;
  const int64_t group = p.heads / p.heads_kv;

  // K, K^T and V^T, with zeros past the last key up to a whole group of lanes. V passes through
  // dV's room.
  load_rows(c.k, p.dtype, item.batch, item.head_kv, sequence.k_row + item.k_begin, keys, p.head_dim,
            s.k, d);
  load_rows(c.v, p.dtype, item.batch, item.head_kv, sequence.k_row + item.k_begin, keys,
            p.head_dim_v, s.dv, dv);
  const int64_t padded = round_up(keys, kBackwardTileK);
  __builtin_memset(s.k + keys * d, 0, static_cast<size_t>((padded - keys) * d) * sizeof(float));
  __builtin_memset(s.dv + keys * dv, 0, static_cast<size_t>((padded - keys) * dv) * sizeof(float));
  for (int64_t r = 0; r < padded; r += kTransposeRows) {
    transpose_rows(s.k + r * d, d, p.head_dim, 1, s.kt + r, block);
    transpose_rows(s.dv + r * dv, dv, p.head_dim_v, 1, s.vt + r, block);
  }
  __builtin_memset(s.dk, 0, static_cast<size_t>(padded * d) * sizeof(float));
  __builtin_memset(s.dv, 0, static_cast<size_t>(padded * dv) * sizeof(float));
  const bool k_nonfinite = any_nonfinite(s.k, keys, d, d);

  const Range queries = sequence.mask.q_range({item.k_begin, item.k_end});
  // Without queries there may be billions of heads.
  const int64_t heads = sequence.mask.seqlen_q > 0 ? group : 0;
  for (int64_t head = item.head_kv * group; head < item.head_kv * group + heads; ++head) {
    const ScoreRule rule = score_rule(c, item.batch, head);
    for (int64_t q = queries.begin / kBackwardTileQ * kBackwardTileQ; q < queries.end;
         q += kBackwardTileQ) {
      const Range tile{q, min64(q + kBackwardTileQ, sequence.mask.seqlen_q)};
      const Visit turn = visit(c, sequence.mask, tile, item.k_begin);
      if (turn.none) continue;
      const int64_t n = tile.size();
      load_rows(c.q, p.dtype, item.batch, head, sequence.q_row + q, n, p.head_dim, s.q, d);
      load_rows(c.dout, p.dtype, item.batch, head, sequence.q_row + q, n, p.head_dim_v, s.dout, dv);
      const int64_t lse_at = sequence.lse_row + head * c.sequences.lse_head_stride + q;
      for (int64_t r = 0; r < n; ++r) {
        const float divisor = row_softmax(c, rule, lse_at + r).divisor;
        if (divisor != 1) scale_row(s.dout + r * dv, dv, divisor);
      }
      const bool nonfinite =
          k_nonfinite || any_nonfinite(s.q, n, d, d) || any_nonfinite(s.dout, n, dv, dv);
      __builtin_memset(s.dq, 0, static_cast<size_t>(n * d) * sizeof(float));
      for (int64_t k = item.k_begin; k < item.k_end; k += kBackwardTileK) {
        backward_step(c, rule, sequence, head, tile, {k, min64(k + kBackwardTileK, item.k_end)},
                      item.k_begin, nonfinite, s);
      }
      hand_over_dq(c, sequence, head, tile, turn, s.dq);
    }
  }
  for (int64_t r = 0; r < keys; ++r) {
    const int64_t row = sequence.k_row + item.k_begin + r;
    store_row(c.dk, p.dtype, item.batch, item.head_kv, row, p.head_dim, s.dk + r * d, p.scale);
    store_row(c.dv, p.dtype, item.batch, item.head_kv, row, p.head_dim_v, s.dv + r * dv, 1);
  }
}

}  // namespace strobe::cpu::STROBE_ISA

#endif  // STROBE_CPU_BACKWARD_INL_H_
