#include "cli/launch_progress.h"

#include <algorithm>
#include <utility>

#include "cli/bench_fill.h"
#include "cli/buffer.h"
#include "cli/dtype.h"
#include "cli/terminal.h"

namespace strobe::cli {
namespace {

constexpr double kMuch = 1e11;  // operations: fractions of a second on a slow core

// Operations a second, forward, of a problem with these heads and few rows; 0 where there is none.
double SpeedOf(const Problem& like) {
  constexpr int64_t kRows = 256;
  const Problem p = {.dtype = like.dtype,
                     .batch = 1,
                     .seqlen_q = kRows,
                     .seqlen_k = kRows,
                     .heads = std::min<int64_t>(like.heads, 8),
                     .head_dim = std::max(like.head_dim, like.head_dim_v),
                     .threads = like.threads};
  Plan plan;
  if (Plan::try_make(p, plan) != Status::kOk) return 0;
  const auto count = static_cast<size_t>(kRows * p.heads * p.head_dim);
  const Buffer q(count * Bytes(p.dtype)), out(q.size());
  FillNormal(p.dtype, q.span(), 1);
  const auto launch = [&] {
    plan.forward({.q = q.data(), .k = q.data(), .v = q.data(), .out = out.data()});
  };
  return ForwardFlop(static_cast<double>(kRows) * kRows, p.heads, p.head_dim, p.head_dim) /
         Measure(launch, 0.02).median;
}

}  // namespace

LaunchProgress::LaunchProgress(std::string label, const Problem& like, double flop)
    : label_(std::move(label)) {
  if (flop < kMuch || like.device != Device::kCpu || !IsTerminal(stderr)) return;
  if (const double speed = SpeedOf(like); speed > 0) Left(flop / speed);
}

void LaunchProgress::Left(double seconds) {
  left_ = seconds;
  watch_ = Stopwatch();
  Show();
}

int32_t LaunchProgress::Interrupt(void* progress) {
  static_cast<const LaunchProgress*>(progress)->Show();
  return 0;
}

void LaunchProgress::Show() const { Progress(label_, std::max(0.0, left_ - watch_.Seconds())); }

}  // namespace strobe::cli
