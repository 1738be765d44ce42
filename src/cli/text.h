// Pieces of messages that hold what a user or a file gave: fit to print, and short.
#ifndef STROBE_CLI_TEXT_H_
#define STROBE_CLI_TEXT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace strobe::cli {

// No error that the tool prints is longer.
inline constexpr size_t kMaxMessage = 400;

// Made fit to print: control characters as \xNN, and cut to about `limit` bytes.
[[nodiscard]] std::string Printable(std::string_view text, size_t limit = 60);

// A path, of which the end says most: a long one loses its beginning.
[[nodiscard]] std::string PathText(std::string_view path);

// "[2, 512, 12, 32]", and of many extents the first few.
[[nodiscard]] std::string ShapeText(std::span<const int64_t> shape);

// "q, k, v", and of many names the first few and how many there are more.
[[nodiscard]] std::string NamesText(const std::vector<std::string_view>& names);

// A whole message, cut to kMaxMessage bytes if the pieces came to more.
[[nodiscard]] std::string Message(std::string text);

}  // namespace strobe::cli

#endif  // STROBE_CLI_TEXT_H_
