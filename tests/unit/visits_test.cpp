// What schedulers know of the visits of tiles before they have any, against the visits of the
// tiles, counted one by one.
#include <algorithm>
#include <cstdint>
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

// Last tile first is the order by visits where the rule says so.
TEST(Visits, RulesKnowInWhichOrderTilesGetLonger) {
  for (const MaskRule& rule : Rules()) {
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
      }
    }));
  }
}

TEST(Visits, MostVisitsIsABoundThatGrowsWithTheLength) {
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

}  // namespace
}  // namespace strobe
