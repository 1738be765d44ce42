// What the CUDA kernels compute with indices alone, checked on the CPU: where things lie in shared
// memory, what an mma fragment holds, in which order tiles are taken.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "cuda/backward/scratch.cuh"
#include "cuda/common/stagger.cuh"
#include "cuda/common/static_order.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/hopper/backward_sm90_wide_maps.cuh"

namespace strobe::cuda {
namespace {

// Row and column within a 16 x 16 A fragment of half `half` of a lane's register r.
constexpr int operand_a_row(int lane, int r) { return lane / 4 + 8 * (r % 2); }
constexpr int operand_a_column(int lane, int r, int half) {
  return 2 * (lane % 4) + half + 8 * (r / 2);
}

// Every (row, 16-byte chunk) of a tile has a place of its own, and the places fill the tile.
template <int kRows, int kWidth, int kValueBytes = 2>
void check_places() {
  using Tile = SharedTile<kRows, kWidth, kValueBytes>;
  EXPECT_EQ(Tile::kBytes, kRows * kWidth * kValueBytes);
  std::set<int> places;
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kWidth; column += 16 / kValueBytes) {
      const int at = Tile::offset(row, column);
      EXPECT_EQ(at % 16, 0);
      EXPECT_GE(at, 0);
      EXPECT_LE(at + 16, Tile::kBytes);
      EXPECT_TRUE(places.insert(at).second) << "row " << row << ", column " << column;
    }
  }
  EXPECT_EQ(places.size() * 16, static_cast<size_t>(Tile::kBytes));
}

// 16-byte accesses of eight lanes are served together when they touch all 32 banks once.
int banks_touched(const std::array<int, 8>& offsets) {
  std::set<int> banks;
  for (const int offset : offsets) {
    for (int word = 0; word < 4; ++word) banks.insert((offset / 4 + word) % 32);
  }
  return static_cast<int>(banks.size());
}

template <int kRows, int kWidth, int kValueBytes = 2>
void check_fragments() {
  using Tile = SharedTile<kRows, kWidth, kValueBytes>;
  constexpr int kHalf = 16 / kValueBytes;  // columns of half a block
  for (int row = 0; row < kRows; row += 16) {
    for (int column = 0; column < kWidth; column += 2 * kHalf) {
      const int k = Tile::block_k(column), block = Tile::block_offset(row, column);
      for (int phase = 0; phase < 4; ++phase) {  // ldmatrix reads eight lanes' rows at a time
        std::array<int, 8> a{}, b{};
        for (int i = 0; i < 8; ++i) {
          const int lane = 8 * phase + i;
          a[i] = block + Tile::fragment_offset(lane, k);
          b[i] = block + Tile::fragment_offset_b(lane, k);
          EXPECT_EQ(a[i], Tile::offset(row + lane % 16, column + lane / 16 * kHalf));
          EXPECT_EQ(b[i],
                    Tile::offset(row + lane % 8 + lane / 16 * 8, column + lane / 8 % 2 * kHalf));
          // What kernels compute: one register per lane, steps by exclusive or.
          EXPECT_EQ(a[i], (Tile::fragment_offset(lane, 0) ^ 32 * k) + block);
          EXPECT_EQ(b[i], (Tile::fragment_offset_b(lane, 0) ^ 32 * k) + block);
        }
        EXPECT_EQ(banks_touched(a), 32);
        EXPECT_EQ(banks_touched(b), 32);
      }
    }
  }
}

TEST(SharedTile, EveryChunkHasItsPlace) {
  check_places<128, 64>();
  check_places<64, 96>();
  check_places<64, 128>();
  check_places<64, 192>();
  check_places<128, 256>();
  check_places<32, 32>();
  check_places<64, 64, 1>();
  check_places<64, 192, 1>();
  check_places<64, 256, 1>();
}

TEST(SharedTile, FragmentsWithoutBankConflicts) {
  check_fragments<128, 64>();
  check_fragments<64, 96>();
  check_fragments<64, 128>();
  check_fragments<64, 192>();
  check_fragments<64, 256>();
  check_fragments<32, 32>();
  check_fragments<64, 64, 1>();
  check_fragments<64, 192, 1>();
  check_fragments<64, 256, 1>();
}

