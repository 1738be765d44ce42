// `make demo`: is Strobe's attention exact, and what does it cost? On Q, K, V and a gradient that a
// real transformer had in memory while it read a real text (examples/data/README.md).
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>
#include <strobe/strobe.hpp>
#include <vector>

#include "cli/buffer.h"
#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/measure.h"
#include "cli/random.h"
#include "cli/safetensors_file.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "standard_attention.h"

namespace strobe::demo {
namespace {

using namespace strobe::cli;

constexpr const char* kDataFile = "data/minilm_layer3_512.safetensors";
constexpr double kMemoryLimit = 4e9;  // bytes that standard attention may take
constexpr int64_t kLongest = 16384;   // tokens of the tables
// Seconds since the start by which each half of each table has to be done. What would take longer
// is left out, so that the demo ends in time on any machine; Strobe's half is the one to see.
struct Deadlines {
  double standard, strobe;
};
constexpr Deadlines kForwardDeadlines = {18, 28};
constexpr Deadlines kBothDeadlines = {32, 34};

// The captured tensors, float32 [tokens, heads, dim].
struct Capture {
  std::string path;
  int64_t tokens = 0, heads = 0, dim = 0;
  std::vector<float> q, k, v, dout;
  std::map<std::string, std::string> metadata;

  [[nodiscard]] std::string Note(const char* key) const {
    const auto found = metadata.find(key);
    return found == metadata.end() ? "?" : Printable(found->second, 100);
  }
};

// A small file may ask for a large demo: standard attention takes tokens * tokens, and the tables
// repeat the tensors to kLongest tokens.
void CheckRoom(const std::string& path, int64_t tokens, int64_t heads, int64_t dim) {
  constexpr int64_t kMostDim = 256;  // the library's
  if (dim > kMostDim) {
    throw UserError(
        fmt::format("{}: q has head_dim {}, expected at most {}", PathText(path), dim, kMostDim));
  }
  const double exact = StandardAttention<double>::ExtraBytes(tokens, heads, true);
  const double tensors = 8.0 * sizeof(float) * static_cast<double>(heads) *
                         static_cast<double>(dim) * static_cast<double>(kLongest);
  if (std::max(exact, tensors) > kMemoryLimit) {
    throw UserError(fmt::format(
        "{}: q has {} tokens and {} heads of {}, expected what takes 4 GB at most: its attention "
        "in "
        "float64 takes {}, its tensors of {} tokens take {}",
        PathText(path), tokens, heads, dim, BytesText(exact), kLongest, BytesText(tensors)));
  }
}

Capture ReadCapture(const std::string& path) {
  SafetensorsFile file(path);
  Capture c;
  c.path = path;
  c.metadata = file.header().metadata;
  const std::pair<const char*, std::vector<float>*> tensors[] = {
      {"q", &c.q}, {"k", &c.k}, {"v", &c.v}, {"dout", &c.dout}};
  for (const auto& [name, values] : tensors) {
    const TensorInfo* info = file.header().Find(name);
    if (info == nullptr)
      throw UserError(fmt::format("{} has no {}, expected q, k, v and dout", PathText(path), name));
    const TensorInfo& q = *file.header().Find("q");
    if (info->dtype != "F32" || info->shape.size() != 4 || info->shape[0] != 1 ||
        info->shape != q.shape || info->shape[1] % 32 != 0 || info->shape[1] == 0 ||
        info->shape[3] % 32 != 0 || info->bytes() == 0) {
      throw UserError(fmt::format(
          "{}: {} is {} {}, expected F32 [1, tokens, heads, head_dim], tokens and head_dim "
          "multiples of 32, all alike",
          PathText(path), name, info->dtype, ShapeText(info->shape)));
    }
    CheckRoom(path, info->shape[1], info->shape[2], info->shape[3]);
    const std::span<const std::byte> data = file.Read(*info);
    values->resize(data.size() / sizeof(float));
    std::memcpy(values->data(), data.data(), data.size());
    c.tokens = info->shape[1];
    c.heads = info->shape[2];
    c.dim = info->shape[3];
  }
  return c;
}

// Strobe over float tensors: converts them to the dtype and back.
struct StrobeRun {
  Problem problem;
  std::vector<float> out, dq, dk, dv;
};

StrobeRun RunStrobe(const Capture& c, DType dtype) {
  const size_t count = c.q.size();
  const auto convert = [&](const std::vector<float>& values) {
    Buffer buffer(count * Bytes(dtype));
    for (size_t i = 0; i < count; ++i) Store(dtype, buffer.data(), i, values[i]);
    return buffer;
  };
  const auto back = [&](const Buffer& buffer) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = Load(dtype, buffer.data(), i);
    return values;
  };
  const Buffer q = convert(c.q), k = convert(c.k), v = convert(c.v), dout = convert(c.dout);
  const Buffer out(count * Bytes(dtype)), dq(out.size()), dk(out.size()), dv(out.size());
  std::vector<float> lse(static_cast<size_t>(c.tokens * c.heads));

