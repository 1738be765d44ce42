// Blocks of rows as work items (cpu/blocks.h), counted one by one.
#include "cpu/blocks.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace strobe::cpu {
namespace {

AttentionProblem ProblemOf(int64_t batch, int64_t heads, int64_t keys) {
  AttentionProblem p{};
  p.batch = batch;
  p.heads = p.heads_kv = heads;
  p.seqlen_q = p.seqlen_k = keys;
  return p;
}

// Every block of every head once, those of a head in ascending order, whatever the threads.
TEST(Blocks, OfKeysComeOnceAndInOrder) {
  constexpr int64_t kSize = 10;
  for (const int64_t batch : {1, 2, 3, 5, 8}) {
    for (const int64_t heads : {1, 2, 3, 7}) {
      for (const int64_t keys : {1, 10, 25, 100}) {
        for (const int64_t threads : {1, 2, 3, 4, 5, 16, 200}) {
          SCOPED_TRACE(testing::Message() << "batch " << batch << ", heads " << heads << ", keys "
                                          << keys << ", threads " << threads);
          const AttentionProblem p = ProblemOf(batch, heads, keys);
          const Blocks blocks = Blocks::of_keys(p, nullptr, kSize, threads);
          std::map<std::pair<int64_t, int64_t>, int64_t> next;
          for (int64_t n = 0; n < blocks.count(); ++n) {
            const Blocks::Block b = blocks[n];
            ASSERT_GE(b.batch, 0);
            ASSERT_LT(b.batch, batch);
            ASSERT_GE(b.head, 0);
            ASSERT_LT(b.head, heads);
            int64_t& begin = next[{b.batch, b.head}];
            ASSERT_EQ(b.begin, begin);
            begin += kSize;
          }
          ASSERT_EQ(static_cast<int64_t>(next.size()), batch * heads);
          for (const auto& [head, end] : next) ASSERT_EQ(end, ceil_div(keys, kSize) * kSize);
        }
      }
    }
  }
}

// Threads that begin together begin with sequences of their own.
TEST(Blocks, OfKeysOfSuccessiveNumbersAreOfDifferentSequences) {
  for (const int64_t batch : {2, 3, 8}) {
    for (const int64_t heads : {1, 4, 16}) {
      const Blocks blocks = Blocks::of_keys(ProblemOf(batch, heads, 1000), nullptr, 512, batch);
      for (int64_t n = 0; n < blocks.count(); n += batch) {
        std::set<int64_t> sequences;
        for (int64_t i = n; i < n + batch; ++i) sequences.insert(blocks[i].batch);
        EXPECT_EQ(static_cast<int64_t>(sequences.size()), batch) << n;
      }
    }
  }
}

}  // namespace
}  // namespace strobe::cpu
