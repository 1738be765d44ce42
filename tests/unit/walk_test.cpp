// core/walk.h's interface: what a kernel does with a walk, done to walks over an interval and to
// walks over a list of blocks that somebody made up. A list answers the same questions, so that
// loops that are written for one do not have to change for the other.
#include "core/walk.h"

#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "core/list_walk.h"
#include "cuda/hopper/part_walk.h"
#include "gtest/gtest.h"

namespace strobe {
namespace {

struct Entry {
  int64_t block;
  bool full;
};

// What a walk is told to be: every block once, and whether it is full.
using Blocks = std::vector<Entry>;

IntervalWalk<int64_t> interval_of(const Blocks& blocks) {
  if (blocks.empty()) return {};
  const int64_t begin = blocks.front().block, end = blocks.back().block + 1;
  int64_t full_begin = begin, full_end = begin;
  for (const auto& b : blocks) {
    if (!b.full) continue;
    if (full_begin == full_end) full_begin = b.block;
    full_end = b.block + 1;
  }
  return IntervalWalk<int64_t>::make(begin, end, full_begin, full_end);
}

template <int kWords>
ListWalk<int64_t, kWords> list_of(const Blocks& blocks) {
  auto walk = ListWalk<int64_t, kWords>::none();
  for (const Entry& e : blocks) walk.add(e.block, e.full);
  return walk;
}

// Up, as mma.sync's kernels go: every block once, ascending, at consecutive places.
template <typename Walk>
void expect_goes_up(const Walk& walk, const Blocks& wanted) {
  ASSERT_EQ(walk.count(), static_cast<int64_t>(wanted.size()));
  ASSERT_EQ(walk.empty(), wanted.empty());
  size_t n = 0;
  bool all_full = true;
  for (auto place = walk.begin; place < walk.end; ++place, ++n) {
    ASSERT_LT(n, wanted.size());
    ASSERT_TRUE(walk.has(place));
    ASSERT_EQ(walk.block(place), wanted[n].block) << "place " << place;
    ASSERT_EQ(walk.is_full(place), wanted[n].full) << "place " << place;
    all_full &= wanted[n].full;
  }
  ASSERT_EQ(n, wanted.size());
  ASSERT_FALSE(walk.has(walk.begin - 1));
  ASSERT_FALSE(walk.has(walk.begin + walk.count()));
  if (!wanted.empty()) {
    ASSERT_EQ(walk.all_full(), all_full);
  }
}

// Down, as Hopper's forward goes, with an inner loop over each run of full blocks.
template <typename Walk>
void expect_goes_down(const Walk& walk, const Blocks& wanted) {
  size_t left = wanted.size();
  const auto visit = [&](auto place, bool full) {
    ASSERT_GT(left, 0u);
    --left;
    ASSERT_EQ(walk.block(place), wanted[left].block) << "place " << place;
    ASSERT_EQ(full, wanted[left].full) << "place " << place;
  };
  for (auto place = walk.end - 1; place >= walk.begin; --place) {
    if (!walk.is_full(place)) {
      ASSERT_NO_FATAL_FAILURE(visit(place, false));
      continue;
    }
    for (const auto end = walk.full_run_begin(place);; --place) {
      ASSERT_NO_FATAL_FAILURE(visit(place, true));
      if (place == end) break;
    }
  }
  ASSERT_EQ(left, 0u);
}

// A place is found by its block, and the ranks of the blocks that are visited are consecutive in
// the order of the blocks: whoever waits for the rank before its own waits for a block that comes.
template <typename Walk>
void expect_ranks(const Walk& walk, const Blocks& wanted, int64_t blocks) {
  auto next = walk.begin;
  std::set<int64_t> visited;
  for (const auto& b : wanted) visited.insert(b.block);
  for (int64_t block = 0; block < blocks; ++block) {
    ASSERT_EQ(walk.visits(block), visited.count(block) > 0) << "block " << block;
    if (!walk.visits(block)) continue;
    ASSERT_EQ(walk.rank(block), next) << "block " << block;
    ASSERT_EQ(walk.block(walk.rank(block)), block);
    ++next;
  }
  ASSERT_EQ(next, walk.end);
}

// What a kernel does to a walk that does not use all of its full blocks: the same blocks, fewer of
// them full.
template <typename Walk>
void expect_partial(const Walk& walk, const Blocks& wanted) {
  Blocks partial = wanted;
  for (auto& b : partial) b.full = false;
  ASSERT_NO_FATAL_FAILURE(expect_goes_up(walk.all_partial(), partial));
  partial = wanted;
  for (auto place = walk.begin; place <= walk.end; ++place) {
    ASSERT_NO_FATAL_FAILURE(expect_goes_up(walk.partial_before(place), partial));
    ASSERT_NO_FATAL_FAILURE(expect_goes_down(walk.partial_before(place), partial));
    if (place < walk.end) partial[static_cast<size_t>(place - walk.begin)].full = false;
  }
}

// A tile of several parts: it goes through the places of them all, and each part takes its own.
// What the parts do not need, a warp that loads counts as idle. (All parts of a list share its
// entries.)
template <typename Walk>
void expect_parts(const std::vector<Walk>& parts, const Walk& all) {
  std::vector<int64_t> taken(parts.size());
  for (auto place = all.end - 1; place >= all.begin; --place) {
    size_t idle = 0;
    for (size_t w = 0; w < parts.size(); ++w) {
      if (!parts[w].has(place)) {
        ++idle;
        continue;
      }
      ++taken[w];
      ASSERT_EQ(parts[w].block(place), all.block(place));
    }
    ASSERT_LE(idle, parts.size());
  }
  for (size_t w = 0; w < parts.size(); ++w) ASSERT_EQ(taken[w], parts[w].count());
}

template <typename Walk>
void expect_walks(const Walk& walk, const Blocks& wanted, int64_t blocks) {
  ASSERT_NO_FATAL_FAILURE(expect_goes_up(walk, wanted));
  ASSERT_NO_FATAL_FAILURE(expect_goes_down(walk, wanted));
  ASSERT_NO_FATAL_FAILURE(expect_ranks(walk, wanted, blocks));
  ASSERT_NO_FATAL_FAILURE(expect_partial(walk, wanted));
  ASSERT_NO_FATAL_FAILURE(expect_parts<Walk>({walk, walk}, walk));
}

constexpr int64_t kBlocks = 9;

// Every interval of a few blocks, with every run of full ones inside; as a list too.
TEST(Walk, IntervalsAndListsOfTheSameBlocksGoTheSameWay) {
  for (int64_t begin = 0; begin < kBlocks; ++begin) {
    for (int64_t end = begin; end <= kBlocks; ++end) {
      for (int64_t full_begin = begin; full_begin <= end; ++full_begin) {
        for (int64_t full_end = full_begin; full_end <= end; ++full_end) {
          Blocks blocks;
          for (int64_t n = begin; n < end; ++n)
            blocks.push_back({n, full_begin <= n && n < full_end});
          ASSERT_NO_FATAL_FAILURE(expect_walks(interval_of(blocks), blocks, kBlocks));
          ASSERT_NO_FATAL_FAILURE(expect_walks(list_of<1>(blocks), blocks, kBlocks));
        }
      }
    }
  }
}

// Lists with gaps, and with runs of full blocks wherever they fall; of one word and of three.
TEST(Walk, MadeUpListsGoEveryPlaceOnce) {
  std::mt19937 random(3);
  for (int round = 0; round < 1000; ++round) {
    Blocks blocks;
    const bool is_long = round % 100 == 0;
    const uint32_t density = 1 + random() % 4, full = random() % 4;
    const int64_t count = is_long ? 150 : 40;
    for (int64_t n = 0; n < count; ++n) {
      if (random() % 4 < density) blocks.push_back({n, random() % 4 < full});
    }
    if (is_long) {
      ASSERT_NO_FATAL_FAILURE(expect_walks(list_of<3>(blocks), blocks, count));
    } else {
      ASSERT_NO_FATAL_FAILURE(expect_walks(list_of<1>(blocks), blocks, count));
    }
  }
}

// What lies within some blocks, and which rows meet a list.
TEST(Walk, PartsOfLists) {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    Blocks blocks;
    for (int64_t n = 0; n < 20; ++n) {
      if (random() % 3 == 0) blocks.push_back({n, random() % 2 == 0});
    }
    const auto walk = list_of<1>(blocks);
    const auto first = static_cast<int64_t>(random() % 20);
    const auto last = first + static_cast<int64_t>(random() % 20);
    Blocks inside;
    for (const Entry& e : blocks) {
      if (first <= e.block && e.block < last) inside.push_back(e);
    }
    ASSERT_NO_FATAL_FAILURE(expect_goes_up(walk.within(first, last), inside));
    const Range rows{7 * first - 3, 7 * last - 4};
    bool meets = false;
    for (const Entry& e : blocks) meets |= !intersect(rows, {7 * e.block, 7 * e.block + 7}).empty();
    if (rows.begin >= 0) {
      ASSERT_EQ(walk.meets(rows, 7), meets);
    }
  }
}

// The parts of a tile under masks of all kinds: what a part visits lies in the walk of the tile.
TEST(Walk, PartsLieInTheWalkOfTheirTile) {
  for (const MaskRule& rule :
       {MaskRule{}, MaskRule{MaskRule::kNoLimit, MaskRule::kNoLimit, 0, true},
        MaskRule{13, MaskRule::kNoLimit, 0, true}, MaskRule{5, 4, 0, false},
        MaskRule{MaskRule::kNoLimit, MaskRule::kNoLimit, 11, true}}) {
    for (const int64_t seqlen_q : {1, 7, 24, 40}) {
      for (const int64_t seqlen_k : {0, 1, 17, 40}) {
        const Mask mask = Mask::make(rule, seqlen_q, seqlen_k);
        for (int64_t begin = 0; begin < seqlen_q; begin += 8) {
          const auto cut = [&](int64_t x) { return x < seqlen_q ? x : seqlen_q; };
          std::vector<IntervalWalk<int64_t>> parts;
          for (const int64_t part : {0, 4})
            parts.push_back(key_walk(mask, {cut(begin + part), cut(begin + part + 4)}, 3));
          ASSERT_NO_FATAL_FAILURE(expect_parts(parts, key_walk(mask, {begin, cut(begin + 8)}, 3)));
        }
      }
    }
  }
}

// Which blocks keep the softmax's reference on Hopper: those that are full, but for the last one to
// be computed where that frees Q early, and for none where rows past the end could change the
// others.
TEST(Walk, BlocksOfAWarpgroupThatKeepTheReference) {
  for (int32_t begin = 0; begin < 4; ++begin) {
    for (int32_t end = begin; end < 9; ++end) {
      for (int32_t full_begin = begin; full_begin <= end; ++full_begin) {
        for (int32_t full_end = full_begin; full_end <= end; ++full_end) {
          const auto walk = IntervalWalk<int32_t>::make(begin, end, full_begin, full_end);
          for (const bool frees_q : {false, true}) {
            for (const bool rows_past_end : {false, true}) {
              const auto part = cuda::sm90::part_walk(walk, frees_q, rows_past_end);
              ASSERT_EQ(part.count(), walk.count());
              for (int32_t place = begin; place < end; ++place) {
                const bool keeps =
                    walk.is_full(place) && !rows_past_end && !(frees_q && place == begin);
                ASSERT_TRUE(part.has(place));
                ASSERT_EQ(part.is_full(place), keeps) << "place " << place << " from " << begin;
              }
            }
          }
        }
      }
    }
  }
}

// Sizes that are known by their logarithm cut at the same places; and rows are those of the blocks.
TEST(Walk, SizesThatAreKnownByTheirLogarithm) {
  for (const bool causal : {false, true}) {
    for (int64_t seqlen_k = 0; seqlen_k < 40; ++seqlen_k) {
      const Mask mask = Mask::make({7, MaskRule::kNoLimit, 0, causal}, 20, seqlen_k);
      for (int32_t log2 = 0; log2 < 5; ++log2) {
        for (int64_t begin = 0; begin < 20; begin += 3) {
          const Range rows{begin, begin + 3 < 20 ? begin + 3 : 20};
          const IntervalWalk<int64_t> walk = key_walk(mask, rows, int64_t{1} << log2);
          ASSERT_EQ(key_walk(mask, rows, PowerOfTwo{log2}), walk);
          ASSERT_EQ(query_walk(mask, rows, PowerOfTwo{log2}),
                    query_walk(mask, rows, int64_t{1} << log2));
          const IntervalWalk<int64_t> in_rows = walk.in_rows(int64_t{1} << log2);
          for (int64_t n = 0; n * (int64_t{1} << log2) < seqlen_k; ++n) {
            ASSERT_EQ(in_rows.has(n << log2), walk.has(n));
            ASSERT_EQ(in_rows.is_full(n << log2), walk.is_full(n));
          }
        }
      }
    }
  }
}

// What computes a row again from its pairs goes through exactly the pairs that the mask allows.
TEST(Walk, SingleRowsVisitTheAllowedPairs) {
  for (const MaskRule& rule :
       {MaskRule{}, MaskRule{MaskRule::kNoLimit, MaskRule::kNoLimit, 0, true},
        MaskRule{5, 4, 0, false}, MaskRule{8, -3, 0, false},
        MaskRule{MaskRule::kNoLimit, MaskRule::kNoLimit, 11, true}}) {
    const Mask mask = Mask::make(rule, 23, 19);
    const auto expect_pairs = [](const auto& walk, int64_t rows, const auto& allows) {
      std::vector<bool> visited(static_cast<size_t>(rows));
      for (int64_t place = walk.begin; place < walk.end; ++place) {
        ASSERT_TRUE(walk.is_full(place));
        visited.at(static_cast<size_t>(walk.block(place))) = true;
      }
      for (int64_t r = 0; r < rows; ++r)
        ASSERT_EQ(visited[static_cast<size_t>(r)], allows(r)) << "row " << r;
    };
    for (int64_t i = 0; i < 23; ++i) {
      ASSERT_NO_FATAL_FAILURE(
          expect_pairs(single_keys(mask, i), 19, [&](int64_t j) { return mask.allows(i, j); }));
    }
    for (int64_t j = 0; j < 19; ++j) {
      ASSERT_NO_FATAL_FAILURE(
          expect_pairs(single_queries(mask, j), 23, [&](int64_t i) { return mask.allows(i, j); }));
    }
  }
}

}  // namespace
}  // namespace strobe
