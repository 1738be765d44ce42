#include "comparator.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <vector>

namespace oracle {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rounds stored values to the dtype, or draws another rounding error of the same size. As in true
// rounding, the error depends on the value alone: equal rows (of a broadcast tensor, say) have
// equal errors, which then do not average out.
class Rounder {
 public:
  Rounder(DType dtype, uint64_t noise_seed)
      : dtype_(dtype), noisy_(noise_seed != 0), seed_(Rng(noise_seed).Next()) {}

  bool noisy() const { return noisy_; }

  float operator()(float x) const {
    if (!noisy_) return Round(dtype_, x);
    // float32 cannot hold a part of its own spacing: with +-1 spacing half of the values move to a
    // neighbour.
    return x + Draw(x) * (dtype_ == DType::kFloat32 ? 1.0f : 0.5f) * Spacing(dtype_, x);
  }

  /// What float32 takes from an lse, or adds: one spacing, the most that it may be off by when it
  /// is computed with care.
  float Lse(float lse) const {
    return Spacing(DType::kFloat32, lse) * (Draw(lse) < 0 ? -1.0f : 1.0f);
  }

  /// x . row for several rows at once, each added up in order, as a matrix product does; from a
  /// random place if noisy, and from another one if again.
  void Dots(const float* x, const std::vector<const float*>& rows, int64_t n, float* dots,
            bool again = false) const {
    const uint64_t place = again ? seed_ / 7919 : seed_;
    const int64_t start = noisy_ ? static_cast<int64_t>(place % static_cast<uint64_t>(n)) : 0;
    for (size_t first = 0; first < rows.size(); first += kAtOnce) {
      const size_t count = std::min(kAtOnce, rows.size() - first);
      const float* row[kAtOnce];
      for (size_t u = 0; u < kAtOnce; ++u) row[u] = rows[first + std::min(u, count - 1)];
      float sum[kAtOnce] = {};
      const auto add = [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          for (size_t u = 0; u < kAtOnce; ++u) sum[u] += x[i] * row[u][i];
        }
      };
      add(start, n);
      add(0, start);
      std::copy(sum, sum + count, dots + first);
    }
  }

 private:
  static constexpr size_t kAtOnce =
      8;  // independent sums, so that the additions need not wait for one another

  /// In [-1, 1), from the value's bits.
  float Draw(float x) const {
    const uint64_t bits = Rng(seed_ ^ std::bit_cast<uint32_t>(x)).Next();
    return static_cast<float>(bits >> 40) * 0x1p-23f - 1;
  }

  DType dtype_;
  bool noisy_;
  uint64_t seed_;
};

// The same shapes as Tensor, in float32.
struct FloatTensor {
  FloatTensor(int64_t rows_, int64_t heads_, int64_t dim_)
      : rows(rows_), heads(heads_), dim(dim_), data(static_cast<size_t>(rows_ * heads_ * dim_)) {}
  explicit FloatTensor(const Tensor& t) : FloatTensor(t.rows, t.heads, t.dim) {
    std::transform(t.data.begin(), t.data.end(), data.begin(),
                   [](double x) { return static_cast<float>(x); });
  }
  float* at(int64_t row, int64_t head) { return data.data() + (row * heads + head) * dim; }

  Tensor Rounded(const Rounder& round) const {
    Tensor t(rows, heads, dim);
    std::transform(data.begin(), data.end(), t.data.begin(), [&](float x) { return round(x); });
    return t;
  }

  int64_t rows, heads, dim;
  std::vector<float> data;
};

class Computation {
 public:
  Computation(const Problem& p, DType dtype, const Tensor& q, const Tensor& k, const Tensor& v,
              const Tensor* dout, const Tensor* dlse, uint64_t noise_seed)
      : p_(p),
        round_(dtype, noise_seed),
        q_(q),
        k_(k),
        v_(v),
        dout_(dout ? *dout : Tensor()),
        dlse_(dlse),
        backward_(dout != nullptr),
        out_(q.rows, p.heads, p.head_dim_v),
        dq_(q.rows, p.heads, p.head_dim),
        dk_(k.rows, p.heads, p.head_dim),
        dv_(v.rows, p.heads, p.head_dim_v),
        dsinks_(1, p.heads, 1),
        dbias_(p.bias.rows, p.bias.heads, p.bias.dim) {}

  Plain Run() {
    for (size_t b = 0; b < p_.sequences.size(); ++b) {
      for (int64_t i = 0; i < p_.sequences[b].q_length; ++i) {
        if (!p_.only_rows.empty() && std::count(p_.only_rows.begin(), p_.only_rows.end(),
                                                p_.sequences[b].q_begin + i) == 0) {
          continue;
        }
        for (int64_t h = 0; h < p_.heads; ++h) RunRow(static_cast<int64_t>(b), h, i);
      }
    }
    Plain result;
    result.out = out_.Rounded(round_);
    if (backward_) {
      result.dq = dq_.Rounded(round_);
      result.dk = SumOverGroups(dk_);
      result.dv = SumOverGroups(dv_);
      result.dsinks = Widen(dsinks_);
      result.dbias = Widen(dbias_);
    }
    return result;
  }

