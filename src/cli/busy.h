// Whether a computer is too busy for timings to mean anything: how many of its processors other
// programs had meanwhile, and how far the repetitions of one timing lie apart. For
// `strobe bench` and the demo.
#ifndef STROBE_CLI_BUSY_H_
#define STROBE_CLI_BUSY_H_

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/measure.h"
#include "cli/terminal.h"

namespace strobe::cli {

// Clock ticks since the computer started, summed over its processors, and how many there are.
struct ProcessorTicks {
  double busy = 0;  // whoever was busy, other guests of the same host included
  int processors = 0;
};

// Of the text of /proc/stat (proc_stat(5)). Without a value where that is not what the text is.
[[nodiscard]] inline std::optional<ProcessorTicks> ReadProcessorTicks(std::istream& stat) {
  std::optional<ProcessorTicks> ticks;
  for (std::string line; std::getline(stat, line) && line.starts_with("cpu");) {
    std::istringstream fields(line);
    std::string name;
    double user = 0, nice = 0, system = 0, idle = 0, waiting = 0, irq = 0, soft_irq = 0, stolen = 0;
    if (!(fields >> name >> user >> nice >> system >> idle >> waiting >> irq >> soft_irq >> stolen))
      return std::nullopt;
    if (!ticks) ticks.emplace();
    if (name == "cpu") {
      ticks->busy = user + nice + system + irq + soft_irq + stolen;
    } else {
      ++ticks->processors;
    }
  }
  if (ticks && ticks->processors == 0) return std::nullopt;
  return ticks;
}

// Clock ticks that a process has had: of the text of /proc/PID/stat. Its second field is the
// program's name in parentheses and may hold anything, spaces and parentheses too.
[[nodiscard]] inline std::optional<double> ReadProcessTicks(std::istream& stat) {
  std::string line;
  std::getline(stat, line);
  const size_t name = line.rfind(')');
  if (name == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name + 1));
  std::string skipped;
  for (int field = 3; field < 14; ++field) fields >> skipped;
  double user = 0, system = 0;
  if (!(fields >> user >> system)) return std::nullopt;
  return user + system;
}

// Counts the time that programs other than these had from its construction on.
class OtherPrograms {
 public:
  explicit OtherPrograms(std::vector<pid_t> ours) : ours_(std::move(ours)), begin_(Now()) {}

  // How many processors they had on average. Without a value where the system does not tell, or
  // too little time has passed.
  [[nodiscard]] std::optional<double> Mean() const {
    const std::optional<Sample> now = Now();
    const double ticks = watch_.Seconds() * static_cast<double>(sysconf(_SC_CLK_TCK));
    constexpr double kLeast = 10;  // fewer are too coarse a measure
    if (!now || !begin_ || ticks < kLeast) return std::nullopt;
    const double others = (now->all.busy - begin_->all.busy) - (now->ours - begin_->ours);
    return std::clamp<double>(others / ticks, 0, now->all.processors);
  }

  [[nodiscard]] int processors() const { return begin_ ? begin_->all.processors : 0; }

 private:
  struct Sample {
    ProcessorTicks all;
    double ours = 0;
  };

  [[nodiscard]] std::optional<Sample> Now() const {
    Sample sample;
    std::ifstream stat("/proc/stat");
    const std::optional<ProcessorTicks> all = ReadProcessorTicks(stat);
    if (!all) return std::nullopt;
    sample.all = *all;
    for (const pid_t process : ours_) {
      std::ifstream file(fmt::format("/proc/{}/stat", process));
      const std::optional<double> ticks = ReadProcessTicks(file);
      if (!ticks) return std::nullopt;
      sample.ours += *ticks;
    }
    return sample;
  }

  std::vector<pid_t> ours_;
  Stopwatch watch_;
  std::optional<Sample> begin_;
};

// "" where timings may be compared; else why not, as a sentence goes on after "too busy: ".
// others: the mean of OtherPrograms. threads: of the programs that were timed.
[[nodiscard]] inline std::string WhyTooBusy(std::optional<double> others, int processors,
                                            int64_t threads, const std::vector<Timing>& timings) {
  // A thread that has to share its processor for a seventh of the time holds the others up: they
  // wait for it at the end of each step.
  constexpr double kShared = 0.15;
  // Undisturbed, the median of repetitions is within a few percent of the fastest.
  constexpr double kSpread = 1.25;
  if (others && *others > (processors - static_cast<double>(threads)) +
                              kShared * static_cast<double>(threads)) {
    return fmt::format("other programs had {:.1f} of the {} processors", *others, processors);
  }
  for (const Timing& timing : timings) {
    if (timing.runs >= 3 && timing.median > kSpread * timing.best) {
      return fmt::format("half of the repetitions took over {:.1f} times as long as the fastest",
                         timing.median / timing.best);
    }
  }
  return "";
}

// What to do for timings that may be compared, as a whole sentence. command: what was typed.
// others, processors, threads: as above. Fewer threads help where the other programs leave some
// processors alone.
[[nodiscard]] inline std::string HowToTime(std::string_view command, std::optional<double> others,
                                           int processors, int64_t threads) {
  constexpr double kLittle = 0.1;  // of a processor, which is not in the way of a thread
  const auto free = static_cast<int64_t>(others ? processors - *others + kLittle : 0);
  const std::string later = fmt::format("Run `{}` again when the other programs rest", command);
  if (free < 1 || free >= threads) return later + ".";
  return fmt::format("{}, or now on the processors that they leave: `OMP_NUM_THREADS={} {}`.",
                     later, free, command);
}

// The lines of a table whose timings say little, for the mark beside each and the sentence below.
class BusyLines {
 public:
  // command: what was typed.
  explicit BusyLines(std::string command) : command_(std::move(command)) {}

  // Why a line's timings say little, "" where they may be compared. others: from its begin on.
  // threads: of the program, 0 where it waits for a GPU.
  [[nodiscard]] std::string Judge(const OtherPrograms& others, int64_t threads,
                                  const std::vector<Timing>& timings) {
    const std::optional<double> mean = threads > 0 ? others.Mean() : std::nullopt;
    std::string why = WhyTooBusy(mean, others.processors(), threads, timings);
    if (!why.empty() && note_.empty()) {
      note_ = fmt::format(
          "busy: this computer was too busy to time such a line; at the first of "
          "them\n{}.\n{}",
          why, HowToTime(command_, mean, others.processors(), threads));
    }
    return why;
  }

  // Of the first such line: why, and what to do. "" where there is none.
  [[nodiscard]] const std::string& note() const { return note_; }

 private:
  std::string command_, note_;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_BUSY_H_
