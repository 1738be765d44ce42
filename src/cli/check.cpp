// `strobe check`: is this installation right? Seeded random problems against float64, one line a
// feature.
#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "cli/cached_case.h"
#include "cli/case.h"
#include "cli/commands.h"
#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/terminal.h"

namespace strobe::cli {
namespace {

constexpr int64_t kDefaultCases = 12;

// A feature: what it does to a random problem, so that every case has it.
struct Feature {
  const char* name;
  std::function<void(CaseSpec*, Random*)> apply;
};

void SetLengths(CaseSpec* spec, int64_t batch, int64_t seqlen_q, int64_t seqlen_k) {
  spec->lengths_q.assign(static_cast<size_t>(batch), seqlen_q);
  spec->lengths_k.assign(static_cast<size_t>(batch), seqlen_k);
}

void SetWindow(CaseSpec* spec, Random* random) {
  spec->problem.window_left = random->Integer(-1, 40);
  spec->problem.window_right = random->Integer(spec->problem.window_left < 0 ? 0 : -1, 20);
}

void SetHeads(CaseSpec* spec, Random* random) {
  spec->problem.heads_kv = random->Integer(1, 2);
  spec->problem.heads = spec->problem.heads_kv * random->Integer(2, 4);
}

void SetSequences(CaseSpec* spec, Random* random) {
  spec->problem.varlen = true;
  spec->lengths_q.clear();
  spec->lengths_k.clear();
  for (int64_t b = random->Integer(1, 4); b > 0; --b) {
    spec->lengths_q.push_back(random->Chance(0.15) ? 0 : random->Integer(1, 60));
    spec->lengths_k.push_back(random->Chance(0.15)  ? 0
                              : random->Chance(0.5) ? spec->lengths_q.back()
                                                    : random->Integer(1, 60));
  }
}

// One number from `least` to most(b) for each sequence.
template <typename Most>
std::vector<int32_t> Numbers(const CaseSpec& spec, Random* random, int64_t least, Most most) {
  std::vector<int32_t> numbers;
  for (size_t b = 0; b < spec.lengths_q.size(); ++b)
    numbers.push_back(static_cast<int32_t>(random->Integer(least, most(b))));
  return numbers;
}

void SetUsed(CaseSpec* spec, Random* random) {
  if (random->Chance(0.4)) SetSequences(spec, random);
  const bool both = random->Chance(0.6);
  if (both || random->Chance(0.5)) {
    spec->arrays.seqused_q =
        Numbers(*spec, random, 0, [&](size_t b) { return spec->lengths_q[b]; });
  }
  if (both || spec->arrays.seqused_q.empty()) {
    spec->arrays.seqused_k =
        Numbers(*spec, random, 0, [&](size_t b) { return spec->lengths_k[b]; });
  }
}

void SetPrefix(CaseSpec* spec, Random* random) {
  spec->problem.causal = true;
  spec->problem.window_left = -1;
  spec->arrays.prefix = Numbers(*spec, random, 0, [&](size_t b) { return spec->lengths_k[b]; });
}

Alibi DrawAlibi(Random* random) {
  return random->Chance(0.5) ? Alibi::kPerHead : Alibi::kPerBatchHead;
}

// A small problem with a little of everything, so that features meet.
CaseSpec Draw(Random* random) {
  CaseSpec spec;
  Problem& p = spec.problem;
  p.dtype = kDTypes[random->Integer(0, 2)];
  p.heads = random->Integer(1, 3);
  p.head_dim = random->OneOf({8, 16, 32, 40, 64, 80, 128});
  const int64_t seqlen = random->Integer(1, 80);
  SetLengths(&spec, random->Integer(1, 2), seqlen, seqlen);
  p.causal = random->Chance(0.3);
  if (random->Chance(0.15)) SetHeads(&spec, random);
  if (random->Chance(0.15)) SetWindow(&spec, random);
  if (random->Chance(0.15)) p.alibi = DrawAlibi(random);
  if (random->Chance(0.1)) p.softcap = 5;
  if (random->Chance(0.1)) p.dropout_p = 0.2F;
  if (random->Chance(0.2)) spec.placement = static_cast<Placement>(random->Integer(0, 3));
  spec.seed = random->Bits();
  return spec;
}

// Moves a case to the device. The GPU's kernels multiply in bfloat16 and float16 only.
void SetDevice(Device device, CaseSpec* spec) {
  spec->problem.device = device;
  if (device == Device::kCuda && spec->problem.dtype == DType::kFloat32) {
    spec->problem.dtype = DType::kBFloat16;
  }
}

// With one visible key a weight is 1 and its gradient 0. Dropout then leaves nothing but the
// rounding of out in the gradient, for which plain attention's error is no yardstick: it may round
// the other way.
void LeaveOutDropoutOfOneKey(CaseSpec* spec) {
  Problem& p = spec->problem;
  // Few keys may be seen there too, in some row.
  if (!spec->arrays.seqused_k.empty() || !spec->arrays.q_position.empty() ||
      spec->problem.attention_chunk > 0) {
    p.dropout_p = 0;
  }
  const bool one_key = *std::max_element(spec->lengths_k.begin(), spec->lengths_k.end()) <= 1 ||
                       (p.window_left == 0 && (p.window_right == 0 || p.causal));
  if (one_key) p.dropout_p = 0;
}

const std::vector<Feature>& Features() {
  const auto dtype = [](DType value, bool backward) {
    return [=](CaseSpec* spec, Random*) {
      spec->problem.dtype = value;
      spec->backward = backward;
    };
  };
  static const std::vector<Feature> features = {
      {"forward, float32", dtype(DType::kFloat32, false)},
      {"forward, bfloat16", dtype(DType::kBFloat16, false)},
      {"forward, float16", dtype(DType::kFloat16, false)},
      {"backward, float32", dtype(DType::kFloat32, true)},
      {"backward, bfloat16", dtype(DType::kBFloat16, true)},
      {"backward, float16", dtype(DType::kFloat16, true)},
      {"causal mask", [](CaseSpec* spec, Random*) { spec->problem.causal = true; }},
      {"sliding window", SetWindow},
      {"ALiBi", [](CaseSpec* spec, Random* random) { spec->problem.alibi = DrawAlibi(random); }},
      {"softcap",
       [](CaseSpec* spec, Random* random) {
         spec->problem.softcap = static_cast<float>(random->Integer(1, 30));
       }},
      {"dropout",
       [](CaseSpec* spec, Random* random) {
         spec->problem.dropout_p = static_cast<float>(0.9 * random->Uniform());
       }},
      {"grouped key heads", SetHeads},
      {"sequences end to end", SetSequences},
      {"lengths in use", SetUsed},
      {"positions of queries",
       [](CaseSpec* spec, Random* random) {
         spec->problem.causal = true;
         spec->arrays.q_position =
             Numbers(*spec, random, -20, [&](size_t b) { return spec->lengths_k[b]; });
       }},
      {"attention chunks",
       [](CaseSpec* spec, Random* random) {
         spec->problem.attention_chunk = random->Integer(1, 50);
       }},
      {"prefix", SetPrefix},
      {"unequal lengths, also 0",
       [](CaseSpec* spec, Random* random) {
         const int64_t none = random->Integer(0, 9);  // 0: no query, 1: no key
         SetLengths(spec, random->Integer(1, 2), none == 0 ? 0 : random->Integer(1, 100),
                    none == 1 ? 0 : random->Integer(1, 100));
       }},
      {"rows that see no key",
       [](CaseSpec* spec, Random* random) {
         const int64_t seqlen_k = random->Integer(1, 60);
         SetLengths(spec, random->Integer(1, 2), seqlen_k + random->Integer(1, 60), seqlen_k);
         spec->problem.causal = true;
       }},
      {"head_dim 1 to 256",
       [](CaseSpec* spec, Random* random) { spec->problem.head_dim = random->Integer(1, 256); }},
      {"head_dim of v",
       [](CaseSpec* spec, Random* random) { spec->problem.head_dim_v = random->Integer(1, 256); }},
      {"strides",
       [](CaseSpec* spec, Random* random) {
         spec->placement = static_cast<Placement>(random->Integer(1, 3));
       }},
      {"scale",
       [](CaseSpec* spec, Random* random) {
         spec->problem.scale = static_cast<float>(random->Normal()) /
                               std::sqrt(static_cast<float>(spec->problem.head_dim));
       }},
      {"gradient of lse", [](CaseSpec* spec, Random*) { spec->dlse_chance = 1; }},
      {"one long sequence",
       [](CaseSpec* spec, Random* random) {
         spec->problem.heads = 1;
         spec->problem.heads_kv = 0;
         spec->problem.head_dim = random->OneOf({16, 32});
         SetLengths(spec, 1, random->Integer(300, 600), random->Integer(300, 600));
       }},
      {"NaN and infinity",
       [](CaseSpec* spec, Random*) {
         spec->specials = true;
         spec->backward = false;
         spec->problem.causal = false;
         spec->problem.window_left = spec->problem.window_right = -1;
         spec->problem.dropout_p = 0;
         spec->problem.softcap = 0;
       }},
  };
  return features;
}

struct Outcome {
  double worst = 0;     // error over allowed error
  std::string failure;  // "" when all is well
};

void RunCase(const CaseSpec& spec, int32_t threads, Outcome* outcome) {
  Case one(spec);
  std::string what = one.RunLibrary(threads);
  double ratio = 0;
  if (what.empty()) ratio = one.Compare(&what);
  outcome->worst = std::max(outcome->worst, ratio);
  if (!what.empty()) outcome->failure = fmt::format("{}\n    in {}", what, one.Describe());
}

void RunCachedCase(const CachedSpec& spec, Random* random, int32_t threads, Outcome* outcome) {
  CachedCase one(spec, random);
  std::string what = one.RunLibrary(threads);
  double ratio = 0;
  if (what.empty()) ratio = one.Compare(&what);
  outcome->worst = std::max(outcome->worst, ratio);
  if (!what.empty()) outcome->failure = fmt::format("{}\n    in {}", what, one.Describe());
}

// Backward with the deterministic flag: the same bits again, and with another number of threads.
void RunDeterministic(CaseSpec spec, int32_t threads, Outcome* outcome) {
  spec.problem.deterministic = true;
  Case one(spec);
  std::vector<std::vector<std::byte>> first;
  for (const int32_t n : {threads, threads, int32_t{1}, int32_t{3}}) {
    const std::string what = one.RunLibrary(n);
    if (!what.empty()) outcome->failure = what;
    if (first.empty()) first = one.ResultBytes();
    if (one.ResultBytes() != first) {
      outcome->failure = fmt::format("other bits with {} threads\n    in {}", n, one.Describe());
    }
  }
}

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
  add([](Problem* p) { p->dtype = static_cast<DType>(7); });
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
  void Header() { Print("{:<28}{:>6}{:>18}\n", "feature", "cases", "error / allowed"); }

