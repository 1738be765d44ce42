// core/mask.h against brute force: every range against allows(), and allows() against the rule
// written out here.
#include "core/mask.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>

#include "core/walk.h"
#include "gtest/gtest.h"

namespace strobe {
namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

struct Setting {
  bool causal;
  int64_t left, right;
  int64_t chunk = 0;
  // Added to the position at the bottom right; keys that all queries see.
  int64_t shift = 0, prefix = 0;
  bool window_signed = false;  // -1 is a limit, kHuge alone is none
};

constexpr Setting kSettings[] = {
    {false, -1, -1}, {true, -1, -1},        {false, 0, 0},    {false, 0, -1},   {false, -1, 0},
    {false, 1, 0},   {false, 3, 2},         {true, 3, 2},     {true, 5, -1},    {true, 0, -1},
    {true, -1, 100}, {false, 2, 7},         {false, 7, 2},    {false, 39, 1},   {false, 1, 39},
    {true, 40, 40},  {false, kHuge, kHuge}, {true, kHuge, 0}, {false, 4, kHuge}};

constexpr Setting kMoreSettings[] = {
    {false, -1, -1, 1},       {false, -1, -1, 7},       {true, -1, -1, 8},
    {true, 3, -1, 5},         {false, 2, 4, 16},        {true, -1, -1, 100},
    {true, -1, -1, kHuge},    {false, -1, -1, 7, -50},  {true, -1, -1, 0, 3},
    {true, -1, -1, 0, -9},    {true, 4, -1, 0, -9},     {false, 2, 2, 0, 11},
    {true, -1, -1, 6, 13},    {true, -1, -1, 0, 90},    {true, -1, -1, 0, -90},
    {true, -1, -1, 0, 0, 1},  {true, -1, -1, 0, 0, 17}, {true, -1, -1, 0, 0, 40},
    {false, -1, 3, 0, 0, 12}, {true, -1, -1, 0, -9, 5}, {false, -1, -1, 0, 0, 5},
    {true, -1, -1, 0, 7, 30}};

// Windows that end before a query's own position, or begin behind it; at last such that hardly one
// query sees a key.
constexpr Setting Signed(bool causal, int64_t left, int64_t right, int64_t shift = 0,
                         int64_t prefix = 0) {
  return {causal, left, right, 0, shift, prefix, true};
}
constexpr Setting kSignedSettings[] = {Signed(false, 8, -3),
                                       Signed(true, 8, -3),
                                       Signed(false, 1, -1),
                                       Signed(false, kHuge, -1),
                                       Signed(true, kHuge, -1),
                                       Signed(false, kHuge, -7),
                                       Signed(false, -1, kHuge),
                                       Signed(false, -4, 9),
                                       Signed(false, -5, 5),
                                       Signed(false, kHuge, kHuge),
                                       Signed(true, 0, kHuge),
                                       Signed(false, 20, -2, 5),
                                       Signed(false, 20, -2, -11),
                                       Signed(false, -2, 6, -9),
                                       Signed(false, kHuge, -3, 0, 6),
                                       Signed(true, kHuge, -9, 4, 3),
                                       Signed(false, 39, -39),
                                       Signed(false, -100, kHuge),
                                       Signed(false, kHuge, -100),
                                       Signed(false, kHuge, std::numeric_limits<int64_t>::min()),
                                       Signed(false, std::numeric_limits<int64_t>::min(), kHuge)};

struct Fields {
  int64_t window_left, window_right, attention_chunk;
  bool causal, window_signed;
};
constexpr MaskRule Rule(const Setting& s) {
  return MaskRule::of(Fields{s.left, s.right, s.chunk, s.causal, s.window_signed});
}

// The documented rule, apart from the header's code.
bool Sees(const Setting& s, int64_t seqlen_q, int64_t seqlen_k, int64_t i, int64_t j) {
  if (j < s.prefix) return true;
  const int64_t position = i + seqlen_k - seqlen_q + s.shift;
  const int64_t ahead = j - position;  // keys that j stands after the query's position
  if (s.causal && ahead > 0) return false;
  if ((s.right >= 0 || s.window_signed) && ahead > s.right) return false;
  if (s.chunk > 0) {
    const double chunk = static_cast<double>(s.chunk);
    if (std::floor(static_cast<double>(position) / chunk) !=
        std::floor(static_cast<double>(j) / chunk)) {
      return false;
    }
  }
  return (s.left < 0 && !s.window_signed) || -ahead <= s.left;
}

template <typename Check>
void ForAllMasks(Check check) {
  const auto one = [&](const Setting& s, int64_t nq, int64_t nk) {
    const int64_t prefix = s.prefix < nk ? s.prefix : nk;
    check(s, Mask::make(Rule(s), nq, nk, nk - nq + s.shift, prefix));
    if (::testing::Test::HasFailure()) {
      FAIL() << "at seqlen_q " << nq << ", seqlen_k " << nk << ", causal " << s.causal
             << ", window (" << s.left << ", " << s.right << "), chunk " << s.chunk << ", shift "
             << s.shift << ", prefix " << s.prefix << ", signed " << s.window_signed;
    }
  };
  for (int64_t nq = 0; nq <= 40; ++nq) {
    for (int64_t nk = 0; nk <= 40; ++nk) {
      for (const Setting& s : kSettings) one(s, nq, nk);
      for (const Setting& s : kSignedSettings) one(s, nq, nk);
    }
  }
  for (int64_t nq = 0; nq <= 40; nq += nq % 4 + 1) {
    for (int64_t nk = 0; nk <= 40; nk += nk % 3 + 1) {
      for (const Setting& s : kMoreSettings) one(s, nq, nk);
    }
  }
}

TEST(Mask, AllowsWhatTheRuleSays) {
  ForAllMasks([](const Setting& s, const Mask& m) {
    for (int64_t i = 0; i < m.seqlen_q; ++i) {
      for (int64_t j = 0; j < m.seqlen_k; ++j) {
        ASSERT_EQ(m.allows(i, j), Sees(s, m.seqlen_q, m.seqlen_k, i, j))
            << "query " << i << ", key " << j;
        ASSERT_EQ(m.row(i).contains(j), m.allows(i, j));
      }
      ASSERT_FALSE(m.allows(i, -1));
      ASSERT_FALSE(m.allows(i, m.seqlen_k));
    }
  });
}

// Smallest interval of [0, size) that holds all n with any(n); empty when there is none.
template <typename Any>
Range Hull(int64_t size, Any any) {
  Range r{size, 0};
  for (int64_t n = 0; n < size; ++n) {
    if (!any(n)) continue;
    if (r.begin > n) r.begin = n;
    r.end = n + 1;
  }
  return r;
}

void ExpectSameKeys(Range got, Range wanted, const char* what, Range of) {
  ASSERT_EQ(got.empty(), wanted.empty()) << what << " of [" << of.begin << ", " << of.end
                                         << "): got [" << got.begin << ", " << got.end << ")";
  if (wanted.empty()) return;
  ASSERT_EQ(got, wanted) << what << " of [" << of.begin << ", " << of.end << "): got [" << got.begin
                         << ", " << got.end << "), wanted [" << wanted.begin << ", " << wanted.end
                         << ")";
}

// All tiles of a few sizes at all starts would be 40^5 steps; the tile sizes below start
// everywhere.
constexpr int64_t kTiles[] = {1, 2, 5, 16, 40};

TEST(Mask, RangesOfQueryTilesAreExact) {
  ForAllMasks([](const Setting&, const Mask& m) {
    for (const int64_t tile : kTiles) {
      for (int64_t begin = 0; begin<m.seqlen_q; begin += tile> 5 ? 3 : 1) {
        const Range q{begin, begin + tile < m.seqlen_q ? begin + tile : m.seqlen_q};
        const auto any = [&](int64_t j) {
          for (int64_t i = q.begin; i < q.end; ++i) {
            if (m.allows(i, j)) return true;
          }
          return false;
        };
        const auto all = [&](int64_t j) {
          for (int64_t i = q.begin; i < q.end; ++i) {
            if (!m.allows(i, j)) return false;
          }
          return true;
        };
        ASSERT_NO_FATAL_FAILURE(
            ExpectSameKeys(m.kv_range(q), Hull(m.seqlen_k, any), "kv_range", q));
        ASSERT_NO_FATAL_FAILURE(
            ExpectSameKeys(m.full_range(q), Hull(m.seqlen_k, all), "full_range", q));
      }
    }
  });
}

TEST(Mask, RangesOfKeyTilesAreExact) {
  ForAllMasks([](const Setting&, const Mask& m) {
    for (const int64_t tile : kTiles) {
      for (int64_t begin = 0; begin<m.seqlen_k; begin += tile> 5 ? 3 : 1) {
        const Range k{begin, begin + tile < m.seqlen_k ? begin + tile : m.seqlen_k};
        const auto any = [&](int64_t i) {
          for (int64_t j = k.begin; j < k.end; ++j) {
            if (m.allows(i, j)) return true;
          }
          return false;
        };
        const auto all = [&](int64_t i) {
          for (int64_t j = k.begin; j < k.end; ++j) {
            if (!m.allows(i, j)) return false;
          }
          return true;
        };
        ASSERT_NO_FATAL_FAILURE(ExpectSameKeys(m.q_range(k), Hull(m.seqlen_q, any), "q_range", k));
        ASSERT_NO_FATAL_FAILURE(
            ExpectSameKeys(m.full_q_range(k), Hull(m.seqlen_q, all), "full_q_range", k));
      }
    }
  });
}

// Blocks that are visited hold every pair that the mask allows; full ones hold no other.
TEST(Walk, CoverWhatTheMaskAllows) {
  ForAllMasks([](const Setting&, const Mask& m) {
    const auto check = [](const IntervalWalk<int64_t>& w, int64_t blocks, int64_t size,
                          int64_t length, int64_t rows, const auto& allows) {
      for (int64_t n = 0; n < blocks; ++n) {
        int64_t allowed = 0;
        for (int64_t j = n * size; j < length && j < (n + 1) * size; ++j) {
          for (int64_t r = 0; r < rows; ++r) allowed += allows(r, j);
        }
        ASSERT_TRUE(allowed == 0 || w.visits(n)) << "block " << n;
        ASSERT_EQ(w.is_full(n), allowed == rows * size) << "block " << n;
      }
      ASSERT_TRUE(w.empty() || (w.begin >= 0 && w.end <= blocks));
    };
    for (const int64_t size : {1, 3, 8}) {
      const auto blocks = [size](int64_t length) { return (length + size - 1) / size; };
      for (int64_t begin = 0; begin < m.seqlen_q; begin += 5) {
        const int64_t end = begin + 5 < m.seqlen_q ? begin + 5 : m.seqlen_q;
        ASSERT_NO_FATAL_FAILURE(
            check(key_walk(m, {begin, end}, size), blocks(m.seqlen_k), size, m.seqlen_k,
                  end - begin, [&](int64_t r, int64_t j) { return m.allows(begin + r, j); }));
      }
      for (int64_t begin = 0; begin < m.seqlen_k; begin += 5) {
        const int64_t end = begin + 5 < m.seqlen_k ? begin + 5 : m.seqlen_k;
        ASSERT_NO_FATAL_FAILURE(
            check(query_walk(m, {begin, end}, size), blocks(m.seqlen_q), size, m.seqlen_q,
                  end - begin, [&](int64_t r, int64_t i) { return m.allows(i, begin + r); }));
      }
    }
  });
}

// The bounds that are known before there are sequences hold for all of them, whatever the offset.
TEST(MaskRule, BoundsWhatARunSees) {
  ForAllMasks([](const Setting& s, const Mask& m) {
    for (const int64_t run : kTiles) {
      const int64_t most_k = Rule(s).most_seen(run, m.seqlen_k);
      const int64_t most_q = Rule(s).most_seen(run, m.seqlen_q);
      ASSERT_LE(most_k, m.seqlen_k);
      for (int64_t begin = 0; begin + run <= m.seqlen_q; ++begin) {
        ASSERT_LE(m.kv_range({begin, begin + run}).size(), most_k) << "of queries from " << begin;
      }
      for (int64_t begin = 0; begin + run <= m.seqlen_k; ++begin) {
        ASSERT_LE(m.q_range({begin, begin + run}).size(), most_q) << "of keys from " << begin;
      }
    }
  });
}

// They are no larger than they have to be: some query sees as many, where there is room for that.
TEST(MaskRule, BoundsOfOneQueryAreExact) {
  const auto check = [](const Setting& s) {
    constexpr int64_t kLength = 300;
    const Mask m = Mask::make(Rule(s), kLength, kLength);
    int64_t most = 0;
    for (int64_t i = 0; i < kLength; ++i) most = std::max(most, m.row(i).size());
    ASSERT_EQ(Rule(s).most_seen(1, kLength), most)
        << "causal " << s.causal << ", window (" << s.left << ", " << s.right << "), chunk "
        << s.chunk;
  };
  for (const Setting& s : kSettings) check(s);
  for (const Setting& s : kMoreSettings) {
    if (s.prefix == 0) check(s);
  }
  for (const Setting& s : kSignedSettings) {
    // Of others, a query sees all keys but at another offset.
    if (s.left != kHuge && s.right != kHuge && s.shift == 0) check(s);
  }
  // A run may meet one chunk more than it has the length of.
  EXPECT_EQ(Rule({false, -1, -1, 8}).most_seen(2, kHuge), 16);
  EXPECT_EQ(Rule({false, -1, -1, 8}).most_seen(9, kHuge), 16);
  EXPECT_EQ(Rule({false, -1, -1, 8}).most_seen(10, kHuge), 24);
  EXPECT_EQ(Rule({false, kHuge, kHuge, kHuge}).most_seen(1, 100), 100);
}

TEST(MaskRule, SaysHowManyKeysLieBeforeTheDiagonal) {
  for (const bool causal : {false, true}) {
    for (int64_t n = 1; n <= 40; ++n) {
      const Mask m = Mask::make(Rule({causal, -1, -1}), n, n);
      int64_t seen = 0;
      for (int64_t i = 0; i < n; ++i) seen += m.row(i).size();
      EXPECT_LE(std::abs(2 * Rule({causal, -1, -1}).keys_to_diagonal(n) * n - 2 * seen), n) << n;
    }
  }
}

TEST(Mask, EmptyTilesSeeNothingAndAskForNothing) {
  const Mask m = Mask::make(Rule({true, 3, -1}), 10, 20);
  EXPECT_TRUE(m.kv_range({4, 4}).empty());
  EXPECT_TRUE(m.q_range({4, 4}).empty());
  EXPECT_EQ(m.full_range({4, 4}), (Range{0, 20}));
  EXPECT_EQ(m.full_q_range({4, 4}), (Range{0, 10}));
}

TEST(Mask, HasNoOverflowAtTheLongestLengths) {
  constexpr int64_t kLongest = std::numeric_limits<int32_t>::max();
  const Mask m = Mask::make(Rule({false, kHuge, kHuge}), kLongest, kLongest);
  EXPECT_TRUE(m.allows(0, kLongest - 1));
  EXPECT_TRUE(m.allows(kLongest - 1, 0));
  EXPECT_EQ(m.kv_range({0, kLongest}), (Range{0, kLongest}));
  EXPECT_EQ(m.full_range({0, kLongest}), (Range{0, kLongest}));
  const Mask one = Mask::make(Rule({true, -1, -1}), kLongest, 1);
  EXPECT_FALSE(one.allows(kLongest - 2, 0));
  EXPECT_TRUE(one.allows(kLongest - 1, 0));
}

// The compiler can evaluate it, as CUDA's and the planner's constant expressions want.
static_assert(Mask::make(Rule({true, -1, -1}), 4, 6).row(0) == Range{0, 3});
static_assert(Mask::make(Rule({true, -1, -1}), 6, 4).row(0).empty());

}  // namespace
}  // namespace strobe