  StrobeRun run;
  run.problem = {.dtype = dtype,
                 .seqlen_q = c.tokens,
                 .seqlen_k = c.tokens,
                 .heads = c.heads,
                 .head_dim = c.dim};
  const Plan forward(run.problem);
  forward.forward(
      {.q = q.data(), .k = k.data(), .v = v.data(), .out = out.data(), .lse = lse.data()});
  Problem backward_problem = run.problem;
  backward_problem.direction = Direction::kBackward;
  const Plan backward(backward_problem);
  backward.backward({.q = q.data(),
                     .k = k.data(),
                     .v = v.data(),
                     .out = out.data(),
                     .lse = lse.data(),
                     .dout = dout.data(),
                     .dq = dq.data(),
                     .dk = dk.data(),
                     .dv = dv.data()});
  run.out = back(out);
  run.dq = back(dq);
  run.dk = back(dk);
  run.dv = back(dv);
  return run;
}

// O, dQ, dK, dV of standard attention in T.
template <typename T>
std::array<std::vector<T>, 4> RunStandard(const Capture& c, std::string_view isa, T (*round)(T)) {
  const auto convert = [&](const std::vector<float>& values) {
    return std::vector<T>(values.begin(), values.end());
  };
  const std::vector<T> q = convert(c.q), k = convert(c.k), v = convert(c.v), dout = convert(c.dout);
  std::array<std::vector<T>, 4> results;
  for (auto& result : results) result.resize(q.size());
  StandardAttention<T> standard(c.tokens, c.heads, c.dim, true, isa, round);
  standard.Forward(q.data(), k.data(), v.data(), results[0].data());
  standard.Backward(q.data(), k.data(), v.data(), dout.data(), results[1].data(), results[2].data(),
                    results[3].data());
  return results;
}

// Root mean square of got - truth, in parts of truth's own.
double Error(const std::vector<float>& got, const std::vector<double>& truth) {
  double error = 0;
  double whole = 0;
  for (size_t i = 0; i < truth.size(); ++i) {
    error += (got[i] - truth[i]) * (got[i] - truth[i]);
    whole += truth[i] * truth[i];
  }
  return std::sqrt(error / whole);
}

void Heading(std::string_view text) { Print("\n{}\n\n", Bold(text)); }

// False when something is wrong.
bool ShowErrors(const Capture& capture, std::string_view isa) {
  Heading("1. Is it exact? Relative error against float64 (root mean square)");
  Print("  {:<6}{:^19}   {:^19}   {:^19}   {}\n", "", "O", "dQ", "dK", "        dV");
  Print("  {:<6}", "dtype");
  for (int i = 0; i < 4; ++i) Print("{:>9} {:>9}{}", "Strobe", "plain", i < 3 ? "   " : "\n");
  std::vector<double> worst;  // of each dtype: Strobe's error over plain's
  std::vector<std::string> shares;
  for (const DType dtype : kDTypes) {
    Progress(fmt::format("  {}    float64 ...", ShortName(dtype)));
    Capture rounded = capture;
    for (std::vector<float>* values : {&rounded.q, &rounded.k, &rounded.v, &rounded.dout}) {
      for (float& x : *values) x = Rounded(dtype, x);
    }
    float (*round)(float) = nullptr;
    if (dtype == DType::kBFloat16) round = [](float x) { return Rounded(DType::kBFloat16, x); };
    if (dtype == DType::kFloat16) round = [](float x) { return Rounded(DType::kFloat16, x); };
    const auto truth = RunStandard<double>(rounded, isa, nullptr);
    const auto plain = RunStandard<float>(rounded, isa, round);
    const StrobeRun strobe_run = RunStrobe(rounded, dtype);
    ClearProgress();
    Print("  {:<6}", ShortName(dtype));
    double ratio = 0;
    const std::vector<float>* results[] = {&strobe_run.out, &strobe_run.dq, &strobe_run.dk,
                                           &strobe_run.dv};
    for (size_t i = 0; i < 4; ++i) {
      const double ours = Error(*results[i], truth[i]);
      const double theirs = Error(plain[i], truth[i]);
      // NaN counts as infinity.
      ratio = std::max(
          ratio, ours / theirs <= 1e9 ? ours / theirs : std::numeric_limits<double>::infinity());
      Print("{} {:>9.1e}{}", Green(fmt::format("{:>9.1e}", ours)), theirs, i < 3 ? "   " : "\n");
    }
    Flush();
    worst.push_back(ratio);
    shares.push_back(fmt::format("{} {:.1f}", ShortName(dtype), ratio));
  }
  Print(
      "\n  Plain: S = QK', P = softmax(S), O = PV, one after the other as a framework does it, "
      "with S\n");
  Print("  and P stored in the dtype. ");
  // The rule of the tests, for gradients: three times.
  const bool right = *std::max_element(worst.begin(), worst.end()) <= 3;
  if (right) {
    Print("Strobe's error in parts of plain's, at most: {}.\n", fmt::join(shares, ", "));
    Print("  Both only round; neither approximates.\n");
  } else {
    Print("\n  {}: too large an error. `strobe check` may tell more.\n", Red("Wrong"));
  }
  return right;
}

// Bytes that a new allocation can have without pushing something out of memory.
double AvailableMemory() {
  double available = std::numeric_limits<double>::infinity();
  std::ifstream meminfo("/proc/meminfo");
  std::string key;
  double value = 0;
  for (std::string unit; meminfo >> key >> value && std::getline(meminfo, unit);) {
    if (key == "MemAvailable:") available = value * 1024;
  }
  double limit = 0;
  double used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&
      std::ifstream("/sys/fs/cgroup/memory.current") >> used) {
    available = std::min(available, limit - used);
  }
  return available;
}