TEST(SharedTile, CopiesWithoutBankConflicts) {
  // cp.async: lane i of eight writes chunk i of a row (64 columns), or of two rows (32 columns).
  std::array<int, 8> wide{}, narrow{};
  for (int row = 0; row < 64; row += 2) {
    for (int i = 0; i < 8; ++i) {
      wide[i] = SharedTile<64, 128>::offset(row, 8 * i);
      narrow[i] = SharedTile<64, 96>::offset(row + i / 4, 8 * (i % 4));
    }
    EXPECT_EQ(banks_touched(wide), 32);
    EXPECT_EQ(banks_touched(narrow), 32);
  }
}

// An accumulator pair, converted, is the A operand of the next product: same rows and columns.
TEST(Fragments, AccumulatorsAreOperandA) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 4; ++r) {
      for (int half = 0; half < 2; ++half) {
        const int accumulator = r / 2, i = 2 * (r % 2) + half;
        EXPECT_EQ(operand_a_row(lane, r), accumulator_row(lane, i));
        EXPECT_EQ(operand_a_column(lane, r, half), 8 * accumulator + accumulator_column(lane, i));
      }
    }
  }
}

TEST(Divisor, EqualsDivision) {
  std::vector<uint32_t> divisors{1, 2, 3, 5, 7, 8, 12, 100, 127, 128, 255, 641, 65535, 65536};
  for (uint32_t d = 9; d < 0x7fffffffu; d = d * 3 + 1) divisors.push_back(d);
  divisors.push_back(0x7fffffffu);
  for (const uint32_t d : divisors) {
    const Divisor divisor(d);
    for (uint64_t q = 0; q * d <= 0x7fffffffu; q = q * 2 + 1) {
      for (const int64_t n : {int64_t(q * d) - 1, int64_t(q * d), int64_t(q * d) + 1}) {
        if (n < 0 || n > 0x7fffffff) continue;
        ASSERT_EQ(divisor.divide(static_cast<uint32_t>(n)), static_cast<uint32_t>(n) / d)
            << n << " / " << d;
      }
    }
    ASSERT_EQ(divisor.divide(0x7fffffffu), 0x7fffffffu / d);
  }
}

CommonParams params(int batch, int heads, int heads_kv, int seqlen, int head_dim, bool causal) {
  CommonParams p{};
  p.batch = batch, p.heads = heads, p.heads_kv = heads_kv, p.group = heads / heads_kv;
  p.seqlen_q = p.seqlen_k = seqlen;
  p.head_dim = p.head_dim_v = head_dim;
  p.rule.causal = causal;
  return p;
}

TEST(StaticOrder, TakesEveryTileOnce) {
  for (const bool causal : {false, true}) {
    for (const auto& p : {params(3, 7, 7, 1000, 128, causal), params(2, 12, 3, 9000, 256, causal),
                          params(1, 1, 1, 1, 64, causal), params(5, 64, 8, 40000, 128, causal)}) {
      const StaticOrder order = StaticOrder::make(p, 128);
      ASSERT_EQ(order.items, int64_t{p.batch} * p.heads * ceil_div(p.seqlen_q, 128));
      std::set<std::array<int, 3>> seen;
      for (int64_t i = 0; i < order.items; ++i) {
        const WorkItem item = order.item(i);
        ASSERT_LT(item.batch, p.batch);
        ASSERT_LT(item.head, p.heads);
        ASSERT_LT(item.tile, static_cast<int32_t>(order.tiles));
        ASSERT_TRUE(seen.insert({item.batch, item.head, item.tile}).second);
      }
    }
  }
}

TEST(StaticOrder, CausalIsLongestFirstWithinAGroup) {
  const CommonParams p = params(1, 16, 16, 16384, 128, true);
  const StaticOrder order = StaticOrder::make(p, 128);
  ASSERT_GT(order.group.value, 1u);
  for (int64_t i = 1; i < int64_t{order.group_items.value}; ++i) {
    EXPECT_LE(order.item(i).tile, order.item(i - 1).tile);
  }
}

TEST(StaticOrder, MoreThanTwoToTheThirtyOneItems) {
  const CommonParams p = params(1 << 20, 64, 64, 16384, 64, true);
  const StaticOrder order = StaticOrder::make(p, 128);
  ASSERT_EQ(order.items, int64_t{1} << 33);
  const WorkItem last = order.item(order.items - 1), first = order.item(0);
  EXPECT_EQ(last.batch, (1 << 20) - 1);
  EXPECT_EQ(last.head, 63);
  EXPECT_EQ(last.tile, 0);
  EXPECT_EQ(first.batch, 0);
  EXPECT_EQ(first.tile, 127);
}

