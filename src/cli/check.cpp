// `strobe check`: is this installation right? Seeded random problems against float64, one line a
// feature. The problems are those of the tests (check/), and so is the rule by which results are
// judged.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "check/cache_fixture.h"
#include "check/problem_gen.h"
#include "check/runner.h"
#include "cli/commands.h"
#include "cli/errors.h"
#include "cli/machine_json.h"
#include "cli/on_device.h"
#include "cli/terminal.h"

namespace strobe::cli {
namespace {

using oracle::DType;
using strobe_test::CacheCase;
using Drawn = strobe_test::Case;
using Special = strobe_test::Special;

constexpr int64_t kDefaultCases = 12;
constexpr int64_t kMostWork =
    1'500'000;  // of most problems: the oracle takes milliseconds for them

// What a problem has to have so that it counts for a feature. Problems are drawn until one has it.
struct Feature {
  const char* name;
  std::function<bool(const Drawn&)> in;
  bool backward = true;
  int64_t most_work = kMostWork;
  Drawn (*generate)(uint64_t) = strobe_test::GenerateCase;
};

const std::vector<Feature>& Features() {
  const auto of = [](DType dtype) { return [dtype](const Drawn& c) { return c.dtype == dtype; }; };
  static const std::vector<Feature> features = {
      {"forward, float32", of(DType::kFloat32), false},
      {"forward, bfloat16", of(DType::kBFloat16), false},
      {"forward, float16", of(DType::kFloat16), false},
      {"backward, float32", of(DType::kFloat32)},
      {"backward, bfloat16", of(DType::kBFloat16)},
      {"backward, float16", of(DType::kFloat16)},
      {"causal mask", [](const Drawn& c) { return c.causal; }},
      {"sliding window",
       [](const Drawn& c) {
         return !c.window_signed && std::max(c.window_left, c.window_right) >= 0;
       }},
      {"window of either sign", [](const Drawn& c) { return c.window_signed; }},
      {"ALiBi", [](const Drawn& c) { return c.alibi != STROBE_ALIBI_NONE; }},
      {"attention sinks", [](const Drawn& c) { return c.has_sinks; }},
      {"softcap", [](const Drawn& c) { return c.softcap > 0; }},
      {"dropout", [](const Drawn& c) { return c.dropout_p > 0; }},
      {"grouped key heads", [](const Drawn& c) { return c.heads > c.heads_kv; }},
      {"sequences end to end", [](const Drawn& c) { return c.varlen && c.batch() > 1; }},
      {"bias", [](const Drawn& c) { return c.has_bias != 0; }},
      {"gradient of a bias", [](const Drawn& c) { return c.has_dbias != 0; }},
      {"lengths in use", [](const Drawn& c) { return c.has_seqused_q || c.has_seqused_k; }},
      {"positions of queries", [](const Drawn& c) { return c.has_q_position; }},
      {"attention chunks", [](const Drawn& c) { return c.attention_chunk > 0; }},
      {"prefix", [](const Drawn& c) { return c.has_prefix; }},
      {"unequal lengths", [](const Drawn& c) { return c.seqlens_q != c.seqlens_k; }},
      {"lengths of 0",
       [](const Drawn& c) {
         return std::min(*std::min_element(c.seqlens_q.begin(), c.seqlens_q.end()),
                         *std::min_element(c.seqlens_k.begin(), c.seqlens_k.end())) == 0;
       }},
      {"rows that see no key",
       [](const Drawn& c) { return c.causal && c.seqlens_q[0] > c.seqlens_k[0]; }},
      {"head_dim to 256", [](const Drawn& c) { return c.head_dim > 128 || c.head_dim % 8 != 0; }},
      {"head_dim of v", [](const Drawn& c) { return c.head_dim != c.head_dim_v; }},
      {"strides",
       [](const Drawn& c) {
         return !c.q.defaulted || c.packing != strobe_test::Packing::kSeparate;
       }},
      {"scale", [](const Drawn& c) { return c.scale == c.scale; }},
      {"gradient of lse", [](const Drawn& c) { return c.has_dlse; }},
      {"out in fp32", [](const Drawn& c) { return c.out_float32; }},
      {"gradients in fp32", [](const Drawn& c) { return c.grad_float32; }},
      {"accumulated gradients", [](const Drawn& c) { return c.accumulate; }},
      {"delta given", [](const Drawn& c) { return c.has_delta; }},
      {"long sequences",
       [](const Drawn& c) { return std::max(c.longest_q(), c.longest_k()) >= 500; }, true,
       std::numeric_limits<int64_t>::max()},
      {"NaN and infinity", [](const Drawn& c) { return c.special != Special::kNone; }},
      {"masks as data", [](const Drawn& c) { return c.mask.there; }, false,
       std::numeric_limits<int64_t>::max(), strobe_test::GenerateMaskedCase},
      {"gradients under such masks", [](const Drawn& c) { return c.mask.there; }, true,
       std::numeric_limits<int64_t>::max(), strobe_test::GenerateMaskedCase},
  };
  return features;
}

struct CacheFeature {
  const char* name;
  bool (*in)(const CacheCase&);
  CacheCase (*draw)(uint64_t seed) = strobe_test::GenerateCacheCase;
};
template <bool kPaged, bool kAppends>
bool IsOfFloats(const CacheCase& c) {
  return c.paged == kPaged && (c.append != STROBE_APPEND_NONE) == kAppends;
}
// Of a quantised one, in pages or not.
template <oracle::Form kForm>
bool IsOf(const CacheCase& c) {
  return c.form == kForm;
}
bool IsAny(const CacheCase&) { return true; }
CacheCase DrawQuantised(uint64_t seed) { return strobe_test::GenerateQuantisedCase(seed); }
CacheCase DrawFloat8(uint64_t seed) { return strobe_test::GenerateFloat8CacheCase(seed); }
CacheCase DrawMasked(uint64_t seed) {
  CacheCase c = strobe_test::GenerateMaskedCacheCase(seed);
  c.batch_invariant = false;  // GPUs do not take both
  return c;
}
constexpr CacheFeature kCacheFeatures[] = {
    {"KV cache", IsOfFloats<false, false>},
    {"KV cache in pages", IsOfFloats<true, false>},
    {"KV cache, new keys", IsOfFloats<false, true>},
    {"KV cache in pages, new keys", IsOfFloats<true, true>},
    {"KV cache, int8", IsOf<oracle::Form::kInt8>, DrawQuantised},
    {"KV cache, e4m3", IsOf<oracle::Form::kE4m3>, DrawQuantised},
    {"KV cache, q8_0", IsOf<oracle::Form::kQ8>, DrawQuantised},
    {"KV cache, q4_0", IsOf<oracle::Form::kQ4>, DrawQuantised},
    {"KV cache, K and V differ", IsAny, strobe_test::GenerateMixedCacheCase},
    {"KV cache, float8 queries", IsAny, DrawFloat8},
    {"KV cache under masks as data", IsAny, DrawMasked},
    {"KV cache with a bias", IsAny, strobe_test::GenerateBiasedCacheCase}};

struct Outcome {
  double worst = 0;     // error over allowed error
  std::string failure;  // "" when all is well

