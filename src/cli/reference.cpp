#include "cli/reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "cli/dtype.h"

namespace strobe::cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Sums are kept in Sum: double for the truth, float for what a framework does.
template <typename Sum>
class Plain {
 public:
  Plain(const ReferenceProblem& problem, const ReferenceInputs& inputs, Arithmetic arithmetic)
      : p_(problem), in_(inputs), arithmetic_(arithmetic), backward_(!inputs.dout.empty()) {
    result_.out.assign(static_cast<size_t>(p_.offsets_q.back() * p_.heads * p_.head_dim_v), 0);
    result_.lse.assign(static_cast<size_t>(p_.offsets_q.back() * p_.heads), -kInfinity);
    if (backward_) {
      result_.dq.assign(in_.q.size(), 0);
      dk_.assign(in_.k.size(), 0);
      dv_.assign(in_.v.size(), 0);
    }
  }

  ReferenceResult Run() {
    for (size_t b = 0; b + 1 < p_.offsets_q.size(); ++b) {
      for (int64_t h = 0; h < p_.heads; ++h) Head(b, h);
    }
    for (const Sum x : dk_) result_.dk.push_back(Round(x));
    for (const Sum x : dv_) result_.dv.push_back(Round(x));
    return std::move(result_);
  }

 private:
  // One score and what the backward pass needs of it.
  struct Weight {
    bool visible = false;
    double score = -kInfinity;
    double slope = 1;  // derivative of the softcap
    double p = 0;      // softmax
    double keep = 1;   // dropout: 0 or 1 / (1 - dropout_p)
    double dp = 0;
  };

  [[nodiscard]] double Round(double x) const {
    switch (arithmetic_) {
      case Arithmetic::kFloat64:
        return x;
      case Arithmetic::kFloat32:
        return static_cast<float>(x);
      case Arithmetic::kBFloat16:
        return Rounded(DType::kBFloat16, static_cast<float>(x));
      case Arithmetic::kFloat16:
        return Rounded(DType::kFloat16, static_cast<float>(x));
    }
    return x;
  }

  // Rows of one head. Key and value heads are shared by groups of query heads.
  [[nodiscard]] size_t QueryRow(int64_t row, int64_t h) const {
    return static_cast<size_t>(row * p_.heads + h);
  }
  [[nodiscard]] size_t KeyRow(int64_t row, int64_t h) const {
    return static_cast<size_t>(row * p_.heads_kv + h / (p_.heads / p_.heads_kv));
  }

  [[nodiscard]] static Sum Dot(const double* a, const double* b, int64_t n) {
    Sum sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<Sum>(a[i]) * static_cast<Sum>(b[i]);
    return sum;
  }

  // Of a sequence, where its array gives a number; else `otherwise`.
  [[nodiscard]] static int64_t Number(const std::vector<int32_t>& values, size_t b,
                                      int64_t otherwise) {
    return values.empty() ? otherwise : values[b];
  }

  // Whether a query at key position `position` sees key j.
  [[nodiscard]] bool Visible(size_t b, int64_t position, int64_t j) const {
    if (j < Number(p_.arrays.prefix, b, 0)) return true;
    const int64_t distance = j - position;
    if (p_.causal && distance > 0) return false;
    if (p_.attention_chunk > 0 &&
        (position < 0 || position - position % p_.attention_chunk != j - j % p_.attention_chunk)) {
      return false;
    }
    if (p_.window_left >= 0 && distance < -p_.window_left) return false;
    return p_.window_right < 0 || distance <= p_.window_right;
  }

  void Head(size_t b, int64_t h) {
    const int64_t q0 = p_.offsets_q[b];
    const int64_t k0 = p_.offsets_k[b];
    const int64_t seqlen_q = Number(p_.arrays.seqused_q, b, p_.offsets_q[b + 1] - q0);
    const int64_t seqlen_k = Number(p_.arrays.seqused_k, b, p_.offsets_k[b + 1] - k0);
    const int64_t first = Number(p_.arrays.q_position, b, seqlen_k - seqlen_q);
    std::vector<Weight> row(static_cast<size_t>(seqlen_k));
    for (int64_t i = 0; i < seqlen_q; ++i) {
      const size_t iq = QueryRow(q0 + i, h);
      for (int64_t j = 0; j < seqlen_k; ++j) row[static_cast<size_t>(j)] = Score(b, h, i, j, first);
      if (!Softmax(&row, &result_.lse[iq]))
        continue;  // no key visible: out 0, lse -inf, no gradient
      Forward(row, iq, k0, h);
      if (backward_) Backward(&row, iq, k0, h);
    }
  }

