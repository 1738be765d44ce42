#include "cli/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace strobe::cli {

Arithmetic ArithmeticOf(DType dtype) {
  return dtype == DType::kFloat32    ? Arithmetic::kFloat32
         : dtype == DType::kBFloat16 ? Arithmetic::kBFloat16
                                     : Arithmetic::kFloat16;
}

double CompareTensor(const char* name, const std::vector<double>& got,
                     const std::vector<double>& plain, const std::vector<double>& truth,
                     double factor, double epsilon, std::string* what) {
  double largest = 0;
  double plain_error = 0;
  double error = 0;
  size_t worst = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    if (!std::isfinite(truth[i]) || !std::isfinite(got[i])) {
      if (got[i] == truth[i] || (std::isnan(got[i]) && std::isnan(truth[i]))) continue;
      *what = fmt::format("{}[{}] = {}, expected {}", name, i, got[i], truth[i]);
      return std::numeric_limits<double>::infinity();
    }
    largest = std::max(largest, std::abs(truth[i]));
    if (std::isfinite(plain[i])) plain_error = std::max(plain_error, std::abs(plain[i] - truth[i]));
    if (std::abs(got[i] - truth[i]) > error) {
      error = std::abs(got[i] - truth[i]);
      worst = i;
    }
  }
  const double allowed = factor * plain_error + 1e-5 + epsilon / 2 * largest;
  if (error > allowed) {
    *what = fmt::format("{}[{}] = {:.7g}, expected {:.7g}: off by {:.3g}, allowed {:.3g}", name,
                        worst, got[worst], truth[worst], error, allowed);
  }
  return error / allowed;
}

}  // namespace strobe::cli
