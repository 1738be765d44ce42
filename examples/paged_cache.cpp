// A paged KV cache in C++: allocate, append, fork a prefix, free.
//
//     c++ -std=c++20 examples/paged_cache.cpp $(pkg-config --cflags --libs strobe) -o paged_cache
//
// Two samples are drawn from one prompt. The second shares the prompt's pages; only the page that
// is not full is copied, because both are going to append to it.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <strobe/strobe.hpp>
#include <vector>

namespace {

constexpr int64_t kHeads = 8, kHeadsKv = 2, kDim = 64;
constexpr int64_t kPages = 32, kPageSize = 16, kMostPages = 8;  // of the pool; rows; a sequence's
constexpr int64_t kRow = kHeadsKv * kDim, kPage = kPageSize * kRow;

struct Sequence {
  std::vector<int32_t> pages;
  int32_t length = 0;
};

class PagedCache {
 public:
  std::vector<float> k = std::vector<float>(kPages * kPage), v = k;

  PagedCache() : users_(kPages) {
    for (int32_t page = kPages; page-- > 0;) free_.push_back(page);
  }
  // Room for `rows` more rows. Strobe writes them: append is a part of attention.
  void reserve(Sequence& s, int64_t rows) {
    while (static_cast<int64_t>(s.pages.size()) * kPageSize < s.length + rows) {
      s.pages.push_back(take());
    }
  }
  // A sequence with the same rows. Full pages have two users from then on; nobody writes to them.
  Sequence fork(const Sequence& s) {
    Sequence copy = s;
    const size_t full = static_cast<size_t>(s.length / kPageSize);
    copy.pages.resize(full);
    for (const int32_t page : copy.pages) ++users_[static_cast<size_t>(page)];
    if (s.length % kPageSize != 0) {
      const int32_t page = take();
      std::copy_n(k.begin() + s.pages[full] * kPage, kPage, k.begin() + page * kPage);
      std::copy_n(v.begin() + s.pages[full] * kPage, kPage, v.begin() + page * kPage);
      copy.pages.push_back(page);
    }
    return copy;
  }
  void release(Sequence& s) {
    for (const int32_t page : s.pages) {
      if (--users_[static_cast<size_t>(page)] == 0) free_.push_back(page);
    }
    s = {};
  }
  size_t free_pages() const { return free_.size(); }

  // Appends `rows` keys and values to each sequence, and attends with as many queries to all of it.
  std::vector<float> attend(const std::vector<Sequence*>& batch, int64_t rows,
                            const std::vector<float>& q, const std::vector<float>& k_new,
                            const std::vector<float>& v_new) {
    std::vector<int32_t> table, lengths;
    for (Sequence* s : batch) {
      reserve(*s, rows);
      lengths.push_back(s->length);  // before the append
      for (size_t n = 0; n < kMostPages; ++n) {
        table.push_back(n < s->pages.size() ? s->pages[n] : -1);  // -1 is never looked at
      }
      s->length += static_cast<int32_t>(rows);
    }
    const auto count = static_cast<int64_t>(batch.size());
    const strobe::Plan plan({.batch = count,
                             .seqlen_q = rows,
                             .seqlen_k = kMostPages * kPageSize,
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
    std::vector<float> out(q.size());
    plan.forward({.q = q.data(),
                  .k = k.data(),
                  .v = v.data(),
                  .out = out.data(),
                  .seqused_k = lengths.data(),
                  .block_table = table.data(),
                  .k_new = k_new.data(),
                  .v_new = v_new.data()});
    return out;
  }

 private:
  int32_t take() {
    if (free_.empty()) throw std::runtime_error("the pool has no free page");
    const int32_t page = free_.back();
    free_.pop_back();
    users_[static_cast<size_t>(page)] = 1;
    return page;
  }

  std::vector<int32_t> free_, users_;
};

std::vector<float> random_rows(int64_t rows, int64_t row) {
  static std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(rows * row));
  for (float& value : x) value = normal(generator);
  return x;
}

void draw_two_samples() {
  PagedCache cache;
  Sequence first;
  // The prompt: 40 tokens, two pages and a half.
  cache.attend({&first}, 40, random_rows(40, kHeads * kDim), random_rows(40, kRow),
               random_rows(40, kRow));
  Sequence second = cache.fork(first);
  std::printf("%zu of %lld pages are free: the samples share two\n", cache.free_pages(),
              static_cast<long long>(kPages));

  // Both get the same token, and then different ones.
  for (int step = 0; step < 30; ++step) {
    std::vector<float> q = random_rows(2, kHeads * kDim), k = random_rows(2, kRow),
                       v = random_rows(2, kRow);
    if (step == 0) {
      for (auto* x : {&q, &k, &v}) {
        const auto half = static_cast<std::ptrdiff_t>(x->size() / 2);
        std::copy_n(x->begin(), half, x->begin() + half);
      }
    }
    const std::vector<float> out = cache.attend({&first, &second}, 1, q, k, v);
    float most = 0;
    for (size_t n = 0; n < out.size() / 2; ++n) {
      most = std::fmax(most, std::fabs(out[n] - out[n + out.size() / 2]));
    }
    if (step < 2) std::printf("step %d: the samples differ by %g\n", step, most);
  }
  std::printf("lengths %d and %d, pages free %zu\n", first.length, second.length,
              cache.free_pages());
  cache.release(first);
  cache.release(second);
  std::printf("all given back: %zu pages are free\n", cache.free_pages());
}

}  // namespace

int main() {
  try {
    draw_two_samples();
  } catch (const strobe::Error& error) {  // why no kernel takes it, for example
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