TEST(Stagger, BlocksOfTheFirstWaveBeginApart) {
  constexpr int64_t kAtOnce = 132, kBytes = 192 << 10;
  const Stagger s = Stagger::make(params(32, 8, 8, 512, 256, false), 1024, kAtOnce, kBytes, 128);
  std::map<uint32_t, int> begins;
  for (int64_t i = 0; i < kAtOnce; ++i) ++begins[s.cycles(i)];
  EXPECT_EQ(begins.size(), Stagger::kBegins);
  EXPECT_EQ(begins.begin()->first, 0u);
  EXPECT_EQ(begins.rbegin()->first, kBytes / 16 / 16 * 15);
  for (const auto& [cycles, blocks] : begins) EXPECT_NEAR(blocks, 132. / 16, 1) << cycles;
  for (int64_t i = kAtOnce; i < 1024; ++i) EXPECT_EQ(s.cycles(i), 0u);
  EXPECT_EQ(s.cycles(int64_t{1} << 33), 0u);
}

TEST(Stagger, NobodyWaitsWhereThatGainsNothing) {
  const auto waits = [](const CommonParams& p, int64_t items) {
    return Stagger::make(p, items, 132, 192 << 10, 128).cycles(15) > 0;
  };
  CommonParams p = params(32, 8, 8, 512, 256, false);
  constexpr int64_t kItems = 6 * 132 + 50;
  EXPECT_TRUE(waits(p, kItems));
  EXPECT_FALSE(waits(p, 5 * 132 + 50)) << "few waves";
  EXPECT_FALSE(waits(p, 8 * 132)) << "the last of few waves is full";
  EXPECT_FALSE(waits(p, 7 * 132 + 106)) << "almost";
  EXPECT_TRUE(waits(p, 7 * 132 + 105));
  EXPECT_TRUE(waits(p, 16 * 132));
  EXPECT_FALSE(waits(params(64, 8, 8, 511, 256, false), kItems)) << "few keys";
  p.seqlen_q = 127;
  EXPECT_FALSE(waits(p, kItems)) << "few queries";
  p.seqlen_q = 513;
  EXPECT_TRUE(waits(p, kItems));
  p.rule.causal = true;
  EXPECT_FALSE(waits(p, kItems)) << "queries before the first key";
  p.seqlen_q = 512;
  EXPECT_TRUE(waits(p, kItems));
  p.rule.window_left = 256;
  EXPECT_FALSE(waits(p, kItems)) << "few keys in the window";
  p.rule.window_left = MaskRule::kNoLimit;
  const int32_t lengths[33] = {};
  p.cu_k = lengths;
  EXPECT_FALSE(waits(p, kItems)) << "sequences of their own lengths";
}

TEST(Stagger, BlocksAtOnce) {
  constexpr int64_t kH200 = 227 << 10, kA100 = 163 << 10;
  EXPECT_EQ(blocks_at_once(132, kH200, 99504, 2), 2 * 132);
  EXPECT_EQ(blocks_at_once(108, kA100, 99504, 2), 108);  // each takes 1 KB more, of 164
  EXPECT_EQ(blocks_at_once(108, kA100, 81 << 10, 2), 2 * 108);
  EXPECT_EQ(blocks_at_once(108, kA100, 82 << 10, 2), 108);
  EXPECT_EQ(blocks_at_once(132, kH200, kH200, 1), 132);
}

// A thread of S^T in wgmma accumulators has queries 8j + 2 (lane % 4) + {0, 1}: those of two
// neighbouring j are the four that one 16-byte load brings.
TEST(QuadOrder, FourQueriesOfALaneAreSideBySide) {
  std::set<int> places;
  for (int query = 0; query < 128; ++query) places.insert(quad_order(query));
  EXPECT_EQ(places.size(), 128u);
  EXPECT_EQ(*places.rbegin(), 127);
  for (int j = 0; j < 16; j += 2) {
    for (int lane = 0; lane < 4; ++lane) {
      const int first = quad_order(8 * j + accumulator_column(lane, 0));
      EXPECT_EQ(first % 4, 0);
      EXPECT_EQ(quad_order(8 * j + accumulator_column(lane, 1)), first + 1);
      EXPECT_EQ(quad_order(8 * (j + 1) + accumulator_column(lane, 0)), first + 2);
      EXPECT_EQ(quad_order(8 * (j + 1) + accumulator_column(lane, 1)), first + 3);
    }
  }
}

