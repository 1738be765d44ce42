// `strobe tune`: measures which choices are faster than the rules' on this machine, and writes
// those down for the library.
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/errors.h"
#include "cli/safetensors_file.h"
#include "cli/terminal.h"
#include "cli/text.h"
#include "cli/tune_problems.h"
#include "cli/tune_timing.h"
#include "cli/tuner.h"
#include "core/tuning_file.h"

namespace strobe::cli {
namespace {

// "" where there is no such file.
std::string ReadText(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return {};
  std::ifstream file(path, std::ios::binary);
  std::string text(TuningFile::kMostBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

void WriteText(const std::string& path, const std::string& text) {
  const std::span<const std::byte> whole = std::as_bytes(std::span(text));
  WriteFile(path, {&whole, 1});
}

// The device that is measured, as the table knows it.
TunedDevice DeviceOf(const TuneOptions& o) {
  const Machine m = machine();
  if (o.device == Device::kCpu) {
    if (m.cpu_name.empty())
      throw UserError("this CPU does not say its name, by which a table would know it");
    return {.device = "cpu", .name = m.cpu_name, .compute_capability = 0, .choices = {}};
  }
  const auto index = static_cast<size_t>(o.device_index);
  if (index >= m.cuda_devices.size()) {
    throw UserError(fmt::format("--device-index = {}, expected below the number of GPUs, {}{}",
                                index, m.cuda_devices.size(),
                                m.cuda_reason.empty() ? "" : ": " + m.cuda_reason));
  }
  const CudaDevice& d = m.cuda_devices[index];
  return {
      .device = "cuda", .name = d.name, .compute_capability = d.compute_capability, .choices = {}};
}

bool IsSame(const TunedDevice& a, const TunedDevice& b) {
  return a.device == b.device && a.name == b.name && a.compute_capability == b.compute_capability;
}

// Where the library will look for the table.
std::string OutputOf(const TuneOptions& o) {
  if (!o.output.empty()) return o.output;
  const char* const named = std::getenv("STROBE_TUNING");
  if (named != nullptr && *named != '\0' && std::string(named) != "0") return named;
  const std::string path = tuning_path_of_user();
  if (path.empty())
    throw UserError("neither HOME nor XDG_CACHE_HOME names a folder, expected --output FILE");
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw UserError(fmt::format("cannot make folder {} for the choices: {}, expected --output FILE",
                                Printable(PathText(folder.string()), 120), error.message()));
  }
  return path;
}

// What has been found out, bucket by bucket, in a file beside the table: a run that is stopped goes
// on from there.
class Progressed {
 public:
  Progressed(std::string path, const TunedDevice& device)
      : path_(std::move(path)), device_(device) {
    TuningFile file;
    // The same format as the table's, in which a bucket where the rules win has no kernel.
    if (!parse_tuning(ReadText(path_), file).empty() || file.version != version() ||
        file.devices.size() != 1 || !IsSame(file.devices[0], device))
      return;
    for (const TunedChoice& choice : file.devices[0].choices) done_[choice.problems] = choice;
  }

  [[nodiscard]] bool Has(const std::string& bucket) const { return done_.contains(bucket); }
  [[nodiscard]] const std::map<std::string, TunedChoice>& done() const { return done_; }

  void Add(const TunedChoice& choice) {
    done_[choice.problems] = choice;
    TuningFile file{.version = version(), .devices = {device_}};
    for (const auto& [bucket, each] : done_) file.devices[0].choices.push_back(each);
    WriteText(path_, to_text(file));
  }
  void Remove() const {
    std::error_code error;
    std::filesystem::remove(path_, error);
  }

 private:
  std::string path_;
  TunedDevice device_;
  std::map<std::string, TunedChoice> done_;
};

// Writes what was found into the table, beside what it has of other buckets and devices. One that
// is broken or of another version is replaced.
size_t WriteTable(const std::string& path, const TunedDevice& device,
                  const std::map<std::string, TunedChoice>& found) {
  TuningFile file;
  if (!parse_tuning(ReadText(path), file).empty() || file.version != version()) file = {};
  file.version = version();
  TunedDevice* own = nullptr;
  for (TunedDevice& each : file.devices)
    if (IsSame(each, device)) own = &each;
  if (own == nullptr) own = &file.devices.emplace_back(device);
  std::erase_if(own->choices,
                [&](const TunedChoice& choice) { return found.contains(choice.problems); });
  for (const auto& [bucket, choice] : found)
    if (!choice.kernel.empty()) own->choices.push_back(choice);
  std::sort(own->choices.begin(), own->choices.end(),
            [](const auto& a, const auto& b) { return a.problems < b.problems; });
  const size_t count = own->choices.size();
  WriteText(path, to_text(file));
  return count;
}

strobe_plan PlanWith(const strobe_problem& problem, const strobe_choice& choice) {
  strobe_plan plan{};
  plan.struct_size = sizeof plan;
  internal::throw_unless_ok(static_cast<Status>(strobe_plan_make_chosen(&problem, &choice, &plan)));
  return plan;
}

// The choice that wins over all problems of a bucket.
TunedChoice TuneOne(const TuneBucket& bucket, const Tuner& tuner, const Stopwatch& watch,
                    double seconds) {
  TunedChoice none{.problems = bucket.text, .kernel = "", .instance = ""};
  const strobe_problem& problem = bucket.problems.front();
  const std::vector<strobe_choice> choices = ChoicesFor(problem);
  const double share = seconds / static_cast<double>(bucket.problems.size());
  const double end = watch.Seconds() + share;
  Verdict verdict;
  {
    TimedProblem launch(problem);
    for (const strobe_choice& choice : choices) launch.Add(PlanWith(problem, choice));
    verdict = tuner.Decide(
        choices.size(), [&](size_t n) { return launch.Run(n); },
        std::max(0.0, end - watch.Seconds()));
  }
  if (verdict.winner == 0) return none;
  const strobe_choice& winner = choices[verdict.winner];
  // It must not lose on any of the others, either.
  constexpr double kNotSlower = 0.99;
  for (size_t i = 1; i < bucket.problems.size(); ++i) {
    const strobe_problem& other = bucket.problems[i];
    strobe_plan plan{};
    plan.struct_size = sizeof plan;
    if (strobe_plan_make_chosen(&other, &winner, &plan) != STROBE_OK) continue;  // nor is it taken
    TimedProblem launch(other);
    launch.Add(PlanWith(other, ChoicesFor(other).front()));
    launch.Add(plan);
    const Ratios ratios = tuner.Compare(
        1, [&](size_t n) { return launch.Run(n); }, watch.Seconds() + share);
    if (ratios.median < kNotSlower) return none;
  }
  return {.problems = bucket.text,
          .kernel = winner.kernel,
          .instance = winner.instance != nullptr ? winner.instance : "",
          .block = winner.block,
          .gain_percent = static_cast<int64_t>(std::lround(100 * verdict.gain))};
}

std::string TextOf(const TunedChoice& choice) {
  return ChoiceText(
      strobe_choice{.struct_size = sizeof(strobe_choice),
                    .kernel = choice.kernel.c_str(),
                    .instance = choice.instance.empty() ? nullptr : choice.instance.c_str(),
                    .block = choice.block});
}

// `strobe tune --check`: the table's choices against the rules'.
int CheckTable(const TuneOptions& o, const std::vector<TuneBucket>& buckets) {
  if (!o.output.empty())
    internal::throw_unless_ok(static_cast<Status>(strobe_tuning_load(o.output.c_str())));
  Print("{}\n\n", tuning());
  const Stopwatch watch;
  const Tuner tuner([&] { return watch.Seconds(); });
  double logarithms = 0;
  int64_t compared = 0, of_rules = 0;
  for (size_t i = 0; i < buckets.size(); ++i) {
    const TuneBucket& bucket = buckets[i];
    for (const strobe_problem& problem : bucket.problems) {
      strobe_plan tuned{};
      tuned.struct_size = sizeof tuned;
      internal::throw_unless_ok(static_cast<Status>(strobe_plan_make(&problem, &tuned)));
      if (tuned.chosen_by != STROBE_CHOSEN_BY_TUNING) {
        ++of_rules;
        continue;
      }
      Progress(bucket.text, o.seconds - watch.Seconds());
      const strobe_choice rules = ChoicesFor(problem).front();
      TimedProblem launch(problem);
      launch.Add(PlanWith(problem, rules));
      launch.Add(tuned);
      double best[2] = {1e300, 1e300};
      const auto run = [&](size_t n) {
        const double seconds = launch.Run(n);
        best[n] = std::min(best[n], seconds);
        return seconds;
      };
      const double left = static_cast<double>(buckets.size() - i);
      for (const size_t n : {0, 1}) (void)run(n);
      const double end = watch.Seconds() + std::max(0.0, o.seconds - watch.Seconds()) / left;
      const Ratios ratios = tuner.Compare(1, run, end);
      logarithms += std::log(ratios.median);
      ++compared;
      ClearProgress();
      Print("{}\n  {:<58} {:>9}\n  {:<58} {:>9}  {:+.1f} %\n", bucket.text, ChoiceText(rules),
            TimeText(best[0]),
            tuned.instance_name != nullptr
                ? tuned.instance_name
                : fmt::format("{}, blocks of {}", tuned.kernel,
                              problem.direction == STROBE_FORWARD ? tuned.block_q : tuned.block_k),
            TimeText(best[1]), 100 * (ratios.median - 1));
      Flush();
    }
  }
  if (compared == 0) {
    Print("The table chooses for none of {} problems: the rules do.\n", of_rules);
    return 0;
  }
  Print("\nChosen by tuning: {} problems, {:+.1f} % in the geometric mean. By the rules: {}.\n",
        compared, 100 * (std::exp(logarithms / static_cast<double>(compared)) - 1), of_rules);
  return 0;
}

}  // namespace

int Tune(const TuneOptions& o) {
  const TunedDevice device = DeviceOf(o);
  const TuneProblems problems = FindTuneProblems(o);
  const std::vector<TuneBucket>& buckets = problems.buckets;
  if (buckets.empty()) throw UserError("there is nothing to choose for any of the problems");
  if (o.check) return CheckTable(o, buckets);
  const std::string path = OutputOf(o);
  CheckWritable(path);
  Progressed progressed(path + ".part", device);
  Print("Strobe {} on {}: {} kinds of problems, about {:.0f} s.\n", version(), device.name,
        buckets.size(), o.seconds);
  if (problems.left_out > 0)
    Print("Left out, as there is nothing to choose: {} problems.\n", problems.left_out);
  size_t left = 0;
  for (const TuneBucket& bucket : buckets) left += !progressed.Has(bucket.text);
  if (left < buckets.size()) Print("Goes on: {} are done.\n", buckets.size() - left);
  Print("\n");
  const Stopwatch watch;
  const Tuner tuner([&] { return watch.Seconds(); });
  const double all = o.seconds * static_cast<double>(left) / static_cast<double>(buckets.size());
  for (const TuneBucket& bucket : buckets) {
    if (progressed.Has(bucket.text)) continue;
    const double rest = std::max(0.0, all - watch.Seconds());
    Progress(bucket.text, rest);
    const TunedChoice found = TuneOne(bucket, tuner, watch, rest / static_cast<double>(left--));
    progressed.Add(found);
    ClearProgress();
    if (found.kernel.empty()) continue;
    Print("{}\n  {}: {} % faster\n", bucket.text, TextOf(found), found.gain_percent);
    Flush();
  }
  size_t won = 0;
  for (const TuneBucket& bucket : buckets) won += !progressed.done().at(bucket.text).kernel.empty();
  const size_t in_table = WriteTable(path, device, progressed.done());
  progressed.Remove();
  Print("\n{} of {} are faster otherwise than by the rules.\n{}\n", won, buckets.size(),
        Bold(fmt::format("wrote {}, {} choices for this device", PathText(path), in_table)));
  return 0;
}

}  // namespace strobe::cli
