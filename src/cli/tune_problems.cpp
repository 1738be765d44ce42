#include "cli/tune_problems.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "cli/dtype.h"
#include "cli/errors.h"
#include "cli/text.h"
#include "cli/tune_timing.h"
#include "core/problem_fields.h"
#include "core/team.h"
#include "core/tuning_bucket.h"

namespace strobe::cli {
namespace {

strobe_problem EmptyProblem(const TuneOptions& o) {
  strobe_problem p;
  strobe_problem_init(&p, sizeof p);
  p.device = static_cast<int32_t>(o.device);
  p.device_index = static_cast<int32_t>(o.device_index);
  p.threads = static_cast<int32_t>(o.threads);
  return p;
}

// ------------------------------------------------------------------------------ the set by default

// GPUs: training, prompts, few tiles, decoding from a cache, chunks of prompts.
std::vector<strobe_problem> SetForCuda(const TuneOptions& o) {
  std::vector<strobe_problem> set;
  constexpr int64_t kTokens = 16384, kHeads = 16;
  const auto dense = [&](strobe_direction direction, int64_t head_dim, bool causal, int64_t batch,
                         int64_t seqlen_q, int64_t seqlen_k, int64_t heads, int64_t heads_kv) {
    strobe_problem p = EmptyProblem(o);
    p.dtype = STROBE_BFLOAT16;
    p.direction = direction;
    p.head_dim = head_dim;
    p.causal = causal;
    p.batch = batch;
    p.seqlen_q = seqlen_q;
    p.seqlen_k = seqlen_k;
    p.heads = heads;
    p.heads_kv = heads_kv;
    set.push_back(p);
  };
  for (const int64_t head_dim : {64, 128}) {
    for (const bool causal : {false, true}) {
      for (const int64_t seqlen : {512, 2048, 8192}) {
        for (const strobe_direction direction : {STROBE_FORWARD, STROBE_BACKWARD})
          dense(direction, head_dim, causal, kTokens / seqlen, seqlen, seqlen, kHeads, kHeads);
      }
      for (const int64_t seqlen : {256, 1024, 4096})
        dense(STROBE_FORWARD, head_dim, causal, 1, seqlen, seqlen, 32, 8);
    }
    for (const int64_t seqlen_q : {1, 16, 128})
      dense(STROBE_FORWARD, head_dim, false, 4, seqlen_q, 4096, 32, 8);
    for (const int64_t page_size : {0, 16, 64}) {
      for (const auto& [batch, seqlen_q, seqlen_k] :
           {std::tuple{1, 1, 8192}, {16, 1, 4096}, {64, 1, 4096}, {16, 4, 4096}, {2, 512, 4096}}) {
        dense(STROBE_FORWARD, head_dim, true, batch, seqlen_q, seqlen_k, 32, 8);
        strobe_problem& p = set.back();
        p.has_seqused_k = 1;
        p.cache = page_size > 0 ? STROBE_CACHE_PAGED : STROBE_CACHE_CONTIGUOUS;
        p.page_size = page_size;
        p.pages_per_sequence = page_size > 0 ? seqlen_k / page_size : 0;
        p.pages = p.pages_per_sequence * batch;
      }
    }
  }
  return set;
}

// CPUs: what they are asked for, of sizes that they compute in a tenth of a second or so.
std::vector<strobe_problem> SetForCpu(const TuneOptions& o) {
  std::vector<strobe_problem> set;
  constexpr int64_t kTokens = 1024, kHeads = 4;
  for (const strobe_dtype dtype : {STROBE_FLOAT32, STROBE_BFLOAT16}) {
    for (const strobe_direction direction : {STROBE_FORWARD, STROBE_BACKWARD}) {
      for (const int64_t head_dim : {64, 128}) {
        for (const bool causal : {false, true}) {
          for (const int64_t seqlen : {256, 1024, 2048}) {
            strobe_problem p = EmptyProblem(o);
            p.dtype = dtype;
            p.direction = direction;
            p.head_dim = head_dim;
            p.causal = causal;
            p.batch = std::max<int64_t>(1, kTokens / seqlen);
            p.seqlen_q = p.seqlen_k = seqlen;
            p.heads = kHeads;
            set.push_back(p);
          }
        }
      }
    }
  }
  return set;
}

// ------------------------------------------------------------------------------------ recorded
// ones

constexpr const char* kDirections[] = {"forward", "backward"};

// The place of a name; throws std::string, what was expected.
template <size_t kCount>
int32_t PlaceOf(const nlohmann::json& value, const char* name, const char* const (&names)[kCount]) {
  for (size_t i = 0; i < kCount; ++i)
    if (value.is_string() && value.get<std::string>() == names[i]) return static_cast<int32_t>(i);
  throw UserError(fmt::format("{} = {}, expected one of {}", name,
                              Printable(value.dump(-1, ' ', true)), fmt::join(names, ", ")));
}

template <typename Field>
void Read(const nlohmann::json& value, const std::string& name, Field* field) {
  if constexpr (std::is_floating_point_v<Field>) {
    if (value.is_number()) {
      *field = value.get<Field>();
      return;
    }
  } else if (value.is_number_integer()) {
    const auto number = value.get<int64_t>();
    if (std::in_range<Field>(number)) {
      *field = static_cast<Field>(number);
      return;
    }
  }
  throw UserError(fmt::format("{} = {}, expected a number", Printable(name),
                              Printable(value.dump(-1, ' ', true))));
}

strobe_problem ReadProblem(const std::string& line, const TuneOptions& o) {
  const nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
  if (!json.is_object()) throw UserError("no JSON object");
  strobe_problem p = EmptyProblem(o);
  constexpr const char* kTypes[] = {"fp32", "bf16", "fp16"};
  for (const auto& [name, value] : json.items()) {
    bool known = true;
    if (name == "direction") {
      p.direction = PlaceOf(value, "direction", kDirections);
    } else if (name == "dtype") {
      p.dtype = PlaceOf(value, "dtype", kTypes);
    } else {
      known = false;
    }
    const std::string& wanted = name;  // a lambda may not use a structured binding
    const nlohmann::json& given = value;
    for_each_extent(p, [&](const char* field_name, auto& field) {
      if (wanted == field_name) Read(given, wanted, &field), known = true;
    });
    for_each_recorded_option(p, [&](const Option& option, auto& field) {
      if (wanted == option.field) Read(given, wanted, &field), known = true;
    });
    if (!known) throw UserError(fmt::format("{} is no field of a problem", Printable(name)));
  }
  if (o.threads > 0) p.threads = static_cast<int32_t>(o.threads);
  // A pool may be as large as the machine's memory; a launch reads those that its sequences have.
  if (p.cache == STROBE_CACHE_PAGED && p.batch > 0 && p.pages_per_sequence > 0)
    p.pages = std::min(p.pages, p.batch * p.pages_per_sequence);
  return p;
}

std::vector<strobe_problem> ReadRecorded(const TuneOptions& o) {
  std::ifstream file(o.input);
  if (!file) {
    throw UserError(fmt::format("cannot read {}: {}", PathText(o.input), std::strerror(errno)));
  }
  constexpr size_t kMostProblems = 100'000;
  constexpr std::streamsize kLongestLine = 1 << 16;
  std::vector<strobe_problem> problems;
  std::string room(static_cast<size_t>(kLongestLine), '\0');
  for (int64_t number = 1; problems.size() < kMostProblems; ++number) {
    if (!file.getline(room.data(), kLongestLine)) {
      if (file.eof() || file.gcount() == 0) break;
      throw UserError(
          fmt::format("{}, line {}: longer than {} bytes, expected what STROBE_RECORD writes",
                      PathText(o.input), number, kLongestLine));
    }
    const std::string line = room.c_str();
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      const strobe_problem p = ReadProblem(line, o);
      strobe_choice choice{};
      choice.struct_size = sizeof choice;
      if (strobe_plan_choice(&p, 0, &choice) == STROBE_INVALID_ARGUMENT)
        throw UserError(last_error());
      problems.push_back(p);
    } catch (const UserError& error) {
      throw UserError(fmt::format("{}, line {}: {}, expected what STROBE_RECORD writes",
                                  PathText(o.input), number, error.what()));
    }
  }
  if (file.bad()) throw UserError(fmt::format("cannot read {}", PathText(o.input)));
  return problems;
}

}  // namespace