  void Add(const oracle::Verdict& verdict, const std::string& what) {
    worst = std::max(worst, verdict.worst);
    if (!verdict.errors.empty()) failure = fmt::format("{}    in {}", verdict.errors, what);
  }
};

std::string Fixed(std::string text) {
  if (!text.empty() && text.back() != '\n') text += '\n';
  return text;
}

class Checker {
 public:
  explicit Checker(const CheckOptions& o)
      : device_(o.device), launch_(o.device, o.device_index, o.threads) {
    launch_.TakeEveryChoice(o.choices);
  }

  // GPUs multiply in bfloat16 and float16 alone.
  [[nodiscard]] bool Has(DType dtype) const {
    return device_ == Device::kCpu || dtype != DType::kFloat32;
  }

  // Nor have they a backward of a bias above head_dim 128.
  [[nodiscard]] bool Has(const Drawn& c) const {
    constexpr int64_t kWidestWithBias = 128;
    return device_ == Device::kCpu || !c.has_bias ||
           std::max(c.head_dim, c.head_dim_v) <= kWidestWithBias;
  }

  void Run(const Feature& feature, oracle::Rng* random, Outcome* outcome) {
    const Drawn c = Draw(
        random,
        [&](const Drawn& d) { return d.Work() <= feature.most_work && Has(d) && feature.in(d); },
        feature.generate, feature.backward);
    strobe_test::Fixture f(c);
    const std::string what = strobe_test::ToString(c);
    std::string error = Forward(f, 0);
    // On GPUs the gradients of infinities are a matter of the order of sums.
    const bool backward =
        feature.backward && (device_ == Device::kCpu || c.special == Special::kNone);
    if (error.empty() && backward) error = Backward(f, 0);
    if (!error.empty()) return outcome->Add({Fixed(error), 0}, what);
    outcome->Add(backward ? JudgeBoth(f, Spare(c.dtype)) : JudgeForward(f, Spare(c.dtype)), what);
  }

