// A Llama-style transformer block, forward, in float32 on the CPU: RMSNorm, rotary embedding,
// grouped-query attention by Strobe, SwiGLU. examples/llama_block.py is the same block in PyTorch,
// with the same weights; both print the same numbers.
//
//     c++ -std=c++20 -O3 -fopenmp examples/llama_block.cpp $(pkg-config --cflags --libs strobe)
//
// Architecture: H. Touvron et al., "LLaMA", arXiv:2302.13971; grouped queries: J. Ainslie et al.,
// "GQA", arXiv:2305.13245.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <span>
#include <strobe/strobe.hpp>

#include "matrix.h"

namespace {

constexpr int64_t kBatch = 2;
constexpr int64_t kSeqlen = 256;
constexpr int64_t kHeads = 8;    // of queries
constexpr int64_t kHeadsKv = 2;  // of keys and values: four query heads share one
constexpr int64_t kHeadDim = 32;
constexpr int64_t kDim = kHeads * kHeadDim;
constexpr int64_t kDimKv = kHeadsKv * kHeadDim;
constexpr int64_t kHidden = 704;  // of the feed-forward layer
constexpr float kNormEpsilon = 1e-5F;
constexpr float kRotaryBase = 10000;

// Rows of the matrices are tokens: row b * kSeqlen + t is token t of sequence b.

// In [-1, 1): draw `index` of stream `seed`. SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), whose
// state at any index is known, so that Python can draw a whole tensor at once.
float Uniform(uint64_t seed, uint64_t index) {
  uint64_t z = (seed << 32) + (index + 1) * 0x9e3779b97f4a7c15U;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9U;
  z = (z ^ z >> 27) * 0x94d049bb133111ebU;
  z ^= z >> 31;
  return static_cast<float>(static_cast<double>(z >> 40) * 0x1p-23 - 1);  // 24 bits: exact
}

Matrix RandomMatrix(uint64_t seed, int64_t rows, int64_t cols, float scale, float offset = 0) {
  Matrix m(rows, cols);
  for (size_t i = 0; i < m.values.size(); ++i) m.values[i] = offset + scale * Uniform(seed, i);
  return m;
}

// Weight of a linear layer, stored [in, out]. Keeps the variance of what goes through it.
Matrix LinearWeight(uint64_t seed, int64_t in, int64_t out) {
  return RandomMatrix(seed, in, out, std::sqrt(3.0F / static_cast<float>(in)));
}

struct Weights {
  Matrix attention_norm = RandomMatrix(1, 1, kDim, 0.1F, 1);
  Matrix query = LinearWeight(2, kDim, kDim);
  Matrix key = LinearWeight(3, kDim, kDimKv);
  Matrix value = LinearWeight(4, kDim, kDimKv);
  Matrix output = LinearWeight(5, kDim, kDim);
  Matrix feed_forward_norm = RandomMatrix(6, 1, kDim, 0.1F, 1);
  Matrix gate = LinearWeight(7, kDim, kHidden);
  Matrix up = LinearWeight(8, kDim, kHidden);
  Matrix down = LinearWeight(9, kHidden, kDim);
};

// Each row over its root mean square, times weight [1, cols].
Matrix RmsNorm(const Matrix& x, const Matrix& weight) {
  Matrix y(x.rows, x.cols);
  for (int64_t i = 0; i < x.rows; ++i) {
    float squares = 0;
    for (const float value : x.row(i)) squares += value * value;
    const float factor = 1 / std::sqrt(squares / static_cast<float>(x.cols) + kNormEpsilon);
    for (int64_t j = 0; j < x.cols; ++j) y.row(i)[j] = x.row(i)[j] * factor * weight.values[j];
  }
  return y;
}

// Turns elements j and j + kHeadDim / 2 of every head of x [tokens, heads * kHeadDim] by an angle
// proportional to the position, so that q.k depends on the distance only (J. Su et al., "RoFormer",
// arXiv:2104.09864).
void Rotate(Matrix& x) {
  constexpr int64_t kHalf = kHeadDim / 2;
  for (int64_t i = 0; i < x.rows; ++i) {
    const auto position = static_cast<float>(i % kSeqlen);
    for (int64_t j = 0; j < kHalf; ++j) {
      const float exponent = -static_cast<float>(j) / static_cast<float>(kHalf);
      const float angle = position * std::pow(kRotaryBase, exponent);
      const float cosine = std::cos(angle);
      const float sine = std::sin(angle);
      for (int64_t head = 0; head < x.cols; head += kHeadDim) {
        float& a = x.row(i)[head + j];
        float& b = x.row(i)[head + j + kHalf];
        const float turned = a * cosine - b * sine;
        b = a * sine + b * cosine;
        a = turned;
      }
    }
  }
}

// Rows of q, k and v are tokens with their heads one after the other: [batch, seqlen, heads,
// head_dim], which is what Strobe takes. Nothing is transposed, and no key is repeated.
Matrix Attention(const Matrix& q, const Matrix& k, const Matrix& v, const strobe::Plan& plan) {
  Matrix out(q.rows, q.cols);
  plan.forward(
      {.q = q.values.data(), .k = k.values.data(), .v = v.values.data(), .out = out.values.data()});
  return out;
}

// x / (1 + exp(-x)) of gate, times up.
Matrix SwiGlu(Matrix gate, const Matrix& up) {
  for (size_t i = 0; i < gate.values.size(); ++i) {
    const float x = gate.values[i];
    gate.values[i] = x / (1 + std::exp(-x)) * up.values[i];
  }
  return gate;
}

// x [tokens, kDim] through the block.
Matrix Block(Matrix x, const Weights& weights, const strobe::Plan& plan) {
  const Matrix attention_in = RmsNorm(x, weights.attention_norm);
  Matrix q = Linear(attention_in, weights.query);
  Matrix k = Linear(attention_in, weights.key);
  const Matrix v = Linear(attention_in, weights.value);
  Rotate(q);
  Rotate(k);
  Add(x, Linear(Attention(q, k, v, plan), weights.output));

  const Matrix feed_forward_in = RmsNorm(x, weights.feed_forward_norm);
  const Matrix gate = Linear(feed_forward_in, weights.gate);
  Add(x, Linear(SwiGlu(gate, Linear(feed_forward_in, weights.up)), weights.down));
  return x;
}

void Print(const char* name, std::span<const float> values) {
  std::printf("%-12s", name);
  for (const float value : values) std::printf(" %10.6f", value);
  std::printf("\n");
}

void Run() {
  // Once for all calls of these shapes.
  const strobe::Plan plan({.batch = kBatch,
                           .seqlen_q = kSeqlen,
                           .seqlen_k = kSeqlen,
                           .heads = kHeads,
                           .heads_kv = kHeadsKv,
                           .head_dim = kHeadDim,
                           .causal = true});
  const Weights weights;
  const Matrix x = RandomMatrix(10, kBatch * kSeqlen, kDim, std::sqrt(3.0F));
  const Matrix y = Block(x, weights, plan);

  double squares = 0;
  double checksum = 0;  // every value counts, and each differently
  for (size_t i = 0; i < y.values.size(); ++i) {
    squares += static_cast<double>(y.values[i]) * y.values[i];
    checksum += static_cast<double>(y.values[i]) * Uniform(11, i);
  }
  const auto count = static_cast<double>(y.values.size());
  std::printf("%lld sequences of %lld tokens, attention by %s\n", static_cast<long long>(kBatch),
              static_cast<long long>(kSeqlen), plan.kernel());
  Print("first token", y.row(0).first(4));
  Print("last token", y.row(y.rows - 1).last(4));
  std::printf("%-12s %10.6f\n", "rms", std::sqrt(squares / count));
  std::printf("%-12s %10.6f\n", "checksum", checksum / std::sqrt(count));
}

}  // namespace

int main() {
  try {
    Run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "llama_block: %s\n", error.what());
    return 1;
  }
}
