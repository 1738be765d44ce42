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
#include <array>
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
  // Of the rank's own keys: whether each query's own one is among them.
  [[nodiscard]] constexpr bool has_own() const noexcept {
    return k.begin <= q.begin && q.end <= k.end;
  }
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

// Of intervals that do not touch, ascending, what lies in these rows.
[[nodiscard]] inline std::vector<RingRows> ring_clipped(const std::vector<RingRows>& some,
                                                        const RingRows& rows) {
  std::vector<RingRows> found;
  auto part = std::upper_bound(some.begin(), some.end(), rows.begin,
                               [](int64_t begin, const RingRows& x) { return begin < x.end; });
  for (; part != some.end() && part->begin < rows.end; ++part)
    found.push_back({std::max(part->begin, rows.begin), std::min(part->end, rows.end)});
  return found;
}

// These rows but for those taken.
[[nodiscard]] inline std::vector<RingRows> ring_without(const RingRows& rows,
                                                        std::vector<RingRows> taken) {
  std::vector<RingRows> found;
  int64_t begin = rows.begin;
  for (const RingRows& part : ring_clipped(ring_joined(std::move(taken)), rows)) {
    if (begin < part.begin) found.push_back({begin, part.begin});
    begin = part.end;
  }
  if (begin < rows.end) found.push_back({begin, rows.end});
  return found;
}

// The queries of blocks, one behind the other in `rows`.
inline void ring_queries_of(const std::vector<RingBlock>& blocks, std::vector<RingRows>& rows) {
  for (const RingBlock& block : blocks) rows.push_back(block.q);
}

}  // namespace internal

// All of a rank's work, forward and backward. Every rank has the steps 1 to ranks - 1, so that
// messages have one order for all of them, which is why none waits for ever.
struct RingSchedule {
  int64_t rows = 0;  // that the rank holds

  // Forward, before the steps: blocks each of whose queries has no other block, so that out is
  // theirs.
  std::vector<RingBlock> final = {};
  // The other queries against the rank's own keys, while the first keys travel.
  std::vector<RingBlock> own = {};

  // Backward, of the same pairs, before the steps: of the blocks of final_last, squares at their
  // ends in which lie all pairs of the rows that others add to. They are computed twice, here for
  // sums.
  std::vector<RingBlock> edges = {};
  // What is a sum alone: before the steps.
  std::vector<RingBlock> own_first = {};
  // And behind them.
  std::vector<RingBlock> own_last = {};
  // Before the steps, blocks whose rows have no other (whole).
  std::vector<RingBlock> final_first = {};
  // Behind them, blocks to some of whose gradients others add: to those of edges; and whole ones
  // between those.
  std::vector<RingBlock> final_last = {};

  std::vector<RingStep> steps = {};  // in their order

  // All lists of blocks but those of the steps.
  [[nodiscard]] std::array<const std::vector<RingBlock>*, 7> of_own_keys() const noexcept {
    return {&final, &own, &edges, &own_first, &own_last, &final_first, &final_last};
  }
  // Rows whose dq is a sum over blocks.
  [[nodiscard]] std::vector<RingRows> summed_q() const {
    std::vector<RingRows> found;
    for (const auto* blocks : {&own_first, &own_last}) internal::ring_queries_of(*blocks, found);
    for (const RingStep& step : steps) internal::ring_queries_of(step.blocks, found);
    return internal::ring_joined(std::move(found));
  }
  // Rows whose dk and dv are sums, over blocks or over ranks.
  [[nodiscard]] std::vector<RingRows> summed_k() const {
    std::vector<RingRows> found;
    for (const auto* blocks : {&own_first, &own_last})
      for (const RingBlock& block : *blocks) found.push_back(block.k);
    for (const RingStep& step : steps)
      found.insert(found.end(), step.sends.begin(), step.sends.end());
    return internal::ring_joined(std::move(found));
  }
};

