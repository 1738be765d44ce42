// Texts of the headers' own errors and plans. Part of the headers for several ranks and for GPUs,
// which include it.
#ifndef STROBE_FORMATTED_HPP_
#define STROBE_FORMATTED_HPP_

#include <array>
#include <cstdarg>
#include <cstdio>
#include <string>

namespace strobe {
inline namespace v0 {
namespace internal {

// As printf has it, in at most 400 bytes, which are the most that the library itself says.
[[nodiscard, gnu::format(printf, 1, 2)]] inline std::string formatted(const char* format, ...) {
  std::array<char, 401> text = {};
  va_list values;
  va_start(values, format);
  std::vsnprintf(text.data(), text.size(), format, values);
  va_end(values);
  return text.data();
}

}  // namespace internal
}  // namespace v0
}  // namespace strobe

#endif  // STROBE_FORMATTED_HPP_
