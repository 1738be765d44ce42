// A layer of attention learns by gradient descent to look one token back: the first half of an
// induction head. It has one description, and two plans of it.
//
//     y = attention(x Wq, x Wk, x Wv) Wo,   loss = mean (y - target)^2
//
// A token is [content, position]; its target is the content of the token before it. Ends with exit
// status 1 where the loss did not fall to a fifth.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <strobe/strobe.hpp>
#include <vector>

using Values = std::vector<float>;

// c[m, n] += a[m, k] b[k, n], with a or b read as transposed where told.
void multiply_add(int64_t m, int64_t k, int64_t n, const Values& a, bool transpose_a,
                  const Values& b, bool transpose_b, Values& c) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t l = 0; l < k; ++l) {
      const float factor = a[transpose_a ? l * m + i : i * k + l];
      for (int64_t j = 0; j < n; ++j) {
        c[i * n + j] += factor * b[transpose_b ? j * k + l : l * n + j];
      }
    }
  }
}

int main() try {
  constexpr int64_t kBatch = 8, kSeqlen = 16, kHeads = 2, kHeadDim = 16, kContent = 16;
  constexpr int64_t kDim = kHeads * kHeadDim, kTokens = kBatch * kSeqlen;
  static_assert(kDim == kContent + kSeqlen);

  // The description of the layer, its two plans, and memory that both may use.
  const strobe::Problem attention = {.batch = kBatch,
                                     .seqlen_q = kSeqlen,
                                     .seqlen_k = kSeqlen,
                                     .heads = kHeads,
                                     .head_dim = kHeadDim,
                                     .causal = true};
  const strobe::Plan forward(attention), backward(attention.backward());
  strobe::Workspace workspace;

  std::mt19937 bits(0);
  std::normal_distribution<float> normal;
  const auto random = [&](int64_t count, float deviation) {
    Values values(count);
    for (float& value : values) value = deviation * normal(bits);
    return values;
  };
  Values x = random(kTokens * kDim, 1), target(kTokens * kContent);
  for (int64_t token = 0; token < kTokens; ++token) {
    const int64_t position = token % kSeqlen;
    float* const row = &x[token * kDim];
    std::fill(row + kContent, row + kDim, 0.0F);
    row[kContent + position] = 1;
    if (position > 0) std::copy_n(row - kDim, kContent, &target[token * kContent]);
  }
  Values wq = random(kDim * kDim, 0.1F), wk = random(kDim * kDim, 0.1F),
         wv = random(kDim * kDim, 0.1F), wo = random(kDim * kContent, 0.1F);

  constexpr int kSteps = 300;
  constexpr float kRate = 3;
  double first = 0, loss = 0;
  for (int step = 0; step < kSteps; ++step) {
    // [batch, seqlen, heads, head_dim] is [tokens, dim].
    Values q(kTokens * kDim), k = q, v = q, out = q, lse(kTokens * kHeads);
    multiply_add(kTokens, kDim, kDim, x, false, wq, false, q);
    multiply_add(kTokens, kDim, kDim, x, false, wk, false, k);
    multiply_add(kTokens, kDim, kDim, x, false, wv, false, v);
    forward.forward({.q = q.data(),
                     .k = k.data(),
                     .v = v.data(),
                     .out = out.data(),
                     .lse = lse.data(),  // backward computes the weights from it again
                     .workspace = workspace.of(forward)});
    Values y(kTokens * kContent), dy = y;
    multiply_add(kTokens, kDim, kContent, out, false, wo, false, y);

    loss = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      const float error = y[i] - target[i];
      loss += error * error / static_cast<double>(y.size());
      dy[i] = 2 * error / static_cast<float>(y.size());
    }
    if (step == 0) first = loss;
    if (step % 50 == 0) std::printf("step %3d  loss %.4f\n", step, loss);

    Values dout(kTokens * kDim), dq(kTokens * kDim), dk = dq, dv = dq;
    multiply_add(kTokens, kContent, kDim, dy, false, wo, true, dout);
    backward.backward({.q = q.data(),
                       .k = k.data(),
                       .v = v.data(),
                       .out = out.data(),
                       .lse = lse.data(),
                       .dout = dout.data(),
                       .dq = dq.data(),
                       .dk = dk.data(),
                       .dv = dv.data(),
                       .workspace = workspace.of(backward)});

    const auto descend = [&](Values& w, int64_t rows, int64_t cols, const Values& in,
                             const Values& gradient) {
      Values dw(w.size());
      multiply_add(rows, kTokens, cols, in, true, gradient, false, dw);
      for (size_t i = 0; i < w.size(); ++i) w[i] -= kRate * dw[i];
    };
    descend(wo, kDim, kContent, out, dy);
    descend(wq, kDim, kDim, x, dq);
    descend(wk, kDim, kDim, x, dk);
    descend(wv, kDim, kDim, x, dv);
  }
  std::printf("loss %.4f after %d steps, from %.4f, by %s and %s\n", loss, kSteps, first,
              forward.kernel(), backward.kernel());
  return loss < first / 5 ? 0 : 1;
} catch (const strobe::Error& error) {
  std::printf("%s\n", error.what());
  return 1;
}