namespace internal {

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

// How many scores a kernel computes, about: a masked block is half empty, and a query sees so many
// keys at most as a window has.
[[nodiscard]] inline int64_t ring_pairs(std::span<const RingBlock> blocks, const RingMask& mask) {
  int64_t pairs = 0;
  for (const RingBlock& block : blocks) {
    const int64_t all = block.q.size() * block.k.size() / (block.masked ? 2 : 1);
    const bool limited = mask.left >= 0 && mask.right >= 0;
    pairs += limited ? std::min(all, block.q.size() * (mask.left + mask.right + 1)) : all;
  }
  return pairs;
}

// An edge, where others have a part of the sums, is computed twice: of its block at most so large a
// part of the pairs, and so many pairs for each row. Python's has where the figures come from.
inline constexpr int64_t kEdgesWithin = 8, kEdgePairs = 512;
// Where float32 sums are, at most so many intervals of rows, each of which has passes of its own.
inline constexpr size_t kMostParts = 32;

// The longest interval of rows without those touched, the first of several.
[[nodiscard]] inline RingRows ring_untouched(const RingRows& rows, std::vector<RingRows> touched) {
  RingRows found = {rows.begin, rows.begin};
  for (const RingRows& part : ring_without(rows, std::move(touched)))
    if (part.size() > found.size()) found = part;
  return found;
}

// Cuts a block on the diagonal into queries that have no other block, which go to `final`, and the
// rest, to `own`. Both are in calls of packed sequences with those of other blocks, so that the
// rest's keys are apart.
inline void ring_cut(const RingBlock& block, const std::vector<RingRows>& touched,
                     const RingMask& mask, std::vector<RingBlock>& final,
                     std::vector<RingBlock>& own) {
  if (touched.empty()) return final.push_back(block);
  if (mask.left < 0 || mask.right < 0) return own.push_back(block);
  const auto [begin, end] = block.q;
  RingRows inner = ring_untouched(block.q, touched);
  // Keys begin at a multiple of 8 if the block's do: kernels draw dropout's bits for so many.
  const int64_t first = inner.begin - mask.left - begin, last = inner.end - mask.left - begin;
  if (first > 0) inner.begin += (8 - first % 8) % 8;
  if (inner.end < end && last > 0) inner.end -= last % 8;
  if (inner.size() < std::max({int64_t{1}, mask.left + mask.right, (end - begin) / 2}))
    return own.push_back(block);
  const RingChunk keys = {begin, begin, end, 0};
  const auto add = [&](const RingRows& rows, std::vector<RingBlock>& to) {
    RingBlock part;
    if (rows.size() > 0 && ring_block({rows.begin, rows.begin, rows.end, 0}, keys, mask, {}, part))
      to.push_back(part);
  };
  add({begin, inner.begin}, own);
  add(inner, final);
  add({inner.end, end}, own);
}

// Squares on the diagonal at the ends of a block there, in which lie all of its pairs with the
// queries and the keys that others have a part of; false: that is too much to compute twice.
[[nodiscard]] inline bool ring_edges(const RingBlock& block, const std::vector<RingRows>& q,
                                     const std::vector<RingRows>& k, const RingMask& mask,
                                     std::vector<RingBlock>& edges) {
  if (q.empty() && k.empty()) return true;
  if (mask.left < 0 || mask.right < 0) return false;
  std::vector<RingRows> touched = q;
  touched.insert(touched.end(), k.begin(), k.end());
  const auto [begin, end] = block.q;
  const int64_t middle = ring_untouched(block.q, std::move(touched)).begin;
  int64_t first = begin, last = end;
  const auto hold = [&](const std::vector<RingRows>& rows, int64_t before, int64_t behind) {
    for (const RingRows& part : rows) {
      if (part.begin < middle) {
        first = std::max(first, std::min(block.q.end, part.end + behind));
      } else {
        last = std::min(last, std::max(block.q.begin, part.begin - before));
      }
    }
  };
  hold(q, mask.left, mask.right);
  hold(k, mask.right, mask.left);
  last -= (last - begin) % 8;  // as keys begin in ring_cut
  if (first > last) return false;
  std::vector<RingBlock> found;
  for (const RingRows& rows : {RingRows{begin, first}, RingRows{last, end}}) {
    const RingChunk square = {rows.begin, rows.begin, rows.end, 0};
    RingBlock edge;
    if (rows.size() > 0 && ring_block(square, square, mask, {}, edge)) found.push_back(edge);
  }
  const int64_t twice = ring_pairs(found, mask);
  if (twice * kEdgesWithin > ring_pairs(std::span(&block, 1), mask) ||
      twice > kEdgePairs * block.q.size()) {
    return false;
  }
  edges.insert(edges.end(), found.begin(), found.end());
  return true;
}

// Rows of a rank that its steps have, joined: as queries, and as keys that are sent.
struct RingOthers {
  std::vector<RingRows> q, k;
};

// A rank's own pairs of a sequence, added to a plan. others: null: nothing is final.
inline void ring_divide(std::span<const RingChunk> chunks, const RingMask& mask,
                        const RingOthers* others, RingSchedule& plan) {
  std::vector<RingBlock> apart = ring_blocks(chunks, chunks, mask, {});
  const std::vector<RingBlock> blocks = ring_own(chunks, apart, mask);
  const auto on_diagonal = [](const RingBlock& block) { return block.q == block.k; };
  const auto insert = [](std::vector<RingBlock>& to, const std::vector<RingBlock>& some) {
    to.insert(to.end(), some.begin(), some.end());
  };
  const RingRows rows = {chunks.front().row,
                         chunks.back().row + chunks.back().end - chunks.back().begin};
  std::vector<RingRows> with_q, with_k;
  bool beside = false;
  if (others) {
    with_q = ring_clipped(others->q, rows);
    with_k = ring_clipped(others->k, rows);
    for (const RingBlock& block : blocks) beside = beside || !on_diagonal(block);
    if (!beside && with_q.empty() && with_k.empty()) {
      insert(plan.final, blocks);
      return insert(plan.final_first, blocks);
    }
  }
  if (others) {
    std::vector<RingRows> touched = with_q;
    for (const RingBlock& block : blocks) {
      if (on_diagonal(block)) continue;
      plan.own.push_back(block);
      touched.push_back(block.q);
    }
    touched = ring_joined(std::move(touched));
    for (const RingBlock& block : blocks)
      if (on_diagonal(block))
        ring_cut(block, ring_clipped(touched, block.q), mask, plan.final, plan.own);
  } else {
    insert(plan.own, blocks);
  }
  // Two parts of about one size: the blocks beside the diagonal and those on it; a single block
  // that is not masked in halves of its queries.
  std::vector<RingBlock> diagonal;
  if (apart.size() == 1 && !apart[0].masked && apart[0].q.size() > 1) {
    RingBlock first = apart[0], last = apart[0];
    const int64_t middle = first.q.begin + first.q.size() / 2;
    first.q.end = last.q.begin = middle;
    last.position += middle - first.q.begin;
    plan.own_first.push_back(first);
    diagonal = {last};
    with_q.push_back(first.q);
    with_k.push_back(first.k);
  } else {
    for (const RingBlock& block : apart) {
      if (on_diagonal(block)) {
        diagonal.push_back(block);
        continue;
      }
      plan.own_first.push_back(block);
      with_q.push_back(block.q);
      with_k.push_back(block.k);
    }
  }
  with_q = ring_joined(std::move(with_q));
  with_k = ring_joined(std::move(with_k));
  for (const RingBlock& block : diagonal) {
    const size_t before = plan.edges.size();
    if (!others || !on_diagonal(block) ||
        !ring_edges(block, ring_clipped(with_q, block.q), ring_clipped(with_k, block.k), mask,
                    plan.edges)) {
      plan.own_last.push_back(block);
    } else {
      (plan.edges.size() > before ? plan.final_last : plan.final_first).push_back(block);
    }
  }
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
  RingSchedule with_steps;
  for (const RingChunk& chunk : mine) with_steps.rows += chunk.end - chunk.begin;
  internal::RingOthers others;
  for (int32_t distance = 1; distance < ranks; ++distance) {
    RingStep step{.distance = distance,
                  .source = (rank + ranks - distance) % ranks,
                  .target = (rank + distance) % ranks};
    internal::RingReceived received =
        internal::ring_received(mine, attended(step.source), mask, seen);
    step.receives = std::move(received.pieces);
    step.blocks = std::move(received.blocks);
    step.sends = internal::ring_received(attended(step.target), mine, mask, seen).pieces;
    internal::ring_queries_of(step.blocks, others.q);
    others.k.insert(others.k.end(), step.sends.begin(), step.sends.end());
    with_steps.steps.push_back(std::move(step));
  }
  others.q = internal::ring_joined(std::move(others.q));
  others.k = internal::ring_joined(std::move(others.k));
  std::vector<std::span<const RingChunk>> sequences;
  for (size_t begin = 0, end = 0; begin < mine.size(); begin = end) {
    while (end < mine.size() && mine[end].sequence == mine[begin].sequence) ++end;
    sequences.push_back(std::span(mine).subspan(begin, end - begin));
  }
  // sums: of the sequences of which some result is one, the first ones of which nothing is final.
  const auto divided = [&](size_t sums, size_t& behind) {
    RingSchedule plan = with_steps;
    behind = 0;
    for (size_t n = 0; n < sequences.size(); ++n) {
      const auto count = [&] {
        return plan.own.size() + plan.edges.size() + plan.own_first.size() + plan.own_last.size();
      };
      const size_t before = count();
      internal::ring_divide(sequences[n], mask, n < sums ? nullptr : &others, plan);
      if (count() > before) behind = n + 1;
    }
    return plan;
  };
  size_t behind = 0;  // the sequences up to the last one with sums
  RingSchedule plan = divided(0, behind);
  std::vector<RingRows> sums;
  for (const auto* blocks : {&plan.own, &plan.edges, &plan.own_last})
    internal::ring_queries_of(*blocks, sums);
  // Final are then those from the last one on that others have nothing of.
  if (internal::ring_joined(std::move(sums)).size() > internal::kMostParts)
    plan = divided(behind, behind);
  // Blocks with each query's own key have all rows, and come first.
  std::stable_partition(plan.own.begin(), plan.own.end(),
                        [](const RingBlock& block) { return block.has_own(); });
  // A call of packed sequences writes zeros to rows between its blocks. Whole blocks that lie
  // between those of final_last are therefore of that call: it would write over what they have.
  if (!plan.final_last.empty()) {
    const RingRows span = {plan.final_last.front().q.begin, plan.final_last.back().q.end};
    const auto between = std::stable_partition(
        plan.final_first.begin(), plan.final_first.end(), [&](const RingBlock& block) {
          return block.q.end <= span.begin || span.end <= block.q.begin;
        });
    plan.final_last.insert(plan.final_last.end(), between, plan.final_first.end());
    plan.final_first.erase(between, plan.final_first.end());
    std::sort(plan.final_last.begin(), plan.final_last.end(),
              [](const RingBlock& a, const RingBlock& b) { return a.q < b.q; });
  }
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

[[nodiscard]] inline int64_t ring_count(std::span<const RingRows> rows) {
  int64_t count = 0;
  for (const RingRows& part : rows) count += part.size();
  return count;
}

// Memory for some rows of a rank, these intervals end to end.
struct RingRoom {
  std::vector<RingRows> rows = {};

  [[nodiscard]] int64_t size() const { return ring_count(rows); }
  // Where rows stand in it, which lie in one of the intervals.
  [[nodiscard]] RingRows place(const RingRows& some) const {
    int64_t before = 0;
    for (const RingRows& part : rows) {
      if (some.end <= part.end) {
        const int64_t begin = before + some.begin - part.begin;
        return {begin, begin + some.size()};
      }
      before += part.size();
    }
    return {before, before + some.size()};
  }
};

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_RING_SCHEDULE_HPP_
