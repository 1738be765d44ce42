// The dropout bits of the GPU kernels against the CPU's mask: all 32 lanes of a warp are played
// here, with the kernels' own lane arithmetic, and shuffles and movmatrix done as the PTX manual
// says.
#include "cuda/common/dropout.cuh"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "cuda/common/tile.cuh"
#include "strobe/strobe.h"

namespace strobe::cuda {
namespace {

constexpr int kLanes = 32;
using Words = std::array<std::array<uint32_t, 4>, kLanes>;

// A copy that the kernels' functions of C arrays take.
struct Four {
  uint32_t w[4];
};

// quad_transpose: in each step all lanes give before any takes, as with a shuffle.
void transpose_quads(Words& words) {
  for (int distance = 2; distance > 0; distance /= 2) {
    for (int n = 0; n < 2; ++n) {
      const int i = n * (3 - distance);
      std::array<uint32_t, kLanes> given{};
      for (int lane = 0; lane < kLanes; ++lane) {
        const auto& mine = words[static_cast<size_t>(lane)];
        const Four four{{mine[0], mine[1], mine[2], mine[3]}};
        given[static_cast<size_t>(lane)] = quad_gives(four.w, lane, distance, i);
      }
      for (int lane = 0; lane < kLanes; ++lane) {
        auto& mine = words[static_cast<size_t>(lane)];
        Four four{{mine[0], mine[1], mine[2], mine[3]}};
        quad_takes(four.w, lane, distance, i, given[static_cast<size_t>(lane ^ distance)]);
        mine = {four.w[0], four.w[1], four.w[2], four.w[3]};
      }
    }
  }
}

// movmatrix.m8n8.trans.b16: lane 4 r + c holds elements (r, 2c) and (r, 2c + 1), low half first.
void transpose_matrices(Words& words) {
  for (size_t d = 0; d < 4; ++d) {
    uint32_t element[8][8];
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      element[lane / 4][2 * (lane % 4)] = words[lane][d] & 0xffffu;
      element[lane / 4][2 * (lane % 4) + 1] = words[lane][d] >> 16;
    }
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      words[lane][d] = element[2 * (lane % 4)][lane / 4] | element[2 * (lane % 4) + 1][lane / 4]
                                                               << 16;
    }
  }
}

Words calls(const Dropout& d, uint32_t batch_head, uint32_t query, uint32_t group,
            DropoutCall (*call_of)(int)) {
  Words words{};
  for (int lane = 0; lane < kLanes; ++lane) {
    const DropoutCall call = call_of(lane);
    const Philox4 bits = d.bits(batch_head, query + call.query, group + call.group);
    for (size_t i = 0; i < 4; ++i) words[static_cast<size_t>(lane)][i] = bits.word[i];
  }
  return words;
}
DropoutCall forward_call(int lane) { return dropout_call(lane); }
DropoutCall backward_call(int lane) { return dropout_call_transposed(lane); }

constexpr uint64_t kSeed = 0x0123456789ABCDEFu, kOffset = 0xFEDCBA9876543210u;

TEST(QuadTranspose, LaneTsWordDBecomesLaneDsWordT) {
  Words words{};
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    for (uint32_t d = 0; d < 4; ++d) words[lane][d] = 4 * lane + d;
  }
  transpose_quads(words);
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    for (uint32_t d = 0; d < 4; ++d) {
      EXPECT_EQ(words[lane][d], 4 * (lane / 4 * 4 + d) + lane % 4) << lane << ", " << d;
    }
  }
}

// Warp::drop (forward_warp.cuh): word b belongs to values 2 (b / 2) + {0, 1} of accumulator b % 2.
TEST(DropoutWords, ForwardIsTheCpusMask) {
  constexpr int64_t kBatch = 2, kHeads = 3, kQueries = 96, kKeys = 128;
  for (const float p : {0.1f, 0.5f, 0.9f}) {
    const Dropout d = Dropout::make(p, kSeed, kOffset);
    std::vector<uint8_t> mask(kBatch * kHeads * kQueries * kKeys);
    ASSERT_EQ(strobe_dropout_mask(kBatch, kHeads, kQueries, kKeys, p, kSeed, kOffset, mask.data()),
              STROBE_OK);
    int64_t checked = 0;
    for (uint32_t bh = 0; bh < kBatch * kHeads; ++bh) {
      for (uint32_t row = 0; row < kQueries; row += 16) {
        for (uint32_t key = 0; key < kKeys; key += 16) {
          Words words = calls(d, bh, row, key / 8, forward_call);
          transpose_quads(words);
          for (int lane = 0; lane < kLanes; ++lane) {
            for (int b = 0; b < 4; ++b) {
              for (int half = 0; half < 2; ++half) {
                const int i = b / 2 * 2 + half;  // of accumulator b % 2
                const int64_t query = row + accumulator_row(lane, i);
                const int64_t column = key + 8 * (b % 2) + accumulator_column(lane, i);
                const uint32_t word = words[static_cast<size_t>(lane)][static_cast<size_t>(b)];
                ASSERT_EQ(half ? keep_high(d, word) : keep_low(d, word),
                          mask[static_cast<size_t>((bh * kQueries + query) * kKeys + column)] != 0)
                    << "lane " << lane << ", word " << b << ", half " << half;
                ++checked;
              }
            }
          }
        }
      }
    }
    EXPECT_EQ(checked, static_cast<int64_t>(mask.size()));
  }
}

