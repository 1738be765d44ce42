// Time and floating-point operations of a launch.
#ifndef STROBE_CLI_MEASURE_H_
#define STROBE_CLI_MEASURE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <strobe/strobe.hpp>
#include <vector>

#include "cli/terminal.h"
#include "core/sequence.h"

namespace strobe::cli {

struct Timing {
  double median = 0;  // seconds
  double best = 0;
  int64_t runs = 0;
};

// Times `work`. runs > 0: exactly that often. Else once to warm up, then at least three times and
// for `seconds`; work that takes longer than `seconds` at the first call runs only once more.
// tell, if given, hears after each run how many seconds of runs like it are left.
template <typename Work>
[[nodiscard]] Timing Measure(Work work, double seconds, int64_t runs = 0,
                             const std::function<void(double)>& tell = {}) {
  std::vector<double> times;
  double total = 0;
  const auto run = [&] {
    const Stopwatch watch;
    work();
    return watch.Seconds();
  };
  if (runs == 0) {
    const double first = run();
    const int64_t least = first > seconds ? 1 : 3;
    if (tell) tell(std::max(seconds, static_cast<double>(least) * first));
    while (total < seconds || static_cast<int64_t>(times.size()) < least) {
      times.push_back(run());
      total += times.back();
    }
  } else {
    for (int64_t i = 0; i < runs; ++i) {
      times.push_back(run());
      if (tell) tell(times.back() * static_cast<double>(runs - i - 1));
    }
  }
  std::sort(times.begin(), times.end());
  return {.median = times[times.size() / 2],
          .best = times.front(),
          .runs = static_cast<int64_t>(times.size())};
}

// Times each work in turns, so that what else the machine does meets all of them: once to warm up,
// then at least three times and for `seconds` in all.
[[nodiscard]] inline std::vector<Timing> MeasureInTurns(
    const std::vector<std::function<void()>>& works, double seconds) {
  for (const auto& work : works) work();
  std::vector<std::vector<double>> times(works.size());
  const Stopwatch all;
  for (int64_t round = 0; round < 3 || all.Seconds() < seconds; ++round) {
    for (size_t i = 0; i < works.size(); ++i) {
      const Stopwatch watch;
      works[i]();
      times[i].push_back(watch.Seconds());
    }
  }
  std::vector<Timing> result;
  for (std::vector<double>& each : times) {
    std::sort(each.begin(), each.end());
    result.push_back({.median = each[each.size() / 2],
                      .best = each.front(),
                      .runs = static_cast<int64_t>(each.size())});
  }
  return result;
}

// The sequences of a problem for VisiblePairs. Args: ForwardArgs or BackwardArgs in the memory of
// the host; empty ones where the problem has no arrays.
template <typename Args>
[[nodiscard]] Sequences SequencesOf(const Problem& p, const Args& a) {
  return {.cu_q = a.cu_seqlens_q,
          .cu_k = a.cu_seqlens_k,
          .used_q = a.seqused_q,
          .used_k = a.seqused_k,
          .q_position = a.q_position,
          .prefix = a.prefix,
          .batch = static_cast<int32_t>(p.batch),
          .heads = static_cast<int32_t>(p.heads),
          .seqlen_q = static_cast<int32_t>(p.seqlen_q),
          .seqlen_k = static_cast<int32_t>(p.seqlen_k),
          .lse_head_stride = 0,
          .rule = MaskRule::of(p)};
}

// Pairs of query and key that see each other: half of all when causal with equal lengths, as is the
// custom, else counted row by row.
[[nodiscard]] inline double VisiblePairs(const Sequences& sequences) {
  MaskRule but_causal = sequences.rule;
  but_causal.causal = false;
  // A batch without rows may be of any size: sequences that are all alike are counted once.
  const bool alike = !sequences.sequences_differ();
  double pairs = 0;
  for (int64_t b = 0; b < (alike ? 1 : sequences.batch); ++b) {
    const Mask mask = sequences.sequence_of_all_heads(b).mask;
    const double all = static_cast<double>(mask.seqlen_q) * static_cast<double>(mask.seqlen_k);
    if (sequences.rule.hides_nothing()) {
      pairs += all;
    } else if (but_causal.hides_nothing() && mask.prefix == 0 && mask.offset == 0 &&
               mask.seqlen_q == mask.seqlen_k) {
      pairs += all / 2;
    } else {
      for (int64_t i = 0; i < mask.seqlen_q; ++i) pairs += static_cast<double>(mask.row(i).size());
    }
  }
  return alike ? pairs * sequences.batch : pairs;
}

// Two products with a multiplication and an addition each: 2 (head_dim + head_dim_v) a pair and
// head.
[[nodiscard]] inline double ForwardFlop(double pairs, int64_t heads, int64_t head_dim,
                                        int64_t head_dim_v) {
  return 2.0 * static_cast<double>(head_dim + head_dim_v) * static_cast<double>(heads) * pairs;
}

// Five products instead of two.
[[nodiscard]] inline double BackwardFlop(double forward) { return 2.5 * forward; }

}  // namespace strobe::cli

#endif  // STROBE_CLI_MEASURE_H_
