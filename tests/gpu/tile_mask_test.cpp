// The 32-bit mask of a tile's rows against the mask that everything else asks.
#include "cuda/common/tile_mask.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "core/mask.h"

namespace strobe::cuda {
namespace {

void expect_same(int64_t seqlen_q, int64_t seqlen_k, bool causal, int64_t left, int64_t right,
                 int64_t first, int32_t rows) {
  CommonParams p{};
  p.rule = {left, right, 0, causal};
  const Mask mask = Mask::make(p.rule, seqlen_q, seqlen_k);
  const TileMask tile = TileMask::make(TileWindow::make(p), static_cast<int32_t>(seqlen_q),
                                       static_cast<int32_t>(seqlen_k), static_cast<int32_t>(first));
  for (int32_t row = 0; row < rows && first + row < seqlen_q; ++row) {
    const Range range = mask.row(first + row);
    ASSERT_EQ(tile.begin(row), range.begin)
        << seqlen_q << " x " << seqlen_k << ", causal " << causal << ", window " << left << ", "
        << right << ", query " << first + row;
    ASSERT_EQ(tile.end(row), range.end)
        << seqlen_q << " x " << seqlen_k << ", causal " << causal << ", window " << left << ", "
        << right << ", query " << first + row;
  }
}

TEST(TileMask, EqualsMaskOnShortSequences) {
  for (int64_t seqlen_q = 1; seqlen_q <= 12; ++seqlen_q) {
    for (int64_t seqlen_k = 0; seqlen_k <= 12; ++seqlen_k) {
      for (const bool causal : {false, true}) {
        for (int64_t left = -1; left <= 13; ++left) {
          for (int64_t right = -1; right <= 13; ++right) {
            for (int64_t first = 0; first < seqlen_q; first += 4) {
              expect_same(seqlen_q, seqlen_k, causal, left, right, first, 4);
            }
          }
        }
      }
    }
  }
}

// Rows past the sequence's end too.
constexpr bool fits(int32_t seqlen_q, int32_t seqlen_k, int32_t first, int32_t row) {
  CommonParams p{};
  const TileWindow unlimited = TileWindow::make(p);
  const TileMask tile = TileMask::make(unlimited, seqlen_q, seqlen_k, first);
  return tile.begin(row) == 0 && tile.end(row) == seqlen_k;
}
constexpr auto kMost = static_cast<int32_t>(kLongestSequence);
static_assert(fits(1, kMost, 0, 191) && fits(kMost, kMost, kMost - 1, 191) && fits(kMost, 1, 0, 0),
              "an overflow would be no constant");

// At the largest lengths and windows.
TEST(TileMask, EqualsMaskAtTheLimits) {
  constexpr int64_t kLongest = kLongestSequence;
  for (const int64_t seqlen_q : {int64_t{1}, int64_t{193}, kLongest}) {
    for (const int64_t seqlen_k : {int64_t{0}, int64_t{1}, int64_t{1000}, kLongest}) {
      for (const bool causal : {false, true}) {
        for (const int64_t left : {int64_t{-1}, int64_t{0}, int64_t{1000}, kLongest, INT64_MAX}) {
          for (const int64_t right :
               {int64_t{-1}, int64_t{0}, int64_t{1000}, kLongest, INT64_MAX}) {
            expect_same(seqlen_q, seqlen_k, causal, left, right, 0, 192);
            expect_same(seqlen_q, seqlen_k, causal, left, right, seqlen_q - 1, 192);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace strobe::cuda