std::vector<strobe_choice> ChoicesFor(const strobe_problem& problem) {
  std::vector<strobe_choice> found;
  strobe_choice choice{};
  choice.struct_size = sizeof choice;
  std::string next_kernel;  // of a CPU: after that of the rules
  for (int32_t i = 0; strobe_plan_choice(&problem, i, &choice) == STROBE_OK; ++i) {
    const bool of_rules = found.empty() || std::string(choice.kernel) == found.front().kernel;
    if (!of_rules) {
      // On a CPU every instruction set takes the problem, the narrow ones in ten times the time;
      // and with batch_invariant a table may not choose another one.
      if (problem.batch_invariant) continue;
      if (problem.device == STROBE_CPU && !next_kernel.empty()) continue;
      next_kernel = choice.kernel;
    }
    found.push_back(choice);
  }
  return found;
}

TuneProblems FindTuneProblems(const TuneOptions& o) {
  const std::vector<strobe_problem> given = !o.input.empty()            ? ReadRecorded(o)
                                            : o.device == Device::kCuda ? SetForCuda(o)
                                                                        : SetForCpu(o);
  TuneProblems found;
  for (const strobe_problem& problem : given) {
    strobe_plan plan{};
    plan.struct_size = sizeof plan;
    std::string text;
    if (strobe_plan_make(&problem, &plan) == STROBE_OK && TimedProblem::Fits(plan.problem) &&
        ChoicesFor(problem).size() > 1) {
      const int threads = problem.threads > 0 ? problem.threads : default_threads();
      text = tuning_bucket(plan.problem, threads);
    }
    if (text.empty()) {
      ++found.left_out;
      continue;
    }
    const auto same = [&](const TuneBucket& bucket) { return bucket.text == text; };
    auto bucket = std::ranges::find_if(found.buckets, same);
    if (bucket == found.buckets.end())
      bucket = found.buckets.insert(bucket, {.text = text, .problems = {}});
    bucket->problems.push_back(plan.problem);
  }
  return found;
}

}  // namespace strobe::cli
