// A paged KV cache in C++: allocate, append, fork a prefix, free.
//
//     c++ -std=c++20 examples/paged_cache.cpp $(pkg-config --cflags --libs strobe) -o paged_cache
//
// Two samples are drawn from one prompt. The second shares the prompt's pages; only the page that
// is not full is copied, because both are going to append to it. page_pool.h keeps the pages, and
// generate.cpp does the same with a real model.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <strobe/strobe.hpp>
#include <vector>

#include "page_pool.h"

namespace {

constexpr int64_t kHeads = 8, kHeadsKv = 2, kDim = 64;
constexpr int64_t kPages = 32, kPageSize = 16, kMostPages = 8;  // of the pool; rows; a sequence's
constexpr int64_t kRow = kHeadsKv * kDim, kPage = kPageSize * kRow;

using Values = std::vector<float>;

// The cache of one layer: [kPages, kPageSize, kHeadsKv, kDim] each.
struct Cache {
  Values k = Values(kPages * kPage), v = k;

  void CopyPage(int32_t from, int32_t to) {
    for (Values* x : {&k, &v}) {
      std::copy_n(x->begin() + from * kPage, kPage, x->begin() + to * kPage);
    }
  }
};

// Appends `rows` keys and values to each sequence, and attends with as many queries to all that it
// has then. q is [batch, rows, kHeads, kDim], k_new and v_new are [batch, rows, kHeadsKv, kDim].
Values Attend(Cache& cache, PagePool& pool, const std::vector<CachedSequence*>& batch, int64_t rows,
              const Values& q, const Values& k_new, const Values& v_new) {
  for (CachedSequence* sequence : batch) pool.Reserve(*sequence, rows);
  const BatchTable table(batch, kMostPages);
  const strobe::Plan plan({.batch = static_cast<int64_t>(batch.size()),
                           .seqlen_q = rows,
                           .seqlen_k = kMostPages * kPageSize,  // the most that one may reach
                           .heads = kHeads,
                           .heads_kv = kHeadsKv,
                           .head_dim = kDim,
                           .causal = true,
                           .has_seqused_k = true,
                           .cache = strobe::Cache::kPaged,
                           .append = strobe::Append::kDense,
                           .pages = kPages,
                           .page_size = kPageSize,
                           .pages_per_sequence = kMostPages,
                           .seqlen_new = rows});
  Values out(q.size());
  plan.forward({.q = q.data(),
                .k = cache.k.data(),  // written: k_new and v_new go here
                .v = cache.v.data(),
                .out = out.data(),
                .seqused_k = table.lengths.data(),
                .block_table = table.block_table.data(),
                .k_new = k_new.data(),
                .v_new = v_new.data()});
  for (CachedSequence* sequence : batch) sequence->length += static_cast<int32_t>(rows);
  return out;
}

Values RandomRows(int64_t rows, int64_t row) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  Values x(static_cast<size_t>(rows * row));
  for (float& value : x) value = normal(generator);
  return x;
}

float LargestDifference(const Values& x, int64_t half) {
  float most = 0;
  for (int64_t n = 0; n < half; ++n) {
    const auto i = static_cast<size_t>(n);
    most = std::fmax(most, std::fabs(x[i] - x[i + static_cast<size_t>(half)]));
  }
  return most;
}

void DrawTwoSamples() {
  Cache cache;
  PagePool pool(kPages, kPageSize);
  const auto free_pages = [&pool] { return static_cast<long long>(pool.free_pages()); };

  // The prompt: 40 tokens, two pages and a half.
  CachedSequence first;
  Attend(cache, pool, {&first}, 40, RandomRows(40, kHeads * kDim), RandomRows(40, kRow),
         RandomRows(40, kRow));
  CachedSequence second =
      pool.Fork(first, [&](int32_t from, int32_t to) { cache.CopyPage(from, to); });
  std::printf("%lld of %lld pages are free: the samples share two\n", free_pages(),
              static_cast<long long>(kPages));

  // Both get the same token, and then different ones.
  for (int step = 0; step < 30; ++step) {
    Values q = RandomRows(2, kHeads * kDim), k = RandomRows(2, kRow), v = RandomRows(2, kRow);
    if (step == 0) {
      for (Values* x : {&q, &k, &v}) {
        const auto half = static_cast<std::ptrdiff_t>(x->size() / 2);
        std::copy_n(x->begin(), half, x->begin() + half);
      }
    }
    const Values out = Attend(cache, pool, {&first, &second}, 1, q, k, v);
    if (step < 2) {
      std::printf("step %d: the samples differ by %g\n", step,
                  LargestDifference(out, kHeads * kDim));
    }
  }
  std::printf("lengths %d and %d, pages free %lld\n", first.length, second.length, free_pages());
  pool.Release(first);
  pool.Release(second);
  std::printf("all given back: %lld pages are free\n", free_pages());
}

}  // namespace

int main() {
  try {
    DrawTwoSamples();
  } catch (const std::exception& error) {  // why no kernel takes it, or that no page is free
    std::fprintf(stderr, "paged_cache: %s\n", error.what());
    return 1;
  }
}
