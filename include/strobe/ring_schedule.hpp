// Who computes what and what travels, when sequences are split over ranks: the schedule of
// ring.hpp, which includes this, in plain numbers; who holds what is said by ring_layout.hpp. It is
// that of Python's strobe.distributed (python/strobe/_ring.py), rank for rank and row for row: a
// test compares them.
//
// So many neighbouring ranks (inside) may be a group that has its ranks' rows together, each of
// them with a share of the heads, by an all-to-all (ulysses.hpp). The ring then goes from group to
// group, and `rank` is one of these. With inside = 1, groups of one, they are the ranks.
#ifndef STROBE_RING_SCHEDULE_HPP_
#define STROBE_RING_SCHEDULE_HPP_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <strobe/ring_layout.hpp>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace strobe {
inline namespace v0 {

// A query sees the keys from so many positions before its own to so many after it; -1: no limit.
struct RingMask {
  int64_t left = -1, right = -1;  // before and after its own; at least -1
  bool by_distance = false;       // scores depend on the distance of query and key (ALiBi), or
                                  // dropout on where they stand: what is computed keeps its
                                  // positions even where nothing is hidden
  int64_t attention_chunk = 0;    // a query sees the keys of its own chunk of so many positions
                                  // alone; 0: there are none
};

// What a mask as data leaves, as far as every rank knows it: narrows queries and keys, rows of one
// sequence counted through all of them, to intervals that hold all pairs which may be seen, the
// smallest but for where keys begin (dropout). Returns false: there is none.
using RingSeen = std::function<bool(RingRows& q, RingRows& k)>;

// One call of attention: queries of a rank against keys that it has at hand. Every other pair of
// the two intervals is hidden or belongs to another block.
struct RingBlock {
  RingRows q = {};       // rows of the rank
  RingRows k = {};       // rows of the rank itself, or of what it received in this step
  int64_t position = 0;  // that of the first query minus that of the first key
  bool masked = false;   // whether the mask hides some pair
  // Whether all numbers are equal.
  constexpr bool operator==(const RingBlock&) const noexcept = default;
};

// What a rank does at one distance. Either list of rows may be empty, and there is then no message;
// the blocks' keys are rows of what is received, piece after piece.
struct RingStep {
  int32_t distance = 0;                 // 1 to ranks - 1
  int32_t source = 0, target = 0;       // whose keys come, and to whom the rank's own go
  std::vector<RingRows> receives = {};  // rows of the rank source
  std::vector<RingRows> sends = {};     // the rank's own
  std::vector<RingBlock> blocks = {};   // what is computed with what was received
};

// All of a rank's work, forward and backward. Every rank has the steps 1 to ranks - 1, so that
// messages have one order for all of them, which is why none waits for ever.
struct RingSchedule {
  int64_t rows = 0;  // that the rank holds
  // Of sequences that the rank has alone, each of whose rows is in one block. They are the last of
  // its rows, and no other block has any of these.
  std::vector<RingBlock> whole = {};
  // The rank's other queries against its own keys: for the forward pass, while the first keys
  // travel.
  std::vector<RingBlock> own = {};
  // Of the same pairs, for the backward pass, those that are computed while the first keys travel.
  std::vector<RingBlock> own_first = {};
  // And those that are computed while the last gradients travel.
  std::vector<RingBlock> own_last = {};
  std::vector<RingStep> steps = {};  // in their order

  // How many of the first rows are of sequences that the rank does not have alone.
  [[nodiscard]] int64_t shared_rows() const { return whole.empty() ? rows : whole.front().q.begin; }
};

namespace internal {

// The union of intervals, as intervals that do not touch.
[[nodiscard]] inline std::vector<RingRows> ring_joined(std::vector<RingRows> rows) {
  std::erase_if(rows, [](const RingRows& part) { return part.size() <= 0; });
  std::sort(rows.begin(), rows.end());
  std::vector<RingRows> found;
  for (const RingRows& part : rows) {
    if (!found.empty() && part.begin <= found.back().end) {
      found.back().end = std::max(found.back().end, part.end);
    } else {
      found.push_back(part);
    }
  }
  return found;
}

// The smallest intervals of two chunks that hold all pairs which the mask leaves, and of those that
// which the mask as data leaves; false: there is none.
[[nodiscard]] inline bool ring_block(const RingChunk& q, const RingChunk& k, const RingMask& mask,
                                     const RingSeen& seen, RingBlock& block) {
  const bool has_left = mask.left >= 0, has_right = mask.right >= 0;
  RingRows of_k = {has_left ? std::max(k.begin, q.begin - mask.left) : k.begin,
                   has_right ? std::min(k.end, q.end + mask.right) : k.end};
  if (of_k.size() <= 0) return false;
  RingRows of_q = {has_right ? std::max(q.begin, of_k.begin - mask.right) : q.begin,
                   has_left ? std::min(q.end, of_k.end + mask.left) : q.end};
  if (seen && !seen(of_q, of_k)) return false;
  const auto [first_q, end_q] = of_q;
  const auto [first_k, end_k] = of_k;
  // The pairs that lie furthest apart, on either side.
  const bool hidden_left = has_left && end_q - 1 - first_k > mask.left;
  const bool hidden_right = has_right && end_k - 1 - first_q > mask.right;
  block = {.q = {q.row + first_q - q.begin, q.row + end_q - q.begin},
           .k = {k.row + first_k - k.begin, k.row + end_k - k.begin},
           .position = first_q - first_k,
           .masked = hidden_left || hidden_right};
  return true;
}

// Every pair of chunks of which something is seen; keys are rows of their owner. In both lists a
// sequence's chunks are neighbours.
[[nodiscard]] inline std::vector<RingBlock> ring_blocks(std::span<const RingChunk> queries,
                                                        std::span<const RingChunk> keys,
                                                        const RingMask& mask,
                                                        const RingSeen& seen) {
  std::unordered_map<int64_t, size_t> first;  // key of a sequence
  for (size_t n = keys.size(); n > 0; --n) first[keys[n - 1].sequence] = n - 1;
  std::vector<RingBlock> found;
  RingBlock block;
  for (const RingChunk& q : queries) {
    const auto of_sequence = first.find(q.sequence);
    if (of_sequence == first.end()) continue;
    for (size_t n = of_sequence->second; n < keys.size() && keys[n].sequence == q.sequence; ++n) {
      if (ring_block(q, keys[n], mask, seen, block)) found.push_back(block);
    }
  }
  return found;
}

// Blocks without a mask that lie beside each other are one: a call of twice the size. by_queries:
// whether it is their queries that do, or their keys.
[[nodiscard]] inline std::vector<RingBlock> ring_fused(std::vector<RingBlock> blocks,
                                                       bool by_queries) {
  std::stable_sort(blocks.begin(), blocks.end(), [&](const RingBlock& a, const RingBlock& b) {
    return by_queries ? std::tie(a.k, a.q) < std::tie(b.k, b.q)
                      : std::tie(a.q, a.k) < std::tie(b.q, b.k);
  });
  std::vector<RingBlock> found;
  for (const RingBlock& block : blocks) {
    if (!found.empty() && !found.back().masked && !block.masked) {
      RingBlock& last = found.back();
      if (by_queries && last.k == block.k && last.q.end == block.q.begin) {
        last.q.end = block.q.end;
        continue;
      }
      if (!by_queries && last.q == block.q && last.k.end == block.k.begin) {
        last.k.end = block.k.end;
        continue;
      }
    }
    found.push_back(block);
  }
  return found;
}
[[nodiscard]] inline std::vector<RingBlock> ring_fused(std::vector<RingBlock> blocks) {
  return ring_fused(ring_fused(std::move(blocks), true), false);
}

// The blocks of a step, and the rows of the owner that they need.
struct RingReceived {
  std::vector<RingBlock> blocks;
  std::vector<RingRows> pieces;
};
[[nodiscard]] inline RingReceived ring_received(std::span<const RingChunk> mine,
                                                std::span<const RingChunk> theirs,
                                                const RingMask& mask, const RingSeen& seen) {
  RingReceived found{ring_blocks(mine, theirs, mask, seen), {}};
  for (const RingBlock& block : found.blocks) found.pieces.push_back(block.k);
  found.pieces = ring_joined(std::move(found.pieces));
  std::vector<int64_t> before = {0};  // rows of the pieces before
  for (const RingRows& piece : found.pieces) before.push_back(before.back() + piece.size());
  for (RingBlock& block : found.blocks) {
    const auto behind =
        std::upper_bound(found.pieces.begin(), found.pieces.end(), block.k.begin,
                         [](int64_t begin, const RingRows& piece) { return begin < piece.begin; });
    const auto n = static_cast<size_t>(behind - found.pieces.begin() - 1);  // which has its keys
    const int64_t shift = before[n] - found.pieces[n].begin;
    block.k = {block.k.begin + shift, block.k.end + shift};
  }
  if (!mask.by_distance) found.blocks = ring_fused(std::move(found.blocks));
  return found;
}

// The blocks of a rank's own rows of a sequence, by as few calls as can be. apart: one for each
// pair of chunks.
[[nodiscard]] inline std::vector<RingBlock> ring_own(std::span<const RingChunk> held,
                                                     const std::vector<RingBlock>& apart,
                                                     const RingMask& mask) {
  if (held.size() > 1 && mask.left < 0 && mask.right == 0 && !mask.by_distance) {
    // All that a causal mask asks, within an attention chunk, is which of two rows is the later
    // one, and the order of the rank's rows is that of their positions.
    const RingRows rows = {held.front().row, held.back().row + held.back().end - held.back().begin};
    return {{.q = rows, .k = rows, .position = 0, .masked = true}};
  }
  if (!mask.by_distance) {
    std::vector<RingBlock> whole = ring_fused(apart);
    if (whole.size() == 1) return whole;
  }
  return apart;
}

// What a rank holds, cut where attention chunks end: each of these sees itself alone, as a sequence
// of its own does.
[[nodiscard]] inline std::vector<RingChunk> ring_attended(const RingLayout& layout, int32_t rank,
                                                          const RingMask& mask, int32_t inside) {
  std::vector<RingChunk> held = layout.chunks(rank, inside);
  const int64_t size = mask.attention_chunk;
  if (size <= 0) return held;
  std::vector<int64_t> before = {0};  // attention chunks of earlier sequences
  for (const int64_t length : layout.lengths())
    before.push_back(before.back() + length / size + (length % size > 0 ? 1 : 0));
  std::vector<RingChunk> found;
  for (const RingChunk& chunk : held) {
    const auto sequence = static_cast<size_t>(chunk.sequence);
    for (int64_t begin = chunk.begin; begin < chunk.end; begin = found.back().end) {
      const int64_t in_sequence = begin - layout.starts()[sequence];
      // (Without a sum that may leave 64 bits.)
      const int64_t rest = size - in_sequence % size;
      const int64_t end = rest < chunk.end - begin ? begin + rest : chunk.end;
      found.push_back(
          {chunk.row + begin - chunk.begin, begin, end, before[sequence] + in_sequence / size});
    }
  }
  return found;
}

}  // namespace internal

// The work of one rank, or of a group of so many ranks inside. What a mask as data hides whole, if
// it is known, is neither sent nor computed; a rank's own pairs do not ask it, since each row has
// its first result from them.
[[nodiscard]] inline RingSchedule ring_schedule(const RingLayout& layout, int32_t rank,
                                                const RingMask& mask, int32_t inside = 1,
                                                const RingSeen& seen = {}) {
  const auto attended = [&](int32_t which) {
    return internal::ring_attended(layout, which, mask, inside);
  };
  const int32_t ranks = layout.ranks() / inside;
  const std::vector<RingChunk> mine = attended(rank);
  RingSchedule plan;
  for (const RingChunk& chunk : mine) plan.rows += chunk.end - chunk.begin;
  int64_t behind = 0;  // the last row that a step has
  for (int32_t distance = 1; distance < ranks; ++distance) {
    RingStep step{.distance = distance,
                  .source = (rank + ranks - distance) % ranks,
                  .target = (rank + distance) % ranks};
    internal::RingReceived received =
        internal::ring_received(mine, attended(step.source), mask, seen);
    step.receives = std::move(received.pieces);
    step.blocks = std::move(received.blocks);
    step.sends = internal::ring_received(attended(step.target), mine, mask, seen).pieces;
    for (const RingBlock& block : step.blocks) behind = std::max(behind, block.q.end);
    for (const RingRows& sent : step.sends) behind = std::max(behind, sent.end);
    plan.steps.push_back(std::move(step));
  }
  // A sequence's chunks, a block for each pair of them, and its blocks by as few calls as can be.
  struct Held {
    std::span<const RingChunk> chunks;
    std::vector<RingBlock> apart, blocks;
  };
  std::vector<Held> sequences;
  for (size_t begin = 0, end = 0; begin < mine.size(); begin = end) {
    while (end < mine.size() && mine[end].sequence == mine[begin].sequence) ++end;
    const std::span<const RingChunk> chunks = std::span(mine).subspan(begin, end - begin);
    std::vector<RingBlock> apart = internal::ring_blocks(chunks, chunks, mask, {});
    std::vector<RingBlock> blocks = internal::ring_own(chunks, apart, mask);
    sequences.push_back({chunks, std::move(apart), std::move(blocks)});
  }
  // From the last one on, as far as no step has a row of it and each row is in one block.
  const auto on_diagonal = [](const RingBlock& block) { return block.q == block.k; };
  while (!sequences.empty() && sequences.back().chunks.front().row >= behind &&
         std::all_of(sequences.back().blocks.begin(), sequences.back().blocks.end(), on_diagonal)) {
    const std::vector<RingBlock>& blocks = sequences.back().blocks;
    plan.whole.insert(plan.whole.begin(), blocks.begin(), blocks.end());
    sequences.pop_back();
  }
  for (const auto& [chunks, apart, blocks] : sequences) {
    plan.own.insert(plan.own.end(), blocks.begin(), blocks.end());
    // Two parts of about one size: the blocks beside the diagonal and those on it; a single block
    // that is not masked in halves of its queries.
    if (apart.size() == 1 && !apart[0].masked && apart[0].q.size() > 1) {
      RingBlock first = apart[0], last = apart[0];
      const int64_t middle = first.q.begin + first.q.size() / 2;
      first.q.end = last.q.begin = middle;
      last.position += middle - first.q.begin;
      plan.own_first.push_back(first);
      plan.own_last.push_back(last);
      continue;
    }
    for (const RingBlock& block : apart)
      (on_diagonal(block) ? plan.own_last : plan.own_first).push_back(block);
  }
  // A query's own key is in a block on the diagonal: those blocks have all rows, and come first.
  std::stable_partition(plan.own.begin(), plan.own.end(), on_diagonal);
  return plan;
}

namespace internal {

// Blocks that one call computes, each a sequence of its own: ascending, and apart from each other,
// among the queries and among the keys.
using RingBatch = std::vector<RingBlock>;

// From the first query of a batch to the last, with those between blocks.
[[nodiscard]] inline RingRows ring_queries(const RingBatch& batch) {
  return {batch.front().q.begin, batch.back().q.end};
}
// The same of its keys.
[[nodiscard]] inline RingRows ring_keys(const RingBatch& batch) {
  return {batch.front().k.begin, batch.back().k.end};
}

// The calls that compute blocks. Of packed sequences, one has as many as can be: the first to which
// a block may be added gets it. So blocks that have all rows, if they come first, are one.
[[nodiscard]] inline std::vector<RingBatch> ring_batched(std::span<const RingBlock> blocks,
                                                         bool packed) {
  std::vector<RingBatch> found;
  for (const RingBlock& block : blocks) {
    RingBatch* room = nullptr;
    for (RingBatch& batch : found) {
      if (!packed) break;
      const RingBlock& last = batch.back();
      if (last.q.end > block.q.begin || last.k.end > block.k.begin) continue;
      room = &batch;
      break;
    }
    if (room) {
      room->push_back(block);
    } else {
      found.push_back({block});
    }
  }
  return found;
}

// The rows 0 to rows - 1 but for those taken.
[[nodiscard]] inline std::vector<RingRows> ring_without(int64_t rows, std::vector<RingRows> taken) {
  std::vector<RingRows> found;
  int64_t begin = 0;
  for (const RingRows& part : ring_joined(std::move(taken))) {
    if (begin < part.begin) found.push_back({begin, part.begin});
    begin = part.end;
  }
  if (begin < rows) found.push_back({begin, rows});
  return found;
}

[[nodiscard]] inline int64_t ring_count(std::span<const RingRows> rows) {
  int64_t count = 0;
  for (const RingRows& part : rows) count += part.size();
  return count;
}

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_RING_SCHEDULE_HPP_
