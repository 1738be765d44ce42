// `strobe bench`: median times of forward and backward over a grid of shapes.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/bench_fill.h"
#include "cli/bench_grid.h"
#include "cli/buffer.h"
#include "cli/busy.h"
#include "cli/commands.h"
#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/machine_json.h"
#include "cli/measure.h"
#include "cli/mirror.h"
#include "cli/terminal.h"

namespace strobe::cli {
namespace {

// The tensors of one shape, for both directions.
class BenchTensors {
 public:
  explicit BenchTensors(const Problem& problem) : problem_(problem) {
    // In double: the product may be beyond 64 bits, and no machine has that much.
    const int64_t longest = std::max(problem.seqlen_q, problem.seqlen_k);
    if (static_cast<double>(problem.batch) * static_cast<double>(longest) *
            static_cast<double>(problem.heads * problem.head_dim) >
        0x1p48) {
      throw std::bad_alloc();
    }
    const auto count_q =
        static_cast<size_t>(problem.batch * problem.seqlen_q * problem.heads * problem.head_dim);
    const auto count_k =
        static_cast<size_t>(problem.batch * problem.seqlen_k * problem.heads_kv * problem.head_dim);
    const size_t bytes = Bytes(problem.dtype);
    for (Buffer* b : {&q_, &out_, &dout_, &dq_}) *b = Buffer(count_q * bytes);
    for (Buffer* b : {&k_, &v_, &dk_, &dv_}) *b = Buffer(count_k * bytes);
    lse_ = Buffer(static_cast<size_t>(problem.batch * problem.heads * problem.seqlen_q) *
                  sizeof(float));
    uint64_t seed = 1;
    for (const Buffer* b : {&q_, &k_, &v_, &dout_}) FillNormal(problem.dtype, b->span(), seed++);
  }

  [[nodiscard]] Plan MakePlan(Direction direction) const {
    Problem p = problem_;
    p.direction = direction;
    return Plan(p);
  }

  [[nodiscard]] Timing Forward(const Plan& plan, double seconds) {
    Mirror mirror(problem_.device, problem_.device_index);
    const Buffer workspace(plan.workspace_bytes());
    const ForwardArgs args = ForwardArguments(&mirror, workspace);
    return Measure(
        [&] {
          plan.forward(args);
          mirror.Wait();
        },
        seconds);
  }

  [[nodiscard]] Timing Backward(const Plan& plan, double seconds) {
    Mirror mirror(problem_.device, problem_.device_index);
    const Plan forward = MakePlan(Direction::kForward);  // backward wants a true out and lse
    const Buffer forward_workspace(forward.workspace_bytes());
    const ForwardArgs before = ForwardArguments(&mirror, forward_workspace);
    forward.forward(before);
    const Buffer workspace(plan.workspace_bytes());
    const BackwardArgs args = {.q = before.q,
                               .k = before.k,
                               .v = before.v,
                               .out = before.out,
                               .lse = before.lse,
                               .dout = mirror.In(dout_.data(), dout_.size()),
                               .dq = mirror.Out(dq_.data(), dq_.size()),
                               .dk = mirror.Out(dk_.data(), dk_.size()),
                               .dv = mirror.Out(dv_.data(), dv_.size()),
                               .workspace = mirror.Out(workspace.span())};
    return Measure(
        [&] {
          plan.backward(args);
          mirror.Wait();
        },
        seconds);
  }

 private:
  ForwardArgs ForwardArguments(Mirror* mirror, const Buffer& workspace) const {
    return {.q = mirror->In(q_.data(), q_.size()),
            .k = mirror->In(k_.data(), k_.size()),
            .v = mirror->In(v_.data(), v_.size()),
            .out = mirror->Out(out_.data(), out_.size()),
            .lse = mirror->Out(lse_.floats(), lse_.size() / sizeof(float)),
            .workspace = mirror->Out(workspace.span())};
  }

