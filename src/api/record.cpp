#include "api/record.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

#include "api/known_numbers.h"
#include "core/checks.h"
#include "core/problem.h"
#include "core/problem_fields.h"
#include "core/tuning_bucket.h"

namespace strobe {

namespace {

std::string to_json(const AttentionProblem& p) {
  std::string s =
      format(R"({"direction": "%s", "dtype": "%s")",
             p.direction == STROBE_FORWARD ? "forward" : "backward", dtype_name(p.dtype));
  const auto integer = [&](const char* name, int64_t value) {
    s += format(", \"%s\": %" PRId64, name, value);
  };
  for_each_extent(p, integer);
  for_each_recorded_option(p, [&](const Option& option, const auto& field) {
    if (static_cast<double>(field) == option.otherwise) return;
    if constexpr (std::is_floating_point_v<std::remove_cvref_t<decltype(field)>>) {
      s += format(", \"%s\": %.9g", option.field, static_cast<double>(field));
    } else {
      integer(option.field, field);
    }
  });
  return s + "}\n";
}

class Record {
 public:
  Record() {
    const char* const path = std::getenv("STROBE_RECORD");
    if (!path || !*path) return;
    // A pipe that nobody reads would have the first launch wait.
    fd_ = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666);
    on_ = fd_ >= 0;
    const int why = errno;
    path_ = format("%.200s", path);
    if (!on_) tell(why);
  }

  bool on() const { return on_.load(std::memory_order_relaxed); }

  void note(const AttentionProblem& p) {
    using Answer = KnownNumbers<kMost>::Answer;
    const std::hash<std::string_view> hash;
    const std::string_view bytes{reinterpret_cast<const char*>(&p), sizeof p};
    switch (problems_.add(hash(bytes))) {
      case Answer::kNew:
        break;
      case Answer::kKnown:
        return;
      case Answer::kFull:  // a program whose shapes are new with each step
        on_ = false;
        return;
    }
    if (tuning_bucket(p, 1).empty()) return;
    const std::string line = to_json(p);
    if (lines_.add(hash(line)) != Answer::kNew) return;
    // In one write, so that lines of several processes do not mix.
    const ssize_t written = write(fd_, line.data(), line.size());
    if (written == static_cast<ssize_t>(line.size())) return;
    const int why = written < 0 ? errno : ENOSPC;  // a part of the line was the last that fitted
    if (why == EAGAIN || why == EINTR) return;     // a pipe's reader is behind: the line is lost
    if (on_.exchange(false)) tell(why);
  }

 private:
  /// Says once that nothing is noted from here on.
  void tell(int why) const {
    const std::string line = format("strobe: STROBE_RECORD = %s: cannot be written: %s\n",
                                    path_.c_str(), std::strerror(why));
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;  // there is nobody to tell
  }

  static constexpr size_t kMost = 4096;
  int fd_ = -1;  // open until the process ends
  std::string path_;
  std::atomic<bool> on_ = false;
  static inline KnownNumbers<kMost> problems_, lines_;  // no memory until they are used
};

Record& the_record() {
  static Record& record = *new Record;
  return record;
}

}  // namespace

void read_record_setting() { the_record(); }

void record_launch(const Plan& plan) {
  Record& record = the_record();
  if (!record.on()) return;
  try {
    record.note(plan.problem);
  } catch (const std::bad_alloc&) {
    // The line is lost, and the launch goes on.
  }
}

}  // namespace strobe
