// `strobe bench --ranks`: sequences split over GPUs, beside one of them.
#include <fmt/format.h>

#include <algorithm>
#include <barrier>
#include <exception>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <string>
#include <strobe/ring.hpp>
#include <strobe/ulysses.hpp>
#include <thread>
#include <variant>
#include <vector>

#include "cli/bench_fill.h"
#include "cli/bench_grid.h"
#include "cli/buffer.h"
#include "cli/commands.h"
#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/machine_json.h"
#include "cli/measure.h"
#include "cli/terminal.h"

namespace strobe::cli {
namespace {

constexpr double kSeconds = 120;  // that a launch may take before a rank is taken for gone

// A pass by the ring alone, or by all-to-all with or without a ring between groups.
class Pass {
 public:
  explicit Pass(const RingProblem& problem)
      : way_(problem.ulysses == 1 ? Way(std::in_place_type<Ring>, problem)
                                  : Way(std::in_place_type<Ulysses>, problem)) {}

  [[nodiscard]] int64_t rows() const {
    return std::visit([](const auto& way) { return way.rows(); }, way_);
  }
  [[nodiscard]] size_t workspace_bytes() const {
    return std::visit([](const auto& way) { return way.workspace_bytes(); }, way_);
  }
  void Run(const ForwardArgs& args, Communicator& ranks) const {
    std::visit([&](const auto& way) { way.forward(args, ranks); }, way_);
  }
  void Run(const BackwardArgs& args, Communicator& ranks) const {
    std::visit([&](const auto& way) { way.backward(args, ranks); }, way_);
  }

 private:
  using Way = std::variant<Ring, Ulysses>;
  Way way_;
};

// A rank's tensors and its two passes.
class RankTensors {
 public:
  RankTensors(const RingProblem& problem, const Gpu& gpu)
      : gpu_(gpu), stream_(gpu.make_stream()), forward_(problem), backward_(problem.backward()) {
    const Problem& p = problem.layer;
    const auto rows = static_cast<size_t>(p.batch * forward_.rows());
    const size_t size = Bytes(p.dtype);
    const auto heads = static_cast<size_t>(p.heads), heads_kv = static_cast<size_t>(p.heads_kv);
    const auto dim = static_cast<size_t>(p.head_dim);
    for (GpuMemory* each : {&q_, &dout_, &out_, &dq_})
      *each = GpuMemory(gpu, rows * heads * dim * size);
    for (GpuMemory* each : {&k_, &v_, &dk_, &dv_})
      *each = GpuMemory(gpu, rows * heads_kv * dim * size);
    lse_ = GpuMemory(gpu, rows * heads * sizeof(float));
    workspace_ = GpuMemory(gpu, std::max(forward_.workspace_bytes(), backward_.workspace_bytes()));
    uint64_t seed = 1;
    for (const GpuMemory* each : {&q_, &k_, &v_, &dout_}) {
      const Buffer values(each->span().size());
      FillNormal(p.dtype, values.span(), seed++);
      gpu.upload(each->data(), values.data(), values.size(), stream_);
      gpu.synchronize(stream_);
    }
  }
  RankTensors(const RankTensors&) = delete;
  RankTensors& operator=(const RankTensors&) = delete;
  ~RankTensors() {
    try {
      gpu_.destroy_stream(stream_);
    } catch (const std::exception&) {  // the GPU is gone
    }
  }

  [[nodiscard]] void* stream() const { return stream_; }
  [[nodiscard]] size_t workspace_bytes() const { return workspace_.span().size(); }

  // Enqueues a pass.
  void Launch(Direction direction, Communicator& ranks) const {
    if (direction == Direction::kForward) {
      forward_.Run(ForwardArgs{.q = q_.data(),
                               .k = k_.data(),
                               .v = v_.data(),
                               .out = out_.data(),
                               .lse = lse_.floats(),
                               .workspace = workspace_.span(),
                               .stream = stream_},
                   ranks);
    } else {
      backward_.Run(BackwardArgs{.q = q_.data(),
                                 .k = k_.data(),
                                 .v = v_.data(),
                                 .out = out_.data(),
                                 .lse = lse_.floats(),
                                 .dout = dout_.data(),
                                 .dq = dq_.data(),
                                 .dk = dk_.data(),
                                 .dv = dv_.data(),
                                 .workspace = workspace_.span(),
                                 .stream = stream_},
                    ranks);
    }
  }

