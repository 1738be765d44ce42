// A prefix that a whole batch shares is attended to once (cascade): its keys are read one time for
// all sequences instead of once for each, and strobe::merge joins the result with that of each
// one's own keys. The result is exact.
//
//     c++ -std=c++20 examples/shared_prefix.cpp $(pkg-config --cflags --libs strobe) -o
//     shared_prefix
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <strobe/strobe.hpp>
#include <vector>

namespace {

constexpr int64_t kBatch = 16, kHeads = 8, kHeadsKv = 2, kDim = 64;
constexpr int64_t kPrefix = 4096, kOwn = 128;  // keys
constexpr int64_t kRow = kHeadsKv * kDim, kOut = kBatch * kHeads * kDim;

using Values = std::vector<float>;

Values random_values(int64_t count) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  Values x(static_cast<size_t>(count));
  for (float& value : x) value = normal(generator);
  return x;
}

// Sequences as they are without this: each with a copy of the prefix before its own keys.
Values with_prefix(const Values& prefix, const Values& own) {
  Values all;
  for (int64_t b = 0; b < kBatch; ++b) {
    all.insert(all.end(), prefix.begin(), prefix.end());
    all.insert(all.end(), own.begin() + b * kOwn * kRow, own.begin() + (b + 1) * kOwn * kRow);
  }
  return all;
}

// Milliseconds of the fastest of ten runs.
template <typename Run>
double time_of(const Run& run) {
  double best = 1e9;
  for (int n = 0; n < 10; ++n) {
    const auto begin = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    best = std::min(best, took.count());
  }
  return best;
}

void attend() {
  const Values q = random_values(kOut);  // one query a sequence
  const Values prefix_k = random_values(kPrefix * kRow), prefix_v = random_values(kPrefix * kRow);
  const Values own_k = random_values(kBatch * kOwn * kRow),
               own_v = random_values(kBatch * kOwn * kRow);
  const Values all_k = with_prefix(prefix_k, own_k), all_v = with_prefix(prefix_v, own_v);

  Values whole(kOut), out(kOut);
  const strobe::Plan at_once({.batch = kBatch,
                              .seqlen_q = 1,
                              .seqlen_k = kPrefix + kOwn,
                              .heads = kHeads,
                              .heads_kv = kHeadsKv,
                              .head_dim = kDim});
  const double plain = time_of([&] {
    at_once.forward({.q = q.data(), .k = all_k.data(), .v = all_v.data(), .out = whole.data()});
  });

  // Part 0: all queries as one sequence on the prefix. Part 1: each on its own keys. Both are
  // packed problems, so that their lse lie alike: [heads, kBatch].
  Values parts(2 * kOut), lses(2 * kHeads * kBatch);
  std::vector<int32_t> starts_q, starts_k;
  for (int32_t b = 0; b <= kBatch; ++b) {
    starts_q.push_back(b);
    starts_k.push_back(static_cast<int32_t>(b * kOwn));
  }
  const int32_t all_q[] = {0, kBatch}, all_prefix[] = {0, kPrefix};
  strobe::Problem problem = {.batch = 1,
                             .seqlen_q = kBatch,
                             .seqlen_k = kPrefix,
                             .heads = kHeads,
                             .heads_kv = kHeadsKv,
                             .head_dim = kDim,
                             .varlen = true,
                             .total_q = kBatch,
                             .total_k = kPrefix};
  const strobe::Plan on_prefix(problem);
  problem.batch = kBatch;
  problem.seqlen_q = 1;
  problem.seqlen_k = kOwn;
  problem.total_k = kBatch * kOwn;
  const strobe::Plan on_own(problem);
  const double cascade = time_of([&] {
    on_prefix.forward({.q = q.data(),
                       .k = prefix_k.data(),
                       .v = prefix_v.data(),
                       .out = parts.data(),
                       .lse = lses.data(),
                       .cu_seqlens_q = all_q,
                       .cu_seqlens_k = all_prefix});
    on_own.forward({.q = q.data(),
                    .k = own_k.data(),
                    .v = own_v.data(),
                    .out = parts.data() + kOut,
                    .lse = lses.data() + kHeads * kBatch,
                    .cu_seqlens_q = starts_q.data(),
                    .cu_seqlens_k = starts_k.data()});
    strobe::merge({.parts = 2,
                   .seqlen_q = kBatch,
                   .heads = kHeads,
                   .head_dim_v = kDim,
                   .outs = parts.data(),
                   .lses = lses.data(),
                   .out = out.data()});
  });

  float most = 0;
  for (size_t n = 0; n < out.size(); ++n) most = std::fmax(most, std::fabs(out[n] - whole[n]));
  std::printf("%lld sequences, %lld shared keys and %lld of their own\n",
              static_cast<long long>(kBatch), static_cast<long long>(kPrefix),
              static_cast<long long>(kOwn));
  std::printf("each on all of its keys  %6.2f ms\nprefix once, and merged  %6.2f ms\n", plain,
              cascade);
  std::printf("largest difference %.2g\n", most);
}

}  // namespace

int main() {
  try {
    attend();
  } catch (const strobe::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
