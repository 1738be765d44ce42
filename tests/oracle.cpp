#include "oracle.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>

namespace oracle {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Four sums, so that the additions need not wait for one another.
double Dot(const double* a, const double* b, int64_t n) {
  double sum[4] = {0, 0, 0, 0};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int64_t u = 0; u < 4; ++u) sum[u] += a[i + u] * b[i + u];
  }
  for (; i < n; ++i) sum[0] += a[i] * b[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

double AbsoluteDot(const double* a, const double* b, int64_t n) {
  double sum[4] = {0, 0, 0, 0};
  for (int64_t i = 0; i < n; ++i) sum[i % 4] += std::fabs(a[i] * b[i]);
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// One query row with the keys that it sees; all vectors run over those keys.
struct Row {
  int64_t query = 0, head = 0, head_kv = 0;  // row of q, its head, and the head of k and v
  std::vector<int64_t> key;                  // rows of k
  std::vector<double> weight;                // P
  std::vector<double> dropped;               // P * keep / (1 - p)
  std::vector<double> keep_scale;            // keep / (1 - p)
  std::vector<double> slope;                 // d(score) / d(scaled q . k): below 1 with softcap
  double lse = -kInfinity;
  double size = 0;
};

Row MakeRow(const Problem& p, int64_t sequence, int64_t head, int64_t i, const Tensor& q,
            const Tensor& k) {
  const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
  Row row;
  row.query = s.q_begin + i;
  row.head = head;
  row.head_kv = head / (p.heads / p.heads_kv);

  double largest = -kInfinity;
  for (const int64_t j : VisibleKeys(p, s, i)) {
    const double* const qi = q.at(row.query, head);
    const double* const kj = k.at(s.k_begin + j, row.head_kv);
    double score = p.scale * Dot(qi, kj, p.head_dim);
    double size = std::fabs(p.scale) * AbsoluteDot(qi, kj, p.head_dim);
    double slope = 1;
    if (p.softcap > 0) {
      const double t = std::tanh(score / p.softcap);
      score = p.softcap * t;
      slope = 1 - t * t;
    }
    if (!p.slopes.empty()) {
      const double distance = static_cast<double>(std::abs(s.Position(i) - j));
      const double bias = -p.slopes[static_cast<size_t>(sequence * p.heads + head)] * distance;
      score += bias;
      size += std::fabs(bias);
    }
    row.key.push_back(s.k_begin + j);
    row.weight.push_back(score);  // becomes the weight below
    row.slope.push_back(slope);
    row.keep_scale.push_back(p.dropout_p > 0 ? Keeps(p, sequence, head, i, j) / (1 - p.dropout_p)
                                             : 1.0);
    largest = std::max(largest, score);
    if (std::isfinite(size)) row.size = std::max(row.size, size);
  }
  if (row.key.empty()) return row;

  double sum = 0;
  for (double& w : row.weight) sum += (w = std::exp(w - largest));
  for (size_t n = 0; n < row.key.size(); ++n) {
    row.weight[n] /= sum;
    row.dropped.push_back(row.weight[n] * row.keep_scale[n]);
  }
  row.lse = largest + std::log(sum);
  return row;
}

// out_i, for a row that sees at least one key.
std::vector<double> Output(const Problem& p, const Row& row, const Tensor& v) {
  std::vector<double> out(static_cast<size_t>(p.head_dim_v), 0.0);
  for (size_t n = 0; n < row.key.size(); ++n) {
    const double* const vj = v.at(row.key[n], row.head_kv);
    for (size_t d = 0; d < out.size(); ++d) out[d] += row.dropped[n] * vj[d];
  }
  return out;
}

void ForEachRow(const Problem& p, const Tensor& q, const Tensor& k,
                const std::function<void(const Row&)>& visit) {
  for (size_t b = 0; b < p.sequences.size(); ++b) {
    const Sequence& s = p.sequences[b];
    for (int64_t i = 0; i < s.q_length; ++i) {
      const bool wanted = p.only_rows.empty() || std::find(p.only_rows.begin(), p.only_rows.end(),
                                                           s.q_begin + i) != p.only_rows.end();
      if (!wanted) continue;
      for (int64_t h = 0; h < p.heads; ++h) visit(MakeRow(p, static_cast<int64_t>(b), h, i, q, k));
    }
  }
}

}  // namespace

std::vector<int64_t> VisibleKeys(const Problem& p, const Sequence& s, int64_t i) {
  std::vector<int64_t> keys;
  const int64_t position = s.Position(i);
  for (int64_t j = 0; j < s.k_length; ++j) {
    bool seen = true;
    if (p.causal && j > position) seen = false;
    const bool negative = p.window_signed;
    if ((negative || p.window_left >= 0) && position - j > p.window_left) seen = false;
    if ((negative || p.window_right >= 0) && j - position > p.window_right) seen = false;
    // Before key 0 there are chunks too, which hold no key.
    if (p.attention_chunk > 0 &&
        (position < 0 || position / p.attention_chunk != j / p.attention_chunk)) {
      seen = false;
    }
    if (seen || j < s.prefix) keys.push_back(j);
  }
  return keys;
}

bool Keeps(const Problem& p, int64_t sequence, int64_t head, int64_t i, int64_t j) {
  const int64_t row = (sequence * p.heads + head) * p.keep_rows + i;
  return p.keep[static_cast<size_t>(row * p.keep_columns + j)] != 0;
}

ForwardResult Forward(const Problem& p, const Tensor& q, const Tensor& k, const Tensor& v) {
  ForwardResult r{Tensor(q.rows, p.heads, p.head_dim_v), Tensor(q.rows, p.heads, 1, -kInfinity),
                  Tensor(q.rows, p.heads, 1)};
  ForEachRow(p, q, k, [&](const Row& row) {
    if (row.key.empty()) return;
    const std::vector<double> out = Output(p, row, v);
    std::copy(out.begin(), out.end(), r.out.at(row.query, row.head));
    *r.lse.at(row.query, row.head) = row.lse;
    *r.size.at(row.query, row.head) = row.size;
  });
  return r;
}

std::vector<double> Rotate(const double* x, int64_t dim, const Tensor& cosines, const Tensor& sines,
                           int64_t position, bool interleaved) {
  std::vector<double> y(x, x + dim);
  for (int64_t n = 0; n < cosines.dim; ++n) {
    const double c = cosines.at(position, 0)[n], s = sines.at(position, 0)[n];
    const auto a = static_cast<size_t>(interleaved ? 2 * n : n);
    const auto b = static_cast<size_t>(interleaved ? 2 * n + 1 : n + cosines.dim);
    y[a] = x[a] * c - x[b] * s;
    y[b] = x[a] * s + x[b] * c;
  }
  return y;
}

BackwardResult Backward(const Problem& p, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& dout, const Tensor* dlse) {
  BackwardResult r{Tensor(q.rows, p.heads, p.head_dim), Tensor(k.rows, p.heads_kv, p.head_dim),
                   Tensor(v.rows, p.heads_kv, p.head_dim_v)};
  std::vector<double> dweight;
  ForEachRow(p, q, k, [&](const Row& row) {
    const double* const dout_i = dout.at(row.query, row.head);
    const double* const q_i = q.at(row.query, row.head);
    double* const dq_i = r.dq.at(row.query, row.head);

    // Gradient of the weights, and its mean under them, which the softmax takes away.
    dweight.clear();
    double mean = 0;
    for (size_t n = 0; n < row.key.size(); ++n) {
      dweight.push_back(row.keep_scale[n] *
                        Dot(dout_i, v.at(row.key[n], row.head_kv), p.head_dim_v));
      mean += row.weight[n] * dweight[n];
    }
    for (size_t n = 0; n < row.key.size(); ++n) {
      double dscore = row.weight[n] * (dweight[n] - mean);
      if (dlse) dscore += row.weight[n] * *dlse->at(row.query, row.head);
      const double dproduct = dscore * row.slope[n] * p.scale;  // gradient of q_i . k_j

      const double* const k_j = k.at(row.key[n], row.head_kv);
      double* const dk_j = r.dk.at(row.key[n], row.head_kv);
      double* const dv_j = r.dv.at(row.key[n], row.head_kv);
      for (int64_t d = 0; d < p.head_dim; ++d) dq_i[d] += dproduct * k_j[d];
      for (int64_t d = 0; d < p.head_dim; ++d) dk_j[d] += dproduct * q_i[d];
      for (int64_t d = 0; d < p.head_dim_v; ++d) dv_j[d] += row.dropped[n] * dout_i[d];
    }
  });
  return r;
}

}  // namespace oracle