// The captured tensor repeated to `tokens`, each repeat with noise of its own, so that no two
// tokens are alike.
std::vector<float> Longer(const std::vector<float>& captured, const Capture& c, int64_t tokens,
                          uint64_t seed) {
  constexpr double kNoise = 0.1;  // of the tensor's own spread
  double squares = 0;
  for (const float x : captured) squares += static_cast<double>(x) * x;
  const double spread = std::sqrt(squares / static_cast<double>(captured.size()));
  Random random(seed);
  std::vector<float> table(4096);
  for (float& x : table) x = static_cast<float>(kNoise * spread * random.Normal());
  std::vector<float> longer(static_cast<size_t>(tokens * c.heads * c.dim));
  for (size_t i = 0; i < longer.size(); ++i) {
    longer[i] = captured[i % captured.size()];
    if (i >= captured.size()) longer[i] += table[random.Bits() % table.size()];
  }
  return longer;
}

// One line of the cost tables.
struct Cost {
  double seconds = 0;  // 0: not measured
  double bytes = 0;
};

// Time and memory for growing lengths, of one direction or both.
class CostTable {
 public:
  CostTable(const Capture& capture, std::string_view isa, bool backward, const Stopwatch& watch)
      : capture_(capture),
        isa_(isa),
        backward_(backward),
        watch_(watch),
        deadlines_(backward ? kBothDeadlines : kForwardDeadlines) {}

  void Run(int64_t longest) {
    Print("  {:>6}  {:^20}  {:^20}  {}\n", "", "  standard", "  Strobe", "  standard / Strobe");
    Print("  {:>6}  {:>9} {:>10}  {:>9} {:>10}  {:>9} {:>10}\n", "tokens", "time", "memory", "time",
          "memory", "time", "memory");
    for (int64_t tokens = 512; tokens <= longest; tokens *= 2) {
      if (!Line(tokens)) break;
    }
    for (const std::string& note : notes_)
      Print("{}  {}\n", &note == notes_.data() ? "\n" : "", note);
  }

 private:
  // Of the work, from one length to the next.
  static constexpr double kGrowth = 4;

