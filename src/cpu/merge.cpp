#include <cmath>

#include "core/arithmetic.h"
#include "core/merge_row.h"
#include "core/problem.h"
#include "core/sink.h"
#include "core/team.h"
#include "cpu/dispatch.h"
#include "cpu/score.h"

namespace strobe::cpu {

namespace {

// Rows that a thread takes at a time, and values that are worth a thread of their own.
constexpr int64_t kRowsAtOnce = 64, kValuesPerThread = int64_t{1} << 16;

// One row of one head.
void merge_row(const MergeArgs& a, int64_t b, int64_t i, int64_t head,
               void (*from_float)(int32_t, const float*, void*, int64_t)) {
  const auto at = [&](const strobe_strides& s) {
    return b * s.batch + i * s.seqlen + head * s.head;
  };
  const float* const lses = a.lses ? a.lses + at(a.lses_strides) : nullptr;
  const float* const outs = a.outs ? a.outs + at(a.outs_strides) : nullptr;
  const auto lse_of = [&](int64_t n) { return merged_lse(lses[n * a.lses_part]); };
  // NaN is no maximum: it reaches the sum, and makes all of the row NaN.
  float largest = lse_of_no_keys();
  for (int64_t n = 0; n < a.parts; ++n) {
    const float lse = lse_of(n);
    if (lse > largest) largest = lse;
  }
  const float sink = sink_of(a.sinks, head);
  if (sink > largest) largest = sink;
  const float of_sink = sink == -kInfinity ? 0 : sink == largest ? 1 : std::exp(sink - largest);
  float sum = of_sink;
  for (int64_t n = 0; n < a.parts; ++n) {
    const float lse = lse_of(n);
    if (lse != lse_of_no_keys()) sum += std::exp(lse - largest);
  }
  const bool empty = sum == 0;
  // Weights of at most 1 together: no sum of large values overflows on its way to a smaller result.
  const int columns = static_cast<int>(a.head_dim_v);
  MergedColumns<kMostMerged> merged;
  for (int d = 0; d < columns; ++d) {
    merged.clear(d);
    // A sink's share of the weight goes with no value, as if that were 0.
    if (of_sink > 0) merged.add(d, of_sink, 0);
  }
  for (int64_t n = 0; n < a.parts; ++n) {
    const float lse = lse_of(n);
    if (lse == lse_of_no_keys()) continue;  // its outs may hold anything
    const float weight = std::exp(lse - largest) / sum;
    if (weight == 0) continue;  // so may those of one that is far below the others
    const float* const part = outs + n * a.outs_part;
    for (int d = 0; d < columns; ++d) merged.add(d, weight, part[d]);
  }
  alignas(64) float row[kMostMerged];
  for (int d = 0; d < columns; ++d) row[d] = merged.average(d);
  from_float(a.out_dtype, row,
             static_cast<std::byte*>(a.out) + at(a.out_strides) * element_size(a.out_dtype),
             a.head_dim_v);
  if (a.lse) a.lse[at(a.lse_strides)] = empty ? lse_of_no_keys() : largest + std::log(sum);
}

}  // namespace

Status merge(const MergeArgs& a) {
  const int64_t rows = a.batch * a.seqlen_q * a.heads;
  const int64_t values = rows * a.head_dim_v * max64(a.parts, 1);
  const int64_t most = threads_or_default(a.threads);
  // The last one is made for every machine, and converts to every dtype; AMX's knows bf16 alone.
  const auto from_float = instruction_sets().back()->from_float;
  const int64_t threads = min64(most, 1 + values / kValuesPerThread);
  share_out(ceil_div(rows, kRowsAtOnce), threads, [&](int64_t n) {
    const int64_t begin = n * kRowsAtOnce;
    for (int64_t row = begin; row < min64(begin + kRowsAtOnce, rows); ++row) {
      merge_row(a, row / a.heads / a.seqlen_q, row / a.heads % a.seqlen_q, row % a.heads,
                from_float);
    }
  });
  return {};
}

Status add(const AddArgs& a) {
  const int64_t rows = a.batch * a.seqlen * a.heads;
  const int64_t most = threads_or_default(a.threads);
  const InstructionSet& any = *instruction_sets().back();  // as above
  const int64_t threads = min64(most, 1 + rows * a.head_dim / kValuesPerThread);
  share_out(ceil_div(rows, kRowsAtOnce), threads, [&](int64_t n) {
    alignas(64) float sum[kMostMerged];
    const int64_t begin = n * kRowsAtOnce;
    for (int64_t row = begin; row < min64(begin + kRowsAtOnce, rows); ++row) {
      const int64_t b = row / a.heads / a.seqlen, i = row / a.heads % a.seqlen, h = row % a.heads;
      const auto at = [&](const strobe_strides& s) {
        return b * s.batch + i * s.seqlen + h * s.head;
      };
      const float* x = a.x + at(a.x_strides);
      auto* const out =
          static_cast<std::byte*>(a.out) + at(a.out_strides) * element_size(a.out_dtype);
      if (a.accumulate) {
        any.to_float(a.out_dtype, out, sum, a.head_dim);
        for (int64_t d = 0; d < a.head_dim; ++d) sum[d] += x[d];
        x = sum;
      }
      any.from_float(a.out_dtype, x, out, a.head_dim);
    }
  });
  return {};
}

}  // namespace strobe::cpu
