// In which order the backward pass takes its work items, and which tiles of the scratch are whose:
// index arithmetic of the CUDA kernels, checked on the CPU.
#include "cuda/common/backward_order.cuh"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "core/visits.h"
#include "cuda/common/backward_scratch.cuh"
#include "cuda/hopper/item_order.h"
#include "cuda/mma_sync/addition_order.h"

namespace strobe::cuda {
namespace {

constexpr int32_t kTile = 64;

// Packed sequences, as the kernels are told of them.
struct Packed {
  std::vector<int32_t> cu{0};
  CommonParams params{};

  Packed(const std::vector<int32_t>& lengths, int32_t heads) {
    for (const int32_t n : lengths) {
      cu.push_back(cu.back() + n);
      params.seqlen_q = params.seqlen_k = std::max(params.seqlen_q, n);
    }
    params.cu_q = params.cu_k = cu.data();
    params.batch = static_cast<int32_t>(lengths.size());
    params.heads = params.heads_kv = heads;
    params.group = 1;
    params.total_q = params.total_k = cu.back();
  }
  int32_t length(int32_t b) const {
    return cu[static_cast<size_t>(b) + 1] - cu[static_cast<size_t>(b)];
  }
};

std::vector<int32_t> random_lengths(std::mt19937& random) {
  std::vector<int32_t> lengths(1 + random() % 12);
  for (int32_t& n : lengths)
    n = random() % 4 == 0 ? 0 : static_cast<int32_t>(random() % (random() % 2 ? 900 : 70));
  return lengths;
}

BackwardOrder order_of(const Packed& p, uint32_t parts, uint32_t group) {
  BackwardOrder o{};
  o.blocks = static_cast<uint32_t>(ceil_div(p.params.seqlen_k, kTile));
  o.parts = parts;
  o.columns = static_cast<uint32_t>(p.params.batch * p.params.heads_kv) * parts;
  o.group = group;
  o.items = int64_t{o.columns} * o.blocks;
  return o;
}

bool exists(const Packed& p, int32_t batch, int32_t block) {
  return p.length(batch) > block * kTile;
}

TEST(BackwardOrder, TakesEveryItemOnceWithKeyBlocksAscending) {
  BackwardOrder o{};
  for (const uint32_t group : {1u, 3u, 16u, 100u}) {
    o.blocks = 5, o.parts = 2, o.columns = 2 * 3 * 2, o.group = group;
    o.items = int64_t{o.columns} * o.blocks;
    std::map<std::array<int, 3>, int> next;  // key block of a column
    for (int64_t i = 0; i < o.items; ++i) {
      const BackwardItem item = backward_item(o, 3, i);
      ASSERT_LT(item.batch, 2);
      ASSERT_LT(item.head_kv, 3);
      ASSERT_LT(item.part, 2);
      ASSERT_EQ(item.block, (next[{item.batch, item.head_kv, item.part}]++));
    }
    EXPECT_EQ(next.size(), o.columns);
  }
}

// From any item that does not exist, what next_existing_item leaves out is not there, and what it
// finds lies ahead.
TEST(BackwardOrder, NextExistingItemLeavesOutNothing) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const Packed p(random_lengths(random), 1 + static_cast<int32_t>(random() % 4));
    const BackwardOrder o = order_of(p, 1 + static_cast<uint32_t>(random() % 3),
                                     1 + static_cast<uint32_t>(random() % 40));
    const auto there = [&](int32_t b, int32_t block) { return exists(p, b, block); };
    const auto item_exists = [&](int64_t i) {
      const BackwardItem item = backward_item(o, p.params.heads_kv, i);
      return there(item.batch, item.block);
    };
    for (int64_t i = 0; i < o.items; ++i) {
      if (item_exists(i)) continue;
      const int64_t next = next_existing_item(o, p.params.heads_kv, i, there);
      ASSERT_GT(next, i);
      ASSERT_LE(next, o.items);
      for (int64_t j = i; j < next; ++j)
        ASSERT_FALSE(item_exists(j)) << "round " << round << ": " << j;
    }
  }
}

