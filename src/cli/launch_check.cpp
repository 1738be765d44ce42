#include "cli/launch_check.h"

#include <bit>

#include "cli/errors.h"
#include "core/packed_mask.h"
#include "core/problem.h"

namespace strobe::cli {

void CheckLaunch(const strobe_problem& problem, const strobe_forward_args& args) {
  strobe_problem here = problem;
  here.device = STROBE_CPU;
  strobe_forward_args checked = args;
  checked.workspace = nullptr;  // its size is the plan's affair
  Status status = check_args(here, 0, checked);
  if (status.ok()) status = check_numbers(here, checked);
  if (!status.ok()) throw UserError(status.text());
}

double CachedPairs(const strobe_problem& problem, const strobe_forward_args& args) {
  const CachedSequences sequences = cached_sequences_of(problem, args);
  double pairs = 0;
  // Sequences without a query may be of any number where nothing tells them apart.
  if (rows_q(problem) == 0 && !problem.append) return pairs;
  for (int64_t b = 0; b < problem.batch; ++b) {
    const CachedSequence s = sequences.sequence_of_all_heads(b);
    for (int64_t i = 0; i < s.mask.seqlen_q; ++i)
      pairs += static_cast<double>(s.mask.row(i).size());
  }
  return pairs;
}

double MaskedPairs(const strobe_problem& problem, const strobe_forward_args& args) {
  const MaskLayout layout = MaskLayout::of(problem);
  double pairs = 0;
  const auto count = [&](const auto& sequences) {
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (int64_t head = 0; head < layout.heads; ++head) {
        const auto s = sequences.sequence(b, head);
        const HeadMask mask = HeadMask::of(static_cast<const int32_t*>(args.mask), layout, s, head);
        for (int64_t i = 0; i < s.mask.seqlen_q; ++i) {
          mask.any_keys(i, s.mask.row(i), [&](int64_t, uint32_t bits) {
            pairs += std::popcount(bits);
            return false;
          });
        }
      }
    }
  };
  if (rows_q(problem) == 0) return 0;
  if (problem.cache) {
    count(cached_sequences_of(problem, args));
  } else {
    count(sequences_of(problem, args));
  }
  return pairs / static_cast<double>(layout.heads);
}

}  // namespace strobe::cli