  [[nodiscard]] Weight Score(size_t b, int64_t h, int64_t i, int64_t j, int64_t first) const {
    const int64_t distance = j - (i + first);
    Weight w;
    w.visible = Visible(b, i + first, j);
    if (!w.visible) return w;
    const double* q = &in_.q[QueryRow(p_.offsets_q[b] + i, h) * static_cast<size_t>(p_.head_dim)];
    const double* k = &in_.k[KeyRow(p_.offsets_k[b] + j, h) * static_cast<size_t>(p_.head_dim)];
    w.score = Round(Round(Dot(q, k, p_.head_dim)) * p_.scale);
    if (p_.softcap > 0) {
      const double t = Round(std::tanh(Round(w.score / p_.softcap)));
      w.score = Round(p_.softcap * t);
      w.slope = 1 - t * t;
    }
    if (!p_.slopes.empty()) {
      const double slope = p_.slopes[b * static_cast<size_t>(p_.heads) + static_cast<size_t>(h)];
      w.score = Round(w.score - Round(slope * std::abs(static_cast<double>(distance))));
    }
    if (p_.dropout_p > 0) {
      const auto at =
          ((static_cast<int64_t>(b) * p_.heads + h) * p_.keep_rows + i) * p_.keep_cols + j;
      w.keep = p_.keep[static_cast<size_t>(at)] != 0 ? 1 / (1 - p_.dropout_p) : 0;
    }
    return w;
  }

  // False when no key is visible.
  [[nodiscard]] bool Softmax(std::vector<Weight>* row, double* lse) const {
    double max = -kInfinity;
    bool any = false;
    for (const Weight& w : *row) {
      if (!w.visible) continue;
      any = true;
      max = std::max(max, w.score);
    }
    if (!any) return false;
    Sum sum = 0;
    for (Weight& w : *row) {
      if (!w.visible) continue;
      w.p = std::exp(w.score - max);
      sum += static_cast<Sum>(w.p);
    }
    for (Weight& w : *row) w.p = Round(w.p / sum);
    *lse = max + std::log(static_cast<double>(sum));
    return true;
  }

  void Forward(const std::vector<Weight>& row, size_t iq, int64_t k0, int64_t h) {
    for (int64_t d = 0; d < p_.head_dim_v; ++d) {
      Sum sum = 0;
      for (size_t j = 0; j < row.size(); ++j) {
        if (!row[j].visible) continue;
        const size_t jk = KeyRow(k0 + static_cast<int64_t>(j), h);
        const double v = in_.v[jk * static_cast<size_t>(p_.head_dim_v) + static_cast<size_t>(d)];
        sum += static_cast<Sum>(Round(row[j].p * row[j].keep)) * static_cast<Sum>(v);
      }
      result_.out[iq * static_cast<size_t>(p_.head_dim_v) + static_cast<size_t>(d)] = Round(sum);
    }
  }

  void Backward(std::vector<Weight>* row, size_t iq, int64_t k0, int64_t h) {
    const auto dim = static_cast<size_t>(p_.head_dim);
    const auto dim_v = static_cast<size_t>(p_.head_dim_v);
    const double* dout = &in_.dout[iq * dim_v];
    // The sum of p * dp over the keys is dout . out (FlashAttention-2 paper, section 2.3). From out
    // as it was stored: where the gradient is nearly 0, as with one key, that rounding is all that
    // is left of it.
    Sum delta = Dot(dout, &result_.out[iq * dim_v], p_.head_dim_v);
    if (!in_.dlse.empty()) delta -= static_cast<Sum>(in_.dlse[iq]);
    for (size_t j = 0; j < row->size(); ++j) {
      Weight& w = (*row)[j];
      if (!w.visible) continue;
      const size_t jk = KeyRow(k0 + static_cast<int64_t>(j), h);
      w.dp = Round(Round(Dot(dout, &in_.v[jk * dim_v], p_.head_dim_v)) * w.keep);
      for (size_t d = 0; d < dim_v; ++d) {
        dv_[jk * dim_v + d] += static_cast<Sum>(Round(w.p * w.keep)) * static_cast<Sum>(dout[d]);
      }
    }
    std::vector<Sum> dq(dim, 0);
    for (size_t j = 0; j < row->size(); ++j) {
      const Weight& w = (*row)[j];
      if (!w.visible) continue;
      const size_t jk = KeyRow(k0 + static_cast<int64_t>(j), h);
      const double ds =
          Round(Round(w.p * (w.dp - static_cast<double>(delta))) * w.slope * p_.scale);
      for (size_t d = 0; d < dim; ++d) {
        dq[d] += static_cast<Sum>(ds) * static_cast<Sum>(in_.k[jk * dim + d]);
        dk_[jk * dim + d] += static_cast<Sum>(ds) * static_cast<Sum>(in_.q[iq * dim + d]);
      }
    }
    for (size_t d = 0; d < dim; ++d) result_.dq[iq * dim + d] = Round(dq[d]);
  }

  const ReferenceProblem& p_;
  const ReferenceInputs& in_;
  Arithmetic arithmetic_;
  bool backward_;
  ReferenceResult result_;
  std::vector<Sum> dk_;
  std::vector<Sum> dv_;
};

}  // namespace

ReferenceResult PlainAttention(const ReferenceProblem& problem, const ReferenceInputs& inputs,
                               Arithmetic arithmetic) {
  if (arithmetic == Arithmetic::kFloat64) return Plain<double>(problem, inputs, arithmetic).Run();
  return Plain<float>(problem, inputs, arithmetic).Run();
}

}  // namespace strobe::cli
