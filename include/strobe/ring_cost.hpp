// What a rank loses beside its attention when sequences are split over ranks, by which Ulysses
// (ulysses.hpp) chooses how many ranks share out the heads: the figures and the rule of Python's
// strobe.distributed (python/strobe/_ring_cost.py), byte for byte: a test compares them.
#ifndef STROBE_RING_COST_HPP_
#define STROBE_RING_COST_HPP_

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <strobe/formatted.hpp>
#include <strobe/ring_schedule.hpp>
#include <utility>
#include <vector>

namespace strobe {
inline namespace v0 {
namespace internal {

// FLOP of a GPU while its link brings a byte; of the ring's computing, what it takes longer than
// that of whole sequences, one of so many parts; bytes that could travel while float32 parts and
// sums of an element of Q, K, V and O are passed over; hundredths of an all-to-all's bytes that
// could while they are packed and unpacked; GPUs of a node, and how many times as long a byte takes
// between nodes. docs/distributed.md has where the figures come from.
inline constexpr int64_t kFlopPerByte = 2000, kPartsTake = 20, kSumsTake = 5, kPackingTakes = 50,
                         kNode = 8, kBetweenNodes = 6;

// Of a call, the whole sequence's. element: bytes of q's dtype.
struct RingSizes {
  int64_t batch = 1, heads = 1, heads_kv = 1, head_dim = 0, head_dim_v = 0, element = 2;

  // Elements of K and V, and of Q and O, in a row.
  [[nodiscard]] int64_t kv_row() const { return batch * heads_kv * (head_dim + head_dim_v); }
  [[nodiscard]] int64_t q_row() const { return batch * heads * (head_dim + head_dim_v); }
  // Of so many scores, forward.
  [[nodiscard]] int64_t flop(int64_t pairs) const {
    return 2 * pairs * batch * heads * (head_dim + head_dim_v);
  }
};

// Of the ring: bytes that no computation hides, counted in those of the fast link, of which one
// takes so many times as long, and those that could travel in the time that computing in parts
// takes longer.
[[nodiscard]] inline int64_t ring_lost(const RingSchedule& plan, const RingSizes& sizes,
                                       const RingMask& mask, int64_t slower) {
  const int64_t own = ring_pairs(plan.own, mask), edges = ring_pairs(plan.edges, mask),
                own_first = ring_pairs(plan.own_first, mask),
                own_last = ring_pairs(plan.own_last, mask), final = ring_pairs(plan.final, mask),
                final_first = ring_pairs(plan.final_first, mask),
                final_last = ring_pairs(plan.final_last, mask);
  std::vector<int64_t> work;
  int64_t of_steps = 0, exposed = 0;
  for (const RingStep& step : plan.steps)
    of_steps += work.emplace_back(ring_pairs(step.blocks, mask));
  for (size_t n = 0; n < plan.steps.size(); ++n) {
    const auto bytes = [&](const std::vector<RingRows>& rows, int64_t element) {
      int64_t count = 0;
      for (const RingRows& part : rows) count += part.size();
      return count * sizes.kv_row() * element;
    };
    const int64_t kv = bytes(plan.steps[n].receives, sizes.element);
    const int64_t gradients = bytes(plan.steps[n].sends, 4);  // they come back
    const int64_t before = n ? work[n - 1] : final + own;
    const int64_t before_backward = n ? work[n - 1] : edges + own_first + final_first;
    const int64_t after = n + 1 < work.size() ? work[n + 1] : own_last + final_last;
    exposed += std::max<int64_t>(0, slower * kv - sizes.flop(before) / kFlopPerByte);
    // Both directions of a step's backward pass share the link with one another; a backward pass
    // has 2.5 times a forward pass's FLOP.
    const int64_t hidden = sizes.flop(before_backward + after) * 5 / 4 / kFlopPerByte;
    exposed += std::max<int64_t>(0, slower * (kv + gradients) - hidden);
  }
  if (work.empty()) return exposed;
  // What is final is not computed in parts; edges are computed twice.
  const int64_t summed = 2 * (own + of_steps) + 5 * (own_first + own_last + of_steps);
  int64_t in_parts = 0;
  for (const RingBlock& block : plan.own) in_parts += block.q.size();
  return exposed + sizes.flop(summed) / 2 / kPartsTake / kFlopPerByte +
         sizes.flop(edges) * 5 / 2 / kFlopPerByte +
         kSumsTake * in_parts * (sizes.q_row() + sizes.kv_row());
}

// Of the all-to-all of groups of so many ranks, forward and backward: attention waits for all of
// it, and for what packs it.
[[nodiscard]] inline int64_t ulysses_lost(int64_t length, int64_t ranks, const RingSizes& sizes,
                                          int64_t inside) {
  const int64_t rows = (length + ranks - 1) / ranks;
  const int64_t row = rows * (sizes.q_row() + sizes.kv_row()) * sizes.element;
  const int64_t once = row * (inside - 1) / inside;
  // Of its members a rank has those of its node beside it.
  const int64_t away = row * (inside - std::min(inside, kNode)) / inside;
  return 2 * (once + (kBetweenNodes - 1) * away) + 2 * once * kPackingTakes / 100;
}

// If the heads are shared out among so many ranks inside of groups, and a ring goes between these.
[[nodiscard]] inline int64_t ranks_lost(const RingLayout& layout, const RingMask& mask,
                                        const RingSizes& sizes, int32_t inside) {
  const int32_t ranks = layout.ranks(), groups = ranks / inside;
  const int64_t found = inside > 1 ? ulysses_lost(layout.all_rows(), ranks, sizes, inside) : 0;
  if (groups == 1) return found;
  RingSizes share = sizes;
  share.heads /= inside;
  share.heads_kv /= inside;
  int64_t most = 0;  // of a few: see Python's
  for (const int32_t group : {0, groups / 2, groups - 1}) {
    most = std::max(most, ring_lost(ring_schedule(layout, group, mask, inside), share, mask,
                                    ranks > kNode ? kBetweenNodes : 1));
  }
  return found + most;
}

// With a unit, powers of ten as links have them.
[[nodiscard]] inline std::string in_bytes(int64_t count) {
  constexpr std::array<std::pair<const char*, double>, 3> kUnits = {
      {{"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}}};
  for (const auto& [unit, size] : kUnits) {
    const double many = static_cast<double>(count) / size;
    if (many >= 1) return formatted("%.3g %s", many, unit);
  }
  return formatted("%" PRId64 " bytes", count);
}

// How many ranks share out the heads, and why so many.
struct RingChoice {
  int32_t inside = 1;
  std::string reason;
};

// Where nothing but the costs says so: the number by which a rank loses least.
[[nodiscard]] inline RingChoice ring_choice(const RingLayout& layout, const RingMask& mask,
                                            const RingSizes& sizes) {
  const int32_t ranks = layout.ranks();
  if (ranks == 1) return {1, "one rank sends nothing"};
  std::vector<std::pair<int64_t, int32_t>> costs;  // and ranks of a group
  for (int32_t n = 1; n <= ranks; ++n) {
    if (ranks % n == 0 && sizes.heads % n == 0 && sizes.heads_kv % n == 0)
      costs.emplace_back(ranks_lost(layout, mask, sizes, n), n);
  }
  if (costs.size() == 1) {
    const bool of_q = sizes.heads % ranks != 0;
    return {1, formatted("%d ranks do not divide %s = %" PRId64, ranks, of_q ? "heads" : "heads_kv",
                         of_q ? sizes.heads : sizes.heads_kv)};
  }
  std::string told = in_bytes(costs.front().first) +
                     formatted(" in a ring, whose parts take %" PRId64 " %% longer and are summed",
                               100 / kPartsTake);
  const bool all = costs.back().second == ranks;
  const auto end = all ? costs.end() - 1 : costs.end();
  if (costs.begin() + 1 != end) {
    const auto& [cost, n] = *std::min_element(costs.begin() + 1, end);
    told +=
        (all ? ", of " : ", and of ") + in_bytes(cost) + formatted(" in a ring of groups of %d", n);
  }
  if (all)
    told += ", and of " + in_bytes(costs.back().first) + " by all-to-all, packed and unpacked";
  return {std::min_element(costs.begin(), costs.end())->second,
          "a rank loses the time of " + told +
              formatted(", where %" PRId64 " FLOP hide a byte", kFlopPerByte)};
}

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_RING_COST_HPP_
