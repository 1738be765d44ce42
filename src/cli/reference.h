// Plain attention, written to be obviously right: what `strobe check` holds the library against.
//
// It shares no code with the library but the names of options. In float64 it is the truth; in
// another arithmetic it is what a framework computes with plain tensor operations of that dtype
// (matrix products summed in float32, each intermediate rounded to the dtype), and its error is the
// yardstick for the library's.
#ifndef STROBE_CLI_REFERENCE_H_
#define STROBE_CLI_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "core/options.h"

namespace strobe::cli {

enum class Arithmetic { kFloat64, kFloat32, kBFloat16, kFloat16 };

// Sequences lie end to end: sequence b has the rows offsets[b] to offsets[b + 1] - 1.
struct ReferenceProblem {
  int64_t heads = 1;
  int64_t heads_kv = 1;
  int64_t head_dim = 1;
  int64_t head_dim_v = 1;
  std::vector<int64_t> offsets_q;  // [batch + 1]
  std::vector<int64_t> offsets_k;  // [batch + 1]
  bool causal = false;
  int64_t window_left = -1;
  int64_t window_right = -1;
  int64_t attention_chunk = 0;                 // 0: off
  ArraysOf<std::vector<int32_t>> arrays = {};  // [batch]; empty: none
  double scale = 1;
  double softcap = 0;
  double dropout_p = 0;
  int64_t keep_rows = 0;  // extents of the last two dimensions of keep
  int64_t keep_cols = 0;
  std::vector<uint8_t> keep;   // [batch, heads, keep_rows, keep_cols], when dropout_p > 0
  std::vector<double> slopes;  // ALiBi: [batch, heads], or empty
};

struct ReferenceInputs {
  std::vector<double> q;     // [rows_q, heads, head_dim]
  std::vector<double> k;     // [rows_k, heads_kv, head_dim]
  std::vector<double> v;     // [rows_k, heads_kv, head_dim_v]
  std::vector<double> dout;  // [rows_q, heads, head_dim_v]; empty: forward only
  std::vector<double> dlse;  // [rows_q, heads]; empty: none
};

struct ReferenceResult {
  std::vector<double> out;  // [rows_q, heads, head_dim_v]
  std::vector<double> lse;  // [rows_q, heads]
  std::vector<double> dq;   // as q; the gradients are empty without dout
  std::vector<double> dk;
  std::vector<double> dv;
};

[[nodiscard]] ReferenceResult PlainAttention(const ReferenceProblem& problem,
                                             const ReferenceInputs& inputs, Arithmetic arithmetic);

}  // namespace strobe::cli

#endif  // STROBE_CLI_REFERENCE_H_
