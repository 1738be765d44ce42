// `make demo`: is Strobe's attention exact, and what does it cost? On Q, K, V and a gradient that a
// real transformer had in memory while it read a real text (examples/data/README.md). It ends with
// a page (demo_page.h) that shows the same, and what each of the transformer's heads looks at.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
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
#include "cli/busy.h"
#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/flags.h"
#include "cli/measure.h"
#include "cli/random.h"
#include "cli/safetensors_file.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "demo_limits.h"
#include "demo_page.h"
#include "pytorch_peer.h"
#include "standard_attention.h"

namespace strobe::demo {
namespace {

using namespace strobe::cli;

constexpr const char* kDataFile = STROBE_EXAMPLES "/data/minilm_layer3_512.safetensors";
constexpr const char* kPageTemplate = STROBE_EXAMPLES "/demo_page.html";
constexpr const char* kPeerScript = STROBE_EXAMPLES "/demo_pytorch.py";
constexpr double kMemoryLimit = 4e9;  // bytes that standard attention may take
constexpr int64_t kLongest = 16384;   // tokens of the tables
constexpr Deadlines kForwardDeadlines = {12, 24};
constexpr Deadlines kBothDeadlines = {12, 16};

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
  std::string kernel;
  std::vector<float> out, dq, dk, dv;
  std::vector<float> lse;  // [heads, tokens]
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
  run.kernel = forward.kernel();
  run.lse = lse;
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

// The weights that Strobe attended with, of its lse. Rows sum to 1 where lse is right.
double Weight(const Capture& c, const StrobeRun& run, int64_t head, int64_t query, int64_t key) {
  const auto at = [&](int64_t token) {
    return static_cast<size_t>((token * c.heads + head) * c.dim);
  };
  double score = 0;
  for (size_t i = 0; i < static_cast<size_t>(c.dim); ++i) {
    score += static_cast<double>(c.q[at(query) + i]) * c.k[at(key) + i];
  }
  score /= std::sqrt(static_cast<double>(c.dim));
  return std::exp(score - run.lse[static_cast<size_t>(head * c.tokens + query)]);
}

// False when something is wrong.
bool ShowErrors(const Capture& capture, std::string_view isa, PageContent* page) {
  Heading("1. Is it exact? Relative error against float64 (root mean square)");
  Print("  {:<6}{:^19}   {:^19}   {:^19}   {}\n", "", "O", "dQ", "dK", "        dV");
  Print("  {:<6}", "dtype");
  for (int i = 0; i < 4; ++i) Print("{:>9} {:>9}{}", "Strobe", "standard", i < 3 ? "   " : "\n");
  std::vector<double> worst;  // of each dtype: Strobe's error over standard attention's
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
    const auto standard = RunStandard<float>(rounded, isa, round);
    const StrobeRun strobe_run = RunStrobe(rounded, dtype);
    if (dtype == DType::kFloat32) {
      page->attention = Attention(page->tokens, capture.tokens, capture.heads,
                                  [&](int64_t head, int64_t query, int64_t key) {
                                    return Weight(rounded, strobe_run, head, query, key);
                                  });
      page->attention.kernel = strobe_run.kernel;
    }
    ErrorLine errors = {.dtype = ShortName(dtype)};
    ClearProgress();
    Print("  {:<6}", ShortName(dtype));
    double ratio = 0;
    const std::vector<float>* results[] = {&strobe_run.out, &strobe_run.dq, &strobe_run.dk,
                                           &strobe_run.dv};
    for (size_t i = 0; i < 4; ++i) {
      const double ours = Error(*results[i], truth[i]);
      const double theirs = Error(standard[i], truth[i]);
      // NaN counts as infinity.
      ratio = std::max(
          ratio, ours / theirs <= 1e9 ? ours / theirs : std::numeric_limits<double>::infinity());
      errors.strobe[i] = ours;
      errors.standard[i] = theirs;
      Print("{} {:>9.1e}{}", Green(fmt::format("{:>9.1e}", ours)), theirs, i < 3 ? "   " : "\n");
    }
    Flush();
    page->errors.push_back(errors);
    worst.push_back(ratio);
    shares.push_back(fmt::format("{} {:.1f}", ShortName(dtype), ratio));
  }
  Print(
      "\n  Standard: S = QK', P = softmax(S), O = PV, one after the other as a framework does it, "
      "with S\n");
  Print("  and P stored in the dtype. ");
  // The rule of the tests, for gradients: three times.
  const bool right = *std::max_element(worst.begin(), worst.end()) <= 3;
  if (right) {
    Print("Strobe's error in parts of standard's, at most: {}.\n", fmt::join(shares, ", "));
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

// Time and memory for growing lengths, of one direction or both.
class CostTable {
 public:
  CostTable(const Capture& capture, std::string_view isa, int64_t threads, bool backward,
            PyTorchPeer* peer)
      : capture_(capture),
        isa_(isa),
        threads_(threads),
        backward_(backward),
        peer_(peer),
        deadlines_(backward ? kBothDeadlines : kForwardDeadlines),
        with_peer_(peer->running()) {}

  std::vector<CostLine> Run(int64_t longest) {
    const auto row = [&](auto tokens, auto standard, auto peer, auto strobe, auto ratios) {
      Print("  {:>6}  {:^20}  {}{:^20}  {}\n", tokens, standard,
            with_peer_ ? fmt::format("{:^20}  ", peer) : "", strobe, ratios);
    };
    const std::string both = fmt::format("{:>9} {:>10}", "time", "memory");
    row("", "  standard", "  PyTorch", "  Strobe",
        with_peer_ ? "times Strobe's time" : "  standard / Strobe");
    row("tokens", both, both, both,
        with_peer_ ? fmt::format("{:>9} {:>9}", "standard", "PyTorch") : both);
    std::vector<CostLine> lines;
    for (int64_t tokens = 512; tokens <= longest; tokens *= 2) {
      if (!Line(tokens, &lines)) break;
    }
    for (const std::string& note : notes_)
      Print("{}  {}\n", &note == notes_.data() ? "\n" : "", note);
    ShowBusy(lines);
    return lines;
  }

 private:
  // Bytes by which a process has to grow for that to say something about what it did.
  static constexpr double kLeastSeen = 1e6;
  static constexpr double kMostAgain = 2;  // seconds of a table

  // False when even Strobe would take too long from here on.
  bool Line(int64_t tokens, std::vector<CostLine>* lines) {
    std::string line = fmt::format("  {:>6}", tokens);
    if (watch_.Seconds() + 1.2 * strobe_.Expected(tokens) > deadlines_.strobe) {
      Print("{}  left out: {}\n", line, TooLong(strobe_.Expected(tokens), deadlines_.strobe));
      return false;
    }
    Progress(line + "  preparing the tensors ...");
    Make(tokens);

    CostLine cost;
    cost.tokens = tokens;
    cost.standard.bytes = StandardAttention<float>::ExtraBytes(tokens, capture_.heads, backward_);
    const std::string reason = WhyNotStandard(tokens, cost.standard.bytes);
    if (!reason.empty())
      notes_.push_back(fmt::format("{} tokens: no standard attention, {}.", tokens, reason));

    // What another program disturbed is measured again, as long as that takes little time.
    MeasureLine(line, reason.empty(), &cost);
    for (const Stopwatch again; !cost.busy.empty() && again_seconds_ < kMostAgain;) {
      MeasureLine(line, reason.empty(), &cost);
      again_seconds_ += again.Seconds();
    }
    strobe_ = {cost.strobe.seconds, tokens};
    if (reason.empty()) standard_ = {cost.standard.seconds, tokens};

    ClearProgress();
    const auto pair = [](const std::string& time, double bytes) {
      return fmt::format("  {:>9} {:>10}", time, BytesText(bytes));
    };
    line +=
        pair(reason.empty() ? TimeText(cost.standard.seconds) : "left out", cost.standard.bytes);
    if (cost.pytorch) {
      line +=
          fmt::format("  {:>9} {:>10}", TimeText(cost.pytorch->seconds),
                      cost.pytorch->bytes < kLeastSeen ? "< 1 MB" : BytesText(cost.pytorch->bytes));
    } else if (with_peer_) {
      line += fmt::format("  {:>9} {:>10}", "left out", "");
    }
    line += pair(TimeText(cost.strobe.seconds), cost.strobe.bytes);
    const auto ratio = [&](double seconds) {
      return !cost.busy.empty() ? "busy" : Times(seconds / cost.strobe.seconds);
    };
    line += fmt::format("  {:>9}", reason.empty() ? ratio(cost.standard.seconds) : "");
    if (with_peer_) {
      line += fmt::format(" {:>9}", cost.pytorch ? ratio(cost.pytorch->seconds) : "");
    } else {
      line += fmt::format(" {:>10}", Times(cost.standard.bytes / cost.strobe.bytes));
    }
    Print("{}\n", line);
    Flush();
    lines->push_back(cost);
    return true;
  }

  void MeasureLine(const std::string& line, bool standard, CostLine* cost) {
    std::vector<pid_t> ours = {getpid()};
    if (peer_->running()) ours.push_back(peer_->process());
    const OtherPrograms others(ours);
    std::vector<Timing> timings;
    Progress(line + (standard ? "  standard attention and Strobe ..." : "  Strobe ..."));
    Time(tokens_, standard, cost, &timings);
    const double left = deadlines_.strobe - watch_.Seconds();
    cost->pytorch.reset();
    if (peer_->running() && 1.5 * pytorch_.Expected(tokens_) < left) {
      Progress(line + "  PyTorch ...");
      // It takes about as long as Strobe does. A minute more is for a computer that is busy.
      if (const auto answer = peer_->Measure(tokens_, backward_, 60 + std::max(0.0, left))) {
        timings.push_back(answer->timing);
        cost->pytorch = {.seconds = answer->timing.best, .bytes = answer->bytes};
        pytorch_ = {answer->timing.best, tokens_};
      } else {
        notes_.push_back("PyTorch's process gave no answer and was ended.");
      }
    }
    const std::optional<double> mean = others.Mean();
    cost->busy = WhyTooBusy(mean, others.processors(), threads_, timings);
    cost->remedy =
        cost->busy.empty() ? "" : HowToTime("make demo", mean, others.processors(), threads_);
  }

  // Says once why there are no ratios, what holds all the same, and how to get them.
  void ShowBusy(const std::vector<CostLine>& lines) {
    const auto busy =
        std::ranges::find_if(lines, [](const CostLine& l) { return !l.busy.empty(); });
    if (busy == lines.end()) return;
    const CostLine& longest = lines.back();
    Print("\n  {}: this computer was too busy to time them; at {} tokens\n", Bold("busy"),
          busy->tokens);
    Print("  {}. A ratio of such times says more\n", busy->busy);
    Print("  about the other programs than about attention. The memory is what it is: at {}\n",
          longest.tokens);
    Print("  tokens {} in place of {}, {} less.\n", BytesText(longest.strobe.bytes),
          BytesText(longest.standard.bytes), Times(longest.standard.bytes / longest.strobe.bytes));
    std::string remedy = busy->remedy;
    constexpr size_t kWide = 90;
    while (remedy.size() > kWide) {
      const size_t end = remedy.rfind(' ', kWide);
      Print("  {}\n", remedy.substr(0, end));
      remedy.erase(0, end + 1);
    }
    Print("  {}\n", remedy);
  }

  static std::string Times(double factor) {
    return fmt::format("{:.{}f} x", factor, factor < 99.5 ? 1 : 0);
  }

  // "" when standard attention can be measured.
  [[nodiscard]] std::string WhyNotStandard(int64_t tokens, double bytes) const {
    const double available = AvailableMemory();
    if (bytes > kMemoryLimit) {
      return fmt::format("its matrices would take {}, over the 4 GB that this demo allows it",
                         BytesText(bytes));
    }
    if (bytes > 0.7 * available) {
      return fmt::format("it would take {}, and this computer has {} free", BytesText(bytes),
                         BytesText(available));
    }
    if (watch_.Seconds() + 1.5 * standard_.Expected(tokens) > deadlines_.standard)
      return TooLong(standard_.Expected(tokens), deadlines_.standard);
    return "";
  }

  void Make(int64_t tokens) {
    tokens_ = tokens;
    q_ = Longer(capture_.q, capture_, tokens, 1);
    k_ = Longer(capture_.k, capture_, tokens, 2);
    v_ = Longer(capture_.v, capture_, tokens, 3);
    out_.assign(q_.size(), 0);
    if (!backward_) return;
    dout_ = Longer(capture_.dout, capture_, tokens, 4);
    for (std::vector<float>* t : {&dq_, &dk_, &dv_}) t->assign(q_.size(), 0);
  }

  // Strobe, and standard attention where it is wanted: in turns when both are short, so that what
  // else the computer does meets both.
  void Time(int64_t tokens, bool standard, CostLine* cost, std::vector<Timing>* timings) {
    std::optional<StandardAttention<float>> attention;
    if (standard) attention.emplace(tokens, capture_.heads, capture_.dim, backward_, isa_);
    const std::function<void()> plain = [&] {
      attention->Forward(q_.data(), k_.data(), v_.data(), out_.data());
      if (backward_) {
        attention->Backward(q_.data(), k_.data(), v_.data(), dout_.data(), dq_.data(), dk_.data(),
                            dv_.data());
      }
    };
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
    cost->strobe.bytes = static_cast<double>(bytes + lse.size() * sizeof(float));
    const std::function<void()> strobe = [&] {
      forward.forward(forward_args);
      if (backward_) backward.backward(backward_args);
    };

    // What takes long runs once.
    constexpr double kLong = 0.25;
    const auto once = [](const std::function<void()>& work) -> Timing {
      const Stopwatch watch;
      work();
      return {.median = watch.Seconds(), .best = watch.Seconds(), .runs = 1};
    };
    Timing of_plain, of_strobe = once(strobe);
    if (standard) of_plain = once(plain);
    if (standard && std::max(of_plain.best, of_strobe.best) <= kLong) {
      const std::vector<Timing> both = MeasureInTurns({plain, strobe}, 0.6);
      of_plain = both[0];
      of_strobe = both[1];
    } else if (of_strobe.best <= kLong) {
      of_strobe = Measure(strobe, 0.3);
    }
    timings->push_back(of_strobe);
    cost->strobe.seconds = of_strobe.best;
    if (!standard) return;
    timings->push_back(of_plain);
    cost->standard.seconds = of_plain.best;
  }

  const Capture& capture_;
  std::string_view isa_;
  int64_t threads_;
  bool backward_;
  PyTorchPeer* peer_;
  Stopwatch watch_;
  Deadlines deadlines_;
  bool with_peer_;  // when the table began
  int64_t tokens_ = 0;
  std::vector<float> q_, k_, v_, out_, dout_, dq_, dk_, dv_;
  double again_seconds_ = 0;
  LatestTime standard_, strobe_, pytorch_;
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

struct Settings {
  std::string capture = std::filesystem::proximate(kDataFile).string();
  std::string page = "strobe_demo.html";
  std::string python;  // "": no PyTorch
  int64_t longest = kLongest;
};

int Demo(const Settings& settings) {
  const Machine m = machine();
  const Capture capture = ReadCapture(settings.capture);
  PageContent page;
  page.tokens = ReadTokens(settings.capture, capture.tokens);
  CheckWritable(settings.page);
  PyTorchPeer peer;  // imports PyTorch while the errors are computed
  // It reads the file too, which it can only where that is no pipe.
  const bool twice = std::filesystem::is_regular_file(settings.capture);
  const std::string python = twice ? settings.python : "";
  if (!python.empty()) {
    peer.Start(python,
               {kPeerScript, settings.capture, "--threads", fmt::format("{}", m.cpu_threads)});
  }
  Print("{}\n\n",
        Bold(fmt::format("Strobe {}: exact attention, forward and backward, in linear memory",
                         version())));
  Print("  read      {}\n", PathText(capture.path));
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

  const bool right = ShowErrors(capture, m.cpu_isa, &page);
  if (!python.empty()) {
    Progress("  importing PyTorch ...");
    page.pytorch = peer.Wait(60).value_or("");
    ClearProgress();
  }
  Heading("2. What does it cost? Forward, float32: time, and memory beyond the tensors themselves");
  Print(
      "  Inputs: the captured tensors, repeated to length, with 10 % of noise. Standard: the "
      "three\n");
  Print("  steps, in blocked and vectorised loops on the same {} threads.", m.cpu_threads);
  if (!page.pytorch.empty()) {
    Print(" PyTorch {}:\n  scaled_dot_product_attention, its memory by how much its process grew.",
          page.pytorch);
  } else if (!python.empty()) {
    Print(" No PyTorch:\n  {} cannot import it.", PathText(python));
  }
  Print("\n\n");
  page.forward = CostTable(capture, m.cpu_isa, m.cpu_threads, false, &peer).Run(settings.longest);
  Heading("3. Forward and backward");
  page.both = CostTable(capture, m.cpu_isa, m.cpu_threads, true, &peer)
                  .Run(std::max<int64_t>(512, settings.longest / 2));
  peer.Stop();
  ShowNext();

  page.facts = {{"version", version()},
                {"cpu", m.cpu_name.empty() ? "an unknown CPU" : m.cpu_name},
                {"file", std::filesystem::path(capture.path).filename().string()},
                {"model", capture.Note("model")},
                {"layer", capture.Note("layer")},
                {"text", capture.Note("text")},
                {"kernels", fmt::format("{}", fmt::join(kernels, ", "))}};
  page.threads = m.cpu_threads;
  page.token_count = capture.tokens;
  page.head_dim = capture.dim;
  WritePage(settings.page, kPageTemplate, page);
  Heading(
      "And a page to look at: what a head attends to, the errors, the costs. Open in a browser:");
  Print("{}\n", std::filesystem::absolute(settings.page).lexically_normal().string());
  Flush();
  return right ? 0 : 1;
}

int Main(int argc, char** argv) {
  Settings settings;
  CLI::App app(
      "Strobe's attention on what a real transformer had in memory: its error against float64, its "
      "time and memory beside standard attention, and a page that shows both.",
      "strobe_demo");
  app.add_option("capture", settings.capture,
                 "Safetensors file with q, k, v and dout, F32 [1, tokens, heads, head_dim]; what "
                 "its tokens are may stand beside it in .tokens.json")
      ->type_name("FILE");
  app.add_option("--page", settings.page, "Where to write the page (strobe_demo.html)")
      ->type_name("FILE")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--python", settings.python,
                 "A Python with PyTorch: its attention is measured too; \"\": it is not")
      ->type_name("PROGRAM")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  AddInteger(app, "--longest", &settings.longest, 512,
             fmt::format("Tokens of the tables' longest line at most ({})", kLongest), kLongest);
  if (const std::optional<int> exit_code = ParseAll(app, argc, argv)) return *exit_code;
  return Demo(settings);
}

}  // namespace
}  // namespace strobe::demo

int main(int argc, char** argv) {
  try {
    return strobe::demo::Main(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "demo: out of memory\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "demo: %s\n", error.what());
  }
  return 2;
}
