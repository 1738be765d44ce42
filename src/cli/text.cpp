#include "cli/text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace strobe::cli {
namespace {

// Of a character of several bytes in UTF-8, one after the first.
bool IsContinuation(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

}  // namespace

std::string Printable(std::string_view text, size_t limit) {
  std::string printable;
  for (const char c : text) {
    if (printable.size() >= limit) return printable + "...";
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || byte >= 0x80) {
      printable += fmt::format("\\x{:02x}", byte);
    } else {
      printable += c;
    }
  }
  return printable;
}

std::string PathText(std::string_view path) {
  constexpr size_t kLimit = 160;
  if (path.empty()) return "\"\"";
  std::string text;
  for (const char c : path) {  // names are written in all languages: bytes from 0x80 stay
    const auto byte = static_cast<unsigned char>(c);
    text += byte < 0x20 || byte == 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  if (text.size() <= kLimit) return text;
  size_t begin = text.size() - kLimit + 3;
  while (begin < text.size() && IsContinuation(text[begin])) ++begin;
  return "..." + text.substr(begin);
}

std::string ShapeText(std::span<const int64_t> shape) {
  constexpr size_t kFew = 6;
  if (shape.size() <= kFew) return fmt::format("[{}]", fmt::join(shape, ", "));
  return fmt::format("[{}, ... {} extents]", fmt::join(shape.first(kFew - 1), ", "), shape.size());
}

std::string NamesText(const std::vector<std::string_view>& names) {
  constexpr size_t kLimit = 120;
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (text.size() >= kLimit) return fmt::format("{} and {} more", text, names.size() - i);
    text += (i > 0 ? ", " : "") + Printable(names[i], 40);
  }
  return text;
}

std::string Message(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  if (text.size() <= kMaxMessage) return text;
  size_t end = kMaxMessage - 3;
  while (end > 0 && IsContinuation(text[end])) --end;
  return text.substr(0, end) + "...";
}

}  // namespace strobe::cli