 private:
  void RunRow(int64_t b, int64_t h, int64_t i) {
    const Sequence& s = p_.sequences[static_cast<size_t>(b)];
    const int64_t row = s.q_begin + i, h_kv = h / (p_.heads / p_.heads_kv);
    const std::vector<int64_t> keys = VisibleKeys(p_, b, h, i);
    const size_t n = keys.size();
    // A framework computes a sink as a column of scores more.
    const float sink =
        p_.sinks.empty() ? -kInfinity : static_cast<float>(p_.sinks[static_cast<size_t>(h)]);
    if (n == 0 && sink == -kInfinity) return;

    // Scores.
    weight_.resize(n);
    rows_.clear();
    for (const int64_t j : keys) rows_.push_back(k_.at(s.k_begin + j, h_kv));
    if (n > 0) round_.Dots(q_.at(row, h), rows_, p_.head_dim, weight_.data());
    dots_ = weight_;
    slope_.assign(n, 1.0f);
    const float scale = static_cast<float>(p_.scale), cap = static_cast<float>(p_.softcap);
    for (size_t t = 0; t < n; ++t) {
      float score = round_(round_(weight_[t]) * scale);
      if (cap > 0) {
        const float tanh = round_(std::tanh(round_(score / cap)));
        score = round_(tanh * cap);
        slope_[t] = round_(1 - tanh * tanh);
      }
      if (!p_.slopes.empty()) {
        const int64_t distance = std::abs(s.Position(i) - keys[t]);
        const double slope = p_.slopes[static_cast<size_t>(b * p_.heads + h)];
        score = round_(score - static_cast<float>(slope) * static_cast<float>(distance));
      }
      if (p_.bias.rows > 0) {
        const Problem::BiasPlace at = p_.BiasAt(b, h, i);
        score = round_(score + static_cast<float>(p_.bias.at(at.row, at.head)[keys[t]]));
      }
      weight_[t] = score;
    }

    // Softmax in float32, stored in the dtype; dropout; weights times V.
    float largest = -kInfinity, sum_of_keys = 0;
    for (const float w : weight_) largest = std::max(largest, w);
    const float reference = largest;
    if (sink != -kInfinity) largest = std::max(largest, sink);
    for (const float w : weight_) sum_of_keys += std::exp(w - reference);
    const float of_sink = sink == -kInfinity ? 0 : sink == kInfinity ? 1 : std::exp(sink - largest);
    float sum = of_sink;
    key_weight_.clear();
    for (float& w : weight_) {
      const float of_keys = std::exp(w - reference) / sum_of_keys;
      key_weight_.push_back(std::isnan(of_keys) ? 0 : of_keys);
      sum += (w = std::exp(w - largest));
    }
    for (float& w : weight_) w = round_(w / sum);
    sink_weight_ = round_(of_sink / sum);
    lse_ = largest + std::log(sum);
    dropped_ = weight_;
    const float keep_scale = p_.dropout_p > 0 ? static_cast<float>(1 / (1 - p_.dropout_p)) : 1;
    keep_.assign(n, keep_scale);
    if (p_.dropout_p > 0) {
      for (size_t t = 0; t < n; ++t) {
        keep_[t] = Keeps(p_, b, h, i, keys[t]) ? keep_scale : 0;
        dropped_[t] = round_(weight_[t] * keep_[t]);
      }
    }
    float* const out = out_.at(row, h);
    for (size_t t = 0; t < n; ++t) {
      const float* const v = v_.at(s.k_begin + keys[t], h_kv);
      for (int64_t d = 0; d < p_.head_dim_v; ++d) out[d] += dropped_[t] * v[d];
    }
    if (!backward_) return;
    float* dbias = nullptr;
    if (p_.bias.rows > 0) {
      const Problem::BiasPlace at = p_.BiasAt(b, h, i);
      dbias = dbias_.at(at.row, at.head);
    }
    RunRowBackward(s, keys, row, h, h_kv, dbias);
  }

