#include "cli/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "cli/text.h"

namespace strobe::cli {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

using nlohmann::json;

// The limit of the reference implementation.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kMaxRank = 32;

// Bytes of an element; 0 for a dtype that the format does not have.
size_t ElementBytes(std::string_view dtype) {
  static constexpr std::array<std::pair<std::string_view, size_t>, 15> kSizes = {{{"BOOL", 1},
                                                                                  {"U8", 1},
                                                                                  {"I8", 1},
                                                                                  {"F8_E5M2", 1},
                                                                                  {"F8_E4M3", 1},
                                                                                  {"I16", 2},
                                                                                  {"U16", 2},
                                                                                  {"F16", 2},
                                                                                  {"BF16", 2},
                                                                                  {"I32", 4},
                                                                                  {"U32", 4},
                                                                                  {"F32", 4},
                                                                                  {"F64", 8},
                                                                                  {"I64", 8},
                                                                                  {"U64", 8}}};
  const auto* found =
      std::find_if(kSizes.begin(), kSizes.end(), [&](const auto& s) { return s.first == dtype; });
  return found == kSizes.end() ? 0 : found->second;
}

// One entry of the header, as it stands there.
struct HeaderEntry {
  std::string name;
  std::optional<std::string> dtype;
  std::optional<std::vector<uint64_t>> shape;
  std::optional<std::vector<uint64_t>> offsets;
};

// Reads the header's JSON as a stream of events and refuses whatever has no place in it at once. So
// nothing nests deeper than {tensor: {field: [number]}}, duplicates are seen, and no tree is ever
// built.
class HeaderHandler : public nlohmann::json_sax<json> {
 public:
  std::vector<HeaderEntry> entries;
  std::map<std::string, std::string> metadata;
  std::string error;

  bool start_object(std::size_t) override {
    if (depth_ == 0) {
      depth_ = 1;
      return true;
    }
    if (depth_ != 1) return Unexpected("an object");
    depth_ = 2;
    in_metadata_ = name_ == "__metadata__";
    if (!in_metadata_) entries.push_back({.name = name_, .dtype = {}, .shape = {}, .offsets = {}});
    return true;
  }

  bool key(string_t& key) override {
    if (depth_ == 1) {
      name_ = key;
      // Tensor names are checked for duplicates by sorting, once all are known.
      if (key == "__metadata__" && std::exchange(seen_metadata_, true))
        return Fail("__metadata__ twice");
      return true;
    }
    field_ = key;
    if (in_metadata_) {
      if (metadata.contains(key))
        return Fail(fmt::format("__metadata__ has \"{}\" twice", Printable(key)));
      return true;
    }
    if (field_ == "dtype" || field_ == "shape" || field_ == "data_offsets") return true;
    return Fail(fmt::format(
        "tensor \"{}\" has the field \"{}\", expected dtype, shape and data_offsets only",
        Printable(name_), Printable(key)));
  }