  void Run(const CacheFeature& feature, oracle::Rng* random, Outcome* outcome) {
    const auto fits = [&](const CacheCase& c) {
      return feature.in(c) && Has(c.dtype) && launch_.Takes(strobe_test::CacheFixture(c).Problem());
    };
    for (int n = 0; n < kMostDraws; ++n) {
      const uint64_t seed = random->Next() >> 16;
      CacheCase c = feature.draw(seed);
      // Of float8 attention a case's dtype is that of weights.
      if (c.float8 && device_ != Device::kCpu) c.dtype = DType::kBFloat16;
      if (!fits(c)) continue;
      strobe_test::CacheFixture f(c);
      std::string launch_error;
      std::string error = f.Run([&](const strobe_problem& problem, strobe_forward_args& args) {
        launch_error = launch_.Run(f.Memory(), problem, args);
        const strobe_status status = launch_error.empty() ? STROBE_OK : STROBE_INTERNAL_ERROR;
        return strobe_test::CacheFixture::Launched(status, launch_.unpacks_first());
      });
      if (!launch_error.empty()) error = launch_error;
      return outcome->Add(
          error.empty() ? f.JudgeWith(Spare(c.dtype)) : oracle::Verdict{Fixed(error), 0},
          strobe_test::ToString(c));
    }
    outcome->failure = "no kernel takes such a problem";
  }

  // The same bits again, and on a CPU with other numbers of threads.
  void RunAgain(oracle::Rng* random, Outcome* outcome) {
    const Drawn c =
        Draw(random, [](const Drawn& d) { return d.deterministic && d.Work() <= kMostWork; });
    strobe_test::Fixture f(c);
    std::string first;
    launch_.TakeEveryChoice(false);  // of which each has its own bits
    for (const int32_t threads : {2, 2, 1, 3}) {
      std::string error = Forward(f, threads);
      if (error.empty()) error = Backward(f, threads);
      std::string bits;
      for (const strobe_test::Strided* t : {&f.out, &f.dq, &f.dk, &f.dv}) bits += f.Bits(*t);
      if (first.empty()) first = bits;
      if (error.empty() && bits != first)
        error = fmt::format("other bits with {} threads", threads);
      if (!error.empty()) return outcome->Add({Fixed(error), 0}, strobe_test::ToString(c));
      f.Poison(STROBE_FORWARD);
      f.Poison(STROBE_BACKWARD);
    }
  }

  [[nodiscard]] const OnDevice& launch() const { return launch_; }

 private:
  static constexpr int kMostDraws = 100'000;

  // Tensor cores cut the sums that the comparator rounds: on GPUs one rounding of the largest value
  // is allowed on top.
  [[nodiscard]] double Spare(DType dtype) const {
    if (device_ == Device::kCpu) return 0;
    return dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
  }

  template <typename Fits>
  Drawn Draw(oracle::Rng* random, const Fits& fits,
             Drawn (*generate)(uint64_t) = strobe_test::GenerateCase, bool backward = true) {
    for (int n = 0; n < kMostDraws; ++n) {
      Drawn c = generate(random->Next() >> 16);
      if (!Has(c.dtype) || !fits(c)) continue;
      if (device_ == Device::kCpu || Takes(c, backward)) return c;
    }
    throw UserError("no kernel takes such a problem");
  }

  [[nodiscard]] bool Takes(const Drawn& c, bool backward) const {
    const strobe_test::Fixture f(c);
    return launch_.Takes(f.MakeProblem(STROBE_FORWARD)) &&
           (!backward || launch_.Takes(f.MakeProblem(STROBE_BACKWARD)));
  }

