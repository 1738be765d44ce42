// The parser of safetensors headers under arbitrary bytes: it gives tensors that fill the file, or
// one line of text.
#include "cli/safetensors.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>

#include "cli/text.h"

namespace {

[[noreturn]] void Wrong(const char* what, const std::string& text) {
  std::fprintf(stderr, "safetensors: %s: %s\n", what, text.c_str());
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using strobe::cli::kPrefixBytes;
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  strobe::cli::SafetensorsHeader header;
  uint64_t header_bytes = 0;
  std::optional<std::string> error = strobe::cli::ParsePrefix(
      file.first(std::min(size, kPrefixBytes)), uint64_t{size}, &header_bytes);
  uint64_t end = 0;
  if (!error) {
    const std::string_view text(reinterpret_cast<const char*>(data) + sizeof header_bytes,
                                header_bytes);
    end = size - sizeof header_bytes - header_bytes;
    error = strobe::cli::ParseHeader(text, end, &header);
  }
  if (error) {
    if (error->empty() || error->find('\n') != std::string::npos ||
        error->size() > strobe::cli::kMaxMessage || !header.tensors.empty()) {
      Wrong("a bad refusal", *error);
    }
    return 0;
  }
  uint64_t at = 0;
  for (const auto& tensor : header.tensors) {
    if (tensor.begin != at || tensor.end < at || tensor.end > end)
      Wrong("not in its place", tensor.name);
    at = tensor.end;
    for (const int64_t extent : tensor.shape) {
      if (extent < 0) Wrong("a negative extent", tensor.name);
    }
    if (header.Find(tensor.name) == nullptr) Wrong("not found", tensor.name);
  }
  if (at != end) Wrong("bytes that belong to none", "");
  return 0;
}