 private:
  Gpu gpu_;
  void* stream_;
  Pass forward_, backward_;
  GpuMemory q_, k_, v_, dout_, out_, dq_, dk_, dv_, lse_, workspace_;
};

// Communicators of the GPUs 0 to ranks - 1.
class GpuRanks {
 public:
  explicit GpuRanks(int64_t ranks) : comms_(static_cast<size_t>(ranks)) {
    std::vector<int> devices(comms_.size());
    for (size_t n = 0; n < devices.size(); ++n) devices[n] = static_cast<int>(n);
    nccl_.init_all(comms_, devices);
    for (void* const comm : comms_) ranks_.push_back(std::make_unique<NcclCommunicator>(comm));
  }
  GpuRanks(const GpuRanks&) = delete;
  GpuRanks& operator=(const GpuRanks&) = delete;
  ~GpuRanks() {
    for (size_t n = 0; n < ranks_.size(); ++n) {
      if (ranks_[n]->aborted()) comms_[n] = nullptr;
    }
    ranks_.clear();
    try {
      for (void* const comm : comms_) {
        if (comm) nccl_.destroy(comm);
      }
    } catch (const std::exception&) {  // the results are there all the same
    }
  }

  [[nodiscard]] size_t size() const { return ranks_.size(); }
  [[nodiscard]] NcclCommunicator& operator[](size_t rank) const { return *ranks_[rank]; }
  // Ends what hangs on the GPUs; they cannot be used any more.
  void Abort() {
    for (const auto& each : ranks_) each->abort();
  }

 private:
  Nccl nccl_;
  std::vector<void*> comms_;
  std::vector<std::unique_ptr<NcclCommunicator>> ranks_;
};

// A thread for each rank, which does a pass when it is told to, at the same time as the others.
class RankThreads {
 public:
  RankThreads(const RingProblem& problem, GpuRanks& ranks)
      : ranks_(ranks),
        begin_(static_cast<std::ptrdiff_t>(ranks.size()) + 1),
        end_(static_cast<std::ptrdiff_t>(ranks.size()) + 1) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      threads_.emplace_back([this, problem, rank] { Work(problem, rank); });
    }
    end_.arrive_and_wait();  // all have their tensors, or one has failed
  }
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;
  ~RankThreads() {
    stop_ = true;
    begin_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }

  // Returns when all ranks are done. Throws what one of them has thrown.
  void Run(Direction direction) {
    Rethrow();
    direction_ = direction;
    begin_.arrive_and_wait();
    end_.arrive_and_wait();
    Rethrow();
  }
  // Throws what went wrong when the tensors were made.
  void Rethrow() {
    if (!error_) return;
    ranks_.Abort();
    std::rethrow_exception(error_);
  }
  [[nodiscard]] size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  void Work(RingProblem problem, size_t rank) {
    std::unique_ptr<RankTensors> tensors;
    Guarded([&] {
      const Gpu& gpu = ranks_[rank].gpu();
      problem.rank = static_cast<int32_t>(rank);
      problem.layer.device_index = gpu.index();
      tensors = std::make_unique<RankTensors>(problem, gpu);
      if (rank == 0) workspace_bytes_ = tensors->workspace_bytes();
      // Kernels are loaded before a GPU can wait for another's messages.
      Rehearsal nobody(problem.ranks, problem.rank);
      for (const Direction direction : {Direction::kForward, Direction::kBackward})
        tensors->Launch(direction, nobody);
      gpu.synchronize(tensors->stream());
    });
    end_.arrive_and_wait();
    for (;;) {
      begin_.arrive_and_wait();
      if (stop_) return;
      Guarded([&] {
        tensors->Launch(direction_, ranks_[rank]);
        ranks_[rank].wait(tensors->stream(), kSeconds);
      });
      end_.arrive_and_wait();
    }
  }
  template <typename Part>
  void Guarded(const Part& part) {
    try {
      part();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  GpuRanks& ranks_;
  std::barrier<> begin_, end_;
  std::vector<std::thread> threads_;
  Direction direction_ = Direction::kForward;
  bool stop_ = false;
  size_t workspace_bytes_ = 0;
  std::mutex mutex_;
  std::exception_ptr error_;
};

// Documents of unlike lengths, the same at every run, that have so many tokens together.
std::vector<int64_t> DocumentsOf(int64_t tokens, int64_t count) {
  std::mt19937 random(1);
  std::vector<int64_t> ends = {0, tokens};
  while (static_cast<int64_t>(ends.size()) <= count)
    ends.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(tokens + 1)));
  std::sort(ends.begin(), ends.end());
  std::adjacent_difference(ends.begin(), ends.end(), ends.begin());
  ends.erase(ends.begin());
  return ends;
}

