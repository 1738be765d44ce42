// Standard attention, for the demo to compare with: S = Q K^T, P = softmax(S), O = P V, with the
// seqlen x seqlen matrices in memory, as a framework without FlashAttention runs it
// (FlashAttention-2 paper, section 2.2).
//
// Written to be a fair opponent: packed and register-blocked matrix products, a vectorised
// exponential, the widest instruction set that Strobe uses too, threads over heads and rows, and
// softmax in place, so that one matrix is enough for the forward pass. In double it is also the
// truth that errors are measured against.
#ifndef STROBE_EXAMPLES_STANDARD_ATTENTION_H_
#define STROBE_EXAMPLES_STANDARD_ATTENTION_H_

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>
#include <type_traits>

#include "core/team.h"

namespace strobe::demo {

// The three inner loops, on vectors of kBytes. Rows are a multiple of the vector long.
template <typename T, int kBytes, int kRowsAtOnce>
struct Loops {
  typedef T V __attribute__((vector_size(kBytes)));
  using I = decltype(V{} > V{});
  static constexpr int kLanes = kBytes / sizeof(T);
  static constexpr int kRows = kRowsAtOnce;  // of one block of the product
  static constexpr int kCols = 2 * kLanes;

  [[gnu::always_inline]] static void Get(const T* p, V& v) { std::memcpy(&v, p, sizeof v); }
  [[gnu::always_inline]] static void Put(T* p, const V& v) { std::memcpy(p, &v, sizeof v); }

  // c[kRows][kCols] (+)= a[depth][kRows] * b[depth][kCols], a and b packed.
  [[gnu::always_inline]] static void Product(int64_t depth, const T* a, const T* b, T* c,
                                             int64_t ldc, bool add) {
    V sum[kRows][2] = {};
    for (int64_t k = 0; k < depth; ++k) {
      V b0, b1;
      Get(b + k * kCols, b0);
      Get(b + k * kCols + kLanes, b1);
      for (int i = 0; i < kRows; ++i) {
        sum[i][0] += a[k * kRows + i] * b0;
        sum[i][1] += a[k * kRows + i] * b1;
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < 2; ++j) {
        V old = {};
        if (add) Get(c + i * ldc + j * kLanes, old);
        Put(c + i * ldc + j * kLanes, sum[i][j] + old);
      }
    }
  }

  // x becomes exp(x), for x <= 0. In float 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2], good to
  // 1 ulp or so.
  [[gnu::always_inline]] static void Exp(V& x) {
    if constexpr (std::is_same_v<T, float>) {
      constexpr float kRound = 0x1.8p23F;  // adding it leaves the nearest integer in the low bits
      const V clamped = x < -87.0F ? V{} - 87.0F : x;
      const V shifted = clamped * 1.44269504F + kRound;
      const V n = shifted - kRound;
      const V r = (clamped - n * 0.693145752F) - n * 1.42860682e-6F;  // ln 2 in two parts
      V p = r * 1.3888889e-3F + 8.3333333e-3F;
      p = p * r + 4.1666667e-2F;
      p = p * r + 1.6666667e-1F;
      p = p * r + 0.5F;
      p = p * (r * r) + r;
      const V power = (V)(((I)shifted + 127) << 23);  // a cast between vectors keeps the bits
      x = p * power + power;
    } else {
      for (int i = 0; i < kLanes; ++i) x[i] = std::exp(x[i]);
    }
  }

  [[gnu::always_inline]] static void Scale(T* row, int64_t n, T factor) {
    for (int64_t j = 0; j < n; j += kLanes) {
      V x;
      Get(row + j, x);
      Put(row + j, x * factor);
    }
  }

  // row becomes softmax(row).
  [[gnu::always_inline]] static void Softmax(T* row, int64_t n) {
    V max;
    Get(row, max);
    for (int64_t j = kLanes; j < n; j += kLanes) {
      V x;
      Get(row + j, x);
      max = x > max ? x : max;
    }
    T top = max[0];
    for (int i = 1; i < kLanes; ++i) top = std::max<T>(top, max[i]);
    V sums = {};
    for (int64_t j = 0; j < n; j += kLanes) {
      V x;
      Get(row + j, x);
      x -= top;
      Exp(x);
      sums += x;
      Put(row + j, x);
    }
    T sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += sums[i];
    Scale(row, n, 1 / sum);
  }