  // False when even Strobe would take too long from here on.
  bool Line(int64_t tokens) {
    std::string line = fmt::format("  {:>6}", tokens);
    if (strobe_.seconds > 0 &&
        watch_.Seconds() + 1.2 * kGrowth * strobe_.seconds > deadlines_.strobe) {
      Print("{}  left out: it would take {:.0f} s more on this computer\n", line,
            kGrowth * strobe_.seconds);
      return false;
    }
    Progress(line + "  preparing the tensors ...");
    Make(tokens);

    Progress(line + "  standard attention ...");
    Cost standard;
    standard.bytes = StandardAttention<float>::ExtraBytes(tokens, capture_.heads, backward_);
    const std::string reason = WhyNotStandard(standard.bytes);
    if (reason.empty()) {
      standard.seconds = Standard(tokens);
      standard_ = standard;
    } else {
      notes_.push_back(fmt::format("{} tokens: no standard attention, {}.", tokens, reason));
    }
    line += fmt::format("  {:>9} {:>10}", reason.empty() ? TimeText(standard.seconds) : "stopped",
                        BytesText(standard.bytes));

    Progress(line + "  Strobe ...");
    strobe_ = Strobe(tokens);
    line += fmt::format("  {:>9} {:>10}", TimeText(strobe_.seconds), BytesText(strobe_.bytes));
    line += fmt::format("  {:>9} {:>10}",
                        reason.empty() ? Times(standard.seconds / strobe_.seconds) : "",
                        Times(standard.bytes / strobe_.bytes));
    ClearProgress();
    Print("{}\n", line);
    Flush();
    return true;
  }

  static std::string Times(double factor) {
    return fmt::format("{:.{}f} x", factor, factor < 99.5 ? 1 : 0);
  }

  // "" when standard attention can be measured.
  [[nodiscard]] std::string WhyNotStandard(double bytes) const {
    const double available = AvailableMemory();
    if (bytes > kMemoryLimit) {
      return fmt::format("its matrices would take {}, over the 4 GB that this demo allows it",
                         BytesText(bytes));
    }
    if (bytes > 0.7 * available) {
      return fmt::format("it would take {}, and this computer has {} free", BytesText(bytes),
                         BytesText(available));
    }
    if (standard_.seconds > 0 &&
        watch_.Seconds() + 1.5 * kGrowth * standard_.seconds > deadlines_.standard) {
      return fmt::format("it would take {:.0f} s more on this computer",
                         kGrowth * standard_.seconds);
    }
    return "";
  }

  void Make(int64_t tokens) {
    q_ = Longer(capture_.q, capture_, tokens, 1);
    k_ = Longer(capture_.k, capture_, tokens, 2);
    v_ = Longer(capture_.v, capture_, tokens, 3);
    out_.assign(q_.size(), 0);
    if (!backward_) return;
    dout_ = Longer(capture_.dout, capture_, tokens, 4);
    for (std::vector<float>* t : {&dq_, &dk_, &dv_}) t->assign(q_.size(), 0);
  }

  double Standard(int64_t tokens) {
    StandardAttention<float> attention(tokens, capture_.heads, capture_.dim, backward_, isa_);
    const auto work = [&] {
      attention.Forward(q_.data(), k_.data(), v_.data(), out_.data());
      if (backward_) {
        attention.Backward(q_.data(), k_.data(), v_.data(), dout_.data(), dq_.data(), dk_.data(),
                           dv_.data());
      }
    };
    return Seconds(work);
  }

  Cost Strobe(int64_t tokens) {
    Problem problem = {
        .seqlen_q = tokens, .seqlen_k = tokens, .heads = capture_.heads, .head_dim = capture_.dim};
    const Plan forward(problem);
    problem.direction = Direction::kBackward;
    const Plan backward(problem);
    const size_t bytes = backward_ ? std::max(forward.workspace_bytes(), backward.workspace_bytes())
                                   : forward.workspace_bytes();
    const Buffer workspace(bytes);
    std::vector<float> lse(backward_ ? static_cast<size_t>(tokens * capture_.heads) : 0);
    const ForwardArgs forward_args = {.q = q_.data(),
                                      .k = k_.data(),
                                      .v = v_.data(),
                                      .out = out_.data(),
                                      .lse = backward_ ? lse.data() : nullptr,
                                      .workspace = workspace.span()};
    const BackwardArgs backward_args = {.q = q_.data(),
                                        .k = k_.data(),
                                        .v = v_.data(),
                                        .out = out_.data(),
                                        .lse = lse.data(),
                                        .dout = dout_.data(),
                                        .dq = dq_.data(),
                                        .dk = dk_.data(),
                                        .dv = dv_.data(),
                                        .workspace = workspace.span()};
    const double seconds = Seconds([&] {
      forward.forward(forward_args);
      if (backward_) backward.backward(backward_args);
    });
    return {.seconds = seconds, .bytes = static_cast<double>(bytes + lse.size() * sizeof(float))};
  }