  void RunRowBackward(const Sequence& s, const std::vector<int64_t>& keys, int64_t row, int64_t h,
                      int64_t h_kv, float* dbias) {
    const size_t n = keys.size();
    const float* const dout = dout_.at(row, h);
    dweight_.resize(n);
    rows_.clear();
    for (const int64_t j : keys) rows_.push_back(v_.at(s.k_begin + j, h_kv));
    if (n > 0) round_.Dots(dout, rows_, p_.head_dim_v, dweight_.data());
    float mean = 0;
    for (size_t t = 0; t < n; ++t) {
      dweight_[t] = round_(dweight_[t]);
      if (p_.dropout_p > 0) dweight_[t] = round_(dweight_[t] * keep_[t]);
      mean += weight_[t] * dweight_[t];
    }
    if (round_.noisy()) {
      // lse in float32 stands for the whole row's weights: what it is off by, all of them are.
      const float off = std::exp(round_.Lse(lse_));
      sink_weight_ *= off;
      // And scores are computed once more, in an order of their own: what the two differ by does
      // not cancel against what they have in lse.
      rows_.clear();
      for (const int64_t j : keys) rows_.push_back(k_.at(s.k_begin + j, h_kv));
      again_.resize(n);
      if (n > 0) round_.Dots(q_.at(row, h), rows_, p_.head_dim, again_.data(), true);
      for (size_t t = 0; t < n; ++t) {
        const float apart = (again_[t] - dots_[t]) * static_cast<float>(p_.scale) * slope_[t];
        const float off_here = off * (std::isfinite(apart) ? std::exp(apart) : 1.0f);
        weight_[t] *= off_here;
        dropped_[t] *= off_here;
        key_weight_[t] *= off_here;
      }
      stored_out_.assign(out_.at(row, h), out_.at(row, h) + p_.head_dim_v);
      for (float& x : stored_out_) x = round_(x);
      // Without keys out is 0 whatever dout holds.
      if (n > 0) round_.Dots(dout, {stored_out_.data()}, p_.head_dim_v, &mean);
    }
    const float scale = static_cast<float>(p_.scale);
    const float dlse = dlse_ ? static_cast<float>(*dlse_->at(row, h)) : 0;
    if (sink_weight_ != 0) {
      const float dsink = round_(sink_weight_ * ((p_.sinks_outside_lse ? 0 : dlse) - mean));
      *dsinks_.at(0, h) += dsink;
    }
    for (size_t t = 0; t < n; ++t) {
      float dscore = round_(weight_[t] * (dweight_[t] - mean));
      const float in_lse = p_.sinks_outside_lse ? key_weight_[t] : weight_[t];
      if (dlse_) dscore = round_(dscore + round_(in_lse * dlse));
      if (dbias) dbias[keys[t]] += dscore;
      if (p_.softcap > 0) dscore = round_(dscore * slope_[t]);
      dscore = round_(dscore * scale);

      const int64_t key = s.k_begin + keys[t];
      const float *const q = q_.at(row, h), *const k = k_.at(key, h_kv);
      float *const dq = dq_.at(row, h), *const dk = dk_.at(key, h), *const dv = dv_.at(key, h);
      for (int64_t d = 0; d < p_.head_dim; ++d) dq[d] += dscore * k[d];
      for (int64_t d = 0; d < p_.head_dim; ++d) dk[d] += dscore * q[d];
      for (int64_t d = 0; d < p_.head_dim_v; ++d) dv[d] += dropped_[t] * dout[d];
    }
  }

  // A framework repeats k and v for the query heads: each head's gradient is stored before they are
  // added up.
  Tensor SumOverGroups(FloatTensor& t) {
    FloatTensor sum(t.rows, p_.heads_kv, t.dim);
    for (int64_t row = 0; row < t.rows; ++row) {
      for (int64_t h = 0; h < p_.heads; ++h) {
        float* const to = sum.at(row, h / (p_.heads / p_.heads_kv));
        for (int64_t d = 0; d < t.dim; ++d) to[d] += round_(t.at(row, h)[d]);
      }
    }
    return p_.heads == p_.heads_kv ? Widen(sum) : sum.Rounded(round_);
  }

  static Tensor Widen(const FloatTensor& t) {
    Tensor wide(t.rows, t.heads, t.dim);
    std::copy(t.data.begin(), t.data.end(), wide.data.begin());
    return wide;
  }

  const Problem& p_;
  Rounder round_;
  FloatTensor q_, k_, v_, dout_;
  const Tensor* dlse_;
  bool backward_;
  FloatTensor out_, dq_, dk_, dv_, dsinks_, dbias_;
  float lse_ = 0, sink_weight_ = 0;  // of the row at hand
  std::vector<const float*> rows_;
  std::vector<float> weight_, key_weight_, dropped_, keep_, slope_, dweight_, stored_out_;
  std::vector<float> dots_, again_;  // scores before anything is done to them
};

}  // namespace

Plain PlainAttention(const Problem& p, DType dtype, const Tensor& q, const Tensor& k,
                     const Tensor& v, const Tensor* dout, const Tensor* dlse, uint64_t noise_seed) {
  return Computation(p, dtype, q, k, v, dout, dlse, noise_seed).Run();
}

}  // namespace oracle