// The way round: few draws, however unequal the lengths.
TEST(BackwardOrder, AGapTakesFewDraws) {
  std::vector<int32_t> lengths(40, 10);
  lengths.push_back(100000);
  const Packed p(lengths, 8);
  const BackwardOrder o = order_of(p, 1, 16);
  int64_t draws = 0, found = 0;
  const auto there = [&](int32_t b, int32_t block) { return exists(p, b, block); };
  for (int64_t i = 0; i < o.items; ++draws) {
    const BackwardItem item = backward_item(o, p.params.heads_kv, i);
    if (there(item.batch, item.block)) {
      ++found, ++i;
    } else {
      i = next_existing_item(o, p.params.heads_kv, i, there);
    }
  }
  EXPECT_EQ(found, 8 * (40 + ceil_div(100000, kTile)));
  EXPECT_LT(draws - found, o.columns);
}

// The counters of dQ, as the kernels keep them in a deterministic launch: whatever the mask, every
// item that visits a query tile finds the counter at its own number, whoever begins the sum knows
// it, and the kernel after knows which tiles nobody visits.
TEST(AdditionsToDq, FollowOnEachOtherUnderEveryMask) {
  std::mt19937 random(3);
  const auto below = [&](uint32_t n) { return static_cast<int64_t>(random() % n); };
  int64_t additions = 0;
  for (int round = 0; round < 20000; ++round) {
    MaskRule rule;
    rule.causal = random() % 2;
    if (random() % 2) rule.window_left = below(100);
    if (random() % 2) rule.window_right = below(100);
    if (random() % 2) rule.attention_chunk = 1 + below(100);
    const int64_t seqlen_q = 1 + below(300), seqlen_k = 1 + below(300);
    const int64_t offset = random() % 2 ? seqlen_k - seqlen_q : below(700) - 350;
    const bool may_have_prefix = rule.window_left < 0 && rule.attention_chunk == 0;
    const int64_t prefix =
        may_have_prefix && random() % 2 ? below(static_cast<uint32_t>(seqlen_k) + 1) : 0;
    const Mask mask = Mask::make(rule, seqlen_q, seqlen_k, offset, prefix);
    const int64_t tile_q = 32 << random() % 2, tile_k = 32 << random() % 3;
    for (int64_t tile = 0; tile * tile_q < seqlen_q; ++tile) {
      const Range queries{tile * tile_q, min64((tile + 1) * tile_q, seqlen_q)};
      int64_t counter = key_visits(mask, queries, tile_k).blocks.begin;
      bool started = false;
      for (int64_t key = 0; key * tile_k < seqlen_k; ++key) {
        const Range keys{key * tile_k, min64((key + 1) * tile_k, seqlen_k)};
        if (!query_visits(mask, keys, tile_q).blocks.contains(tile)) continue;
        ASSERT_EQ(counter, key) << "round " << round;
        ASSERT_EQ(tile >= sm80::first_tile_started(mask, keys.begin, tile_q), !started);
        started = true, ++counter, ++additions;
      }
      ASSERT_EQ(started, !mask.kv_range(queries).empty()) << "round " << round;
    }
  }
  EXPECT_GT(additions, 100000);
}

// A kernel that does not ask beforehand for what is not finite has a flag for each tile of dQ,
// which the kernel after it writes, also where there are no keys and hence no flags of keys.
TEST(BackwardScratch, HasFlagsOfDqWithoutKeys) {
  BackwardSizes sizes{};
  sizes.batch = sizes.heads = sizes.heads_kv = 2, sizes.seqlen_q = 100;
  const auto carve = [&](int64_t seqlen_k, int64_t words_of_item) {
    alignas(64) static std::byte memory[1 << 20];
    sizes.seqlen_k = seqlen_k, sizes.total_k = 2 * seqlen_k;
    Arena arena(memory);
    const int64_t flags = words_of_item < 0 ? -1 : backward_items(sizes, 128) * words_of_item;
    const BackwardScratch scratch = carve_backward(arena, sizes, 64, 128, 128, 0, nullptr, flags);
    EXPECT_LE(arena.used(), sizeof memory);
    return scratch;
  };
  for (const int64_t seqlen_k : {0, 1, 300}) {
    const BackwardScratch scratch = carve(seqlen_k, 8);
    EXPECT_NE(scratch.dq_nonfinite, nullptr) << seqlen_k;
    EXPECT_NE(scratch.dq_nonfinite, scratch.nonfinite) << seqlen_k;
  }
  EXPECT_EQ(carve(300, -1).dq_nonfinite, nullptr);
}