  // dp becomes p * (dp - sum(p * dp)): the gradient of softmax.
  [[gnu::always_inline]] static void SoftmaxGradient(const T* p, T* dp, int64_t n) {
    V sums = {};
    for (int64_t j = 0; j < n; j += kLanes) {
      V x, dx;
      Get(p + j, x);
      Get(dp + j, dx);
      sums += x * dx;
    }
    T sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += sums[i];
    for (int64_t j = 0; j < n; j += kLanes) {
      V x, dx;
      Get(p + j, x);
      Get(dp + j, dx);
      Put(dp + j, x * (dx - sum));
    }
  }
};

// The loops of one instruction set, behind pointers.
template <typename T>
struct Kernels {
  int rows, cols;
  void (*product)(int64_t depth, const T* a, const T* b, T* c, int64_t ldc, bool add);
  void (*scale)(T* row, int64_t n, T factor);
  void (*softmax)(T* row, int64_t n);
  void (*softmax_gradient)(const T* p, T* dp, int64_t n);
};

// One set of functions compiled for TARGET, with vectors of BYTES and ROWS rows of the product at
// once.
#define STROBE_DEMO_KERNELS(NAME, TARGET, BYTES, ROWS)                                   \
  template <typename T>                                                                  \
  struct NAME {                                                                          \
    using L = Loops<T, BYTES, ROWS>;                                                     \
    TARGET static void Product(int64_t depth, const T* a, const T* b, T* c, int64_t ldc, \
                               bool add) {                                               \
      L::Product(depth, a, b, c, ldc, add);                                              \
    }                                                                                    \
    TARGET static void Scale(T* row, int64_t n, T factor) { L::Scale(row, n, factor); }  \
    TARGET static void Softmax(T* row, int64_t n) { L::Softmax(row, n); }                \
    TARGET static void SoftmaxGradient(const T* p, T* dp, int64_t n) {                   \
      L::SoftmaxGradient(p, dp, n);                                                      \
    }                                                                                    \
    static constexpr Kernels<T> kKernels = {L::kRows, L::kCols, Product,                 \
                                            Scale,    Softmax,  SoftmaxGradient};        \
  };

STROBE_DEMO_KERNELS(Portable, , 16, 4)
#if defined(__x86_64__)
STROBE_DEMO_KERNELS(Avx2, __attribute__((target("avx2,fma"))), 32, 6)
STROBE_DEMO_KERNELS(Avx512, __attribute__((target("avx512f"))), 64, 12)
#endif
#undef STROBE_DEMO_KERNELS

// isa: the one that Strobe uses, "portable", "avx2", "avx512", "avx512_bf16", "amx" or
// "neon".
template <typename T>
[[nodiscard]] inline const Kernels<T>& KernelsFor(std::string_view isa) {
#if defined(__x86_64__)
  if (isa.starts_with("avx512") || isa == "amx") return Avx512<T>::kKernels;
  if (isa == "avx2") return Avx2<T>::kKernels;
#endif
  (void)isa;
  return Portable<T>::kKernels;
}

// A matrix inside something larger; either dimension may be the contiguous one.
template <typename T>
struct Matrix {
  T* data;
  int64_t row_stride, col_stride;

  [[nodiscard]] Matrix Transposed() const { return {data, col_stride, row_stride}; }
};

template <typename T>
class StandardAttention {
 public:
  // Tensors are [seqlen, heads, dim]; seqlen and dim are multiples of 32. `round` is applied to
  // each intermediate, as a framework stores them in the tensors' dtype; null: none.
  StandardAttention(int64_t seqlen, int64_t heads, int64_t dim, bool backward, std::string_view isa,
                    T (*round)(T) = nullptr)
      : seqlen_(seqlen), heads_(heads), dim_(dim), kernels_(KernelsFor<T>(isa)), round_(round) {
    p_ = Touched();
    if (backward) dp_ = Touched();
  }

  // Of the seqlen x seqlen matrices.
  [[nodiscard]] static double ExtraBytes(int64_t seqlen, int64_t heads, bool backward) {
    return static_cast<double>(seqlen) * static_cast<double>(seqlen * heads) * sizeof(T) *
           (backward ? 2 : 1);
  }

