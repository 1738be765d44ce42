#include "oracle.h"

#include <algorithm>
#include <array>
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
  Problem::BiasPlace bias = {0, 0};          // of its values, one for each key of the sequence
  std::vector<int64_t> key;                  // rows of k
  std::vector<int64_t> place;                // of these keys in the sequence
  std::vector<double> weight;                // P
  std::vector<double> below_largest;         // the score less the row's largest
  std::vector<double> dropped;               // P * keep / (1 - p)
  std::vector<double> keep_scale;            // keep / (1 - p)
  std::vector<double> slope;                 // d(score) / d(scaled q . k): below 1 with softcap
  double sink_weight = 0;                    // P of the sink
  std::vector<double> key_weight;            // softmax of the keys alone
  double lse = -kInfinity;
  double size = 0;
};

// The sink of a head; -infinity where it has none.
double SinkOf(const Problem& p, int64_t head) {
  return p.sinks.empty() ? -kInfinity : p.sinks[static_cast<size_t>(head)];
}

// exp(x - largest), where an x of +infinity that is itself the largest counts as 1.
double Share(double x, double largest) {
  return x == kInfinity && largest == kInfinity ? 1 : std::exp(x - largest);
}

Row MakeRow(const Problem& p, int64_t sequence, int64_t head, int64_t i, const Tensor& q,
            const Tensor& k) {
  const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
  Row row;
  row.query = s.q_begin + i;
  row.head = head;
  row.head_kv = head / (p.heads / p.heads_kv);
  if (p.bias.rows > 0) row.bias = p.BiasAt(sequence, head, i);

  double largest = -kInfinity;
  for (const int64_t j : VisibleKeys(p, sequence, head, i)) {
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
    if (p.bias.rows > 0) {
      const double bias = p.bias.at(row.bias.row, row.bias.head)[j];
      score += bias;
      size += std::fabs(bias);
    }
    row.key.push_back(s.k_begin + j);
    row.place.push_back(j);
    row.weight.push_back(score);  // becomes the weight below
    row.slope.push_back(slope);
    row.keep_scale.push_back(p.dropout_p > 0 ? Keeps(p, sequence, head, i, j) / (1 - p.dropout_p)
                                             : 1.0);
    largest = std::max(largest, score);
    if (std::isfinite(size)) row.size = std::max(row.size, size);
  }
  const double sink = SinkOf(p, head);
  const bool has_sink = sink != -kInfinity;  // NaN is one
  if (row.key.empty()) {
    row.sink_weight = has_sink ? 1 : 0;
    if (!p.sinks_outside_lse) row.lse = sink;
    if (std::isfinite(sink)) row.size = std::fabs(sink);
    return row;
  }

  // Beside a sink, keys whose scores are all -infinity have the weight 0, and their lse is that.
  const double reference = has_sink && largest == -kInfinity ? 0 : largest;
  double sum_of_keys = 0;
  for (const double w : row.weight) {
    row.key_weight.push_back(std::exp(w - reference));
    sum_of_keys += row.key_weight.back();
  }
  for (double& w : row.key_weight) w = sum_of_keys == 0 ? 0 : w / sum_of_keys;
  const double lse_of_keys = reference + std::log(sum_of_keys);

  if (has_sink) largest = std::isnan(sink) ? sink : std::max(largest, sink);
  double sum = has_sink ? Share(sink, largest) : 0;
  for (double& w : row.weight) {
    row.below_largest.push_back(w - largest);
    sum += (w = std::exp(w - largest));
  }
  for (size_t n = 0; n < row.key.size(); ++n) {
    row.weight[n] /= sum;
    row.dropped.push_back(row.weight[n] * row.keep_scale[n]);
  }
  if (has_sink) row.sink_weight = Share(sink, largest) / sum;
  if (std::isfinite(sink)) row.size = std::max(row.size, std::fabs(sink));
  row.lse = p.sinks_outside_lse ? lse_of_keys : largest + std::log(sum);
  return row;
}

// out_i: 0 for a row that sees no key.
std::vector<double> Output(const Problem& p, const Row& row, const Tensor& v) {
  std::vector<double> out(static_cast<size_t>(p.head_dim_v), 0.0);
  for (size_t n = 0; n < row.key.size(); ++n) {
    const double* const vj = v.at(row.key[n], row.head_kv);
    for (size_t d = 0; d < out.size(); ++d) out[d] += row.dropped[n] * vj[d];
  }
  return out;
}