  std::string Forward(strobe_test::Fixture& f, int32_t threads) {
    return f.Forward(
        [&](strobe_problem problem, const strobe_forward_args& args) {
          if (threads > 0) problem.threads = threads;
          return launch_.Run(f.Memory(), problem, args);
        },
        true);
  }
  std::string Backward(strobe_test::Fixture& f, int32_t threads) {
    return f.Backward([&](strobe_problem problem, const strobe_backward_args& args) {
      if (threads > 0) problem.threads = threads;
      return launch_.Run(f.Memory(), problem, args);
    });
  }

  Device device_;
  OnDevice launch_;
};

// Requests that break a rule: refused with a text, and the plan left as it was.
std::vector<Problem> BrokenProblems(const Problem& good) {
  std::vector<Problem> broken;
  const auto add = [&](auto change) {
    broken.push_back(good);
    change(&broken.back());
  };
  add([](Problem* p) { p->batch = 0; });
  add([](Problem* p) { p->seqlen_q = -1; });
  add([](Problem* p) { p->heads = 0; });
  add([](Problem* p) { p->heads_kv = p->heads + 1; });
  add([](Problem* p) { p->head_dim = 0; });
  add([](Problem* p) { p->head_dim = 257; });
  add([](Problem* p) { p->head_dim_v = 257; });
  add([](Problem* p) { p->window_left = -2; });
  add([](Problem* p) { p->dropout_p = 1; });
  add([](Problem* p) { p->dropout_p = -0.1F; });
  add([](Problem* p) { p->softcap = -1; });
  add([](Problem* p) { p->threads = -1; });
  add([](Problem* p) { p->dtype = static_cast<strobe::DType>(7); });
  add([](Problem* p) { p->q = {.batch = 64, .seqlen = 64, .head = 64, .dim = 2}; });
  add([](Problem* p) { p->out = {.batch = 1, .seqlen = 1, .head = 1, .dim = 1}; });
  return broken;
}

Outcome CheckRefusals(int64_t* cases) {
  Outcome outcome;
  const Problem good = {.batch = 2, .seqlen_q = 32, .seqlen_k = 32, .heads = 2, .head_dim = 64};
  for (const Problem& problem : BrokenProblems(good)) {
    ++*cases;
    Plan plan;
    if (Plan::try_make(problem, plan) != Status::kInvalidArgument || last_error().empty() ||
        *plan.kernel() != '\0') {
      outcome.failure =
          fmt::format("problem {} of the list was not refused as it should be", *cases);
    }
  }
  std::vector<float> tensor(static_cast<size_t>(2 * 32 * 2 * 64), 1.0F);
  const Plan plan(good);
  ++*cases;
  if (plan.try_forward(
          {.q = nullptr, .k = tensor.data(), .v = tensor.data(), .out = tensor.data()}) !=
          Status::kInvalidArgument ||
      tensor != std::vector<float>(tensor.size(), 1.0F)) {
    outcome.failure = "a launch without q was not refused, or wrote something";
  }
  return outcome;
}

class Report {
 public:
  Report(const CheckOptions& options, nlohmann::ordered_json head)
      : json_(options.json), document_(std::move(head)) {
    document_["features"] = nlohmann::ordered_json::array();
    if (!json_) Print("{:<28}{:>6}{:>18}\n", "feature", "cases", "error / allowed");
  }

  void Line(const char* name, int64_t cases, const Outcome& outcome, bool has_error) {
    const bool ok = outcome.failure.empty();
    cases_ += cases;
    ++lines_;
    if (!ok) ++failures_;
    document_["features"].push_back(
        {{"name", name},
         {"cases", cases},
         {"ok", ok},
         {"error_over_allowed", has_error ? nlohmann::ordered_json(outcome.worst) : nullptr},
         {"failure", outcome.failure}});
    if (json_) return;
    const std::string ratio = has_error ? fmt::format("{:.2f}", outcome.worst) : "";
    Print("{:<28}{:>6}{:>18}  {}\n", name, cases, ratio, ok ? Green("ok") : Red("FAILED"));
    if (!ok) Print("  {}\n", outcome.failure);
    Flush();
  }

