// core/sequence.h and core/cache.h: where a sequence's rows lie and how many are in use is the same
// whoever asks, with a head or without; and the mask of a head has these lengths.
#include "core/sequence.h"

#include <cstdint>
#include <random>
#include <vector>

#include "core/cache.h"
#include "gtest/gtest.h"

namespace strobe {
namespace {

constexpr int32_t kBatch = 5, kHeads = 3;

bool SameRows(const SequenceRows& a, const SequenceRows& b) {
  return a.batch == b.batch && a.q_row == b.q_row && a.k_row == b.k_row && a.lse_row == b.lse_row &&
         a.rows_q == b.rows_q && a.rows_k == b.rows_k && a.seqlen_q == b.seqlen_q &&
         a.seqlen_k == b.seqlen_k;
}
bool SameMask(const Mask& a, const Mask& b) {
  return a.seqlen_q == b.seqlen_q && a.seqlen_k == b.seqlen_k && a.first == b.first &&
         a.last == b.last && a.offset == b.offset && a.chunk == b.chunk && a.prefix == b.prefix;
}

struct Numbers {
  std::vector<int32_t> cu_q, cu_k, used_q, used_k, position, prefix;

  explicit Numbers(std::mt19937& random) {
    const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
    cu_q = cu_k = {0};
    for (int b = 0; b < kBatch; ++b) {
      cu_q.push_back(cu_q.back() + below(9));
      cu_k.push_back(cu_k.back() + below(12));
      // What leads out of a sequence is cut.
      used_q.push_back(below(14) - 2);
      used_k.push_back(below(18) - 2);
      position.push_back(below(40) - 20);
      prefix.push_back(below(15) - 1);
    }
  }
};

// Every second choice of which numbers are given.
void Fill(Sequences& s, const Numbers& n, std::mt19937& random) {
  const auto maybe = [&](const std::vector<int32_t>& numbers) {
    return random() % 2 ? numbers.data() : nullptr;
  };
  s.cu_q = maybe(n.cu_q);
  s.cu_k = maybe(n.cu_k);
  s.used_q = maybe(n.used_q);
  s.used_k = maybe(n.used_k);
  s.q_position = maybe(n.position);
  s.batch = kBatch, s.heads = kHeads;
  s.seqlen_q = 8, s.seqlen_k = 11;
  s.lse_head_stride = 8;
  s.rule = {MaskRule::kNoLimit, MaskRule::kNoLimit, 0, random() % 2 == 0};
  if (random() % 2) s.rule.window_left = static_cast<int64_t>(random() % 9);
  if (s.rule.window_left == MaskRule::kNoLimit) s.prefix = maybe(n.prefix);
}

template <typename All>
void ExpectTheSameOfAllHeads(const All& all) {
  for (int64_t b = 0; b < kBatch; ++b) {
    const auto rows = all.sequence_rows(b);
    ASSERT_EQ(rows.batch, b);
    ASSERT_LE(rows.seqlen_q, rows.rows_q);
    ASSERT_LE(rows.seqlen_k, rows.rows_k);
    for (int64_t head = 0; head < kHeads; ++head) {
      const auto sequence = all.sequence(b, head);
      ASSERT_TRUE(SameRows(sequence, rows)) << "sequence " << b;
      ASSERT_EQ(sequence.mask.seqlen_q, rows.seqlen_q);
      ASSERT_EQ(sequence.mask.seqlen_k, rows.seqlen_k);
      if constexpr (!masks_differ_by_head()) {
        ASSERT_TRUE(SameRows(all.sequence_of_all_heads(b), rows));
        ASSERT_TRUE(SameMask(all.sequence_of_all_heads(b).mask, sequence.mask)) << "head " << head;
      }
    }
  }
}

TEST(Sequence, RowsAreTheSameWithAHeadAndWithout) {
  std::mt19937 random(11);
  for (int round = 0; round < 2000; ++round) {
    const Numbers numbers(random);
    Sequences all{};
    Fill(all, numbers, random);
    ASSERT_NO_FATAL_FAILURE(ExpectTheSameOfAllHeads(all)) << "round " << round;
    for (int64_t b = 0; b < kBatch; ++b) {
      const SequenceRows s = all.sequence_rows(b);
      const auto n = static_cast<size_t>(b);
      ASSERT_EQ(s.q_row, all.cu_q ? numbers.cu_q[n] : 0);
      ASSERT_EQ(s.k_row, all.cu_k ? numbers.cu_k[n] : 0);
      ASSERT_EQ(s.rows_q, all.cu_q ? numbers.cu_q[n + 1] - numbers.cu_q[n] : 8);
      ASSERT_EQ(s.rows_k, all.cu_k ? numbers.cu_k[n + 1] - numbers.cu_k[n] : 11);
      const auto used = [](const int32_t* given, size_t i, int64_t rows) {
        const int64_t x = given ? given[i] : rows;
        return x < 0 ? 0 : x > rows ? rows : x;
      };
      ASSERT_EQ(s.seqlen_q, used(all.used_q, n, s.rows_q));
      ASSERT_EQ(s.seqlen_k, used(all.used_k, n, s.rows_k));
      const Mask mask = all.sequence(b, 1).mask;
      ASSERT_EQ(mask.position(0), all.q_position ? numbers.position[n] : s.seqlen_k - s.seqlen_q);
      ASSERT_LE(mask.prefix, s.seqlen_k);
    }
  }
}

TEST(Sequence, ThoseOfACacheToo) {
  std::mt19937 random(12);
  for (int round = 0; round < 2000; ++round) {
    const Numbers numbers(random);
    CachedSequences all{};
    Fill(all, numbers, random);
    all.cu_k = nullptr;
    all.cache_batch = kBatch;
    all.rows_new = static_cast<int32_t>(random() % 3);
    all.cuts_lengths = random() % 2 == 0;
    all.least_q = static_cast<int32_t>(random() % 4);
    all.most_q = random() % 2 ? INT32_MAX : 5;
    ASSERT_NO_FATAL_FAILURE(ExpectTheSameOfAllHeads(all)) << "round " << round;
    for (int64_t b = 0; b < kBatch; ++b) {
      const CachedRows s = all.sequence_rows(b), of_all = all.of_all().sequence_rows(b);
      // Sequences with fewer or more queries are another kernel's: they have none here.
      const bool own = all.least_q <= of_all.seqlen_q && of_all.seqlen_q <= all.most_q;
      ASSERT_EQ(s.seqlen_q, own ? of_all.seqlen_q : 0);
      ASSERT_EQ(s.seqlen_k, of_all.seqlen_k);
      ASSERT_EQ(s.rows_k, s.seqlen_k);
      ASSERT_EQ(s.seqlen_k - s.new_begin, s.in_range ? all.rows_new : 0);
      ASSERT_EQ(all.sequence(b, 2).in_range, s.in_range);
      ASSERT_EQ(all.sequence(b, 2).new_begin, s.new_begin);
    }
  }
}

}  // namespace
}  // namespace strobe
