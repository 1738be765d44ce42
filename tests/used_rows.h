// Problems with lengths in use, positions of the first query, prefixes and chunks: their tensors, a
// launch on a CPU kernel, and the oracle's results. For unit/used_rows_test.cpp.
#ifndef STROBE_TESTS_USED_ROWS_H_
#define STROBE_TESTS_USED_ROWS_H_

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels.h"
#include "numeric.h"
#include "oracle.h"

namespace strobe_test::used_rows {

using oracle::DType;
using oracle::Rng;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// One sequence: rows that it has, rows in use, where its first query stands, its prefix.
struct Sequence {
  int64_t rows_q, rows_k, used_q, used_k, position, prefix;
};

struct Scenario {
  DType dtype = DType::kFloat32;
  bool packed = false;
  std::vector<Sequence> sequences;  // not packed: all with the same rows
  bool with_position = false, with_prefix = false, with_used_q = true, with_used_k = true;
  int64_t heads = 2, heads_kv = 1, head_dim = 16, head_dim_v = 16;
  bool causal = false;
  int64_t window_left = -1, window_right = -1, chunk = 0;
  float softcap = 0, slope = 0, dropout_p = 0;
  bool with_dlse = false, deterministic = false, batch_invariant = false;
  int32_t threads = 1;
  int64_t pad = 0;    // unused elements after each row of all heads
  double unused = 0;  // what the rows that are not in use hold

  int64_t batch() const { return static_cast<int64_t>(sequences.size()); }
};

/// A tensor [rows, heads, dim] of all sequences one after the other, with what a row's padding
/// holds.
struct Values {
  DType dtype = DType::kFloat32;
  int64_t rows = 0, heads = 0, dim = 0, stride = 0;
  std::vector<uint32_t> memory;

  Values(DType type, int64_t rows_, int64_t heads_, int64_t dim_, int64_t pad)
      : dtype(type), rows(rows_), heads(heads_), dim(dim_), stride(heads_ * dim_ + pad) {
    memory.resize(static_cast<size_t>(rows * stride + 1));
    for (int64_t i = 0; i < rows * stride; ++i) {
      oracle::Store(dtype, memory.data(), i, static_cast<float>(kNan));
    }
  }
  int64_t Index(int64_t row, int64_t head, int64_t e) const {
    return row * stride + head * dim + e;
  }
  double Get(int64_t row, int64_t head, int64_t e) const {
    return static_cast<double>(oracle::Load(dtype, memory.data(), Index(row, head, e)));
  }
  /// All elements as [rows][heads][dim].
  std::vector<double> Read() const {
    std::vector<double> all;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < heads * dim; ++i) all.push_back(Get(row, 0, i));
    }
    return all;
  }
  void Set(int64_t row, int64_t head, int64_t e, double x) {
    oracle::Store(dtype, memory.data(), Index(row, head, e), static_cast<float>(x));
  }
  strobe_strides Strides(const Scenario& s) const {
    return {s.packed ? 0 : rows / s.batch() * stride, stride, dim, 1};
  }
  void Fill(Rng& rng) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t e = 0; e < dim; ++e) Set(row, h, e, rng.Normal());
      }
    }
  }
  void FillRows(int64_t begin, int64_t end, double x) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t e = 0; e < dim; ++e) Set(row, h, e, x);
      }
    }
  }
  /// The elements of rows [begin, end), for comparing bits.
  std::string Bits(int64_t begin, int64_t end) const {
    std::string bits;
    const auto size = static_cast<size_t>(oracle::ElementSize(dtype));
    const char* const bytes = reinterpret_cast<const char*>(memory.data());
    for (int64_t row = begin; row < end; ++row) {
      bits.append(bytes + static_cast<size_t>(row * stride) * size,
                  static_cast<size_t>(heads * dim) * size);
    }
    return bits;
  }
  bool PaddingIsPoison() const {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = heads * dim; i < stride; ++i) {
        if (!std::isnan(oracle::Load(dtype, memory.data(), row * stride + i))) return false;
      }
    }
    return true;
  }
};

