// core/visit_order.h and what schedulers know of the visits of tiles before they have any: all
// against the visits of the tiles, counted one by one.
#include "core/visit_order.h"

#include <algorithm>
#include <cstdint>
#include <queue>
#include <random>
#include <vector>

#include "core/arithmetic.h"
#include "core/walk.h"
#include "gtest/gtest.h"

namespace strobe {
namespace {

constexpr int64_t kNone = MaskRule::kNoLimit;

// Causal or not, with windows, chunks, and both.
std::vector<MaskRule> Rules() {
  std::vector<MaskRule> rules;
  for (const bool causal : {false, true}) {
    for (const int64_t left : {kNone, int64_t{0}, int64_t{9}, int64_t{40}, int64_t{-3}}) {
      for (const int64_t right : {kNone, int64_t{0}, int64_t{9}, int64_t{-3}}) {
        for (const int64_t chunk : {0, 7, 16, 50}) {
          const MaskRule rule{left, right, chunk, causal};
          // What validate.cpp refuses.
          if (chunk > 0 && (left < 0 || right < 0)) continue;
          if (left != kNone && rule.is_limited_right() && left + rule.right() < 0) continue;
          rules.push_back(rule);
        }
      }
    }
  }
  return rules;
}

testing::Message Say(const MaskRule& rule) {
  return testing::Message() << "causal " << rule.causal << ", window (" << rule.window_left << ", "
                            << rule.window_right << "), chunk " << rule.attention_chunk;
}

std::vector<int64_t> Visits(const Mask& mask, int64_t tile_q, int64_t tile_k) {
  std::vector<int64_t> visits;
  for (int64_t begin = 0; begin < mask.seqlen_q; begin += tile_q) {
    const Range rows{begin, std::min(begin + tile_q, mask.seqlen_q)};
    visits.push_back(key_walk(mask, rows, tile_k).count());
  }
  return visits;
}

constexpr int64_t kTileQ = 5, kTileK = 4;

// Calls check(mask, visits, where) for the rule's masks of many lengths and positions.
template <typename Check>
void ForMasks(const MaskRule& rule, const Check& check) {
  for (const int64_t seqlen_q : {1, 12, 40, 64}) {
    for (const int64_t seqlen_k : {0, 1, 12, 40, 64, 90}) {
      for (const int64_t shift : {0, 3, -3, 30, -30}) {
        for (const int64_t prefix : {0, 13}) {
          if (prefix > 0 && (rule.attention_chunk > 0 || rule.is_limited_left())) continue;
          const Mask mask = Mask::make(rule, seqlen_q, seqlen_k, seqlen_k - seqlen_q + shift,
                                       std::min(prefix, seqlen_k));
          ASSERT_NO_FATAL_FAILURE(check(mask, Visits(mask, kTileQ, kTileK)))
              << Say(rule) << ", " << seqlen_q << " x " << seqlen_k << ", shift " << shift
              << ", prefix " << prefix;
        }
      }
    }
  }
}

// Last tile first, or first tile first, is the order by visits where the rule says so.
TEST(VisitOrder, RulesKnowInWhichOrderTilesGetLonger) {
  for (const MaskRule& rule : Rules()) {
    ASSERT_FALSE(rule.later_see_more() && rule.later_see_less());
    // With chunks that holds within a chunk alone.
    if (rule.attention_chunk > 0) continue;
    ASSERT_NO_FATAL_FAILURE(ForMasks(rule, [&](const Mask& mask, const std::vector<int64_t>& v) {
      // A tile whose rows the sequence does not fill sees the less for it, if it has that many.
      const auto whole = static_cast<size_t>(mask.seqlen_q / kTileQ);
      for (size_t i = 1; i < whole; ++i) {
        if (rule.later_see_more()) {
          // A window begins anywhere in a block, so that a tile may visit one less than the tile
          // before; and queries that stand past the last key see the fewer the later they come.
          const int64_t less = rule.is_limited_left() ? 1 : 0;
          const auto last = static_cast<int64_t>(i + 1) * kTileQ - 1;
          if (rule.is_limited_left() && mask.position(last) >= mask.seqlen_k) break;
          ASSERT_GE(v[i] + less, v[i - 1]) << "tile " << i;
        }
        if (rule.later_see_less()) {
          ASSERT_LE(v[i], v[i - 1]) << "tile " << i;
        }
      }
    }));
  }
}

TEST(VisitOrder, MostVisitsIsABoundThatGrowsWithTheLength) {
  for (const MaskRule& rule : Rules()) {
    ASSERT_NO_FATAL_FAILURE(ForMasks(rule, [&](const Mask& mask, const std::vector<int64_t>& v) {
      const int64_t most = most_visits(rule, kTileQ, mask.seqlen_k, kTileK);
      // (A prefix is for rules alone whose bound is the length.)
      ASSERT_LE(*std::max_element(v.begin(), v.end()), most);
      ASSERT_LE(most, ceil_div(mask.seqlen_k, kTileK));
    }));
    for (int64_t length = 0; length < 200; ++length) {
      ASSERT_LE(most_visits(rule, kTileQ, length, kTileK),
                most_visits(rule, kTileQ, length + 1, kTileK))
          << Say(rule) << ", length " << length;
    }
  }
}

// As a warp of a scheduler works it out: where each sequence's tiles end among those of all.
std::vector<int64_t> Ends(const std::vector<VisitKey>& keys, const std::vector<int64_t>& tiles) {
  std::vector<int64_t> ends = tiles;
  for (size_t i = 0; i < keys.size(); ++i) {
    for (size_t j = 0; j < keys.size(); ++j) ends[i] += keys[j].goes_before(keys[i]) ? tiles[j] : 0;
  }
  return ends;
}

TEST(VisitOrder, EveryTileOnceAndTheLongestFirst) {
  std::mt19937 random(5);
  for (int round = 0; round < 2000; ++round) {
    const auto n = static_cast<size_t>(1 + random() % 32);
    std::vector<uint32_t> visits;
    std::vector<VisitKey> keys;
    std::vector<int64_t> tiles;
    for (size_t i = 0; i < n; ++i) {
      visits.push_back(random() % 6 * (round % 2 ? 1 : (1u << 27) / 6));
      keys.push_back(VisitKey::make(visits[i], static_cast<uint32_t>(i)));
      tiles.push_back(static_cast<int64_t>(random() % 4));
    }
    const std::vector<int64_t> ends = Ends(keys, tiles);
    std::vector<size_t> order(n);  // of a stable sort
    for (size_t i = 0; i < n; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return visits[a] > visits[b]; });
    int64_t at = 0;
    for (const size_t i : order) {
      ASSERT_EQ(ends[i] - tiles[i], at) << "of " << i;
      at = ends[i];
    }
  }
}

// How long a launch takes whose thread blocks take the next tile whenever they are done with one.
int64_t Makespan(const std::vector<int64_t>& visits, size_t blocks) {
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> free;
  for (size_t i = 0; i < blocks; ++i) free.push(0);
  int64_t end = 0;
  for (const int64_t v : visits) {
    const int64_t done = free.top() + v;
    free.pop();
    free.push(done);
    end = std::max(end, done);
  }
  return end;
}

// Sequences of different lengths, the longest last: handed out longest first they end at about the
// least time that is possible, in batch order a quarter later.
TEST(VisitOrder, LongSequencesAtTheEndLeaveNoTail) {
  constexpr size_t kBlockCount = 12;
  const std::vector<int64_t> lengths{400, 100, 90, 300, 80, 200, 100, 60, 100, 2000};
  const auto launch = [&](bool by_visits) {
    std::vector<size_t> order;
    std::vector<VisitKey> keys;
    std::vector<std::vector<int64_t>> tiles;
    for (size_t b = 0; b < lengths.size(); ++b) {
      const Mask mask = Mask::make({}, 40, lengths[b]);
      tiles.push_back(Visits(mask, kTileQ, kTileK));
      const int64_t visits = most_visits({}, kTileQ, lengths[b], kTileK);
      keys.push_back(VisitKey::make(static_cast<uint32_t>(visits), static_cast<uint32_t>(b)));
      order.push_back(b);
    }
    if (by_visits) {
      std::sort(order.begin(), order.end(),
                [&](size_t a, size_t b) { return keys[a].goes_before(keys[b]); });
    }
    std::vector<int64_t> all;
    for (const size_t b : order) all.insert(all.end(), tiles[b].rbegin(), tiles[b].rend());
    return all;
  };
  const std::vector<int64_t> all = launch(true);
  int64_t total = 0, longest = 0;
  for (const int64_t v : all) total += v, longest = std::max(longest, v);
  const int64_t least = std::max(longest, ceil_div(total, kBlockCount));
  EXPECT_LE(100 * Makespan(all, kBlockCount), 105 * least);
  EXPECT_GT(100 * Makespan(launch(false), kBlockCount), 125 * least);
}

}  // namespace
}  // namespace strobe
