// The truth that the tests and `strobe check` measure against: attention in float64, written
// naively from its definition (docs/semantics.md), one query row at a time. Shares no code with the
// library, and includes none of its headers. c_api.h has it for other languages.
//
//   s_ij  = scale * q_i . k_j;  with softcap c: c * tanh(s / c);  with ALiBi: - slope *
//   |position(i) - j|;  with a bias: + b_ij;  position(i) = i + seqlen_k - seqlen_q, or i +
//   q_position;  i sees j when position(i) - left <= j <= position(i) + right and both are of one
//   chunk, or j is below the prefix;  P_ij  = exp(s_ij - max_j s_ij) / sum over the keys that i
//   sees;  lse_i = log of the sum of exp(s_ij) out_i = sum_j P_ij * keep_ij / (1 - p) * v_j
//
// A bias of -infinity hides its pair: the row does not see the key.
//
// An attention sink is one more term of the sum, exp(sink), that no value goes with: its P takes
// from the keys' and adds nothing to out. lse has it or not, as the problem says.
//
// A key that a row does not see takes no part in it: whatever stands there, NaN included, cannot
// reach the row, nor the row the key's gradients. Keys that it sees take part as in plain
// attention: with a score of +infinity, or with all scores -infinity, exp(inf - inf) makes the row
// NaN, lse too. A row that sees no key: out 0, lse -infinity, gradients 0. So have rows that belong
// to no sequence: those past a sequence's rows in use.
#ifndef STROBE_ORACLE_H_
#define STROBE_ORACLE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace oracle {

/// Dense [rows, heads, dim]. All sequences stand one after the other in `rows`, padded batches too.
struct Tensor {
  Tensor() = default;
  Tensor(int64_t rows_, int64_t heads_, int64_t dim_, double fill = 0)
      : rows(rows_),
        heads(heads_),
        dim(dim_),
        data(static_cast<size_t>(rows_ * heads_ * dim_), fill) {}

  double* at(int64_t row, int64_t head) { return data.data() + (row * heads + head) * dim; }
  const double* at(int64_t row, int64_t head) const {
    return data.data() + (row * heads + head) * dim;
  }

  int64_t rows = 0, heads = 0, dim = 0;
  std::vector<double> data;
};

/// Where one sequence's rows stand in q and in k: those in use.
struct Sequence {
  int64_t q_begin = 0, q_length = 0;
  int64_t k_begin = 0, k_length = 0;
  std::optional<int64_t> q_position = {};  // of query 0; without one the last query is at the last
                                           // key
  int64_t prefix = 0;                      // so many keys are seen by every query

  int64_t Position(int64_t i) const { return i + q_position.value_or(k_length - q_length); }
};

struct Problem {
  std::vector<Sequence> sequences;  // one for each batch entry
  int64_t heads = 1, heads_kv = 1;
  int64_t head_dim = 1, head_dim_v = 1;

  bool causal = false;
  int64_t window_left = -1, window_right = -1;  // -1 and INT64_MAX: no limit
  bool window_signed = false;                   // -1 is a limit
  int64_t attention_chunk = 0;                  // 0: off

  double scale = 1;
  double softcap = 0;         // 0: off
  std::vector<double> sinks;  // [heads]; -infinity: none; empty: off
  bool sinks_outside_lse = false;
  std::vector<double> slopes;  // ALiBi: [sequences, heads]; empty: off

  /// Additive bias [sequences * bias_queries, heads, keys], where the first two numbers and the
  /// heads may be 1: one value for all. Keys and queries count from 0 in each sequence. No rows:
  /// off.
  Tensor bias;
  int64_t bias_queries = 0;

  /// Row and head of the bias, and of its gradient, that query i of a head has.
  struct BiasPlace {
    int64_t row, head;
  };
  BiasPlace BiasAt(int64_t sequence, int64_t head, int64_t i) const {
    const int64_t first = bias.rows == bias_queries ? 0 : sequence * bias_queries;
    return {first + (bias_queries == 1 ? 0 : i), bias.heads == 1 ? 0 : head};
  }

  double dropout_p = 0;
  std::vector<uint8_t> keep;  // with dropout: [sequences, heads, keep_rows, keep_columns]
  int64_t keep_rows = 0, keep_columns = 0;