// weights_half (backward_sm80.cuh): scores are [key][query]; word[h][d] of keys 8 h on belongs to
// values 2 h + {0, 1} of accumulator d.
TEST(DropoutWords, BackwardIsTheCpusMask) {
  constexpr int64_t kHeads = 2, kQueries = 64, kKeys = 96;
  for (const float p : {0.1f, 0.5f, 0.9f}) {
    const Dropout d = Dropout::make(p, kSeed, kOffset);
    std::vector<uint8_t> mask(kHeads * kQueries * kKeys);
    ASSERT_EQ(strobe_dropout_mask(1, kHeads, kQueries, kKeys, p, kSeed, kOffset, mask.data()),
              STROBE_OK);
    int64_t checked = 0;
    for (uint32_t bh = 0; bh < kHeads; ++bh) {
      for (uint32_t query0 = 0; query0 < kQueries; query0 += 32) {
        for (uint32_t key0 = 0; key0 < kKeys; key0 += 16) {
          for (uint32_t h = 0; h < 2; ++h) {
            Words words = calls(d, bh, query0, (key0 + 8 * h) / 8, backward_call);
            transpose_quads(words);
            transpose_matrices(words);
            for (int lane = 0; lane < kLanes; ++lane) {
              for (int block = 0; block < 4; ++block) {
                for (int half = 0; half < 2; ++half) {
                  const int i = static_cast<int>(2 * h) + half;
                  const int64_t key = key0 + accumulator_row(lane, i);
                  const int64_t query = query0 + 8 * block + accumulator_column(lane, i);
                  const uint32_t word =
                      words[static_cast<size_t>(lane)][static_cast<size_t>(block)];
                  ASSERT_EQ(half ? keep_high(d, word) : keep_low(d, word),
                            mask[static_cast<size_t>((bh * kQueries + query) * kKeys + key)] != 0)
                      << "lane " << lane << ", block " << block << ", half " << half;
                  ++checked;
                }
              }
            }
          }
        }
      }
    }
    EXPECT_EQ(checked, static_cast<int64_t>(mask.size()));
  }
}

// DroppedWeights (backward_sm90_scores.cuh): the same words as bits.
TEST(DroppedBits, AreTheCpusMask) {
  constexpr int64_t kQueries = 64, kKeys = 48;
  for (const float p : {0.1f, 0.5f, 0.9f}) {
    const Dropout d = Dropout::make(p, kSeed, kOffset);
    std::vector<uint8_t> mask(kQueries * kKeys);
    ASSERT_EQ(strobe_dropout_mask(1, 1, kQueries, kKeys, p, kSeed, kOffset, mask.data()),
              STROBE_OK);
    for (uint32_t key0 = 0; key0 < kKeys; key0 += 16) {
      std::array<uint32_t, kLanes> dropped{};
      for (uint32_t b = 0; b < 2; ++b) {
        for (uint32_t row = 0; row < 2; ++row) {
          Words words = calls(d, 0, 32 * b, (key0 + 8 * row) / 8, backward_call);
          transpose_quads(words);
          transpose_matrices(words);
          for (size_t lane = 0; lane < kLanes; ++lane) {
            const auto& w = words[lane];
            const uint32_t word[4] = {w[0], w[1], w[2], w[3]};
            const uint32_t bits = dropped_bits(d, word, static_cast<int>(b), static_cast<int>(row));
            ASSERT_EQ(dropped[lane] & bits, 0u);
            dropped[lane] |= bits;
          }
        }
      }
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int j = 0; j < 4; ++j) {
          for (int i = 0; i < 8; ++i) {
            const int64_t key = key0 + accumulator_row(lane, i % 4);
            const int64_t query = 16 * j + i / 4 * 8 + accumulator_column(lane, i % 4);
            const bool is_dropped =
                (dropped[static_cast<size_t>(lane)] >> dropped_bit(j, i) & 1) != 0;
            ASSERT_EQ(!is_dropped, mask[static_cast<size_t>(query * kKeys + key)] != 0)
                << "lane " << lane << ", j " << j << ", i " << i;
          }
        }
      }
    }
  }
}

TEST(KeepOne, IsDropoutKeep) {
  const Dropout d = Dropout::make(0.4f, kSeed, kOffset);
  for (uint32_t row = 0; row < 40; ++row) {
    for (uint32_t key = 0; key < 40; ++key) {
      ASSERT_EQ(keep_one(d, 7, row, key), d.keep(7, row, key));
    }
  }
}

}  // namespace
}  // namespace strobe::cuda