// The four words of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
// 2011) for eight keys of a row. The counter has no room for the offset's high half, which changes
// the key.
std::array<uint32_t, 4> Philox(int64_t keys, int64_t row, int64_t plane, uint64_t seed,
                               uint64_t offset) {
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x & 0xFFFFFFFF); };
  const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
  constexpr uint32_t kStep[2] = {0x9E3779B9, 0xBB67AE85};
  uint32_t key[2] = {low(seed), high(seed) ^ low(uint64_t{high(offset)} * kStep[0])};
  std::array<uint32_t, 4> x = {low(static_cast<uint64_t>(keys)), low(static_cast<uint64_t>(row)),
                               low(static_cast<uint64_t>(plane)), low(offset)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * x[0], b = uint64_t{0xCD9E8D57} * x[2];
    x = {high(b) ^ x[1] ^ key[0], low(b), high(a) ^ x[3] ^ key[1], low(a)};
    for (int n = 0; n < 2; ++n) key[n] += kStep[n];
  }
  return x;
}

void CopyRow(const Tensor& from, int64_t row, Tensor& to, int64_t to_row) {
  std::copy_n(from.at(row, 0), from.heads * from.dim, to.at(to_row, 0));
}

// A row of x as it is at that position of the rotary tables.
void TurnRow(const Cache& cache, Tensor& x, int64_t row, int64_t position) {
  for (int64_t h = 0; cache.cosines.dim > 0 && h < x.heads; ++h) {
    const std::vector<double> y =
        Rotate(x.at(row, h), x.dim, cache.cosines, cache.sines, position, cache.interleaved);
    std::copy(y.begin(), y.end(), x.at(row, h));
  }
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

std::vector<int64_t> VisibleKeys(const Problem& p, int64_t sequence, int64_t head, int64_t i) {
  const Sequence& s = p.sequences[static_cast<size_t>(sequence)];
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
    if (!seen && j >= s.prefix) continue;
    if (p.hides && p.hides(sequence, head, i, j)) continue;
    if (p.bias.rows > 0) {
      const Problem::BiasPlace at = p.BiasAt(sequence, head, i);
      if (p.bias.at(at.row, at.head)[j] == -kInfinity) continue;
    }
    keys.push_back(j);
  }
  return keys;
}

bool Keeps(const Problem& p, int64_t sequence, int64_t head, int64_t i, int64_t j) {
  const int64_t row = (sequence * p.heads + head) * p.keep_rows + i;
  return p.keep[static_cast<size_t>(row * p.keep_columns + j)] != 0;
}

ForwardResult Forward(const Problem& p, const Tensor& q, const Tensor& k, const Tensor& v) {
  ForwardResult r{Tensor(q.rows, p.heads, p.head_dim_v), Tensor(q.rows, p.heads, 1, -kInfinity),
                  Tensor(q.rows, p.heads, 1), Tensor(q.rows, p.heads, p.head_dim_v)};
  const bool infinite =
      std::any_of(v.data.begin(), v.data.end(), [](double x) { return std::isinf(x); });
  ForEachRow(p, q, k, [&](const Row& row) {
    *r.lse.at(row.query, row.head) = row.lse;
    *r.size.at(row.query, row.head) = row.size;
    const std::vector<double> out = Output(p, row, v);
    std::copy(out.begin(), out.end(), r.out.at(row.query, row.head));
    double* const faintest = r.faintest.at(row.query, row.head);
    for (size_t n = 0; infinite && n < row.key.size(); ++n) {
      const double* const vj = v.at(row.key[n], row.head_kv);
      for (int64_t d = 0; d < p.head_dim_v; ++d) {
        if (std::isinf(vj[d])) faintest[d] = std::min(faintest[d], row.below_largest[n]);
      }
    }
  });
  return r;
}

