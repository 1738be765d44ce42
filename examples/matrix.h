// Matrices of float32 and the product of a linear layer: what a transformer needs beside attention.
// For the examples in C++: plain loops, which the compiler vectorises.
#ifndef STROBE_EXAMPLES_MATRIX_H_
#define STROBE_EXAMPLES_MATRIX_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

// Row-major.
struct Matrix {
  Matrix() = default;
  Matrix(int64_t m, int64_t n) : rows(m), cols(n), values(static_cast<size_t>(m * n)) {}
  [[nodiscard]] std::span<float> row(int64_t i) {
    return {values.data() + i * cols, static_cast<size_t>(cols)};
  }
  [[nodiscard]] std::span<const float> row(int64_t i) const {
    return {values.data() + i * cols, static_cast<size_t>(cols)};
  }

  int64_t rows = 0, cols = 0;
  std::vector<float> values;
};

// x weight, [rows, in] [in, out]. A row's bits do not depend on the other rows. A panel of the
// weight's columns stays in cache while all rows use it, and the panel's sums in registers.
[[nodiscard]] inline Matrix Linear(const Matrix& x, const Matrix& weight) {
  constexpr int64_t kPanel = 32;
  Matrix y(x.rows, weight.cols);
  for (int64_t begin = 0; begin < weight.cols; begin += kPanel) {
    const int64_t width = std::min(kPanel, weight.cols - begin);
    for (int64_t i = 0; i < x.rows; ++i) {
      float sums[kPanel] = {};
      for (int64_t k = 0; k < x.cols; ++k) {
        const float factor = x.values[static_cast<size_t>(i * x.cols + k)];
        const float* const terms = weight.values.data() + k * weight.cols + begin;
        if (width == kPanel) {
          for (int64_t j = 0; j < kPanel; ++j) sums[j] += factor * terms[j];
        } else {
          for (int64_t j = 0; j < width; ++j) sums[j] += factor * terms[j];
        }
      }
      std::copy_n(sums, width, y.row(i).data() + begin);
    }
  }
  return y;
}

inline void Add(Matrix& x, const Matrix& y) {
  for (size_t i = 0; i < x.values.size(); ++i) x.values[i] += y.values[i];
}

#endif  // STROBE_EXAMPLES_MATRIX_H_