/// A problem with its tensors. lse and dlse are [rows, heads, 1] here, and copied to the library's
/// order for a launch.
struct Tensors {
  Values q, k, v, out, dout, dq, dk, dv, lse, dlse;
  std::vector<int32_t> cu_q{0}, cu_k{0}, used_q, used_k, position, prefix;
  std::vector<float> slopes;

  Tensors(const Scenario& s, uint64_t seed)
      : q(s.dtype, Rows(s, true), s.heads, s.head_dim, s.pad),
        k(s.dtype, Rows(s, false), s.heads_kv, s.head_dim, s.pad),
        v(s.dtype, Rows(s, false), s.heads_kv, s.head_dim_v, s.pad),
        out(s.dtype, Rows(s, true), s.heads, s.head_dim_v, s.pad),
        dout(s.dtype, Rows(s, true), s.heads, s.head_dim_v, s.pad),
        dq(s.dtype, Rows(s, true), s.heads, s.head_dim, s.pad),
        dk(s.dtype, Rows(s, false), s.heads_kv, s.head_dim, s.pad),
        dv(s.dtype, Rows(s, false), s.heads_kv, s.head_dim_v, s.pad),
        lse(DType::kFloat32, Rows(s, true), s.heads, 1, 0),
        dlse(DType::kFloat32, Rows(s, true), s.heads, 1, 0),
        slopes(static_cast<size_t>(s.heads), s.slope) {
    int64_t at_q = 0, at_k = 0;
    for (const Sequence& b : s.sequences) {
      // The values of a sequence in use depend on the seed and its lengths in use alone.
      Rng rng(seed + static_cast<uint64_t>(b.used_q * 1000 + b.used_k));
      for (Values* const t : {&q, &dout, &dlse}) FillUsed(*t, rng, at_q, b.used_q);
      for (Values* const t : {&k, &v}) FillUsed(*t, rng, at_k, b.used_k);
      for (Values* const t : {&q, &dout, &dlse}) {
        t->FillRows(at_q + b.used_q, at_q + b.rows_q, s.unused);
      }
      for (Values* const t : {&k, &v}) t->FillRows(at_k + b.used_k, at_k + b.rows_k, s.unused);
      at_q += b.rows_q;
      at_k += b.rows_k;
      cu_q.push_back(static_cast<int32_t>(at_q));
      cu_k.push_back(static_cast<int32_t>(at_k));
      used_q.push_back(static_cast<int32_t>(b.used_q));
      used_k.push_back(static_cast<int32_t>(b.used_k));
      position.push_back(static_cast<int32_t>(b.position));
      prefix.push_back(static_cast<int32_t>(b.prefix));
    }
  }
  static void FillUsed(Values& t, Rng& rng, int64_t first, int64_t count) {
    for (int64_t row = first; row < first + count; ++row) {
      for (int64_t h = 0; h < t.heads; ++h) {
        for (int64_t e = 0; e < t.dim; ++e) t.Set(row, h, e, rng.Normal());
      }
    }
  }
  static int64_t Rows(const Scenario& s, bool queries) {
    int64_t rows = 0;
    for (const Sequence& b : s.sequences) rows += queries ? b.rows_q : b.rows_k;
    return rows;
  }

  /// Bits of all results of one sequence's rows [0, queries) and [0, keys).
  std::string Bits(size_t b, int64_t queries, int64_t keys) const {
    std::string bits;
    for (const Values* const t : {&out, &lse, &dq}) bits += t->Bits(cu_q[b], cu_q[b] + queries);
    for (const Values* const t : {&dk, &dv}) bits += t->Bits(cu_k[b], cu_k[b] + keys);
    return bits;
  }
  std::string Bits() const {
    std::string bits;
    for (size_t b = 0; b + 1 < cu_q.size(); ++b) {
      bits += Bits(b, cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]);
    }
    return bits;
  }
};

/// Where a row of [rows, heads, 1] stands in lse as the library has it.
inline int64_t LsePlace(const Scenario& s, int64_t rows, int64_t row, int64_t head) {
  if (s.packed) return head * rows + row;
  const int64_t n = rows / s.batch();
  return (row / n * s.heads + head) * n + row % n;
}