  Problem problem_;
  Buffer q_, k_, v_, dout_, out_, lse_, dq_, dk_, dv_;
};

struct Measured {
  Problem problem;
  Direction direction;
  std::string kernel;
  int threads = 0;
  size_t workspace_bytes = 0;
  Timing timing;
  double flop = 0;
  double bytes = 0;
  std::string busy;  // why the timing says little
};

// Of q, k, v and out; for the backward pass their gradients too.
double TensorBytes(const Problem& p, Direction direction) {
  const double rows = static_cast<double>(p.heads * p.seqlen_q + p.heads_kv * p.seqlen_k);
  const double tensors = direction == Direction::kForward ? 2 : 4;
  return tensors * rows * static_cast<double>(p.batch * p.head_dim) *
         static_cast<double>(Bytes(p.dtype));
}

nlohmann::ordered_json ToJson(const Measured& m) {
  const Problem& p = m.problem;
  return {{"dtype", Name(p.dtype)},
          {"head_dim", p.head_dim},
          {"causal", p.causal},
          {"seqlen", p.seqlen_q},
          {"seqlen_k", p.seqlen_k},
          {"batch", p.batch},
          {"heads", p.heads},
          {"heads_kv", p.heads_kv},
          {"direction", m.direction == Direction::kForward ? "forward" : "backward"},
          {"kernel", m.kernel},
          {"threads", m.threads},
          {"workspace_bytes", m.workspace_bytes},
          {"runs", m.timing.runs},
          {"median_seconds", m.timing.median},
          {"best_seconds", m.timing.best},
          {"flop", m.flop},
          {"gflops", m.flop / m.timing.median / 1e9},
          {"bytes", m.bytes},
          {"gbytes_per_second", m.bytes / m.timing.median / 1e9},
          {"busy", m.busy}};
}

double FlopOf(const Problem& p) {
  return ForwardFlop(VisiblePairs(SequencesOf(p, ForwardArgs{})), p.heads, p.head_dim, p.head_dim);
}

BenchOptions WithDefaults(BenchOptions o) {
  if (o.dtypes.empty()) o.dtypes = {DType::kFloat32, DType::kBFloat16};
  if (o.head_dims.empty()) o.head_dims = {64, 128};
  if (o.seqlens.empty()) o.seqlens = {512, 1024, 2048, 4096};
  if (o.causal.empty()) o.causal = {false, true};
  if (o.heads == 0) o.heads = 8;
  o.direction = o.direction.value_or(Which::kBoth);
  return o;
}

}  // namespace

std::vector<Problem> Grid(const BenchOptions& o) {
  std::vector<Problem> grid;
  const auto add = [&](DType dtype, int64_t head_dim, bool causal, int64_t seqlen_q,
                       int64_t seqlen_k) {
    Problem p = {.dtype = dtype,
                 .device = o.device,
                 .device_index = static_cast<int32_t>(o.device_index),
                 .batch = std::max<int64_t>(1, 4096 / std::max(seqlen_q, seqlen_k)),
                 .seqlen_q = seqlen_q,
                 .seqlen_k = seqlen_k,
                 .heads = o.heads,
                 .heads_kv = o.heads_kv > 0 ? o.heads_kv : o.heads,
                 .head_dim = head_dim};
    if (o.batch > 0) p.batch = o.batch;
    copy_options(o.problem, p);
    p.causal = causal;
    p.threads = static_cast<int32_t>(o.threads);
    grid.push_back(p);
  };
  for (const DType dtype : o.dtypes) {
    for (const int64_t head_dim : o.head_dims) {
      for (const bool causal : o.causal) {
        for (const int64_t seqlen : o.seqlens) {
          if (o.seqlens_k.empty()) add(dtype, head_dim, causal, seqlen, seqlen);
          for (const int64_t seqlen_k : o.seqlens_k) add(dtype, head_dim, causal, seqlen, seqlen_k);
        }
      }
    }
  }
  return grid;
}

int Bench(const BenchOptions& given) {
  if (given.heads_kv > 0) {
    const int64_t heads = given.heads > 0 ? given.heads : given.decode ? 32 : 8;
    if (heads % given.heads_kv != 0) {
      throw UserError(fmt::format("--heads = {}, expected a multiple of --heads-kv = {}", heads,
                                  given.heads_kv));
    }
  }
  if (given.ranks > 0) return BenchRanks(given);
  if (given.documents > 0) throw UserError("--documents without --ranks, expected both");
  if (given.decode) return BenchDecode(given);
  if (!given.kv.empty()) throw UserError("--kv without --decode, expected both");
  if (!given.page_sizes.empty()) throw UserError("--page-size without --decode, expected both");
  if (given.layout) throw UserError("--layout without --decode, expected both");
  const BenchOptions options = WithDefaults(given);
  const std::vector<Problem> grid = Grid(options);
  // A problem that no kernel takes ends the command before it has begun.
  for (const Problem& problem : grid) {
    Problem backward = problem;
    backward.direction = Direction::kBackward;
    if (*options.direction != Which::kBackward) (void)Plan(problem);
    if (*options.direction != Which::kForward) (void)Plan(backward);
  }
  const Machine m = machine();
  const bool cuda = options.device == Device::kCuda;
  nlohmann::ordered_json json = {{"machine", MachineJson(m)},
                                 {"results", nlohmann::ordered_json::array()}};
  const int seqlen_width = options.seqlens_k.empty() ? 7 : 13;
  if (!options.json) {
    const std::string where =
        cuda ? m.cuda_devices[static_cast<size_t>(options.device_index)].name
             : fmt::format("{}, {} threads", m.cpu_name,
                           options.threads > 0 ? options.threads : m.cpu_threads);
    Print("Strobe {} on {}, {} heads. Median times; backward does 2.5 times the work.\n", version(),
          where, options.heads);
    Print("{}\n\n",
          Dim("tensors: the bytes of q, k, v and out, backward of their gradients too, by "
              "that time."));
    Print("{:<9} {:>8} {:>6} {:>{}} {:>6}  {:<13} {:>10} {:>13} {:>9}   {:>10} {:>13} {:>9}\n",
          "dtype", "head_dim", "causal", "seqlen", seqlen_width, "batch", "kernel", "forward", "",
          "tensors", "backward", "", "tensors");
  }
  // Of a figure: twice the time that is wanted at least, or two runs at the speed of the last
  // figure.
  double speed = 0;
  const auto expected = [&](size_t first) {
    double seconds = 0;
    for (size_t n = first; n < grid.size() && speed > 0; ++n) {
      const double flop = FlopOf(grid[n]);
      for (const double each : {flop, BackwardFlop(flop)}) {
        const bool wanted = *options.direction == Which::kBoth ||
                            (each == flop) == (*options.direction == Which::kForward);
        if (wanted) seconds += std::max(1.2 * options.min_time, 2 * each / speed);
      }
    }
    return seconds;
  };
  size_t done = 0;
  BusyLines busy_lines("strobe bench");
  for (const Problem& problem : grid) {
    const std::string seqlen = options.seqlens_k.empty()
                                   ? fmt::format("{}", problem.seqlen_q)
                                   : fmt::format("{}/{}", problem.seqlen_q, problem.seqlen_k);
    std::string label =
        fmt::format("{:<9} {:>8} {:>6} {:>{}} {:>6}", Name(problem.dtype), problem.head_dim,
                    problem.causal ? "yes" : "no", seqlen, seqlen_width, problem.batch);
    Progress(label, expected(done));
    BenchTensors bench(problem);
    const OtherPrograms others({getpid()});
    std::vector<Measured> line;
    const double flop = FlopOf(problem);
    std::string kernel;
    std::string row;
    for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
      const bool forward = direction == Direction::kForward;
      if (*options.direction == (forward ? Which::kBackward : Which::kForward)) {
        row += fmt::format(" {:>10} {:>13} {:>9}  ", "-", "", "");
        continue;
      }
      const Plan plan = bench.MakePlan(direction);
      const Measured& measured =
          line.emplace_back(Measured{.problem = problem,
                                     .direction = direction,
                                     .kernel = plan.kernel(),
                                     .threads = plan.threads(),
                                     .workspace_bytes = plan.workspace_bytes(),
                                     .timing = forward ? bench.Forward(plan, options.min_time)
                                                       : bench.Backward(plan, options.min_time),
                                     .flop = forward ? flop : BackwardFlop(flop),
                                     .bytes = TensorBytes(problem, direction),
                                     .busy = ""});
      if (kernel.empty()) {
        kernel = plan.kernel();
        label += fmt::format("  {:<13}", kernel);
      }
      row += fmt::format(" {:>10} {:>13} {:>9}  ", TimeText(measured.timing.median),
                         SpeedText(measured.flop / measured.timing.median),
                         BytesText(measured.bytes / measured.timing.median) + "/s");
      speed = measured.flop / measured.timing.median;
      Progress(label + row, expected(done + 1));
    }
    std::vector<Timing> timings;
    for (const Measured& measured : line) timings.push_back(measured.timing);
    const std::string busy = busy_lines.Judge(others, cuda ? 0 : line.front().threads, timings);
    for (Measured& measured : line) {
      measured.busy = busy;
      json["results"].push_back(ToJson(measured));
    }
    ++done;
    ClearProgress();
    if (options.json) continue;
    while (row.back() == ' ') row.pop_back();
    Print("{}{}{}\n", label, row, busy.empty() ? "" : "  busy");
    Flush();
  }
  if (options.json) Print("{}\n", json.dump(2));
  if (!options.json && !busy_lines.note().empty()) Print("\n{}\n", busy_lines.note());
  return 0;
}

}  // namespace strobe::cli
