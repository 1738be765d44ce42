#include "api/log.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>

#include "api/known_numbers.h"
#include "api/plan.h"
#include "core/checks.h"

namespace strobe {

namespace {

// In one write, so that lines of several threads and processes do not mix. A line that cannot be
// written is lost: there is nobody to tell.
void write_line(const std::string& text) {
  const std::string line = "strobe: " + text + "\n";
  std::fwrite(line.data(), 1, line.size(), stderr);
}

// As docs/semantics.md promises. A program whose shapes are new with each step would write forever.
constexpr size_t kMostLines = 1024;

class Log {
 public:
  Log() {
    const char* const given = std::getenv("STROBE_LOG");
    if (!given || !*given || std::strcmp(given, "0") == 0) return;
    if (std::strcmp(given, "1") == 0) {
      on_ = true;
      return;
    }
    write_line(
        format("STROBE_LOG = %.60s, expected 0 (off) or 1 (a line for each new problem)", given));
  }

  bool on() const { return on_.load(std::memory_order_relaxed); }

  // Whether a launch of this plan may have something new to say: asked before its line is made,
  // which takes longer than many a launch.
  bool may_be_new(const Plan& plan) {
    const auto* bytes = reinterpret_cast<const char*>(&plan.problem);
    return plans_.add(hash({bytes, sizeof plan.problem})) != KnownNumbers<kMostPlans>::kKnown;
  }

  void say(const std::string& text) {
    switch (lines_.add(hash(text))) {
      case KnownNumbers<kMostLines>::kNew:
        return write_line(text);
      case KnownNumbers<kMostLines>::kKnown:
        return;
      case KnownNumbers<kMostLines>::kFull:
        if (on_.exchange(false)) {
          write_line(
              format("STROBE_LOG has told of %zu problems and tells of no more", kMostLines));
        }
    }
  }

 private:
  static uint64_t hash(std::string_view bytes) { return std::hash<std::string_view>{}(bytes); }

  // Problems that differ in strides alone are told of in the same words.
  static constexpr size_t kMostPlans = 4 * kMostLines;
  std::atomic<bool> on_ = false;
  KnownNumbers<kMostPlans> plans_;
  KnownNumbers<kMostLines> lines_;
};

Log& the_log() {
  static Log log;
  return log;
}

}  // namespace

void read_log_setting() { the_log(); }

void log_launch(const Plan& plan) {
  Log& log = the_log();
  const AttentionProblem& p = plan.problem;
  // A launch without rows runs no kernel.
  if (!log.on() || (rows_q(p) == 0 && rows_k(p) == 0) || !log.may_be_new(plan)) return;
  try {
    log.say(who_computes(plan));
  } catch (const std::bad_alloc&) {
    // The line is lost, and the launch goes on.
  }
}

void log_declined(std::string_view text) {
  Log& log = the_log();
  if (!log.on()) return;
  std::string line;
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  for (const char c : text) c == '\n' ? line += "; " : line += c;
  log.say(line);
}

}  // namespace strobe
