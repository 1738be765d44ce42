// In which order the backward pass takes its work items, and which tiles of the scratch are whose:
// index arithmetic of the CUDA kernels, checked on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "core/walk.h"
#include "cuda/backward/order.cuh"
#include "cuda/backward/scratch.cuh"
#include "cuda/backward/steps.h"
#include "cuda/common/features.h"
#include "cuda/hopper/item_order.h"

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
  o.tracks = static_cast<uint32_t>(p.params.batch * p.params.heads_kv) * parts;
  o.group = group;
  o.items = int64_t{o.tracks} * o.blocks;
  return o;
}

bool exists(const Packed& p, int32_t batch, int32_t block) {
  return p.length(batch) > block * kTile;
}

TEST(BackwardOrder, TakesEveryItemOnceWithKeyBlocksAscending) {
  BackwardOrder o{};
  for (const uint32_t group : {1u, 3u, 16u, 100u}) {
    o.blocks = 5, o.parts = 2, o.tracks = 2 * 3 * 2, o.group = group;
    o.items = int64_t{o.tracks} * o.blocks;
    std::map<std::array<int, 3>, int> next;  // key block of a track
    for (int64_t i = 0; i < o.items; ++i) {
      const BackwardItem item = backward_item(o, 3, i);
      ASSERT_LT(item.batch, 2);
      ASSERT_LT(item.head_kv, 3);
      ASSERT_LT(item.part, 2);
      ASSERT_EQ(item.block, (next[{item.batch, item.head_kv, item.part}]++));
    }
    EXPECT_EQ(next.size(), o.tracks);
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
  EXPECT_LT(draws - found, o.tracks);
}

// The counters of dQ, as the kernels keep them in a deterministic launch: whatever the mask, every
// item that visits a query tile finds the counter at its own rank, and the kernel after knows which
// tiles nobody visits.
TEST(AdditionsToDq, FollowOnEachOtherUnderEveryMask) {
  std::mt19937 random(3);
  const auto below = [&](uint32_t n) { return static_cast<int64_t>(random() % n); };
  int64_t additions = 0;
  for (int round = 0; round < 20000; ++round) {
    MaskRule rule;
    rule.causal = random() % 2;
    if (random() % 2) rule.window_left = below(100);
    if (random() % 2) rule.window_right = below(100);
    if (random() % 2) {
      rule.attention_chunk = 1 + below(100);
    } else if (random() % 4 == 0) {  // a window that ends before a query's own position
      rule.window_right = -below(50);
      if (rule.is_limited_left()) rule.window_left -= rule.window_right;
    }
    const int64_t seqlen_q = 1 + below(300), seqlen_k = 1 + below(300);
    const int64_t offset = random() % 2 ? seqlen_k - seqlen_q : below(700) - 350;
    const bool may_have_prefix = !rule.is_limited_left() && rule.attention_chunk == 0;
    const int64_t prefix =
        may_have_prefix && random() % 2 ? below(static_cast<uint32_t>(seqlen_k) + 1) : 0;
    const Mask mask = Mask::make(rule, seqlen_q, seqlen_k, offset, prefix);
    const int64_t tile_q = 32 << random() % 2, tile_k = 32 << random() % 3;
    for (int64_t tile = 0; tile * tile_q < seqlen_q; ++tile) {
      const Range queries{tile * tile_q, min64((tile + 1) * tile_q, seqlen_q)};
      const IntervalWalk<int64_t> walk = key_walk(mask, queries, tile_k);
      int64_t counter = walk.begin;
      bool started = false;
      for (int64_t key = 0; key * tile_k < seqlen_k; ++key) {
        const Range keys{key * tile_k, min64((key + 1) * tile_k, seqlen_k)};
        if (!query_walk(mask, keys, tile_q).visits(tile)) continue;
        ASSERT_EQ(counter, walk.rank(key)) << "round " << round;
        started = true, ++counter, ++additions;
      }
      ASSERT_EQ(started, !mask.kv_range(queries).empty()) << "round " << round;
    }
  }
  EXPECT_GT(additions, 100000);
}

// Every place of every head once, head by head, in the direction that is asked for.
TEST(HeadStep, GoesThroughAllPlacesOfOneHeadAfterTheOther) {
  for (const int32_t direction : {1, -1}) {
    for (const int32_t places : {1, 2, 5}) {
      for (const int32_t heads : {1, 3}) {
        const IntervalWalk<int32_t> walk{7, 7 + places, 7, 7};
        const int32_t head_end = 4 + heads;
        HeadStep step = HeadStep::first(walk, 4, direction);
        for (int32_t i = 0; i < heads * places; ++i, step.advance(walk, direction)) {
          ASSERT_FALSE(step.done(head_end));
          EXPECT_EQ(step.head, 4 + i / places);
          EXPECT_EQ(step.place, direction > 0 ? 7 + i % places : 6 + places - i % places);
          EXPECT_EQ(step.is_last(walk, head_end, direction), i == heads * places - 1);
        }
        EXPECT_TRUE(step.done(head_end));
      }
    }
  }
}

TEST(ItemWalk, HasNoFullTileWhereKeysArePastTheEnd) {
  const Mask mask = Mask::make(MaskRule{}, 256, 200);
  const auto whole = item_walk({}, mask, {0, 128}, 64, 128),
             part = item_walk({}, mask, {128, 200}, 64, 128);
  for (int32_t place = 0; place < 4; ++place) {
    EXPECT_TRUE(whole.visits(place) && whole.is_full(place));
    EXPECT_TRUE(part.visits(place) && !part.is_full(place));
  }
  EXPECT_EQ(whole.count() + part.count(), 8);
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
    const BackwardScratch scratch = carve_backward(arena, sizes, 64, 128, 128, 0, flags);
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

// Where a main kernel writes dQ itself, there is no sum of it.
TEST(BackwardScratch, HasASumOfDqWhereItIsWanted) {
  alignas(64) static std::byte memory[1 << 22];
  BackwardSizes sizes{};
  sizes.batch = sizes.heads = sizes.heads_kv = 2, sizes.seqlen_q = sizes.seqlen_k = 100;
  size_t used[2];
  for (const bool sums : {false, true}) {
    Arena arena(memory), count;
    const BackwardScratch scratch = carve_backward(arena, sizes, 64, 128, 128, 0, 16, sums);
    carve_backward(count, sizes, 64, 128, 128, 0, 16, sums);
    EXPECT_EQ(count.used(), arena.used());
    used[sums] = arena.used();
    EXPECT_EQ(scratch.dq != nullptr, sums);
  }
  EXPECT_LT(used[0], used[1]);
}

TEST(BackwardScratch, OneBlockOfKeysAddsOnce) {
  for (const bool batch_invariant : {false, true}) {
    for (const bool lengths_differ : {false, true}) {
      for (const int64_t keys : {0, 1, 128, 129}) {
        EXPECT_EQ(adds_once(keys, 128, batch_invariant, lengths_differ),
                  keys <= 128 && !(batch_invariant && lengths_differ));
      }
    }
  }
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
    o.records = 5, o.parts = 2, o.tracks = 3 * o.parts;
    o.items = entries * o.tracks * o.records;
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

// OrderedItems::make, and a mask's work items as the kernel goes through them.
struct OrderedProblem {
  MaskRule rule;
  int32_t batch = 1, heads_kv = 1, group = 1, parts = 1;
  int32_t tile_q = 64, tile_k = 128;
  bool batch_invariant = false;
  // Whether a head of packed sequences has as many records for each of them as the longest needs,
  // as in the kernel for wide heads, which takes an item by two thread blocks; else as many as
  // there are (key_block_begin).
  bool padded = false;
  std::vector<Mask> masks;             // of each sequence
  int64_t seqlen_q = 0, seqlen_k = 0;  // of the longest; keys of packed ones may be more
  std::vector<int32_t> cu_q, cu_k;     // packed, else empty

  /// Of a sequence, as far as the kernel has work items for them.
  int64_t keys(int32_t b) const { return min64(masks[static_cast<size_t>(b)].seqlen_k, seqlen_k); }

  CommonParams params() const {
    CommonParams p{};
    p.batch = batch, p.heads_kv = heads_kv, p.group = group, p.heads = heads_kv * group;
    p.cu_q = cu_q.empty() ? nullptr : cu_q.data();
    p.cu_k = cu_k.empty() ? nullptr : cu_k.data();
    p.seqlen_q = static_cast<int32_t>(seqlen_q), p.seqlen_k = static_cast<int32_t>(seqlen_k);
    return p;
  }
  sm90::OrderedItems items(int64_t tiles_of_item) const {
    sm90::ItemOrder o{};
    const CommonParams p = params();
    BackwardSizes sizes{};
    sizes.batch = batch, sizes.varlen = p.cu_k != nullptr, sizes.seqlen_k = seqlen_k;
    sizes.total_k = p.cu_k ? cu_k.back() : batch * seqlen_k;
    const int64_t of_sequence = ceil_div(seqlen_k, tile_k);
    const auto blocks =
        static_cast<uint32_t>(padded ? batch * of_sequence : key_blocks(sizes, tile_k));
    o.tracks = static_cast<uint32_t>(heads_kv * parts);
    o.parts = static_cast<uint32_t>(parts);
    o.heads_per_part = static_cast<int32_t>(ceil_div(group, parts));
    o.records = p.cu_k ? blocks : static_cast<uint32_t>(of_sequence);
    o.items = blocks * o.tracks;
    return sm90::OrderedItems::make(o, tiles_of_item, rule.later_see_more(), batch_invariant,
                                    padded ? 2 : 1);
  }
};

// What the kernel knows of an item: OrderedKeyBlock.
struct OrderedBlock {
  IntervalWalk<int32_t> walk{};
  int32_t head_begin = 0, head_end = 0, direction = -1;
  int32_t batch = 0, number = 0;  // of the key block in its sequence
  uint32_t rank = 0;
  int64_t scratch = 0;
};

OrderedBlock ordered_block(const OrderedProblem& problem, const CommonParams& p,
                           const sm90::OrderedItems& items, uint32_t index) {
  const auto item = items.item(index);
  OrderedBlock block;
  const auto of_sequence = static_cast<uint32_t>(ceil_div(problem.seqlen_k, problem.tile_k));
  const auto begin = [&](int32_t b) {
    return problem.padded ? static_cast<uint32_t>(b) * of_sequence
                          : key_block_begin(p, problem.tile_k, b);
  };
  block.batch = sequence_at(item.record, p.batch, begin);
  block.number = static_cast<int32_t>(item.record - begin(block.batch));
  block.head_begin = item.head_kv * p.group + item.part * items.order.heads_per_part;
  block.head_end =
      std::min(block.head_begin + items.order.heads_per_part, (item.head_kv + 1) * p.group);
  block.direction = item.descends ? 1 : -1;
  block.rank = addition_rank(static_cast<uint32_t>(block.number), of_sequence, item.descends);
  block.scratch = scratch_begin(p, problem.tile_q, block.batch);
  const Mask& mask = problem.masks[static_cast<size_t>(block.batch)];
  const Range keys{int64_t{block.number} * problem.tile_k,
                   min64(int64_t{block.number + 1} * problem.tile_k, problem.keys(block.batch))};
  if (keys.begin < problem.keys(block.batch))
    block.walk = item_walk({}, mask, keys, problem.tile_q, problem.tile_k);
  return block;
}

OrderedProblem random_ordered(std::mt19937& random) {
  const auto below = [&](uint32_t n) { return static_cast<int64_t>(random() % n); };
  OrderedProblem problem;
  problem.rule.causal = random() % 2;
  if (random() % 3 == 0) problem.rule.window_left = below(400);
  if (random() % 3 == 0) problem.rule.window_right = below(400);
  if (random() % 6 == 0) problem.rule.attention_chunk = 1 + below(600);
  problem.batch = 1 + static_cast<int32_t>(below(4));
  problem.heads_kv = 1 + static_cast<int32_t>(below(4));
  problem.group = 1 + static_cast<int32_t>(below(4));
  const int64_t parts = 1 + below(static_cast<uint32_t>(problem.group));
  problem.parts = static_cast<int32_t>(ceil_div(problem.group, ceil_div(problem.group, parts)));
  problem.tile_q = random() % 2 ? 64 : 128;
  problem.batch_invariant = random() % 4 == 0;
  problem.padded = random() % 3 == 0;
  const bool packed = random() % 2, same = random() % 2;
  const auto length = [&] { return random() % 8 == 0 ? 0 : 1 + below(random() % 2 ? 1500 : 90); };
  const int64_t longest_q = length(), longest_k = length();
  if (packed) problem.cu_q = problem.cu_k = {0};
  for (int32_t b = 0; b < problem.batch; ++b) {
    const int64_t q = same ? longest_q : length(), k = same ? longest_k : length();
    const int64_t offset = random() % 2 ? k - q : below(700) - 350;
    const bool may_have_prefix =
        !problem.rule.is_limited_left() && problem.rule.attention_chunk == 0;
    const int64_t prefix =
        may_have_prefix && random() % 3 == 0 ? below(static_cast<uint32_t>(k) + 1) : 0;
    problem.masks.push_back(Mask::make(problem.rule, q, k, offset, prefix));
    problem.seqlen_q = std::max(problem.seqlen_q, q),
    problem.seqlen_k = std::max(problem.seqlen_k, k);
    if (packed) {
      problem.cu_q.push_back(problem.cu_q.back() + static_cast<int32_t>(q));
      problem.cu_k.push_back(problem.cu_k.back() + static_cast<int32_t>(k));
    }
  }
  if (packed && random() % 4 == 0)
    problem.seqlen_k = below(static_cast<uint32_t>(problem.seqlen_k) + 1);
  return problem;
}

// The counters as backward/pre.cuh leaves them, by tile of the scratch.
std::map<int64_t, uint32_t> first_turns(const OrderedProblem& problem, const CommonParams& p,
                                        uint32_t descending, int64_t tiles) {
  BackwardScratch scratch{};
  scratch.descending = descending, scratch.tile_k = problem.tile_k;
  scratch.key_tiles = static_cast<uint32_t>(ceil_div(problem.seqlen_k, problem.tile_k));
  std::map<int64_t, uint32_t> turns;
  for (int32_t b = 0; b < p.batch; ++b) {
    const Mask& mask = problem.masks[static_cast<size_t>(b)];
    for (int32_t head = 0; head < p.heads; ++head) {
      for (int64_t begin = 0; begin < mask.seqlen_q; begin += problem.tile_q) {
        const Range queries{begin, min64(begin + problem.tile_q, mask.seqlen_q)};
        const int64_t at =
            head * tiles + scratch_begin(p, problem.tile_q, b) + begin / problem.tile_q;
        turns[at] = first_rank(p, scratch, b, head, key_walk(mask, queries, problem.tile_k));
      }
    }
  }
  return turns;
}

// A deterministic launch, its thread blocks at random speeds and in any number, from one to more
// than there are items: whoever is drawn next may be the slowest. Each takes its items from one
// counter, adds to a tile when the tile's counter says so, and reports an addition one step later,
// which may be in its next item. Nobody is left waiting for ever, every item is done, and the order
// of additions to each tile is the one in which the items are handed out.
TEST(OrderedItems, NobodyWaitsForEverAndTheOrderIsThatOfTheItems) {
  std::mt19937 random(11);
  int64_t additions = 0, waits = 0, descending = 0;
  for (int round = 0; round < 1500; ++round) {
    const OrderedProblem problem = random_ordered(random);
    const CommonParams p = problem.params();
    const auto items = problem.items(1 + static_cast<int64_t>(random() % 200));
    BackwardSizes sizes{};
    sizes.batch = p.batch, sizes.varlen = p.cu_q != nullptr, sizes.seqlen_q = problem.seqlen_q;
    sizes.total_q = p.cu_q ? problem.cu_q.back() : 0;
    const int64_t tiles = scratch_tiles(sizes, problem.tile_q);
    auto turn = first_turns(problem, p, items.descending, tiles);
    std::map<int64_t, uint32_t> last;  // tile: one past the item that added last

    // Every key block of every head once, whatever the order.
    std::set<std::array<int, 4>> seen;
    size_t wanted = 0;
    for (uint32_t i = 0; i < items.order.items; ++i) {
      const OrderedBlock block = ordered_block(problem, p, items, i);
      if (int64_t{block.number} * problem.tile_k >= problem.keys(block.batch)) continue;
      ASSERT_TRUE(
          seen.insert({block.batch, block.number, block.head_begin, block.head_end}).second);
    }
    for (int32_t b = 0; b < p.batch; ++b)
      wanted += static_cast<size_t>(ceil_div(problem.keys(b), problem.tile_k) * p.heads_kv) *
                static_cast<size_t>(problem.parts);
    ASSERT_EQ(seen.size(), wanted) << "round " << round;

    struct ThreadBlock {
      OrderedBlock block;
      HeadStep now{};
      uint32_t item = 0;
      bool has_item = false, ended = false;
      int64_t made = -1, reports = -1;  // tiles: of the step before; added, but not reported
      uint32_t next = 0, next_reported = 0;
    };
    std::vector<ThreadBlock> blocks(1 + random() % (random() % 2 ? 4 : 40));
    uint32_t ticket = 0;
    const auto tile_of = [&](const ThreadBlock& t) {
      return t.now.head * tiles + t.block.scratch + t.block.walk.block(t.now.place);
    };
    for (size_t ended = 0, idle = 0; ended < blocks.size();) {
      ASSERT_LT(idle, 3000u) << "round " << round << ": all wait";
      ThreadBlock& t = blocks[random() % blocks.size()];
      if (t.ended) continue;
      ++idle;
      if (!t.has_item) {
        if (ticket >= items.order.items) {  // the last of all
          if (t.made >= 0) turn[t.made] = t.next;
          t.ended = true, ++ended, idle = 0;
          continue;
        }
        t.item = ticket++;
        t.block = ordered_block(problem, p, items, t.item);
        if (t.block.walk.empty()) continue;
        t.now = HeadStep::first(t.block.walk, t.block.head_begin, t.block.direction);
        t.has_item = true;
      }
      // One step: what was added in it is reported at its end, of the step before.
      const int64_t tile = tile_of(t);
      if (turn.at(tile) != t.block.rank) {
        // At the end of the step that waits, the addition before it is told of all the same.
        if (t.made >= 0) turn[t.made] = t.next, t.made = -1, idle = 0;
        ++waits;
        continue;
      }
      ASSERT_LE(last[tile], t.item) << "round " << round;
      last[tile] = t.item + 1;
      if (t.made >= 0) turn[t.made] = t.next;
      t.made = tile, t.next = t.block.rank + 1;
      ++additions, idle = 0;
      descending += t.block.direction > 0;
      t.now.advance(t.block.walk, t.block.direction);
      if (t.now.done(t.block.head_end)) t.has_item = false;
    }
  }
  EXPECT_GT(additions, 100000);
  EXPECT_GT(waits, 10000);
  EXPECT_GT(descending, 10000);
  EXPECT_LT(descending, additions);
}

// Which way a sequence's key blocks are added depends on nothing else of the batch.
TEST(OrderedItems, BatchInvariantIsOneOrderForAll) {
  for (const int32_t batch : {1, 3}) {
    for (const bool causal : {false, true}) {
      OrderedProblem problem;
      problem.rule.causal = causal, problem.batch_invariant = true;
      problem.batch = batch, problem.heads_kv = 2, problem.seqlen_q = problem.seqlen_k = 1000;
      const auto items = problem.items(16);
      for (uint32_t i = 0; i < items.order.items; ++i) ASSERT_EQ(items.item(i).descends, causal);
    }
  }
}

// The long key blocks of all heads come first, the others head by head; each item once, whatever
// the words of the mask are.
TEST(MaskedItems, LongBlocksOfAllHeadsComeFirst) {
  constexpr uint32_t kBlocks = 12, kTracks = 10;
  CommonParams p{};
  auto& l = p.mask_layout;
  l.block_k = 128, l.blocks_k = l.per_sequence_k = kBlocks;
  l.key_lists = 32, l.key_order = 64;
  std::vector<int32_t> words(96);
  p.mask = words.data();
  // Blocks 5 and 2 are visited 21 times, the others twice: 62 in all, 5 on average.
  const int32_t order[kBlocks] = {5, 2, 0, 1, 3, 4, 6, 7, 8, 9, 10, 11};
  std::copy(std::begin(order), std::end(order), words.begin() + l.key_order);
  for (uint32_t n = 0; n < kBlocks; ++n) words[32 + 2 * n + 1] = n == 5 || n == 2 ? 21 : 2;
  words[7] = 62;
  sm90::ItemOrder o{};
  o.records = kBlocks, o.tracks = 5, o.parts = 1, o.heads_per_part = 1;
  o.items = kBlocks * kTracks;
  const auto ordered = sm90::OrderedItems::one_by_one(o);
  const auto made = sm90::MaskedItems::make(ordered, p, 128, false);
  const uint32_t long_blocks = made.long_blocks(p);
  ASSERT_EQ(long_blocks, 2u);
  std::set<std::pair<uint32_t, int32_t>> seen;
  for (uint32_t i = 0; i < o.items; ++i) {
    const auto item = made.item(p, i, long_blocks);
    EXPECT_TRUE(seen.insert({item.record, item.head_kv}).second);
    const uint32_t block = item.record % kBlocks;
    EXPECT_EQ(block == 5 || block == 2, i < 2 * kTracks) << i;
    // Those of a head are neighbours.
    if (i >= 2 * kTracks && (i - 2 * kTracks) % 10 != 0) {
      const auto before = made.item(p, i - 1, long_blocks);
      EXPECT_EQ(item.head_kv, before.head_kv);
      EXPECT_GT(item.record, before.record);
    }
  }
  EXPECT_EQ(seen.size(), o.items);

  // An even mask, additions in order, blocks of other sizes, masks of several heads, packed rows.
  for (uint32_t n = 0; n < kBlocks; ++n) words[32 + 2 * n + 1] = 5;
  EXPECT_EQ(made.long_blocks(p), 0u);
  for (uint32_t i = 0; i < o.items; ++i)
    EXPECT_EQ(made.item(p, i, 0).record, ordered.item(i).record);
  EXPECT_FALSE(sm90::MaskedItems::make(ordered, p, 128, true).has_order);
  EXPECT_FALSE(sm90::MaskedItems::make(ordered, p, 64, false).has_order);
  l.blocks_k = 2 * kBlocks;
  EXPECT_FALSE(sm90::MaskedItems::make(ordered, p, 128, false).has_order);
  l.blocks_k = kBlocks;
  const int32_t begins[] = {0, 1};
  p.cu_k = begins;
  EXPECT_FALSE(sm90::MaskedItems::make(ordered, p, 128, false).has_order);

  // Words that are no mask's stay inside.
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    for (int32_t& word : words) word = static_cast<int32_t>(random());
    const uint32_t some = made.long_blocks(p);
    ASSERT_LE(some, kBlocks);
    for (uint32_t i = 0; i < o.items; ++i) ASSERT_LT(made.item(p, i, some).record, 2 * kBlocks);
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