  bool end_object() override {
    if (--depth_ == 0 || in_metadata_) {
      in_metadata_ = false;
      return true;
    }
    const HeaderEntry& entry = entries.back();
    const char* missing = !entry.dtype     ? "dtype"
                          : !entry.shape   ? "shape"
                          : !entry.offsets ? "data_offsets"
                                           : nullptr;
    return missing == nullptr ||
           Fail(fmt::format("tensor \"{}\" has no {}", Printable(name_), missing));
  }

  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_metadata_ || field_ == "dtype") return Unexpected("a list");
    std::optional<std::vector<uint64_t>>& list = List();
    if (list) return Twice();
    list.emplace();
    depth_ = 3;
    return true;
  }

  bool end_array() override {
    depth_ = 2;
    return true;
  }

  bool string(string_t& text) override {
    if (depth_ != 2) return Unexpected("a string");
    if (in_metadata_) {
      metadata.emplace(field_, text);
      return true;
    }
    if (field_ != "dtype") return Unexpected("a string");
    if (entries.back().dtype) return Twice();
    entries.back().dtype = text;
    return true;
  }

  bool number_unsigned(number_unsigned_t number) override {
    if (depth_ != 3) return Unexpected(fmt::format("{}", number));
    if (List()->size() == kMaxRank) {
      return Fail(fmt::format("tensor \"{}\": {} has more than {} numbers", Printable(name_),
                              field_, kMaxRank));
    }
    List()->push_back(number);
    return true;
  }

  bool number_integer(number_integer_t number) override {
    return Unexpected(fmt::format("{}", number));
  }
  bool number_float(number_float_t, const string_t& text) override {
    return Unexpected(Printable(text, 30));
  }
  bool null() override { return Unexpected("null"); }
  bool boolean(bool value) override { return Unexpected(value ? "true" : "false"); }
  bool binary(binary_t&) override { return Unexpected("binary data"); }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    return Fail(fmt::format("not valid JSON at byte {} of it", position));
  }

 private:
  std::optional<std::vector<uint64_t>>& List() {
    return field_ == "shape" ? entries.back().shape : entries.back().offsets;
  }

  bool Fail(std::string text) {
    error = std::move(text);
    return false;
  }

  bool Twice() { return Fail(fmt::format("tensor \"{}\" has {} twice", Printable(name_), field_)); }

  bool Unexpected(std::string_view got) {
    if (depth_ == 0) return Fail(fmt::format("got {}, expected an object", got));
    if (depth_ == 1) {
      return Fail(fmt::format("\"{}\" is {}, expected an object with dtype, shape and data_offsets",
                              Printable(name_), got));
    }
    if (in_metadata_) {
      return Fail(
          fmt::format("__metadata__ \"{}\" is {}, expected a string", Printable(field_), got));
    }
    const char* wanted = field_ == "dtype" ? "a string"
                         : depth_ == 3     ? "whole numbers >= 0"
                                           : "a list of numbers";
    const char* verb = depth_ == 3 ? "holds" : "is";
    return Fail(fmt::format("tensor \"{}\": {} {} {}, expected {}", Printable(name_), field_, verb,
                            got, wanted));
  }

  int depth_ = 0;
  bool in_metadata_ = false;
  bool seen_metadata_ = false;
  std::string name_;
  std::string field_;
};

// Checks one entry, against the bytes of data where their number is known.
std::optional<std::string> MakeInfo(HeaderEntry& entry, std::optional<uint64_t> data_bytes,
                                    TensorInfo* info) {
  const std::string name = Printable(entry.name);
  const size_t element = ElementBytes(*entry.dtype);
  if (element == 0) {
    return fmt::format("tensor \"{}\": dtype \"{}\" is unknown, expected F32, BF16, F16, I32, ...",
                       name, Printable(*entry.dtype, 20));
  }
  if (entry.offsets->size() != 2) {
    return fmt::format("tensor \"{}\": data_offsets has {} numbers, expected 2", name,
                       entry.offsets->size());
  }
  uint64_t bytes = element;
  for (const uint64_t extent : *entry.shape) {
    // Each extent by itself must fit int64_t, also beside an extent of 0.
    if (extent > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
        __builtin_mul_overflow(bytes, extent, &bytes)) {
      return fmt::format("tensor \"{}\": its shape holds more bytes than 64 bits can count", name);
    }
  }
  const uint64_t begin = (*entry.offsets)[0];
  const uint64_t end = (*entry.offsets)[1];
  if (begin > end || (data_bytes && end > *data_bytes)) {
    return fmt::format(
        "tensor \"{}\": data_offsets [{}, {}] lie outside the file's data{}", name, begin, end,
        begin > end ? "" : fmt::format(", {} bytes (is the file cut off?)", *data_bytes));
  }
  const std::vector<int64_t> shape(entry.shape->begin(), entry.shape->end());
  if (end - begin != bytes) {
    return fmt::format("tensor \"{}\": data_offsets span {} bytes, expected {} for shape {} of {}",
                       name, end - begin, bytes, ShapeText(shape), *entry.dtype);
  }
  *info = {.name = std::move(entry.name),
           .dtype = std::move(*entry.dtype),
           .shape = shape,
           .begin = begin,
           .end = end};
  return std::nullopt;
}