// FLOP of a forward pass of the whole.
double WorkOf(const RingProblem& problem) {
  Problem p = problem.layer;
  std::vector<int32_t> begins = {0};
  ForwardArgs args;
  if (!problem.lengths.empty()) {
    p.varlen = true;
    p.batch = static_cast<int64_t>(problem.lengths.size());
    for (const int64_t length : problem.lengths) {
      begins.push_back(begins.back() + static_cast<int32_t>(length));
      p.seqlen_q = p.seqlen_k = std::max(p.seqlen_q, length);
    }
    p.total_q = p.total_k = begins.back();
    args.cu_seqlens_q = args.cu_seqlens_k = begins.data();
  }
  return ForwardFlop(VisiblePairs(SequencesOf(p, args)), p.heads, p.head_dim, p.head_dim);
}

// How many ranks may share out the heads: 1 is a ring alone.
std::vector<int32_t> WaysOf(const RingProblem& problem) {
  const Problem& p = problem.layer;
  const int64_t heads_kv = p.heads_kv == 0 ? p.heads : p.heads_kv;
  std::vector<int32_t> ways;
  for (int32_t n = 1; n <= problem.ranks; ++n)
    if (problem.ranks % n == 0 && p.heads % n == 0 && heads_kv % n == 0) ways.push_back(n);
  return ways;
}

std::string WayText(int32_t inside, int64_t ranks) {
  if (inside == 1) return "ring";
  return inside == ranks ? "all-to-all" : fmt::format("groups of {}", inside);
}

void Check(const BenchOptions& o) {
  if (o.decode) throw UserError("--ranks with --decode, expected one of them");
  if (o.documents > 0 && o.batch > 1) {
    throw UserError(
        fmt::format("--batch = {} with --documents, expected 1: documents are packed "
                    "end to end",
                    o.batch));
  }
  if (!o.seqlens_k.empty()) {
    throw UserError("--ranks with --seqlen-k, expected --seqlen alone: queries have as many keys");
  }
  if (o.device != Device::kCuda) {
    throw UserError("--ranks without --device cuda, expected both: a rank is a GPU");
  }
  if (o.device_index != 0) {
    throw UserError(
        fmt::format("--device-index = {} with --ranks, expected 0: ranks are the GPUs "
                    "from 0 on",
                    o.device_index));
  }
  if (Gpu::count() < o.ranks) {
    const std::string why = Gpu::unavailable();
    throw UserError(fmt::format("--ranks = {}, expected at most {}, the GPUs of this machine{}",
                                o.ranks, Gpu::count(), why.empty() ? "" : ": " + why));
  }
}

}  // namespace

