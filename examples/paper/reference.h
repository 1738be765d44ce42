// Attention in float64 on the host, written from its definition, and what a step's results are held
// against it with.
#ifndef STROBE_EXAMPLES_PAPER_REFERENCE_H_
#define STROBE_EXAMPLES_PAPER_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "steps.h"

namespace strobe::paper {

struct Case {
  int head_dim, seqlen;
  bool causal;
  int batch = 2, heads = 2;

  int64_t rows() const { return int64_t{batch} * seqlen * heads; }
  int64_t elements() const { return rows() * head_dim; }
  int64_t scores() const { return rows() * stride_of_scores(seqlen); }
  float scale() const { return static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim))); }
};

inline double number(bf16 x) { return static_cast<double>(static_cast<float>(x)); }
inline double rounded(double x) { return number(bf16(static_cast<float>(x))); }

/// Attention, and the largest errors that roundings to bf16 alone make in the same formula: of
/// weights and outputs in the flash steps, and of the scores too in standard attention.
struct Reference {
  std::vector<double> out, lse;
  double flash_error = 0, standard_error = 0;
};

inline Reference reference_of(const Case& c, const std::vector<bf16>& q, const std::vector<bf16>& k,
                              const std::vector<bf16>& v) {
  Reference result;
  result.out.resize(static_cast<size_t>(c.elements()));
  result.lse.resize(static_cast<size_t>(c.rows()));
  const double scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  const auto n = static_cast<size_t>(c.seqlen), d = static_cast<size_t>(c.head_dim);
  const auto heads = static_cast<size_t>(c.heads);
  std::vector<double> score(n);
  for (size_t b = 0; b < static_cast<size_t>(c.batch); ++b) {
    for (size_t h = 0; h < heads; ++h) {
      const auto at = [&](size_t row) { return ((b * n + row) * heads + h) * d; };
      for (size_t i = 0; i < n; ++i) {
        const size_t keys = c.causal ? i + 1 : n;
        double max = -std::numeric_limits<double>::infinity(), bf16_max = max;
        for (size_t j = 0; j < keys; ++j) {
          double dot = 0;
          for (size_t x = 0; x < d; ++x) dot += number(q[at(i) + x]) * number(k[at(j) + x]);
          score[j] = scale * dot;
          max = std::max(max, score[j]);
          bf16_max = std::max(bf16_max, rounded(score[j]));
        }
        double sum = 0, bf16_sum = 0;
        for (size_t j = 0; j < keys; ++j) {
          sum += std::exp(score[j] - max);
          bf16_sum += std::exp(rounded(score[j]) - bf16_max);
        }
        result.lse[(b * heads + h) * n + i] = max + std::log(sum);
        for (size_t x = 0; x < d; ++x) {
          double exact = 0, flash = 0, standard = 0;
          for (size_t j = 0; j < keys; ++j) {
            const double value = number(v[at(j) + x]), weight = std::exp(score[j] - max);
            exact += weight * value;
            flash += rounded(weight) * value;
            standard += rounded(std::exp(rounded(score[j]) - bf16_max) / bf16_sum) * value;
          }
          exact /= sum;
          result.out[at(i) + x] = exact;
          result.flash_error = std::max(result.flash_error, std::abs(rounded(flash / sum) - exact));
          result.standard_error =
              std::max(result.standard_error, std::abs(rounded(standard) - exact));
        }
      }
    }
  }
  return result;
}

/// Values behind the end of every array that a step writes, to see that it does not write there:
/// more than a tile.
inline constexpr int64_t kGuard = 128 * 128 * 4;

/// All that a step wrote, and the guards; where it wrote nothing every bit is set.
struct Results {
  std::vector<bf16> out, scores;
  std::vector<float> row_max, row_sum, lse;
};

/// Largest difference; inf where there is a NaN.
template <typename T>
double difference(const std::vector<T>& got, const std::vector<double>& want) {
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = std::abs(static_cast<double>(static_cast<float>(got[i])) - want[i]);
    worst = d <= worst ? worst : std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
  }
  return worst;
}

/// Whether all bits are still set behind the first `count` values.
template <typename T>
bool untouched(const std::vector<T>& values, int64_t count) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(values.data());
  return std::all_of(bytes + static_cast<size_t>(count) * sizeof(T),
                     bytes + values.size() * sizeof(T), [](unsigned char x) { return x == 0xff; });
}

/// `error` of out may be `allowed`: twice what rounding to bf16 makes in float64. lse may be off by
/// 1e-4, some hundred float32 roundings of values near 8.
struct Verdict {
  double error, allowed, lse_error;
  bool wrote_elsewhere;

  bool fine() const { return error <= allowed && lse_error <= 1e-4 && !wrote_elsewhere; }
};

inline Verdict judge(Step step, const Case& c, const Reference& want, const Results& got) {
  const Stores stores = stores_of(step);
  const double rounding = step == kStandard ? want.standard_error : want.flash_error;
  Verdict verdict{difference(got.out, want.out), 2 * rounding + 1e-6, 0, false};
  verdict.wrote_elsewhere = !untouched(got.out, c.elements()) ||
                            !untouched(got.scores, stores.scores ? c.scores() : 0) ||
                            !untouched(got.row_max, stores.max_and_sum ? c.rows() : 0) ||
                            !untouched(got.row_sum, stores.max_and_sum ? c.rows() : 0) ||
                            !untouched(got.lse, stores.lse ? c.rows() : 0);
  std::vector<float> lse = got.lse;
  for (size_t row = 0; stores.max_and_sum && row < want.lse.size(); ++row) {
    lse[row] = got.row_max[row] + std::log(got.row_sum[row]);
  }
  if (stores.lse || stores.max_and_sum) verdict.lse_error = difference(lse, want.lse);
  return verdict;
}

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_REFERENCE_H_