// Every row of every head is in one tile, and tiles of the scratch are in memory as they are
// numbered.
TEST(QueryTile, CoversEveryRowOnce) {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    const Packed p(random_lengths(random), 1 + static_cast<int32_t>(random() % 3));
    BackwardSizes sizes{};
    sizes.batch = p.params.batch, sizes.varlen = true, sizes.total_q = p.params.total_q;
    const auto tiles = static_cast<uint32_t>(scratch_tiles(sizes, kTile));
    std::set<std::array<int, 3>> seen;
    for (int64_t i = 0; i < query_tiles(p.params, tiles); ++i) {
      const QueryTile tile = query_tile(p.params, i, tiles, kTile);
      ASSERT_LT(tile.head, p.params.heads);
      ASSERT_GE(tile.begin, 0);
      if (tile.begin >= p.length(tile.batch)) continue;
      EXPECT_EQ(tile.scratch, int64_t{tile.head} * tiles +
                                  scratch_begin(p.params, kTile, tile.batch) + tile.begin / kTile);
      ASSERT_TRUE(seen.insert({tile.batch, tile.head, tile.begin}).second);
    }
    size_t wanted = 0;
    for (int32_t b = 0; b < p.params.batch; ++b) {
      wanted += static_cast<size_t>(ceil_div(p.length(b), kTile) * p.params.heads);
    }
    ASSERT_EQ(seen.size(), wanted) << "round " << round;
  }
}

TEST(QueryTile, OfEqualLengths) {
  CommonParams p{};
  p.batch = 3, p.heads = 5, p.seqlen_q = 130;
  std::set<std::array<int, 3>> seen;
  for (int64_t i = 0; i < query_tiles(p, 9); ++i) {
    const QueryTile tile = query_tile(p, i, 9, kTile);
    ASSERT_LT(tile.batch, 3);
    ASSERT_LT(tile.begin, 130);
    EXPECT_EQ(tile.scratch, i);
    ASSERT_TRUE(seen.insert({tile.batch, tile.head, tile.begin}).second);
  }
  EXPECT_EQ(seen.size(), 45u);
}

TEST(ItemOrder, TakesEveryKeyBlockOfEveryHeadOnce) {
  for (const uint32_t entries : {1u, 3u}) {
    sm90::ItemOrder o{};
    o.records = 5, o.parts = 2, o.columns = 3 * o.parts;
    o.items = entries * o.columns * o.records;
    std::set<std::array<uint32_t, 3>> seen;
    uint32_t before = 0;
    for (uint32_t i = 0; i < o.items; ++i) {
      const auto item = o.item(i);
      ASSERT_LT(item.record, entries * o.records);
      ASSERT_LT(item.head_kv, 3);
      ASSERT_LT(item.part, 2);
      EXPECT_TRUE(seen.insert({item.record, static_cast<uint32_t>(item.head_kv),
                               static_cast<uint32_t>(item.part)})
                      .second);
      // A head's key blocks are neighbours, the first one first.
      if (i % o.records != 0) {
        EXPECT_EQ(item.record, before + 1);
      }
      before = item.record;
    }
  }
}

TEST(ItemOrder, PackedKeyBlocksHaveRecordsOfTheirOwn) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const Packed p(random_lengths(random), 1);
    BackwardSizes sizes{};
    sizes.varlen = true;
    sizes.batch = p.params.batch;
    sizes.total_k = p.params.total_k;
    const auto begin = [&](int32_t b) { return key_block_begin(p.params, kTile, b); };
    int64_t next = 0;  // that no sequence has yet
    for (int32_t b = 0; b < p.params.batch; ++b) {
      for (int32_t block = 0; exists(p, b, block); ++block) {
        const uint32_t record = begin(b) + static_cast<uint32_t>(block);
        ASSERT_GE(record, next);
        ASSERT_LT(record, key_blocks(sizes, kTile));
        ASSERT_EQ(sequence_at(record, p.params.batch, begin), b);
        next = int64_t{record} + 1;
      }
    }
  }
}

}  // namespace
}  // namespace strobe::cuda
