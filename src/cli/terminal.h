// What a person sees: standard output whose failures are seen, units, colour only on a terminal, a
// progress line that erases itself.
#ifndef STROBE_CLI_TERMINAL_H_
#define STROBE_CLI_TERMINAL_H_

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "cli/errors.h"

namespace strobe::cli {

[[noreturn]] inline void ThrowOutputError() {
  throw UserError(fmt::format("cannot write standard output: {}", std::strerror(errno)));
}

// To standard output. Throws UserError where it cannot be written; as it is buffered, a full disk
// may show at Flush only.
template <typename... Args>
void Print(fmt::format_string<Args...> text, Args&&... args) {
  const std::string line = fmt::format(text, std::forward<Args>(args)...);
  if (std::fwrite(line.data(), 1, line.size(), stdout) != line.size()) ThrowOutputError();
}
inline void Flush() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) ThrowOutputError();
}

[[nodiscard]] inline bool IsTerminal(std::FILE* file) { return isatty(fileno(file)) != 0; }

// Colour on a terminal, unless NO_COLOR is set (https://no-color.org) or the terminal cannot.
[[nodiscard]] inline bool UseColour(std::FILE* file) {
  const char* no_colour = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  return IsTerminal(file) && (no_colour == nullptr || *no_colour == '\0') &&
         (terminal == nullptr || std::string_view(terminal) != "dumb");
}

[[nodiscard]] inline std::string Coloured(std::string_view text, const char* code) {
  static const bool use = UseColour(stdout);
  return use ? fmt::format("\033[{}m{}\033[0m", code, text) : std::string(text);
}
[[nodiscard]] inline std::string Bold(std::string_view text) { return Coloured(text, "1"); }
[[nodiscard]] inline std::string Dim(std::string_view text) { return Coloured(text, "2"); }
[[nodiscard]] inline std::string Green(std::string_view text) { return Coloured(text, "32"); }
[[nodiscard]] inline std::string Cyan(std::string_view text) { return Coloured(text, "36"); }
[[nodiscard]] inline std::string Red(std::string_view text) { return Coloured(text, "31"); }

// A line on standard error that the next one overwrites, on a terminal only. It says how long the
// command still takes, where that is known and was or is five seconds at least. A caller erases it
// before it prints.
inline void Progress(std::string_view text, double seconds_left = 0) {
  static const bool shown = IsTerminal(stderr);
  static const auto begin = std::chrono::steady_clock::now();
  if (!shown) return;
  const double so_far =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  std::string line(text);
  if (!text.empty() && seconds_left > 0 && so_far + seconds_left >= 5) {
    const auto left = static_cast<int64_t>(std::ceil(seconds_left));
    line += left < 100 ? fmt::format("  {} s left", left)
                       : fmt::format("  {} min left", (left + 59) / 60);
  }
  std::fprintf(stderr, "\r\033[K%s", line.c_str());
  std::fflush(stderr);
}
inline void ClearProgress() { Progress(""); }

// Three significant digits, without an exponent.
[[nodiscard]] inline std::string ThreeDigits(double value) {
  const int before = value < 9.995 ? 1 : value < 99.95 ? 2 : 3;
  return fmt::format("{:.{}f}", value, 3 - before);
}

[[nodiscard]] inline std::string TimeText(double seconds) {
  if (seconds < 999.5e-6) return ThreeDigits(seconds * 1e6) + " us";
  if (seconds < 0.9995) return ThreeDigits(seconds * 1e3) + " ms";
  return ThreeDigits(seconds) + " s ";
}

// 1 KB is 1000 bytes.
[[nodiscard]] inline std::string BytesText(double bytes) {
  if (bytes < 999.5) return fmt::format("{:.0f} B ", bytes);
  if (bytes < 999.5e3) return ThreeDigits(bytes / 1e3) + " KB";
  if (bytes < 999.5e6) return ThreeDigits(bytes / 1e6) + " MB";
  return ThreeDigits(bytes / 1e9) + " GB";
}

[[nodiscard]] inline std::string SpeedText(double flop_per_second) {
  if (flop_per_second < 999.5e9) return ThreeDigits(flop_per_second / 1e9) + " GFLOP/s";
  return ThreeDigits(flop_per_second / 1e12) + " TFLOP/s";
}

class Stopwatch {
 public:
  [[nodiscard]] double Seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_TERMINAL_H_
