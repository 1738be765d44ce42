// The boxes in which the Hopper kernels fetch keys from a cache, against where each key lies by
// itself.
#include "cuda/common/key_boxes.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace strobe::cuda {
namespace {

// The blocks of keys of the rows in kernels.def.
constexpr int32_t kBlocks[] = {64, 80, 96, 128};

TEST(KeyBoxes, AreWholeGroupsOfEightRowsThatDivideBlockAndPage) {
  for (const int32_t tile_k : kBlocks) {
    EXPECT_EQ(KeyBoxes::make(tile_k, 0).rows, tile_k) << "without pages a block is a box";
    for (int64_t page_size = 1; page_size <= 520; ++page_size) {
      const int32_t rows = KeyBoxes::make(tile_k, page_size).rows;
      if (page_size % 8 != 0) {
        EXPECT_EQ(rows, 0) << "pages of " << page_size;
        continue;
      }
      ASSERT_GE(rows, 8) << "pages of " << page_size;
      EXPECT_EQ(rows, std::gcd(page_size, int64_t{tile_k}));
      EXPECT_EQ(rows % 8, 0);
      EXPECT_LE(tile_k / rows, 32) << "a lane has one box";
    }
  }
}

TEST(KeyBoxes, HoldConsecutiveRowsOfOnePage) {
  std::mt19937 random(7);
  for (const int32_t tile_k : kBlocks) {
    for (const int64_t page_size : {8, 16, 24, 40, 48, 64, 80, 96, 120, 128, 160, 256, 1000}) {
      const KeyBoxes boxes = KeyBoxes::make(tile_k, page_size);
      ASSERT_GT(boxes.rows, 0);
      constexpr int64_t kKeys = 3000;
      std::vector<int32_t> table(static_cast<size_t>(kKeys / page_size + 1));
      for (int32_t& page : table) page = static_cast<int32_t>(random() % 60) - 10;
      const KeyRows keys{0, table.data(), Divider::make(static_cast<uint32_t>(page_size)), 40, 0};
      for (int64_t block = 0; block + tile_k <= kKeys; block += tile_k) {
        for (int32_t i = 0; i < tile_k / boxes.rows; ++i) {
          const KeyRows::Place box = boxes.place(keys, block, i);
          EXPECT_EQ(keys.has(box.entry), 0 <= box.entry && box.entry < 40);
          for (int32_t row = 0; row < boxes.rows; ++row) {
            const int64_t key = block + i * boxes.rows + row;
            ASSERT_EQ(box.entry, table[static_cast<size_t>(key / page_size)]);
            ASSERT_EQ(box.row + row, key % page_size) << "key " << key;
          }
        }
      }
    }
  }
}

TEST(KeyBoxes, AContiguousEntryBeginsAtItsLeftPad) {
  const KeyBoxes boxes = KeyBoxes::make(128, 0);
  const KeyRows keys{5, nullptr, Divider::make(1), 0, 17};
  const KeyRows::Place box = boxes.place(keys, 256, 0);
  EXPECT_EQ(box.entry, 5);
  EXPECT_EQ(box.row, 17 + 256);
  EXPECT_TRUE(box.there);
}

}  // namespace
}  // namespace strobe::cuda
