// The header of the safetensors format: 8 bytes of little-endian length, and JSON that says where
// in the data that follows each tensor lies.
//
// The parser trusts nothing: whatever bytes it is given, it returns either tensors that fill the
// data exactly or one line that says what is wrong. fuzz/safetensors.cpp drives it.
#ifndef STROBE_CLI_SAFETENSORS_H_
#define STROBE_CLI_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace strobe::cli {

// One tensor of a file, and which bytes of the file's data it is.
struct TensorInfo {
  std::string name;
  std::string dtype;           // as the format spells it: "F32", "BF16", "F16", "I32", ...
  std::vector<int64_t> shape;  // every extent >= 0; with the element's size they give bytes()
  uint64_t begin = 0;
  uint64_t end = 0;

  [[nodiscard]] uint64_t bytes() const { return end - begin; }
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;

  // Null when there is no such tensor.
  [[nodiscard]] const TensorInfo* Find(std::string_view name) const;
};

// The length of the header and its first character: so much is looked at before anything else.
inline constexpr size_t kPrefixBytes = 9;

// Both return nothing on success, else one line that says what was got and what was wanted. They
// throw nothing but std::bad_alloc. Of a pipe the size is not known beforehand.

// `first`: the file's first kPrefixBytes, or all of it when it has fewer.
[[nodiscard]] std::optional<std::string> ParsePrefix(std::span<const std::byte> first,
                                                     std::optional<uint64_t> file_bytes,
                                                     uint64_t* header_bytes);

// `text`: the header; `data_bytes`: what follows it. On failure *header is empty. Memory is bounded
// by the text's size.
[[nodiscard]] std::optional<std::string> ParseHeader(std::string_view text,
                                                     std::optional<uint64_t> data_bytes,
                                                     SafetensorsHeader* header);

}  // namespace strobe::cli

#endif  // STROBE_CLI_SAFETENSORS_H_