// Tensors sorted by offset must follow each other without overlap or hole, and end with the file.
std::optional<std::string> CheckLayout(const std::vector<TensorInfo>& tensors,
                                       std::optional<uint64_t> data_bytes) {
  uint64_t at = 0;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.begin != at) {
      return fmt::format(
          "tensor \"{}\" starts at byte {} of the data, expected {}: tensors must neither overlap "
          "nor leave holes",
          Printable(tensor.name), tensor.begin, at);
    }
    at = tensor.end;
  }
  if (data_bytes && at != *data_bytes) {
    return fmt::format("{} bytes of data, but its tensors take {}", *data_bytes, at);
  }
  return std::nullopt;
}

std::optional<std::string> ParseInto(std::string_view text, std::optional<uint64_t> data_bytes,
                                     SafetensorsHeader* header) {
  // To the JSON parser it is the end of the text, whatever follows.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    return fmt::format("not valid JSON at byte {} of it: a NUL", nul);
  }
  HeaderHandler handler;
  if (!json::sax_parse(text.begin(), text.end(), &handler)) return handler.error;

  header->metadata = std::move(handler.metadata);
  header->tensors.resize(handler.entries.size());
  for (size_t i = 0; i < handler.entries.size(); ++i) {
    if (auto error = MakeInfo(handler.entries[i], data_bytes, &header->tensors[i])) return error;
  }

  std::vector<std::string_view> names;
  for (const TensorInfo& tensor : header->tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  if (const auto twin = std::adjacent_find(names.begin(), names.end()); twin != names.end()) {
    return fmt::format("tensor \"{}\" twice", Printable(*twin));
  }
  // Empty tensors sort before the one that starts where they lie.
  std::stable_sort(header->tensors.begin(), header->tensors.end(),
                   [](const TensorInfo& a, const TensorInfo& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  return CheckLayout(header->tensors, data_bytes);
}

}  // namespace

const TensorInfo* SafetensorsHeader::Find(std::string_view name) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const TensorInfo& t) { return t.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

std::optional<std::string> ParsePrefix(std::span<const std::byte> first,
                                       std::optional<uint64_t> file_bytes, uint64_t* header_bytes) {
  if (first.size() < sizeof *header_bytes) {
    return fmt::format("{} bytes, expected a safetensors file of at least 10", first.size());
  }
  std::memcpy(header_bytes, first.data(), sizeof *header_bytes);
  if (*header_bytes > kMaxHeaderBytes) {
    return fmt::format(
        "header length {} in the first 8 bytes, expected at most {}: not a safetensors file?",
        *header_bytes, kMaxHeaderBytes);
  }
  if (*header_bytes == 0 || (first.size() >= kPrefixBytes && first[8] != std::byte{'{'})) {
    return "header does not begin with '{': not a safetensors file?";
  }
  if (file_bytes && *header_bytes > *file_bytes - sizeof *header_bytes) {
    return fmt::format("header length {}, but only {} bytes follow: the file is cut off",
                       *header_bytes, *file_bytes - sizeof *header_bytes);
  }
  return std::nullopt;
}

std::optional<std::string> ParseHeader(std::string_view text, std::optional<uint64_t> data_bytes,
                                       SafetensorsHeader* header) {
  *header = {};
  std::optional<std::string> error = ParseInto(text, data_bytes, header);
  if (!error) return std::nullopt;
  *header = {};
  return "header: " + *error;
}

}  // namespace strobe::cli