std::vector<uint8_t> DropoutMask(int64_t batch, int64_t heads, int64_t rows, int64_t columns,
                                 float dropout_p, uint64_t seed, uint64_t offset,
                                 const DropoutPlace& place) {
  const auto threshold = static_cast<uint32_t>(dropout_p * 65536.0F + 0.5F);
  std::vector<uint8_t> keep;
  const int64_t heads_there = place.heads == 0 ? heads : place.heads;
  for (int64_t n = 0; n < batch * heads; ++n) {
    const int64_t plane = place.plane + n / heads * heads_there + n % heads;
    for (int64_t i = 0; i < rows; ++i) {
      std::array<uint32_t, 4> words = {};
      for (int64_t j = place.column; j < place.column + columns; ++j) {
        if (j == place.column || j % 8 == 0)
          words = Philox(j / 8, place.row + i, plane, seed, offset);
        const uint32_t word = words[static_cast<size_t>(j / 2 % 4)];
        keep.push_back((j % 2 == 0 ? word % 65536 : word / 65536) >= threshold);
      }
    }
  }
  return keep;
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
                   Tensor(v.rows, p.heads_kv, p.head_dim_v), Tensor(1, p.heads, 1),
                   Tensor(p.bias.rows, p.bias.heads, p.bias.dim)};
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
    if (row.sink_weight != 0) {
      double dsink = -mean;  // the sink's own weight has no gradient: no value goes with it
      if (dlse && !p.sinks_outside_lse) dsink += *dlse->at(row.query, row.head);
      *r.dsinks.at(0, row.head) += row.sink_weight * dsink;
    }
    for (size_t n = 0; n < row.key.size(); ++n) {
      double dscore = row.weight[n] * (dweight[n] - mean);
      const double in_lse = p.sinks_outside_lse ? row.key_weight[n] : row.weight[n];
      if (dlse) dscore += in_lse * *dlse->at(row.query, row.head);
      if (p.bias.rows > 0) r.dbias.at(row.bias.row, row.bias.head)[row.place[n]] += dscore;
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

int64_t PagedRow(const int32_t* pages, int64_t page_size, int64_t n) {
  return pages[n / page_size] * page_size + n % page_size;
}

Appended Append(const Cache& cache) {
  Appended a;
  for (const CachedSequence& s : cache.sequences)
    a.rows.insert(a.rows.end(), s.rows.begin() + s.used, s.rows.begin() + s.used + s.added);
  const auto count = static_cast<int64_t>(a.rows.size());
  a.k = Tensor(count, cache.k_new.heads, cache.k_new.dim);
  a.v = Tensor(count, cache.v_new.heads, cache.v_new.dim);
  int64_t row = 0;
  for (const CachedSequence& s : cache.sequences) {
    for (int64_t i = 0; i < s.added; ++i, ++row) {
      CopyRow(cache.k_new, s.new_begin + i, a.k, row);
      CopyRow(cache.v_new, s.new_begin + i, a.v, row);
      TurnRow(cache, a.k, row, s.rotary_start + i);
    }
  }
  return a;
}

Gathered Gather(const Problem& problem, const Cache& cache, const Tensor& q) {
  Gathered g{problem, q, {}, {}};
  const Problem& p = problem;
  int64_t keys = 0;
  for (const CachedSequence& s : cache.sequences) keys += s.used + s.added - s.leftpad;
  g.k = Tensor(keys, cache.k.heads, cache.k.dim);
  g.v = Tensor(keys, cache.v.heads, cache.v.dim);
  // Without a mask all queries of a sequence have one position in the tables.
  const bool limited = p.window_signed || p.window_left >= 0 || p.window_right >= 0;
  const bool move = p.causal || limited || p.attention_chunk > 0;
  int64_t key = 0;
  for (size_t b = 0; b < cache.sequences.size(); ++b) {
    const CachedSequence& s = cache.sequences[b];
    Sequence& sequence = g.problem.sequences[b];
    sequence.k_begin = key;
    sequence.k_length = s.used + s.added - s.leftpad;
    for (int64_t n = s.leftpad; n < s.used + s.added; ++n, ++key) {
      CopyRow(cache.k, s.rows[static_cast<size_t>(n)], g.k, key);
      CopyRow(cache.v, s.rows[static_cast<size_t>(n)], g.v, key);
    }
    for (int64_t i = 0; i < sequence.q_length; ++i)
      TurnRow(cache, g.q, sequence.q_begin + i, s.rotary_start + (move ? i : 0));
  }
  return g;
}

ForwardResult Merge(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses,
                    const std::vector<double>& sinks) {
  const Tensor& like = outs.front();
  ForwardResult r{Tensor(like.rows, like.heads, like.dim),
                  Tensor(like.rows, like.heads, 1, -kInfinity), Tensor()};
  for (int64_t row = 0; row < like.rows; ++row) {
    for (int64_t h = 0; h < like.heads; ++h) {
      double largest = -kInfinity, sum = 0;
      std::vector<size_t> parts;
      for (size_t n = 0; n < outs.size(); ++n) {
        if (!std::isinf(*lses[n].at(row, h))) parts.push_back(n);
      }
      const double sink = sinks.empty() ? -kInfinity : sinks[static_cast<size_t>(h)];
      for (const size_t n : parts) largest = std::fmax(largest, *lses[n].at(row, h));
      largest = std::fmax(largest, sink);
      for (const size_t n : parts) sum += std::exp(*lses[n].at(row, h) - largest);
      if (sink != -kInfinity) sum += Share(sink, largest);
      if (parts.empty() && sink == -kInfinity) continue;
      const double lse = *r.lse.at(row, h) = largest + std::log(sum);
      for (const size_t n : parts) {
        const double weight = std::exp(*lses[n].at(row, h) - lse);
        if (static_cast<float>(weight) == 0) continue;  // whatever outs hold
        for (int64_t d = 0; d < like.dim; ++d)
          r.out.at(row, h)[d] += weight * outs[n].at(row, h)[d];
      }
    }
  }
  return r;
}

}  // namespace oracle