  // Once when that takes long; else the best of a few.
  template <typename Work>
  static double Seconds(Work work) {
    const Stopwatch watch;
    work();
    const double first = watch.Seconds();
    return first > 0.25 ? first : Measure(work, 0.3).best;
  }

  const Capture& capture_;
  std::string_view isa_;
  bool backward_;
  const Stopwatch& watch_;
  Deadlines deadlines_;
  std::vector<float> q_, k_, v_, out_, dout_, dq_, dk_, dv_;
  Cost standard_, strobe_;  // of the length before
  std::vector<std::string> notes_;
};

void ShowNext() {
  Heading("What to type next");
  const auto line = [](const char* what, const char* command) {
    Print("  {:<32}  {}\n", what, Bold(command));
  };
  line("every test that needs no GPU", "make test");
  line("this computer, instruction sets", "build/release/bin/strobe info");
  line("is this installation right?", "build/release/bin/strobe check");
  line("speed over a grid of shapes", "build/release/bin/strobe bench");
  line("your own tensors",
       "build/release/bin/strobe run FILE.safetensors -o OUT.safetensors --causal");
  line("from C++", "examples/consumer/quickstart.cpp");
}

int Demo(const std::string& path) {
  const Stopwatch watch;
  const Machine m = machine();
  Print("{}\n\n",
        Bold(fmt::format("Strobe {}: exact attention, forward and backward, in linear memory",
                         version())));
  const Capture capture = ReadCapture(path);
  Print("  read      {}\n", capture.path);
  Print("            {}, {}\n", capture.Note("model"), capture.Note("layer"));
  Print("            Q, K, V and the gradient of O while it read {}\n", capture.Note("text"));
  Print("            {} tokens, {} heads, head_dim {}, float32\n", capture.tokens, capture.heads,
        capture.dim);
  Print("  computer  {}, {} threads\n", m.cpu_name.empty() ? "unknown CPU" : m.cpu_name,
        m.cpu_threads);
  std::vector<std::string> kernels;
  for (const DType dtype : kDTypes) {
    const Plan plan({.dtype = dtype,
                     .seqlen_q = capture.tokens,
                     .seqlen_k = capture.tokens,
                     .heads = capture.heads,
                     .head_dim = capture.dim});
    kernels.push_back(fmt::format("{} by {}", ShortName(dtype), plan.kernel()));
  }
  Print("  kernels   {}\n", fmt::join(kernels, ", "));
  Flush();

  const bool right = ShowErrors(capture, m.cpu_isa);
  Heading("2. What does it cost? Forward, float32: time, and memory beyond the tensors themselves");
  Print(
      "  Inputs: the captured tensors, repeated to length, with 10 % of noise. Standard: the "
      "three\n");
  Print("  steps, in blocked and vectorised loops on the same {} threads.\n\n", m.cpu_threads);
  CostTable(capture, m.cpu_isa, false, watch).Run(kLongest);
  Heading("3. Forward and backward");
  CostTable(capture, m.cpu_isa, true, watch).Run(kLongest / 2);
  ShowNext();
  Flush();
  return right ? 0 : 1;
}

}  // namespace
}  // namespace strobe::demo

int main(int argc, char** argv) {
  try {
    const std::string beside = std::string(STROBE_EXAMPLES) + "/" + strobe::demo::kDataFile;
    const std::string here = std::filesystem::proximate(beside).string();
    return strobe::demo::Demo(argc > 1 ? argv[1] : here.size() < beside.size() ? here : beside);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "demo: out of memory\n");
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "demo: %s\n", error.what());
    return 2;
  }
}