  void Forward(const T* q, const T* k, const T* v, T* out) {
    const T scale = 1 / std::sqrt(static_cast<T>(dim_));
    Multiply(Tensor(q), false, Tensor(k), true, Square(p_), seqlen_, dim_, seqlen_);
    EachRow([&](int64_t at) {
      kernels_.scale(&p_[at], seqlen_, scale);
      Round(&p_[at]);
      kernels_.softmax(&p_[at], seqlen_);
      Round(&p_[at]);
    });
    Multiply(Square(p_), false, Tensor(v), false, Tensor(out), seqlen_, seqlen_, dim_);
    RoundTensor(out);
  }

  // After Forward.
  void Backward(const T* q, const T* k, const T* v, const T* dout, T* dq, T* dk, T* dv) {
    const T scale = 1 / std::sqrt(static_cast<T>(dim_));
    Multiply(Square(p_), true, Tensor(dout), false, Tensor(dv), seqlen_, seqlen_, dim_);
    Multiply(Tensor(dout), false, Tensor(v), true, Square(dp_), seqlen_, dim_, seqlen_);
    EachRow([&](int64_t at) {
      Round(&dp_[at]);
      kernels_.softmax_gradient(&p_[at], &dp_[at], seqlen_);
      Round(&dp_[at]);
      kernels_.scale(&dp_[at], seqlen_, scale);
      Round(&dp_[at]);
    });
    Multiply(Square(dp_), false, Tensor(k), false, Tensor(dq), seqlen_, seqlen_, dim_);
    Multiply(Square(dp_), true, Tensor(q), false, Tensor(dk), seqlen_, seqlen_, dim_);
    for (T* gradient : {dq, dk, dv}) RoundTensor(gradient);
  }

 private:
  static constexpr int64_t kBlockRows = 96;  // a multiple of every kRows
  static constexpr int64_t kBlockCols = 512;
  static constexpr int64_t kBlockDepth = 256;

  // One operand for all heads.
  struct Operand {
    T* data;
    int64_t head_stride, row_stride;
  };
  [[nodiscard]] Operand Tensor(const T* x) const {
    return {const_cast<T*>(x), dim_, heads_ * dim_};
  }
  [[nodiscard]] Operand Square(const std::unique_ptr<T[]>& x) const {
    return {x.get(), seqlen_ * seqlen_, seqlen_};
  }

  // Memory that the operating system has handed out already, so that no timing counts that.
  [[nodiscard]] std::unique_ptr<T[]> Touched() const {
    std::unique_ptr<T[]> memory(new T[static_cast<size_t>(heads_ * seqlen_ * seqlen_)]);
    EachRow([&](int64_t at) { std::fill_n(&memory[at], seqlen_, T{0}); });
    return memory;
  }

  // work(where the row begins), each thread with the rows of one run.
  template <typename Work>
  void EachRow(Work work) const {
    const int64_t rows = heads_ * seqlen_, threads = default_threads();
    const int64_t run = (rows + threads - 1) / threads;
    share_out(threads, threads, [&](int64_t n) {
      const int64_t end = std::min(rows, (n + 1) * run);
      for (int64_t row = n * run; row < end; ++row) work(row * seqlen_);
    });
  }

  void Round(T* row) const {
    if (round_ == nullptr) return;
    for (int64_t j = 0; j < seqlen_; ++j) row[j] = round_(row[j]);
  }
  void RoundTensor(T* x) const {
    if (round_ == nullptr) return;
    for (int64_t i = 0; i < seqlen_ * heads_ * dim_; ++i) x[i] = round_(x[i]);
  }