  int Summary(double seconds, const std::map<std::string, int64_t>& kernels) {
    if (json_) {
      document_["kernels"] = kernels;
      document_["problems"] = cases_;
      document_["failed_features"] = failures_;
      document_["seconds"] = seconds;
      document_["ok"] = failures_ == 0;
      Print("{}\n", document_.dump(2));
    } else if (failures_ == 0) {
      Print("\nAll {} features are right: {} problems in {:.1f} s.\n", lines_, cases_, seconds);
    } else {
      Print("\n{} of {} features are wrong. Please report this with the output of `strobe info`.\n",
            failures_, lines_);
    }
    return failures_ == 0 ? 0 : 1;
  }

 private:
  bool json_;
  nlohmann::ordered_json document_;
  int64_t cases_ = 0;
  int lines_ = 0, failures_ = 0;
};

}  // namespace

int Check(const CheckOptions& options) {
  if (!options.kv.empty()) return CheckKv(options);
  const Stopwatch watch;
  const int64_t cases = options.cases > 0 ? options.cases : kDefaultCases;
  const bool cuda = options.device == Device::kCuda;
  const Problem probe = {.dtype = cuda ? strobe::DType::kBFloat16 : strobe::DType::kFloat32,
                         .device = options.device,
                         .device_index = static_cast<int32_t>(options.device_index),
                         .seqlen_q = 64,
                         .seqlen_k = 64,
                         .head_dim = 64,
                         .threads = static_cast<int32_t>(options.threads)};
  const Plan plan(probe);  // throws what the device lacks
  const Machine m = machine();
  if (!options.json) {
    if (cuda) {
      Print("Strobe {} on {}, seed {}\n", version(),
            m.cuda_devices[static_cast<size_t>(options.device_index)].name, options.seed);
    } else {
      Print("Strobe {} on {}, kernels for {}, {} threads, seed {}\n", version(), m.cpu_name,
            m.cpu_isa, options.threads > 0 ? options.threads : m.cpu_threads, options.seed);
    }
    Print("{}\n\n", Dim("The error is the largest against float64. Allowed is twice that of plain "
                        "attention in the same "
                        "dtype\n(gradients three times, with ALiBi eight times), and 1e-5."));
  }
  Report report(options, {{"machine", MachineJson(m)},
                          {"device", cuda ? "cuda" : "cpu"},
                          {"seed", options.seed},
                          {"threads", options.threads > 0 ? options.threads : m.cpu_threads},
                          {"cases", cases}});
  Checker checker(options);

  std::vector<const Feature*> features;
  for (const Feature& feature : Features()) {
    if (!cuda || !std::string_view(feature.name).ends_with("float32")) features.push_back(&feature);
  }
  const auto total = static_cast<double>(cases) *
                     static_cast<double>(features.size() + std::size(kCacheFeatures) + 1);
  uint64_t line = 0;
  double all_done = 0;
  const auto run = [&](const char* name, auto one, bool has_error) {
    oracle::Rng random(static_cast<uint64_t>(options.seed) * 1000 + line++);
    Outcome outcome;
    int64_t done = 0;
    while (done < cases && outcome.failure.empty()) {
      const double seconds = watch.Seconds();
      Progress(fmt::format("{:<28}{:>6}", name, done),
               all_done > 0 ? seconds / all_done * (total - all_done) : 0);
      try {
        one(&random, &outcome);
      } catch (const std::exception& error) {
        outcome.failure = error.what();
      }
      ++done;
      ++all_done;
    }
    ClearProgress();
    report.Line(name, done, outcome, has_error);
  };
  for (const Feature* feature : features) {
    run(
        feature->name, [&](auto* random, auto* outcome) { checker.Run(*feature, random, outcome); },
        true);
  }
  for (const CacheFeature& feature : kCacheFeatures) {
    run(
        feature.name, [&](auto* random, auto* outcome) { checker.Run(feature, random, outcome); },
        true);
  }
  run(
      cuda ? "same bits again" : "same bits, any threads",
      [&](auto* random, auto* outcome) { checker.RunAgain(random, outcome); }, false);
  int64_t refusals = 0;
  const Outcome refused = CheckRefusals(&refusals);
  report.Line("refuses bad requests", refusals, refused, false);
  return report.Summary(watch.Seconds(), checker.launch().kernels());
}

}  // namespace strobe::cli
