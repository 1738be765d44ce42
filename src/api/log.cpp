#include "api/log.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>

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

// Numbers that were given to it, of which it holds so many at most. Without a lock, which a fork in
// the midst of a launch would leave locked in the child.
template <size_t kMost>
class Numbers {
 public:
  enum Answer { kNew, kKnown, kFull };
  Answer add(uint64_t number) {
    number |= uint64_t{1} << 63;  // 0 marks a free place
    for (size_t i = 0; i < kMost; ++i) {
      uint64_t found = 0;
      if (places_[(number + i) % kMost].compare_exchange_strong(found, number)) return kNew;
      if (found == number) return kKnown;
    }
    return kFull;
  }

 private:
  std::atomic<uint64_t> places_[kMost] = {};
};

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
    return plans_.add(hash({bytes, sizeof plan.problem})) != Numbers<kMostPlans>::kKnown;
  }

  void say(const std::string& text) {
    switch (lines_.add(hash(text))) {
      case Numbers<kMostLines>::kNew:
        return write_line(text);
      case Numbers<kMostLines>::kKnown:
        return;
      case Numbers<kMostLines>::kFull:
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
  Numbers<kMostPlans> plans_;
  Numbers<kMostLines> lines_;
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