  // c = op(a) op(b) for every head: rows x depth times depth x cols.
  void Multiply(Operand a, bool transpose_a, Operand b, bool transpose_b, Operand c, int64_t rows,
                int64_t depth, int64_t cols) const {
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
    constexpr size_t kPackedA = kBlockRows * kBlockDepth, kPackedB = kBlockDepth * kBlockCols;
    const std::unique_ptr<T[]> callers(new T[kPackedA + kPackedB]);
    std::atomic<int64_t> next{0};
    parallel(default_threads(), [&](int thread) {
      // The others do without a thread for which there is no memory.
      const std::unique_ptr<T[]> own(thread == 0 ? nullptr
                                                 : new (std::nothrow) T[kPackedA + kPackedB]);
      T* const packed = thread == 0 ? callers.get() : own.get();
      if (packed == nullptr) return;
      for (int64_t n; (n = next.fetch_add(1, std::memory_order_relaxed)) < heads_ * blocks;) {
        const int64_t h = n / blocks, row = n % blocks * kBlockRows;
        Matrix<T> ma = {a.data + h * a.head_stride, a.row_stride, 1};
        Matrix<T> mb = {b.data + h * b.head_stride, b.row_stride, 1};
        if (transpose_a) ma = ma.Transposed();
        if (transpose_b) mb = mb.Transposed();
        ma.data += row * ma.row_stride;
        Block(ma, mb, c.data + h * c.head_stride + row * c.row_stride, c.row_stride,
              std::min(kBlockRows, rows - row), depth, cols, packed, packed + kPackedA);
      }
    });
  }

  // At most kBlockRows rows of one product.
  void Block(Matrix<T> a, Matrix<T> b, T* c, int64_t ldc, int64_t rows, int64_t depth, int64_t cols,
             T* packed_a, T* packed_b) const {
    for (int64_t k = 0; k < depth; k += kBlockDepth) {
      const int64_t deep = std::min(kBlockDepth, depth - k);
      Pack({a.data + k * a.col_stride, a.col_stride, a.row_stride}, deep, rows, kernels_.rows,
           packed_a);
      for (int64_t j = 0; j < cols; j += kBlockCols) {
        const int64_t wide = std::min(kBlockCols, cols - j);
        Pack({b.data + k * b.row_stride + j * b.col_stride, b.row_stride, b.col_stride}, deep, wide,
             kernels_.cols, packed_b);
        Tiles(packed_a, packed_b, c + j, ldc, rows, deep, wide, k > 0);
      }
    }
  }

  // [depth][width] into panels [width / panel][depth][panel], filled up with zeros.
  static void Pack(Matrix<T> from, int64_t depth, int64_t width, int64_t panel, T* to) {
    for (int64_t j = 0; j < width; j += panel) {
      const int64_t n = std::min(panel, width - j);
      if (from.col_stride == 1) {
        for (int64_t k = 0; k < depth; ++k) {
          const T* row = from.data + k * from.row_stride + j;
          std::copy_n(row, n, to + k * panel);
          std::fill(to + k * panel + n, to + (k + 1) * panel, T{0});
        }
      } else {
        for (int64_t i = 0; i < panel; ++i) {
          const T* col = from.data + (j + i) * from.col_stride;
          for (int64_t k = 0; k < depth; ++k)
            to[k * panel + i] = i < n ? col[k * from.row_stride] : T{0};
        }
      }
      to += depth * panel;
    }
  }

  void Tiles(const T* packed_a, const T* packed_b, T* c, int64_t ldc, int64_t rows, int64_t depth,
             int64_t cols, bool add) const {
    const int64_t tile_rows = kernels_.rows;
    const int64_t tile_cols = kernels_.cols;
    for (int64_t j = 0; j < cols; j += tile_cols) {
      for (int64_t i = 0; i < rows; i += tile_rows) {
        const T* a = packed_a + i * depth;
        const T* b = packed_b + j * depth;
        const int64_t high = std::min(tile_rows, rows - i);
        const int64_t wide = std::min(tile_cols, cols - j);
        if (high == tile_rows && wide == tile_cols) {
          kernels_.product(depth, a, b, c + i * ldc + j, ldc, add);
          continue;
        }
        T edge[12 * 32];  // the largest tile
        kernels_.product(depth, a, b, edge, tile_cols, false);
        for (int64_t y = 0; y < high; ++y) {
          for (int64_t x = 0; x < wide; ++x) {
            T& cell = c[(i + y) * ldc + j + x];
            cell = edge[y * tile_cols + x] + (add ? cell : T{0});
          }
        }
      }
    }
  }

  int64_t seqlen_, heads_, dim_;
  const Kernels<T>& kernels_;
  T (*round_)(T);
  std::unique_ptr<T[]> p_;   // [heads, seqlen, seqlen]: scores, then weights
  std::unique_ptr<T[]> dp_;  // their gradients
};

}  // namespace strobe::demo

#endif  // STROBE_EXAMPLES_STANDARD_ATTENTION_H_