/// Runs forward, then backward, on one kernel; a pass that it does not take, on the one that the
/// rules choose. "" or what went wrong.
inline std::string Launch(const Scenario& s, const CpuKernel& kernel, Tensors& t) {
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.dtype = StrobeDType(s.dtype);
  p.batch = s.batch();
  p.heads = s.heads;
  p.heads_kv = s.heads_kv;
  p.head_dim = s.head_dim;
  p.head_dim_v = s.head_dim_v;
  p.varlen = s.packed;
  for (const Sequence& b : s.sequences) {
    p.seqlen_q = std::max(p.seqlen_q, b.rows_q);
    p.seqlen_k = std::max(p.seqlen_k, b.rows_k);
  }
  p.total_q = s.packed ? t.q.rows : 0;
  p.total_k = s.packed ? t.k.rows : 0;
  p.causal = s.causal;
  p.window_left = s.window_left;
  p.window_right = s.window_right;
  p.attention_chunk = s.chunk;
  p.softcap = s.softcap;
  p.dropout_p = s.dropout_p;
  p.alibi = s.slope != 0 ? STROBE_ALIBI_PER_HEAD : STROBE_ALIBI_NONE;
  p.deterministic = s.deterministic;
  p.batch_invariant = s.batch_invariant;
  p.threads = s.threads;
  p.has_seqused_q = s.with_used_q;
  p.has_seqused_k = s.with_used_k;
  p.has_q_position = s.with_position;
  p.has_prefix = s.with_prefix;
  p.q = t.q.Strides(s);
  p.k = t.k.Strides(s);
  p.v = t.v.Strides(s);
  p.out = t.out.Strides(s);

  std::vector<float> lse(static_cast<size_t>(t.q.rows * s.heads), std::nanf(""));
  std::vector<float> dlse = lse;
  const auto common = [&](auto& a) {
    a.struct_size = sizeof a;
    a.q = t.q.memory.data();
    a.k = t.k.memory.data();
    a.v = t.v.memory.data();
    a.out = t.out.memory.data();
    a.lse = lse.data();
    a.cu_seqlens_q = s.packed ? t.cu_q.data() : nullptr;
    a.cu_seqlens_k = s.packed ? t.cu_k.data() : nullptr;
    a.alibi_slopes = p.alibi ? t.slopes.data() : nullptr;
    a.dropout_seed = 77;
    a.seqused_q = p.has_seqused_q ? t.used_q.data() : nullptr;
    a.seqused_k = p.has_seqused_k ? t.used_k.data() : nullptr;
    a.q_position = p.has_q_position ? t.position.data() : nullptr;
    a.prefix = p.has_prefix ? t.prefix.data() : nullptr;
  };
  strobe_plan plan;
  plan.struct_size = sizeof plan;
  p.direction = STROBE_FORWARD;
  if (strobe_plan_make(&p, &plan) != STROBE_OK) return strobe_last_error();
  if (kernel.Takes(plan.problem)) kernel.Take(plan);
  strobe_forward_args forward{};
  common(forward);
  if (strobe_forward(&plan, &forward) != STROBE_OK) return strobe_last_error();
  for (int64_t row = 0; row < t.q.rows; ++row) {
    for (int64_t h = 0; h < s.heads; ++h) {
      const auto at = static_cast<size_t>(LsePlace(s, t.q.rows, row, h));
      t.lse.Set(row, h, 0, static_cast<double>(lse[at]));
      dlse[at] = static_cast<float>(t.dlse.Get(row, h, 0));
    }
  }
  // Backward reads neither out nor lse of rows that are not in use.
  Tensors given = t;
  for (size_t b = 0; b < s.sequences.size(); ++b) {
    const int64_t begin = t.cu_q[b] + s.sequences[b].used_q, end = t.cu_q[b + 1];
    given.out.FillRows(begin, end, s.unused);
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t h = 0; h < s.heads; ++h) {
        lse[static_cast<size_t>(LsePlace(s, t.q.rows, row, h))] = static_cast<float>(s.unused);
      }
    }
  }
  p.direction = STROBE_BACKWARD;
  p.has_dlse = s.with_dlse;
  p.dout = t.dout.Strides(s);
  p.dq = t.dq.Strides(s);
  p.dk = t.dk.Strides(s);
  p.dv = t.dv.Strides(s);
  if (strobe_plan_make(&p, &plan) != STROBE_OK) return strobe_last_error();
  if (kernel.Takes(plan.problem)) kernel.Take(plan);
  strobe_backward_args backward{};
  common(backward);
  backward.out = given.out.memory.data();
  backward.dout = t.dout.memory.data();
  backward.dlse = s.with_dlse ? dlse.data() : nullptr;
  backward.dq = t.dq.memory.data();
  backward.dk = t.dk.memory.data();
  backward.dv = t.dv.memory.data();
  if (strobe_backward(&plan, &backward) != STROBE_OK) return strobe_last_error();
  for (const Values* const r : {&t.out, &t.dq, &t.dk, &t.dv}) {
    if (!r->PaddingIsPoison()) return "memory between rows was written";
  }
  return "";
}

