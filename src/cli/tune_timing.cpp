#include "cli/tune_timing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "cli/bench_fill.h"
#include "cli/random.h"
#include "cli/terminal.h"
#include "core/element.h"
#include "core/extents.h"

namespace strobe::cli {
namespace {

constexpr double kMostBytes = 4e9;
// So much of caches is read before the first one comes again: more than most machines hold.
constexpr double kTurnBytes = 256e6;
constexpr double kMostCopies = 32;
constexpr double kLeastRun = 1e-3;  // seconds
constexpr double kMostRepeats = 500;

double CacheElements(const strobe_problem& p) {
  return static_cast<double>(kv_entries(p)) * static_cast<double>(kv_rows(p)) *
         static_cast<double>(p.heads_kv) * static_cast<double>(p.head_dim + p.head_dim_v);
}

// q, k, v and out; backward their gradients too.
double TensorBytes(const strobe_problem& p) {
  const double rows = static_cast<double>(rows_q(p)) * static_cast<double>(p.heads) *
                          static_cast<double>(p.head_dim + p.head_dim_v) +
                      CacheElements(p);
  return rows * static_cast<double>(element_size(p.dtype)) *
         (p.direction == STROBE_FORWARD ? 1 : 2);
}

void ThrowUnlessOk(strobe_status status) { internal::throw_unless_ok(static_cast<Status>(status)); }

// Packed sequences: [batch + 1] offsets of sequences that are alike.
std::vector<int32_t> Offsets(int64_t batch, int64_t total) {
  std::vector<int32_t> offsets;
  for (int64_t b = 0; b <= batch; ++b)
    offsets.push_back(static_cast<int32_t>(total / batch * b + total % batch * b / batch));
  return offsets;
}

}  // namespace

std::string ChoiceText(const strobe_choice& choice) {
  if (choice.instance != nullptr) return choice.instance;
  if (choice.block == 0) return choice.kernel;
  return fmt::format("{}, blocks of {}", choice.kernel, choice.block);
}

bool TimedProblem::Fits(const strobe_problem& problem) {
  return TensorBytes(problem) <= kMostBytes;
}

template <typename T>
T* TimedProblem::Take(const std::vector<T>& values) {
  memory_.emplace_back(std::max<size_t>(values.size(), 1) * sizeof(T));
  std::memcpy(memory_.back().data(), values.data(), values.size() * sizeof(T));
  return mirror_.Out(reinterpret_cast<T*>(memory_.back().data()), values.size());
}

std::byte* TimedProblem::TakeTensor(double elements, bool filled, int64_t copies) {
  const auto bytes =
      static_cast<size_t>(elements) * static_cast<size_t>(element_size(problem_.dtype));
  memory_.emplace_back(bytes * static_cast<size_t>(copies));
  std::byte* const first = memory_.back().data();
  if (filled) FillNormal(static_cast<DType>(problem_.dtype), {first, bytes}, seed_++);
  for (size_t n = 1; n < static_cast<size_t>(copies); ++n)
    std::memcpy(first + n * bytes, first, bytes);
  return mirror_.Out(memory_.back().data(), memory_.back().size());
}

TimedProblem::TimedProblem(const strobe_problem& problem)
    : problem_(problem), mirror_(static_cast<Device>(problem.device), problem.device_index) {
  const strobe_problem& p = problem_;
  const double of_q = static_cast<double>(rows_q(p)) * static_cast<double>(p.heads);
  const double of_k = CacheElements(p) / static_cast<double>(p.head_dim + p.head_dim_v);
  const auto size = static_cast<double>(element_size(p.dtype));
  if (p.cache) {
    const double turns = std::ceil(kTurnBytes / (CacheElements(p) * size));
    copies_ = static_cast<int64_t>(std::clamp(turns, 1.0, kMostCopies));
  }
  forward_.struct_size = sizeof forward_;
  forward_.q = TakeTensor(of_q * static_cast<double>(p.head_dim), true);
  // One after the other: K of all copies, and V of all.
  forward_.k = TakeTensor(of_k * static_cast<double>(p.head_dim), true, copies_);
  forward_.v = TakeTensor(of_k * static_cast<double>(p.head_dim_v), true, copies_);
  forward_.out = TakeTensor(of_q * static_cast<double>(p.head_dim_v), false);
  forward_.lse = Take(std::vector<float>(static_cast<size_t>(of_q)));
  SetNumbers();
  if (p.direction == STROBE_BACKWARD) MakeForwardResults();
}

void TimedProblem::SetNumbers() {
  const strobe_problem& p = problem_;
  if (p.varlen) {
    forward_.cu_seqlens_q = Take(Offsets(p.batch, p.total_q));
    if (!p.cache) forward_.cu_seqlens_k = Take(Offsets(p.batch, p.total_k));
  }
  if (p.has_seqused_k) {
    forward_.seqused_k =
        Take(std::vector<int32_t>(static_cast<size_t>(p.batch), static_cast<int32_t>(p.seqlen_k)));
  }
  if (p.cache == STROBE_CACHE_PAGED) {
    // Pages in a random order, as a pool has them after a while.
    Random random(1);
    std::vector<int32_t> pages;
    for (int64_t i = 0; i < p.pages; ++i) {
      pages.push_back(static_cast<int32_t>(i));
      std::swap(pages.back(), pages[static_cast<size_t>(random.Integer(0, i))]);
    }
    std::vector<int32_t> table;
    for (int64_t i = 0; i < p.batch * p.block_table_stride; ++i)
      table.push_back(pages[static_cast<size_t>(i % p.pages)]);
    forward_.block_table = Take(table);
  }
  const auto heads = static_cast<size_t>(p.heads);
  if (p.alibi) {
    const size_t sequences =
        p.alibi == STROBE_ALIBI_PER_BATCH_HEAD ? static_cast<size_t>(p.batch) : 1;
    forward_.alibi_slopes = Take(std::vector<float>(heads * sequences, 0.01F));
  }
  if (p.has_sinks) forward_.sinks = Take(std::vector<float>(heads, 0.5F));
  forward_.dropout_seed = 1;
}

void TimedProblem::MakeForwardResults() {
  strobe_problem p = problem_;
  p.direction = STROBE_FORWARD;
  p.has_dlse = p.has_dsinks = 0;
  p.dout = p.dq = p.dk = p.dv = {};
  p.grad_dtype = STROBE_SAME_DTYPE;
  Prepared forward{};
  forward.plan.struct_size = sizeof forward.plan;
  ThrowUnlessOk(strobe_plan_make(&p, &forward.plan));
  ThrowUnlessOk(strobe_forward(&forward.plan, &forward_));
  mirror_.Wait();

  const double of_q = static_cast<double>(rows_q(p)) * static_cast<double>(p.heads);
  const double of_k = static_cast<double>(rows_k(p)) * static_cast<double>(p.heads_kv);
  backward_.struct_size = sizeof backward_;
  backward_.q = forward_.q;
  backward_.k = forward_.k;
  backward_.v = forward_.v;
  backward_.out = forward_.out;
  backward_.lse = forward_.lse;
  backward_.dout = TakeTensor(of_q * static_cast<double>(p.head_dim_v), true);
  backward_.dq = TakeTensor(of_q * static_cast<double>(p.head_dim), false);
  backward_.dk = TakeTensor(of_k * static_cast<double>(p.head_dim), false);
  backward_.dv = TakeTensor(of_k * static_cast<double>(p.head_dim_v), false);
  backward_.cu_seqlens_q = forward_.cu_seqlens_q;
  backward_.cu_seqlens_k = forward_.cu_seqlens_k;
  backward_.alibi_slopes = forward_.alibi_slopes;
  backward_.sinks = forward_.sinks;
  backward_.dropout_seed = forward_.dropout_seed;
  if (problem_.has_dlse) backward_.dlse = Take(std::vector<float>(static_cast<size_t>(of_q), 0.1F));
  if (problem_.has_dsinks)
    backward_.dsinks = Take(std::vector<float>(static_cast<size_t>(p.heads)));
}

size_t TimedProblem::Add(const strobe_plan& plan) {
  memory_.emplace_back(plan.workspace_bytes);
  prepared_.push_back({plan, mirror_.Out(memory_.back().span()).data(), 0});
  return prepared_.size() - 1;
}

void TimedProblem::Launch(const Prepared& prepared) {
  if (problem_.direction == STROBE_BACKWARD) {
    strobe_backward_args args = backward_;
    args.workspace = prepared.workspace;
    args.workspace_bytes = prepared.plan.workspace_bytes;
    return ThrowUnlessOk(strobe_backward(&prepared.plan, &args));
  }
  strobe_forward_args args = forward_;
  args.workspace = prepared.workspace;
  args.workspace_bytes = prepared.plan.workspace_bytes;
  const double rows = CacheElements(problem_) /
                      static_cast<double>(problem_.head_dim + problem_.head_dim_v) *
                      static_cast<double>(element_size(problem_.dtype));
  const auto copy = static_cast<double>(next_++ % copies_);
  const auto place = [&](const void* of, int64_t dim) {
    return static_cast<std::byte*>(const_cast<void*>(of)) +
           static_cast<size_t>(copy * rows * static_cast<double>(dim));
  };
  args.k = place(args.k, problem_.head_dim);
  args.v = place(args.v, problem_.head_dim_v);
  ThrowUnlessOk(strobe_forward(&prepared.plan, &args));
}

double TimedProblem::Run(size_t number) {
  Prepared& prepared = prepared_[number];
  const auto seconds_of = [&](int64_t launches) {
    const Stopwatch watch;
    for (int64_t i = 0; i < launches; ++i) Launch(prepared);
    mirror_.Wait();
    return watch.Seconds() / static_cast<double>(launches);
  };
  if (prepared.repeats == 0) {
    (void)seconds_of(1);  // loads its code, touches its memory
    const double wanted = std::ceil(kLeastRun / std::max(seconds_of(1), 1e-9));
    prepared.repeats = static_cast<int64_t>(std::clamp(wanted, 1.0, kMostRepeats));
  }
  return seconds_of(prepared.repeats);
}

}  // namespace strobe::cli
