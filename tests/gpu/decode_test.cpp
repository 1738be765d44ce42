// How decode kernels split keys: shares of a line, pieces of a span, chunks, where pieces lie in
// the workspace, and the keys of listed blocks. The walk through a share is played here on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "cuda/decode/listed_keys.h"
#include "cuda/decode/shares.h"

namespace strobe::cuda {
namespace {

/// Of a line of some equal stretches, of so many units each: every stretch in equal shares of its
/// own thread blocks.
void ExpectEqualShares(const Shares& shares, int32_t stretches, int32_t units, int32_t blocks) {
  ASSERT_EQ(shares.blocks, stretches * blocks);
  for (int32_t b = 0; b < shares.blocks; ++b) {
    const int32_t begin = shares.begin(b), end = shares.begin(b + 1), stretch = b / blocks;
    if (b % blocks == 0) {
      ASSERT_EQ(begin, stretch * units);
    }
    ASSERT_LE(end, (stretch + 1) * units);
    ASSERT_GE(end - begin, std::max(1, units / blocks));
    ASSERT_LE(end - begin, (units + blocks - 1) / blocks);
    for (int32_t u = begin; u < end; ++u) ASSERT_EQ(shares.holder(u), b) << "unit " << u;
  }
  ASSERT_EQ(shares.begin(shares.blocks), stretches * units);
}

TEST(Decode, SharesAreEqualAndHoldEveryUnitOnce) {
  for (const int32_t blocks : {1, 2, 3, 7, 33, 264}) {
    for (const int32_t total : {1, 2, 6, 7, 8, 100, 263, 264, 265, 1000, 99999}) {
      SCOPED_TRACE(testing::Message() << total << " units, " << blocks << " blocks");
      ASSERT_NO_FATAL_FAILURE(
          ExpectEqualShares(Shares::make(total, Divisor(static_cast<uint32_t>(blocks))), 1, total,
                            std::min(blocks, total)));
    }
  }
}

TEST(Decode, SharesOfSpansAreEqualAndHoldEveryUnitOnce) {
  for (int32_t spans = 1; spans <= 9; ++spans) {
    for (int32_t units = 1; units <= 40; ++units) {
      for (int32_t own = 1; own <= units; ++own) {
        SCOPED_TRACE(testing::Message()
                     << spans << " spans of " << units << " units, " << own << " blocks each");
        ASSERT_NO_FATAL_FAILURE(ExpectEqualShares(
            Shares::of_spans(spans * units, spans, Divisor(static_cast<uint32_t>(own))), spans,
            units, own));
      }
    }
  }
  ASSERT_NO_FATAL_FAILURE(
      ExpectEqualShares(Shares::of_spans(7 * 99999, 7, Divisor(37)), 7, 99999, 37));
}

TEST(Decode, NothingToShareLeavesNoBlock) { EXPECT_EQ(Shares::make(0, Divisor(12)).blocks, 0); }

// Every piece of a span that is cut has a slot of its own, and whoever merges finds the pieces in
// their order. spans: units of each.
void ExpectPiecesWhereBlocksLeaveThem(const Shares& shares, const std::vector<int32_t>& spans) {
  std::map<int32_t, std::vector<int32_t>> slots_of_span;  // in order of blocks
  std::set<int32_t> slots;
  std::vector<int32_t> begins{0};
  for (const int32_t units : spans) begins.push_back(begins.back() + units);
  for (int32_t block = 0; block < shares.blocks; ++block) {
    int32_t left = shares.begin(block + 1) - shares.begin(block);
    int32_t at = shares.begin(block), span = 0;
    while (begins[static_cast<size_t>(span) + 1] <= at) ++span;
    for (bool first = true; left > 0; first = false, ++span) {
      const auto g = static_cast<size_t>(span);
      const int32_t here = std::min(begins[g + 1] - at, left);
      if (here < spans[g]) {
        const int32_t slot = 2 * block + (first ? 0 : 1);
        ASSERT_TRUE(slots.insert(slot).second);
        ASSERT_LT(slot, 2 * shares.blocks);
        slots_of_span[span].push_back(slot);
      }
      at += here;
      left -= here;
    }
  }
  for (size_t g = 0; g < spans.size(); ++g) {
    const SpanPieces pieces = SpanPieces::of_shares(shares, begins[g], spans[g]);
    const auto left = slots_of_span.find(static_cast<int32_t>(g));
    if (left == slots_of_span.end()) {
      ASSERT_EQ(pieces.count, 1);
      continue;
    }
    ASSERT_EQ(pieces.count, static_cast<int32_t>(left->second.size()));
    for (int32_t i = 0; i < pieces.count; ++i) {
      ASSERT_EQ(pieces.slot(i), left->second[static_cast<size_t>(i)]);
    }
  }
}

TEST(Decode, PiecesAreFoundWhereBlocksLeaveThem) {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    const auto below = [&](uint32_t n) { return static_cast<int32_t>(random() % n); };
    std::vector<int32_t> spans(static_cast<size_t>(1 + below(12)));
    for (int32_t& units : spans) units = 1 + below(round % 2 ? 5 : 40);
    const int32_t total = std::accumulate(spans.begin(), spans.end(), 0);
    ASSERT_NO_FATAL_FAILURE(ExpectPiecesWhereBlocksLeaveThem(
        Shares::make(total, Divisor(static_cast<uint32_t>(1 + below(20)))), spans));
  }
  for (int32_t spans = 1; spans <= 5; ++spans) {
    for (int32_t units = 1; units <= 12; ++units) {
      for (int32_t own = 1; own <= units; ++own) {
        const auto shares =
            Shares::of_spans(spans * units, spans, Divisor(static_cast<uint32_t>(own)));
        ASSERT_NO_FATAL_FAILURE(ExpectPiecesWhereBlocksLeaveThem(
            shares, std::vector<int32_t>(static_cast<size_t>(spans), units)));
      }
    }
  }
}

TEST(Decode, ChunksBeginAtMultiplesFromTheFirstKey) {
  for (int32_t shift : {0, 1, 2, 4}) {
    for (const int32_t first : {0, 3, 16, 21}) {
      for (int32_t units = 1; units < 200; ++units) {
        SequenceUnits s{};
        s.walk = {first, first + units};
        const KeyCut cut{1, 4, 6, 1000, shift, 0}, whole{1, 4, 6, 1000, shift, 1};
        int32_t at = 0, chunks = 0;
        for (; at < units; at = s.chunk_end(at, shift), ++chunks) {
          ASSERT_TRUE(at == 0 || (first + at) % (1 << shift) == 0);
          ASSERT_EQ(cut.share_begin(s, at), at);
          for (int32_t in = at; in < s.chunk_end(at, shift); ++in) {
            ASSERT_EQ(s.chunk(in, shift), chunks);
            ASSERT_EQ(cut.share_begin(s, in), in == at ? at : s.chunk_end(at, shift));
            ASSERT_EQ(whole.share_begin(s, in), in == 0 ? 0 : units);
          }
        }
        ASSERT_EQ(at, units);
        ASSERT_EQ(chunks, s.chunks(shift));
      }
    }
  }
}

TEST(Decode, UnitsHoldEveryKeyThatSomeQuerySees) {
  for (const int64_t seqlen_q : {0, 1, 2, 5, 17}) {
    for (const int64_t seqlen_k : {0, 1, 63, 64, 65, 500}) {
      for (const int64_t left : {-1, 0, 10, 100}) {
        for (const bool causal : {false, true}) {
          const Mask mask = Mask::make({left, -1, 0, causal}, seqlen_q, seqlen_k);
          for (const int32_t span : {1, 4, 8}) {
            const KeyCut cut{span, 4, 6, 0, 0, 0};
            const SequenceUnits s = cut.of({}, mask, 3);
            ASSERT_EQ(s.tiles, (seqlen_q * span + 15) / 16);
            ASSERT_EQ(s.spans, 3 * s.tiles);
            ASSERT_GE(s.units(), 1);
            for (int64_t i = 0; i < seqlen_q; ++i) {
              const Range keys = mask.row(i);
              if (keys.empty()) continue;
              ASSERT_GE(keys.begin, s.walk.begin * 64);
              ASSERT_LE(keys.end, s.walk.end * 64);
            }
          }
        }
      }
    }
  }
}

// The keys without gaps are those of the listed blocks that hold keys of the range, in order.
TEST(Decode, ListedKeysAreThoseOfListedBlocks) {
  std::mt19937 random(1);
  const auto below = [&](int64_t n) {
    return std::uniform_int_distribution<int64_t>(0, n - 1)(random);
  };
  for (int n = 0; n < 2000; ++n) {
    const auto log2_k = static_cast<int32_t>(6 + below(3));
    const int64_t side = int64_t{1} << log2_k, blocks = 1 + below(12);
    const auto width = static_cast<int32_t>(2 + below(4));
    // A list behind another one.
    std::vector<int32_t> entries(static_cast<size_t>(3 * width), -7), listed;
    for (int64_t block = 0; block < blocks; ++block) {
      if (below(2) == 0) continue;
      listed.push_back(static_cast<int32_t>(block));
      entries.push_back(listed.back());
      entries.resize(entries.size() + static_cast<size_t>(width) - 1, 5);
    }
    const auto count = static_cast<int32_t>(listed.size());
    const int32_t lists[] = {0, 3, 3, count};
    const BlockLists of{lists, entries.data(), width, 64, side, 0, 3 + count};
    const int64_t begin = below(blocks * side + 1), end = below(blocks * side + 1);
    const Range range{begin, end};
    const ListedKeys keys = ListedKeys::of(of, 1, range);
    std::vector<int64_t> wanted;
    for (const int32_t block : listed) {
      if (intersect({block * side, (block + 1) * side}, range).empty()) continue;
      for (int64_t key = block * side; key < (block + 1) * side; ++key) wanted.push_back(key);
    }
    ASSERT_EQ(keys.keys(log2_k), static_cast<int64_t>(wanted.size()));
    for (int32_t i = 0; i < keys.keys(log2_k); ++i) {
      ASSERT_NE(keys.entry(i, width, log2_k), nullptr);
      ASSERT_EQ(keys.key(i, width, log2_k), wanted[static_cast<size_t>(i)]);
    }
    const int32_t past = keys.keys(log2_k);
    ASSERT_EQ(keys.entry(past, width, log2_k), nullptr);
    ASSERT_EQ(keys.key(past, width, log2_k), ListedKeys::kNoKey);
    constexpr ListedKeys kNoLists{nullptr, 0};
    ASSERT_EQ(kNoLists.entry(past, width, log2_k), nullptr);
    ASSERT_EQ(kNoLists.key(past, width, log2_k), past);
  }
}

}  // namespace
}  // namespace strobe::cuda