/// What the results should be, by the oracle. Its tensors are float32, zeros (lse: -infinity) where
/// nothing is computed.
struct Truth {
  Values out, lse, dq, dk, dv;
  double largest_score = 0;  // at most: the terms of a score, all of one sign
};

inline Values FromOracle(const oracle::Tensor& t) {
  Values values(DType::kFloat32, t.rows, t.heads, t.dim, 0);
  for (int64_t row = 0; row < t.rows; ++row) {
    for (int64_t h = 0; h < t.heads; ++h) {
      for (int64_t e = 0; e < t.dim; ++e) values.Set(row, h, e, t.at(row, h)[e]);
    }
  }
  return values;
}

inline Truth Solve(const Scenario& s, const Tensors& t) {
  const auto read = [](const Values& x) {
    oracle::Tensor dense(x.rows, x.heads, x.dim);
    dense.data = x.Read();
    return dense;
  };
  oracle::Problem p;
  p.heads = s.heads;
  p.heads_kv = s.heads_kv;
  p.head_dim = s.head_dim;
  p.head_dim_v = s.head_dim_v;
  p.causal = s.causal;
  p.window_left = s.window_left;
  p.window_right = s.window_right;
  p.attention_chunk = s.chunk;
  p.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
  p.softcap = static_cast<double>(s.softcap);
  p.slopes.assign(static_cast<size_t>(s.batch() * s.heads), static_cast<double>(s.slope));
  for (size_t n = 0; n < s.sequences.size(); ++n) {
    const Sequence& b = s.sequences[n];
    oracle::Sequence sequence{t.cu_q[n], b.used_q, t.cu_k[n], b.used_k};
    if (s.with_position) sequence.q_position = b.position;
    if (s.with_prefix) sequence.prefix = b.prefix;
    p.sequences.push_back(sequence);
    p.keep_rows = std::max(p.keep_rows, b.rows_q);
    p.keep_columns = std::max(p.keep_columns, b.rows_k);
  }
  p.dropout_p = static_cast<double>(s.dropout_p);
  p.keep = oracle::DropoutMask(s.batch(), s.heads, p.keep_rows, p.keep_columns, s.dropout_p, 77, 0);
  const oracle::Tensor q = read(t.q), k = read(t.k), v = read(t.v), dout = read(t.dout),
                       dlse = read(t.dlse);
  const oracle::ForwardResult forward = oracle::Forward(p, q, k, v);
  const oracle::BackwardResult backward =
      oracle::Backward(p, q, k, v, dout, s.with_dlse ? &dlse : nullptr);
  const auto& sizes = forward.size.data;
  return {
      FromOracle(forward.out), FromOracle(forward.lse),
      FromOracle(backward.dq), FromOracle(backward.dk),
      FromOracle(backward.dv), sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end())};
}

