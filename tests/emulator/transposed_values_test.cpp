// Float8 V transposed in shared memory: the orders of its keys and columns, and what the warpgroup
// that transposes a block leaves.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/hopper/forward_sm90_producer.cuh"
#include "run_time.h"

namespace strobe::cuda {
extern char shared[];
}

namespace strobe::emulator {
namespace {

using cuda::sm90::accumulator_at;
using cuda::sm90::key_at_place;
using cuda::sm90::row_of_column;
using cuda::sm90::TransposedTile;

// A thread's scores, packed four a register, are P's operand with keys in the order of
// key_at_place.
TEST(TransposedValues, WeightsNeedCrossNoLanes) {
  for (int t = 0; t < 4; ++t) {
    for (int step = 0; step < 4; ++step) {
      for (int half = 0; half < 2; ++half) {
        for (int byte = 0; byte < 4; ++byte) {
          // Accumulator 4 j + {0, 1} of the row is column 8 j + 2 t + {0, 1}.
          const int j = 4 * step + 2 * half + byte / 2, key = 8 * j + 2 * t + byte % 2;
          EXPECT_EQ(key_at_place(32 * step + 16 * half + 4 * t + byte), key);
        }
      }
    }
  }
}

TEST(TransposedValues, OrdersArePermutations) {
  std::vector<int> keys(128), rows(128), values(64);
  for (int i = 0; i < 128; ++i) {
    ++keys[static_cast<size_t>(key_at_place(i))];
    ++rows[static_cast<size_t>(row_of_column(i))];
    EXPECT_EQ(key_at_place(i) / 16, i / 16);
    EXPECT_EQ(row_of_column(i) / 16, i / 16);
  }
  for (int i = 0; i < 64; ++i) ++values[static_cast<size_t>(accumulator_at(i))];
  EXPECT_EQ(std::count(keys.begin(), keys.end(), 1), 128);
  EXPECT_EQ(std::count(rows.begin(), rows.end(), 1), 128);
  EXPECT_EQ(std::count(values.begin(), values.end(), 1), 64);
}

// Value i of a thread in the order of columns is in the accumulator whose column of the product is
// the row that V's column has.
TEST(TransposedValues, AccumulatorsHaveTheirColumns) {
  for (int t = 0; t < 4; ++t) {
    for (int i = 0; i < 64; ++i) {
      const int column = i / 4 * 8 + 2 * t + i % 2, at = accumulator_at(i);
      EXPECT_EQ(at / 4 * 8 + 2 * t + at % 2, row_of_column(column));
      EXPECT_EQ(at / 2 % 2, i / 2 % 2);  // of the same row
    }
  }
}

// The eight rows that stmatrix writes at a time lie in different banks.
TEST(TransposedValues, StoresMeetNoBankTwice) {
  using Tile = TransposedTile<128, 128>;
  for (int column = 0; column < 128; column += 32) {
    for (int unit = 0; unit < 8; ++unit) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        uint32_t units = 0;
        for (int row = 0; row < 8; ++row)
          units |= 1u << Tile::stored_offset(8 * matrix + row, column, unit) % 128 / 16;
        EXPECT_EQ(units, 0xffu);
      }
    }
  }
}

// Whatever is transposed, and whichever of its keys are in use.
template <int kWidth, int kTileK>
void ExpectTransposed() {
  using Tr =
      cuda::sm90::Traits<cuda::kE4m3Codes, kWidth, 128, kTileK, 2, 8, false, false, false, false>;
  using KTile = typename Tr::KTile;
  using VTile = typename Tr::VTile;
  const auto code = [](int key, int column) {
    return static_cast<uint8_t>(key * 37 + column * 101 + key * column / 7 + 1);
  };
  for (const int used : {kTileK, kTileK - 1, 33, 16, 1, 0, -5}) {
    const std::string wrong = run(1, 1, 128, KTile::kBytes + VTile::kBytes, [&] {
      for (int i = static_cast<int>(threadIdx.x); i < kTileK * kWidth; i += 128) {
        const int key = i / kWidth, column = i % kWidth;
        cuda::shared[KTile::offset(key, column / 16 * 16) + column % 16] =
            static_cast<char>(code(key, column));
      }
      barrier(0, 128);
      const uint32_t from = shared_address(cuda::shared);
      cuda::sm90::transpose_block<Tr>(from, from + KTile::kBytes, used);
      barrier(0, 128);
      const char* const to = cuda::shared + KTile::kBytes;
      for (int i = static_cast<int>(threadIdx.x); i < kTileK * kWidth; i += 128) {
        const int place = i / kWidth, column = i % kWidth, key = key_at_place(place);
        const auto got =
            static_cast<uint8_t>(to[VTile::offset(row_of_column(column), place / 16) + place % 16]);
        const uint8_t wanted = key < used ? code(key, column) : uint8_t{0};
        if (got != wanted) {
          fail("key " + std::to_string(key) + ", column " + std::to_string(column) + ": " +
               std::to_string(got) + ", expected " + std::to_string(wanted));
        }
      }
    });
    EXPECT_EQ(wrong, "") << kWidth << ", of " << kTileK << " keys " << used << " in use";
  }
}

TEST(TransposedValues, BlocksAreTransposed) {
  ExpectTransposed<64, 128>();
  ExpectTransposed<96, 128>();
  ExpectTransposed<128, 128>();
  ExpectTransposed<192, 96>();
  ExpectTransposed<256, 64>();
}

}  // namespace
}  // namespace strobe::emulator