  /// Whether key j is hidden from query i of a head whatever else is said. Empty: none is.
  std::function<bool(int64_t sequence, int64_t head, int64_t i, int64_t j)> hides;

  std::vector<int64_t>
      only_rows;  // rows of q (counted through all sequences) to compute; empty: all
};

/// The keys that query i of a sequence sees in a head, smallest first. sequence: its number.
std::vector<int64_t> VisibleKeys(const Problem& p, int64_t sequence, int64_t head, int64_t i);
bool Keeps(const Problem& p, int64_t sequence, int64_t head, int64_t i, int64_t j);

struct ForwardResult {
  Tensor out;   // [rows of q, heads, head_dim_v]
  Tensor lse;   // [rows of q, heads, 1]
  Tensor size;  // [rows of q, heads, 1]: largest sum of absolute terms of a score; what rounding
                // errors scale with
  Tensor faintest = {};  // [rows of q, heads, head_dim_v]: of the keys whose v is infinite there,
                         // the least score less the row's largest; 0 where there is none
};

struct BackwardResult {
  Tensor dq, dk, dv;  // the shapes of q, k, v
  Tensor dsinks;      // [1, heads, 1]; zeros without sinks
  Tensor dbias;       // the bias's
};

ForwardResult Forward(const Problem& p, const Tensor& q, const Tensor& k, const Tensor& v);

/// Where a problem's weights lie in a larger one's: the numbers there of its first row, column and
/// head of its first sequence, and how many heads a sequence has there (0: as many as here).
struct DropoutPlace {
  int64_t row = 0, column = 0, plane = 0, heads = 0;
};

/// Dropout's decisions [batch, heads, rows, columns], 1 for what is kept, drawn by Philox4x32-10.
std::vector<uint8_t> DropoutMask(int64_t batch, int64_t heads, int64_t rows, int64_t columns,
                                 float dropout_p, uint64_t seed, uint64_t offset,
                                 const DropoutPlace& place = {});

/// Rotary embedding of the row x[position]: its pairs of elements, the first 2 * pairs of it,
/// turned by the angles whose cosine and sine the tables [positions, 1, pairs] have. interleaved:
/// a pair is 2n and 2n + 1, else n and n + pairs.
std::vector<double> Rotate(const double* x, int64_t dim, const Tensor& cosines, const Tensor& sines,
                           int64_t position, bool interleaved);

/// dlse: gradient of lse, [rows of q, heads, 1], or null.
BackwardResult Backward(const Problem& p, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& dout, const Tensor* dlse = nullptr);

/// What one sequence has of a key-value cache. Rows count from 0, before the left pad.
struct CachedSequence {
  int64_t leftpad = 0, used = 0, added = 0;  // rows to skip; rows before the append; new keys
  int64_t new_begin = 0;                     // of its new keys in k_new
  int64_t rotary_start = 0;                  // position of its first new key and first query
  std::vector<int64_t> rows = {};            // of the cache that hold its used + added rows
};

struct Cache {
  std::vector<CachedSequence> sequences;
  Tensor k, v;            // [all rows of all entries or pages, heads_kv, dim]
  Tensor k_new, v_new;    // [new rows, heads_kv, dim]; may be empty
  Tensor cosines, sines;  // [positions, 1, pairs]; empty: no rotary embedding
  bool interleaved = false;
};

/// Which row of the cache row n of a sequence is, whose pages are `pages`.
int64_t PagedRow(const int32_t* pages, int64_t page_size, int64_t n);

/// What an append writes: the new keys of all sequences one after the other, turned, and the rows
/// of the cache that they go to.
struct Appended {
  Tensor k, v;
  std::vector<int64_t> rows;
};
Appended Append(const Cache& cache);

/// The problem over keys that lie end to end which attention over a cache is. The cache holds the
/// new keys already, as the append stored them. `problem` has its queries' part of the sequences.
struct Gathered {
  Problem problem;
  Tensor q, k, v;  // q turned, in float64
};
Gathered Gather(const Problem& problem, const Cache& cache, const Tensor& q);

/// Partial results over parts of the keys joined: outs [rows, heads, dim] and lses [rows, heads, 1]
/// of each part. An lse of either infinity stands for a part in which the row has no key. sinks:
/// [heads], which the parts were computed without; empty: none.
ForwardResult Merge(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses,
                    const std::vector<double>& sinks = {});

}  // namespace oracle

#endif  // STROBE_ORACLE_H_
