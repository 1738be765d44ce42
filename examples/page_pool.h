// Which pages of a paged KV cache are free, and which sequence has the others. For the examples.
//
// A page is a number here. The keys and values are in tensors of the caller's, [pages, page_size,
// heads_kv, head_dim]; a model of several layers has two for each layer, and a sequence that has a
// page has it in all of them.
#ifndef STROBE_EXAMPLES_PAGE_POOL_H_
#define STROBE_EXAMPLES_PAGE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

// What a sequence has in the cache: its row n is row n % page_size of page pages[n / page_size].
struct CachedSequence {
  std::vector<int32_t> pages;
  int32_t length = 0;  // rows that hold keys and values
};

class PagePool {
 public:
  PagePool(int64_t pages, int64_t page_size)
      : page_size_(page_size), users_(static_cast<size_t>(pages)) {
    for (auto page = static_cast<int32_t>(pages); page-- > 0;) free_.push_back(page);
  }

  // Takes the pages that `rows` more rows of the sequence need. Strobe writes the rows itself, as
  // append is a part of attention; whoever launches it adds them to the length. Throws
  // std::runtime_error where too few pages are free: the sequence is then as it was.
  void Reserve(CachedSequence& sequence, int64_t rows) {
    const int64_t wanted = (sequence.length + rows + page_size_ - 1) / page_size_;
    const int64_t more = wanted - static_cast<int64_t>(sequence.pages.size());
    if (more > free_pages()) throw std::runtime_error("the cache has no free page");
    for (int64_t n = 0; n < more; ++n) sequence.pages.push_back(Take());
  }

  // A sequence with the same rows. Full pages have one more user from then on, and nobody writes to
  // them. Where the last page is not full, both sequences are going to append to it, so the copy
  // gets its own: copy_page(from, to) copies the rows. Throws as Reserve.
  template <typename CopyPage>
  [[nodiscard]] CachedSequence Fork(const CachedSequence& sequence, CopyPage copy_page) {
    const auto full = static_cast<size_t>(sequence.length / page_size_);
    const auto first = sequence.pages.begin();
    CachedSequence copy = {{first, first + static_cast<std::ptrdiff_t>(full)}, 0};
    copy.length = static_cast<int32_t>(full) * static_cast<int32_t>(page_size_);
    const int32_t rest = sequence.length - copy.length;
    Reserve(copy, rest);
    for (size_t n = 0; n < full; ++n) ++users_[static_cast<size_t>(copy.pages[n])];
    if (rest != 0) copy_page(sequence.pages[full], copy.pages[full]);
    copy.length = sequence.length;
    return copy;
  }

  // Gives the sequence's pages back, those with other users when these give them back too.
  void Release(CachedSequence& sequence) {
    for (const int32_t page : sequence.pages) {
      if (--users_[static_cast<size_t>(page)] == 0) free_.push_back(page);
    }
    sequence = {};
  }

  [[nodiscard]] int64_t free_pages() const { return static_cast<int64_t>(free_.size()); }

 private:
  int32_t Take() {
    const int32_t page = free_.back();
    free_.pop_back();
    users_[static_cast<size_t>(page)] = 1;
    return page;
  }

  int64_t page_size_;
  std::vector<int32_t> free_, users_;
};

// What a launch has to know of a batch whose sequences append to the cache: where each one's rows
// are, and how many they were before.
struct BatchTable {
  BatchTable(std::span<CachedSequence* const> batch, int64_t columns) {
    for (const CachedSequence* sequence : batch) {
      lengths.push_back(sequence->length);
      for (size_t n = 0; n < static_cast<size_t>(columns); ++n) {
        // -1, where a sequence has no page, is never looked at.
        block_table.push_back(n < sequence->pages.size() ? sequence->pages[n] : -1);
      }
    }
  }

  std::vector<int32_t> lengths;      // [batch] seqused_k
  std::vector<int32_t> block_table;  // [batch, columns]
};

#endif  // STROBE_EXAMPLES_PAGE_POOL_H_
