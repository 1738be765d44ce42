// The pages that examples/paged_cache.cpp and generate.cpp keep: as many sequences as come grow,
// fork and end in any order, and each row stays what its owner wrote.
#include "page_pool.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

namespace {

constexpr int64_t kPages = 12;

// A sequence and what it should find in its rows.
struct Owner {
  CachedSequence cached;
  std::vector<int> rows;
};

class Pool {
 public:
  explicit Pool(int64_t page_size)
      : page_size_(page_size),
        pool_(kPages, page_size),
        memory_(static_cast<size_t>(kPages * page_size), -1) {}

  // False where the pool has no room for it.
  bool Append(Owner& owner, int64_t rows) {
    const CachedSequence before = owner.cached;
    const int64_t free = pool_.free_pages();
    try {
      pool_.Reserve(owner.cached, rows);
    } catch (const std::runtime_error&) {
      EXPECT_EQ(owner.cached.pages, before.pages);
      EXPECT_EQ(pool_.free_pages(), free);
      return false;
    }
    for (int64_t n = 0; n < rows; ++n) {
      At(owner.cached, owner.cached.length++) = next_;
      owner.rows.push_back(next_++);
    }
    return true;
  }

  bool Fork(const Owner& owner, Owner& copy) {
    const int64_t free = pool_.free_pages();
    try {
      copy.cached = pool_.Fork(owner.cached, [&](int32_t from, int32_t to) {
        for (int64_t n = 0; n < page_size_; ++n) {
          memory_[static_cast<size_t>(to * page_size_ + n)] =
              memory_[static_cast<size_t>(from * page_size_ + n)];
        }
      });
    } catch (const std::runtime_error&) {
      EXPECT_EQ(pool_.free_pages(), free);
      return false;
    }
    EXPECT_GE(pool_.free_pages(), free - 1);  // shared, but for one page at most
    copy.rows = owner.rows;
    return true;
  }

  void Release(Owner& owner) {
    pool_.Release(owner.cached);
    owner.rows.clear();
    EXPECT_TRUE(owner.cached.pages.empty());
    EXPECT_EQ(owner.cached.length, 0);
  }

  // Each finds its rows, and every page is free or somebody's.
  void Check(const std::vector<Owner>& owners) {
    std::map<int32_t, int> used;
    for (const Owner& owner : owners) {
      ASSERT_EQ(owner.cached.length, static_cast<int32_t>(owner.rows.size()));
      for (int32_t n = 0; n < owner.cached.length; ++n) {
        ASSERT_EQ(At(owner.cached, n), owner.rows[static_cast<size_t>(n)]);
      }
      for (const int32_t page : owner.cached.pages) {
        ASSERT_GE(page, 0);
        ASSERT_LT(page, kPages);
        ++used[page];
      }
    }
    ASSERT_EQ(pool_.free_pages() + static_cast<int64_t>(used.size()), kPages);
  }

 private:
  int& At(const CachedSequence& s, int32_t row) {
    const auto page = s.pages[static_cast<size_t>(row / page_size_)];
    return memory_[static_cast<size_t>(page * page_size_ + row % page_size_)];
  }

  int64_t page_size_;
  PagePool pool_;
  std::vector<int> memory_;
  int next_ = 0;
};

TEST(PagePool, RowsStayTheirOwners) {
  for (const int64_t page_size : {1, 2, 3, 16}) {
    Pool pool(page_size);
    std::vector<Owner> owners(5);
    std::mt19937 random(static_cast<unsigned>(page_size));
    int refused = 0, forked = 0;
    for (int step = 0; step < 3000; ++step) {
      Owner& owner = owners[random() % owners.size()];
      const auto what = random() % 10;
      if (what < 7) {
        refused += pool.Append(owner, static_cast<int64_t>(random() % 4)) ? 0 : 1;
      } else if (what < 8) {
        pool.Release(owner);
      } else if (Owner& copy = owners[random() % owners.size()]; copy.cached.pages.empty()) {
        forked += pool.Fork(owner, copy) ? 1 : 0;
      }
      pool.Check(owners);
      if (HasFatalFailure()) FAIL() << "page size " << page_size << ", step " << step;
    }
    EXPECT_GT(forked, 20);
    if (page_size <= 3) {
      EXPECT_GT(refused, 20);
    }
    for (Owner& owner : owners) pool.Release(owner);
    pool.Check(owners);
  }
}

TEST(PagePool, TableOfABatch) {
  CachedSequence first = {{4, 2}, 7}, second = {{}, 0};
  CachedSequence* const batch[] = {&first, &second};
  const BatchTable table(batch, 3);
  EXPECT_EQ(table.lengths, (std::vector<int32_t>{7, 0}));
  EXPECT_EQ(table.block_table, (std::vector<int32_t>{4, 2, -1, -1, -1, -1}));
}

}  // namespace
