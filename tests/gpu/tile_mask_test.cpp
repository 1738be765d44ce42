// The mask in 32 bits, for the rows of a tile, against the one in 64 that everything else asks.
#include "cuda/common/tile_mask.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "core/mask.h"
#include "core/sequence.h"
#include "core/walk.h"

namespace strobe::cuda {
namespace {

void expect_same(const MaskRule& rule, const Mask& mask, int64_t first, int32_t rows) {
  const TileMask tile = mask.tile(first, rows);
  const TileMask of_rule = mask.tile(first, rows, TileRule::make(rule));
  for (int32_t row = 0; row < tile.seqlen_q; ++row) {
    ASSERT_EQ(of_rule.row(row), tile.row(row)) << "made from the rule, query " << first + row;
  }
  ASSERT_EQ(tile.seqlen_q, std::min<int64_t>(rows, mask.seqlen_q - first));
  const auto where = [&](int64_t row) {
    return ::testing::Message() << mask.seqlen_q << " x " << mask.seqlen_k << ", window "
                                << mask.first << " to " << mask.last << ", offset " << mask.offset
                                << ", chunk " << mask.chunk << ", prefix " << mask.prefix
                                << ", query " << first + row;
  };
  for (int32_t row = 0; row < tile.seqlen_q; ++row) {
    ASSERT_EQ(tile.row(row), mask.row(first + row)) << where(row);
    ASSERT_EQ(tile.position(row), mask.position(first + row)) << where(row);
  }
  for (const int64_t size : {64, 80, 128}) {
    const auto narrow =
        static_cast<IntervalWalk<int64_t>>(key_walk(tile, {0, tile.seqlen_q}, size));
    const IntervalWalk<int64_t> wide = key_walk(mask, {first, first + tile.seqlen_q}, size);
    ASSERT_EQ(narrow, wide) << where(0);
  }
}

// From the side of the keys, all queries being one tile: what the backward pass asks.
void expect_same_queries(const Mask& mask, int64_t key) {
  const TileMask whole = mask.tile(0, mask.seqlen_q);
  ASSERT_EQ(whole.seqlen_q, mask.seqlen_q);
  ASSERT_EQ(whole.q_range({key, key + 1}), mask.q_range({key, key + 1})) << "key " << key;
  for (const int64_t size : {64, 128}) {
    const Range keys{key, std::min(key + 2 * size, mask.seqlen_k)};
    const auto narrow = static_cast<IntervalWalk<int64_t>>(query_walk(whole, keys, size));
    const IntervalWalk<int64_t> wide = query_walk(mask, keys, size);
    ASSERT_EQ(narrow, wide) << "key " << key;
  }
}

TEST(TileMask, EqualsMaskOnShortSequences) {
  constexpr int64_t kNone = MaskRule::kNoLimit;
  for (const int64_t seqlen_q : {1, 2, 5, 9}) {
    for (const int64_t seqlen_k : {0, 1, 4, 7, 12}) {
      for (const bool causal : {false, true}) {
        for (const int64_t left :
             {kNone, int64_t{-2}, int64_t{0}, int64_t{1}, int64_t{3}, int64_t{13}}) {
          for (const int64_t right : {kNone, int64_t{-3}, int64_t{0}, int64_t{2}, int64_t{13}}) {
            for (const int64_t chunk : {0, 1, 2, 3, 5, 30}) {
              for (int64_t offset = -14; offset <= 14; ++offset) {
                for (const int64_t prefix : {0, 1, 3, 12}) {
                  const MaskRule rule{left, right, chunk, causal};
                  if (prefix > 0 && (rule.is_limited_left() || chunk > 0)) continue;
                  // What validate.cpp refuses.
                  if (chunk > 0 && (left < 0 || right < 0)) continue;
                  if (left != kNone && left + rule.right() < 0) continue;
                  const Mask mask =
                      Mask::make(rule, seqlen_q, seqlen_k, offset, std::min(prefix, seqlen_k));
                  for (int64_t first = 0; first < seqlen_q; first += 4) {
                    ASSERT_NO_FATAL_FAILURE(expect_same(rule, mask, first, 4));
                  }
                  for (int64_t key = 0; key < seqlen_k; ++key)
                    ASSERT_NO_FATAL_FAILURE(expect_same_queries(mask, key));
                }
              }
            }
          }
        }
      }
    }
  }
}

// At the largest lengths, windows, chunks and positions.
TEST(TileMask, EqualsMaskAtTheLimits) {
  constexpr int64_t kLongest = kLongestSequence, kFurthest = Sequences::kFurthestPosition;
  constexpr int64_t kSizes[] = {
      -MaskRule::kFarthest, -kLongest, -1000, 0, 1000, kLongest, INT32_MAX, MaskRule::kNoLimit};
  for (const int64_t seqlen_q : {int64_t{1}, int64_t{193}, kLongest}) {
    for (const int64_t seqlen_k : {int64_t{0}, int64_t{1}, int64_t{1000}, kLongest}) {
      for (const int64_t offset : {seqlen_k - seqlen_q, -kFurthest, -kFurthest + 100, -seqlen_q,
                                   int64_t{0}, int64_t{999999}, kFurthest - 100, kFurthest}) {
        for (const bool causal : {false, true}) {
          for (const int64_t left : kSizes) {
            for (const int64_t right : kSizes) {
              for (const int64_t chunk :
                   {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{1000}, kLongest, kFurthest,
                    int64_t{INT32_MAX}, int64_t{1} << 31, INT64_MAX}) {
                const MaskRule rule{left, right, chunk, causal};
                if (chunk > 0 && (left < 0 || right < 0)) continue;
                const bool both = rule.is_limited_left() && rule.is_limited_right();
                if (both && left + rule.right() < 0) continue;
                const Mask mask = Mask::make(
                    rule, seqlen_q, seqlen_k, offset,
                    !rule.is_limited_left() && chunk == 0 ? std::min<int64_t>(seqlen_k, 77) : 0);
                for (const int64_t first : {int64_t{0}, seqlen_q / 2, seqlen_q - 1}) {
                  ASSERT_NO_FATAL_FAILURE(expect_same(rule, mask, first, 16));
                }
                for (const int64_t key : {int64_t{0}, seqlen_k / 2, seqlen_k - 1}) {
                  if (key >= 0 && key < seqlen_k) {
                    ASSERT_NO_FATAL_FAILURE(expect_same_queries(mask, key));
                  }
                }
              }
            }
          }
        }
      }
    }
  }
}

// The last row of the largest tile too; and nothing overflows: an overflow would be no constant.
constexpr bool same(const Mask& mask, int64_t first) {
  const TileMask tile = mask.tile(first, Mask::kTileRows);
  const int32_t last = tile.seqlen_q - 1;
  return tile.row(0) == mask.row(first) && tile.row(last) == mask.row(first + last) &&
         tile.q_range({0, 1}).begin >= 0;
}
constexpr bool same_queries(const Mask& mask) {
  const TileMask whole = mask.tile(0, mask.seqlen_q);
  const Range last{mask.seqlen_k - 1, mask.seqlen_k};
  return whole.q_range({0, 1}) == mask.q_range({0, 1}) && whole.q_range(last) == mask.q_range(last);
}
constexpr int64_t kMost = kLongestSequence, kFar = Sequences::kFurthestPosition;
static_assert(same(Mask::make({}, 1, kMost), 0) && same(Mask::make({}, kMost, kMost), kMost - 1) &&
              same(Mask::make({}, kMost, 1), 0));
static_assert(same(Mask::make({INT64_MAX, INT64_MAX, INT64_MAX, false}, kMost, kMost, kFar, 0),
                   kMost - 1024));
static_assert(same(Mask::make({INT64_MAX, INT64_MAX, INT64_MAX, true}, kMost, kMost, -kFar, 0), 0));
static_assert(same(Mask::make({0, 0, 1, true}, kMost, kMost, kFar, 0), kMost - 1024));
static_assert(same(Mask::make({0, 0, INT32_MAX, false}, kMost, kMost, -kFar, 0), 0));
static_assert(same_queries(Mask::make({}, kMost, kMost)) &&
              same_queries(Mask::make({INT64_MAX, INT64_MAX, INT64_MAX, true}, kMost, kMost, kFar,
                                      0)) &&
              same_queries(Mask::make({0, 0, INT32_MAX, false}, kMost, kMost, -kFar, 0)) &&
              same_queries(Mask::make({0, 0, 1, true}, kMost, kMost, kFar, 0)));

}  // namespace
}  // namespace strobe::cuda