int BenchRanks(const BenchOptions& given) {
  Check(given);
  BenchOptions o = given;
  if (o.dtypes.empty()) o.dtypes = {DType::kBFloat16};
  if (o.head_dims.empty()) o.head_dims = {128};
  if (o.seqlens.empty()) o.seqlens = {16384, 65536};
  if (o.causal.empty()) o.causal = {false, true};
  if (o.heads == 0) o.heads = 8;
  o.direction = o.direction.value_or(Which::kBoth);
  std::vector<RingProblem> problems;
  for (const Problem& p : Grid(o)) {
    RingProblem& problem = problems.emplace_back();
    problem.layer = p;
    problem.ranks = static_cast<int32_t>(o.ranks);
    if (o.documents == 0) continue;
    problem.lengths = DocumentsOf(p.seqlen_q, o.documents);
    problem.layer.batch = 1;
    problem.layer.seqlen_q = problem.layer.seqlen_k = 0;
  }
  // Without NCCL, or with a problem that no kernel takes, the command ends before it has begun.
  (void)Nccl();
  for (RingProblem problem : problems) {
    for (const int32_t inside : WaysOf(problem)) {
      problem.ulysses = inside;
      (void)Pass(problem);
      (void)Pass(problem.backward());
    }
  }
  Progress("connecting the GPUs");
  GpuRanks ranks(o.ranks);
  ClearProgress();
  const Machine m = machine();
  nlohmann::ordered_json json = {{"machine", MachineJson(m)},
                                 {"results", nlohmann::ordered_json::array()}};
  if (!o.json) {
    Print("Strobe {} on {} x {}, {} heads{}. Median times of whole sequences.\n\n", version(),
          o.ranks, m.cuda_devices.empty() ? "" : m.cuda_devices.front().name, o.heads,
          o.documents ? fmt::format(", {} packed documents", o.documents) : "");
    Print("{:<9} {:>8} {:>6} {:>8} {:>6}  {:<9} {:<12} {:>12} {:>13} {:>12} {:>13} {:>7}\n",
          "dtype", "head_dim", "causal", "seqlen", "batch", "pass", "by", "1 GPU", "",
          fmt::format("{} GPUs", o.ranks), "", "faster");
    Flush();
  }
  for (const RingProblem& problem : problems) {
    const Problem& p = problem.layer;
    const int64_t tokens =
        o.documents ? std::accumulate(problem.lengths.begin(), problem.lengths.end(), int64_t{0})
                    : p.seqlen_q;
    const std::string label = fmt::format("{:<9} {:>8} {:>6} {:>8} {:>6}", Name(p.dtype),
                                          p.head_dim, p.causal ? "yes" : "no", tokens, p.batch);
    const double flop = WorkOf(problem);
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      const bool forward = direction == Direction::kForward;
      if (*o.direction == (forward ? Which::kBackward : Which::kForward)) continue;
      const double work = forward ? flop : BackwardFlop(flop);
      for (const int32_t inside : WaysOf(problem)) {
        Progress(label);
        // One GPU again for each, so that clocks are alike.
        Timing one, all;
        size_t one_bytes = 0, all_bytes = 0;
        {
          RingProblem alone = problem;
          alone.ranks = alone.ulysses = 1;
          OneRank nobody;
          const Gpu gpu(0);
          const RankTensors tensors(alone, gpu);
          one_bytes = tensors.workspace_bytes();
          const auto run = [&](Direction pass) {
            tensors.Launch(pass, nobody);
            gpu.synchronize(tensors.stream());
          };
          run(Direction::kForward);  // backward wants a true out and lse
          one = Measure([&] { run(direction); }, o.min_time);
        }
        {
          RingProblem shared = problem;
          shared.ulysses = inside;
          RankThreads threads(shared, ranks);
          threads.Rethrow();
          threads.Run(Direction::kForward);
          all_bytes = threads.workspace_bytes();
          all = Measure([&] { threads.Run(direction); }, o.min_time);
        }
        json["results"].push_back({{"dtype", Name(p.dtype)},
                                   {"head_dim", p.head_dim},
                                   {"causal", p.causal},
                                   {"window", {p.window_left, p.window_right}},
                                   {"seqlen", tokens},
                                   {"documents", o.documents},
                                   {"batch", p.batch},
                                   {"heads", p.heads},
                                   {"heads_kv", p.heads_kv},
                                   {"direction", forward ? "forward" : "backward"},
                                   {"ranks", o.ranks},
                                   {"ulysses", inside},
                                   {"chosen", ulysses_ranks(problem) == inside},
                                   {"one_workspace_bytes", one_bytes},
                                   {"workspace_bytes", all_bytes},
                                   {"runs", all.runs},
                                   {"one_median_seconds", one.median},
                                   {"median_seconds", all.median},
                                   {"best_seconds", all.best},
                                   {"flop", work},
                                   {"faster", one.median / all.median}});
        ClearProgress();
        if (o.json) continue;
        Print("{}  {:<9} {:<12} {:>12} {:>13} {:>12} {:>13} {:>7.2f}\n", label,
              forward ? "forward" : "backward", WayText(inside, o.ranks), TimeText(one.median),
              SpeedText(work / one.median), TimeText(all.median), SpeedText(work / all.median),
              one.median / all.median);
        Flush();
      }
    }
  }
  if (o.json) Print("{}\n", json.dump(2));
  return 0;
}

}  // namespace strobe::cli