  void Line(const char* name, int64_t cases, const Outcome& outcome, bool has_error) {
    ClearProgress();
    const std::string ratio = has_error ? fmt::format("{:.2f}", outcome.worst) : "";
    Print("{:<28}{:>6}{:>18}  {}\n", name, cases, ratio,
          outcome.failure.empty() ? Green("ok") : Red("FAILED"));
    if (!outcome.failure.empty()) {
      Print("    {}\n", outcome.failure);
      ++failures_;
    }
    cases_ += cases;
    ++lines_;
    Flush();
  }

  int Summary(double seconds) {
    if (failures_ == 0) {
      Print("\nAll {} features are right: {} problems in {:.1f} s.\n", lines_, cases_, seconds);
      return 0;
    }
    Print("\n{} of {} features are wrong. Please report this with the output of `strobe info`.\n",
          failures_, lines_);
    return 1;
  }

 private:
  int64_t cases_ = 0;
  int lines_ = 0;
  int failures_ = 0;
};

}  // namespace

int Check(const CheckOptions& options) {
  const Stopwatch watch;
  const int64_t cases = options.cases > 0 ? options.cases : kDefaultCases;
  const auto threads = static_cast<int32_t>(options.threads);
  const bool cuda = options.device == Device::kCuda;
  const Problem probe = {.dtype = cuda ? DType::kBFloat16 : DType::kFloat32,
                         .device = options.device,
                         .seqlen_q = 64,
                         .seqlen_k = 64,
                         .head_dim = 64,
                         .threads = threads};
  const Plan plan(probe);  // throws what the device lacks
  const Machine m = machine();
  if (cuda) {
    Print("Strobe {} on {}, seed {}\n", version(), m.cuda_devices.front().name, options.seed);
  } else {
    Print("Strobe {} on {}, kernels for {}, {} threads, seed {}\n", version(), m.cpu_name,
          m.cpu_isa, options.threads > 0 ? options.threads : m.cpu_threads, options.seed);
  }
  Print("{}\n\n",
        Dim("The error is the largest against float64. Allowed is twice that of plain attention in "
            "the same dtype\n"
            "(gradients three times, with ALiBi eight times), and one rounding of the result."));
  Report report;
  report.Header();

  uint64_t line = 0;
  const auto run = [&](const char* name, auto one, bool has_error) {
    Random random(static_cast<uint64_t>(options.seed) * 1000 + line++);
    Outcome outcome;
    int64_t done = 0;
    while (done < cases && outcome.failure.empty()) {
      Progress(fmt::format("{:<28}{:>6}", name, done));
      try {
        one(&random, &outcome);
      } catch (const Error& error) {
        outcome.failure = error.what();
      }
      ++done;
    }
    report.Line(name, done, outcome, has_error);
  };
  for (const Feature& feature : Features()) {
    if (cuda && std::string_view(feature.name).ends_with("float32")) continue;
    run(
        feature.name,
        [&](Random* random, Outcome* outcome) {
          CaseSpec spec = Draw(random);
          feature.apply(&spec, random);
          SetDevice(options.device, &spec);
          LeaveOutDropoutOfOneKey(&spec);
          RunCase(spec, threads, outcome);
        },
        true);
  }
  for (const auto& [name, paged, append] : {std::tuple{"KV cache", false, false},
                                            {"KV cache in pages", true, false},
                                            {"KV cache, new keys", false, true},
                                            {"KV cache in pages, new keys", true, true}}) {
    const CachedSpec spec = {.device = options.device, .paged = paged, .append = append};
    run(
        name,
        [&](Random* random, Outcome* outcome) { RunCachedCase(spec, random, threads, outcome); },
        true);
  }
  run(
      cuda ? "same bits again" : "same bits, any threads",
      [&](Random* random, Outcome* outcome) {
        CaseSpec spec = Draw(random);
        SetDevice(options.device, &spec);
        RunDeterministic(spec, threads, outcome);
      },
      false);
  int64_t refusals = 0;
  const Outcome refused = CheckRefusals(&refusals);
  report.Line("refuses bad requests", refusals, refused, false);
  return report.Summary(watch.Seconds());
}

}  // namespace strobe::cli