// The Hopper backward for wide heads (backward_sm90_wide_maps.cuh).

TEST(WideBackward, WeightsPassFromThreadToThread) {
  std::set<int> places;
  for (int j = 0; j < sm90_wide::kQueries / 16; ++j) {
    for (int first = 0; first < 128; first += 8) {  // eight threads store at a time
      std::array<int, 8> offsets{};
      for (int i = 0; i < 8; ++i) {
        offsets[i] = sm90_wide::weights_offset(first + i, j);
        EXPECT_TRUE(places.insert(offsets[i]).second);
        EXPECT_EQ(offsets[i] % 16, 0);
      }
      EXPECT_EQ(banks_touched(offsets), 32);
    }
  }
  EXPECT_EQ(places.size() * 16, size_t{sm90_wide::kKeys * sm90_wide::kQueries * 2});
  EXPECT_EQ(*places.rbegin() + 16, sm90_wide::kKeys * sm90_wide::kQueries * 2);
}

// A pair makes each panel of dQ once a step, both as many in the long run, from keys that are
// there.
template <int kPanels>
void check_shares() {
  std::array<int, 2> made{};
  for (uint32_t step = 0; step < 8; ++step) {
    std::multiset<int> panels;
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const auto share = sm90_wide::dq_share<kPanels>(rank, step);
      const auto there = sm90_wide::peer_panels<kPanels>(rank);
      EXPECT_EQ(there.count, sm90_wide::peer_panels<kPanels>(0).count) << "the room is the same";
      EXPECT_GE(share.first, there.first);
      EXPECT_LE(share.first + share.count, there.first + there.count);
      EXPECT_LE(there.first + there.count, kPanels);
      for (int i = 0; i < share.count; ++i) panels.insert(share.first + i);
      made[rank] += share.count;
    }
    std::multiset<int> all;
    for (int i = 0; i < kPanels; ++i) all.insert(i);
    EXPECT_EQ(panels, all) << "step " << step;
  }
  EXPECT_EQ(made[0], made[1]);
}

TEST(WideBackward, EveryPanelOfDqOnce) {
  check_shares<3>();
  check_shares<4>();
}

// What a warp leaves of dS, 16 keys, is one piece of memory: it sends that to the other block.
TEST(WideBackward, AWarpsDsIsOnePiece) {
  using Tile = SharedTile<sm90_wide::kKeys, sm90_wide::kQueries>;
  constexpr int kPiece = Tile::kBytes / 4;
  for (int row = 0; row < sm90_wide::kKeys; ++row) {
    for (int column = 0; column < sm90_wide::kQueries; column += 8) {
      EXPECT_EQ(Tile::offset(row, column) / kPiece, row / 16);
    }
  }
}

// The four warps' accumulators of all panels fill the sum of a tile, each place once.
template <int kWidth>
void check_sum() {
  std::set<int> places;
  for (int warp = 0; warp < 4; ++warp) {
    for (int panel = 0; panel < kWidth / 64; ++panel) {
      for (int j = 0; j < 8; ++j) {
        const int at = sm90_wide::sum_block<kWidth>(warp, 8 * panel) + 128 * j;
        EXPECT_EQ(at, sm90_wide::sum_block<kWidth>(warp, 8 * panel + j));
        EXPECT_TRUE(places.insert(at).second);
      }
    }
  }
  EXPECT_EQ(places.size() * 128, size_t{sm90_wide::kQueries * kWidth});
  EXPECT_EQ(*places.rbegin() + 128, sm90_wide::kQueries * kWidth);
}

TEST(WideBackward, AccumulatorsFillTheSumOfDq) {
  check_sum<192>();
  check_sum<256>();
}

// In the order of the item's keys, each for as many: what backward/post.cuh takes them for.
TEST(WideBackward, FlagsAreInTheOrderOfKeys) {
  for (int key = 0; key < sm90_wide::kItemKeys; ++key) {
    EXPECT_EQ(sm90_wide::flag_word(static_cast<uint32_t>(key / 64), key / 16 % 4),
              key / (sm90_wide::kItemKeys / sm90_wide::kFlagWords));
  }
}

}  // namespace
}  // namespace strobe::cuda
