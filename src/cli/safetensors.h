// Reader and writer of the safetensors format: 8 bytes of little-endian header length, a JSON
// header, tensor data.
//
// The reader trusts nothing: whatever bytes it is given, it returns either views that lie inside
// them or one line that says what is wrong. fuzz/safetensors.cpp drives ParseSafetensors.
#ifndef STROBE_CLI_SAFETENSORS_H_
#define STROBE_CLI_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace strobe::cli {

// One tensor of a parsed file. `data` points into the bytes that were parsed.
struct TensorView {
  std::string name;
  std::string dtype;  // as the format spells it: "F32", "BF16", "F16", "I32", ...
  std::vector<int64_t>
      shape;  // every extent >= 0; their product times the element size is data.size()
  std::span<const std::byte> data;
};

struct SafetensorsView {
  std::vector<TensorView> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;

  // Null when there is no such tensor.
  [[nodiscard]] const TensorView* Find(std::string_view name) const;
};

// Parses a whole file. On success fills *view and returns nothing; else returns one line that says
// what was got and what was wanted, and leaves *view empty. Throws nothing but std::bad_alloc;
// memory is bounded by the header's size.
[[nodiscard]] std::optional<std::string> ParseSafetensors(std::span<const std::byte> file,
                                                          SafetensorsView* view);

// The whole file at `path` in memory that is aligned to 64 bytes, and its parse.
class SafetensorsFile {
 public:
  // Throws UserError (errors.h) with the path in its text.
  explicit SafetensorsFile(const std::string& path);
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;
  ~SafetensorsFile();

  [[nodiscard]] const SafetensorsView& view() const { return view_; }

 private:
  std::byte* bytes_ = nullptr;
  size_t size_ = 0;
  SafetensorsView view_;
};

// Throws UserError when `path` cannot be written: a directory, no such folder, no permission.
// Writes nothing.
void CheckWritable(const std::string& path);

// Writes the tensors to a temporary file beside `path`, then renames it: `path` holds the whole
// result or what it held before. Throws UserError.
void WriteSafetensors(const std::string& path, std::span<const TensorView> tensors,
                      const std::map<std::string, std::string>& metadata);

// Text from a file, made fit to print: control characters as \xNN, and cut to `limit` bytes.
[[nodiscard]] std::string Printable(std::string_view text, size_t limit = 60);

// "[2, 512, 12, 32]"
[[nodiscard]] std::string ShapeText(std::span<const int64_t> shape);

}  // namespace strobe::cli

#endif  // STROBE_CLI_SAFETENSORS_H_