/// "" when `got` is near `wanted`: within `tolerance` of wanted's largest value, and exactly there
/// where that is 0 or not finite.
inline std::string Compare(const char* name, const Values& got, const Values& wanted,
                           double tolerance) {
  double largest = 0.1;
  for (int64_t row = 0; row < wanted.rows; ++row) {
    for (int64_t h = 0; h < wanted.heads; ++h) {
      for (int64_t e = 0; e < wanted.dim; ++e) {
        const double x = std::fabs(wanted.Get(row, h, e));
        if (std::isfinite(x)) largest = std::max(largest, x);
      }
    }
  }
  for (int64_t row = 0; row < wanted.rows; ++row) {
    for (int64_t h = 0; h < wanted.heads; ++h) {
      for (int64_t e = 0; e < wanted.dim; ++e) {
        const double g = got.Get(row, h, e), w = wanted.Get(row, h, e);
        if (g == w || std::fabs(g - w) <= tolerance * largest) continue;
        return std::string(name) + " of row " + std::to_string(row) + ", head " +
               std::to_string(h) + ", element " + std::to_string(e) + ": " + std::to_string(g) +
               ", expected " + std::to_string(w);
      }
    }
  }
  return "";
}

inline std::string Check(const Scenario& s, const Tensors& t, const Truth& truth) {
  const double type = s.dtype == DType::kFloat32 ? 2e-5 : s.dtype == DType::kFloat16 ? 5e-3 : 3e-2;
  // A large score leaves rounding errors in all weights of its row.
  const double tolerance = type + 2e-6 * truth.largest_score;
  std::string wrong = Compare("out", t.out, truth.out, tolerance);
  if (wrong.empty()) wrong = Compare("lse", t.lse, truth.lse, 1e-5 + type / 10);
  if (wrong.empty()) wrong = Compare("dq", t.dq, truth.dq, tolerance);
  if (wrong.empty()) wrong = Compare("dk", t.dk, truth.dk, tolerance);
  if (wrong.empty()) wrong = Compare("dv", t.dv, truth.dv, tolerance);
  // Rows that are not in use: exactly 0, whatever the tolerance.
  for (size_t b = 0; wrong.empty() && b < s.sequences.size(); ++b) {
    const auto zeros = [&](const Values& r, int64_t begin, int64_t end) {
      const std::string bits = r.Bits(begin, end);
      if (bits != std::string(bits.size(), '\0')) wrong = "a row that is not in use is not 0";
    };
    const Sequence& n = s.sequences[b];
    zeros(t.out, t.cu_q[b] + n.used_q, t.cu_q[b + 1]);
    zeros(t.dq, t.cu_q[b] + n.used_q, t.cu_q[b + 1]);
    zeros(t.dk, t.cu_k[b] + n.used_k, t.cu_k[b + 1]);
    zeros(t.dv, t.cu_k[b] + n.used_k, t.cu_k[b + 1]);
  }
  return wrong;
}

inline std::string ToString(const Scenario& s) {
  std::string text = std::string(oracle::Name(s.dtype)) + (s.packed ? " packed" : " dense") +
                     " heads " + std::to_string(s.heads) + "/" + std::to_string(s.heads_kv) +
                     " dims " + std::to_string(s.head_dim) + "/" + std::to_string(s.head_dim_v) +
                     (s.causal ? " causal" : "") + " window " + std::to_string(s.window_left) +
                     "," + std::to_string(s.window_right) + " chunk " + std::to_string(s.chunk) +
                     " softcap " + std::to_string(s.softcap) + " slope " + std::to_string(s.slope) +
                     " dropout " + std::to_string(s.dropout_p) + " threads " +
                     std::to_string(s.threads) + " unused " + std::to_string(s.unused);
  for (const Sequence& b : s.sequences) {
    text += " | q " + std::to_string(b.used_q) + " of " + std::to_string(b.rows_q) + " k " +
            std::to_string(b.used_k) + " of " + std::to_string(b.rows_k);
    if (s.with_position) text += " position " + std::to_string(b.position);
    if (s.with_prefix) text += " prefix " + std::to_string(b.prefix);
  }
  return text;
}

}  // namespace strobe_test::used_rows

#endif  // STROBE_TESTS_USED_ROWS_H_
