#include "cli/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <new>
#include <nlohmann/json.hpp>

#include "cli/errors.h"

namespace strobe::cli {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

using nlohmann::json;

// The limit of the reference implementation.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr size_t kMaxRank = 32;
constexpr size_t kAlignment = 64;

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

// Checks one entry against the `available` bytes of data and turns it into a view.
std::optional<std::string> MakeView(HeaderEntry& entry, std::span<const std::byte> data,
                                    TensorView* view) {
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
      return fmt::format("tensor \"{}\": shape [{}] holds more bytes than 64 bits can count", name,
                         fmt::join(*entry.shape, ", "));
    }
  }
  const uint64_t begin = (*entry.offsets)[0];
  const uint64_t end = (*entry.offsets)[1];
  if (begin > end || end > data.size()) {
    return fmt::format(
        "tensor \"{}\": data_offsets [{}, {}] lie outside the file's {} bytes of data{}", name,
        begin, end, data.size(), begin > end ? "" : " (is the file cut off?)");
  }
  if (end - begin != bytes) {
    return fmt::format(
        "tensor \"{}\": data_offsets span {} bytes, expected {} for shape [{}] of {}", name,
        end - begin, bytes, fmt::join(*entry.shape, ", "), *entry.dtype);
  }
  *view = {.name = std::move(entry.name),
           .dtype = std::move(*entry.dtype),
           .shape = {entry.shape->begin(), entry.shape->end()},
           .data = data.subspan(begin, bytes)};
  return std::nullopt;
}

// Tensors sorted by offset must follow each other without overlap or hole, and end with the file.
std::optional<std::string> CheckLayout(const std::vector<TensorView>& tensors,
                                       std::span<const std::byte> data) {
  const std::byte* at = data.data();
  for (const TensorView& tensor : tensors) {
    if (tensor.data.data() != at) {
      return fmt::format(
          "tensor \"{}\" starts at byte {} of the data, expected {}: tensors must neither overlap "
          "nor "
          "leave holes",
          Printable(tensor.name), tensor.data.data() - data.data(), at - data.data());
    }
    at += tensor.data.size();
  }
  const size_t used = static_cast<size_t>(at - data.data());
  if (used != data.size()) {
    return fmt::format("{} bytes of data, but its tensors take {}", data.size(), used);
  }
  return std::nullopt;
}

std::optional<std::string> ParseInto(std::span<const std::byte> file, SafetensorsView* view) {
  uint64_t header_bytes = 0;
  if (file.size() < sizeof header_bytes) {
    return fmt::format("{} bytes, expected a safetensors file of at least 10", file.size());
  }
  std::memcpy(&header_bytes, file.data(), sizeof header_bytes);
  if (header_bytes > kMaxHeaderBytes) {
    return fmt::format(
        "header length {} in the first 8 bytes, expected at most {}: not a safetensors file?",
        header_bytes, kMaxHeaderBytes);
  }
  const std::span<const std::byte> rest = file.subspan(sizeof header_bytes);
  const char* header = reinterpret_cast<const char*>(rest.data());
  if (header_bytes == 0 || (!rest.empty() && header[0] != '{')) {
    return "header does not begin with '{': not a safetensors file?";
  }
  if (header_bytes > rest.size()) {
    return fmt::format("header length {}, but only {} bytes follow: the file is cut off",
                       header_bytes, rest.size());
  }

  HeaderHandler handler;
  if (!json::sax_parse(header, header + header_bytes, &handler)) return "header: " + handler.error;

  const std::span<const std::byte> data = rest.subspan(header_bytes);
  view->metadata = std::move(handler.metadata);
  view->tensors.resize(handler.entries.size());
  for (size_t i = 0; i < handler.entries.size(); ++i) {
    if (auto error = MakeView(handler.entries[i], data, &view->tensors[i]))
      return "header: " + *error;
  }

  std::vector<std::string_view> names;
  for (const TensorView& tensor : view->tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  if (const auto twin = std::adjacent_find(names.begin(), names.end()); twin != names.end()) {
    return fmt::format("header: tensor \"{}\" twice", Printable(*twin));
  }
  // Empty tensors sort before the one that starts where they lie.
  std::sort(
      view->tensors.begin(), view->tensors.end(), [](const TensorView& a, const TensorView& b) {
        return std::pair(a.data.data(), a.data.size()) < std::pair(b.data.data(), b.data.size());
      });
  if (auto error = CheckLayout(view->tensors, data)) return "header: " + *error;
  return std::nullopt;
}

std::string ErrnoText() { return std::strerror(errno); }

// A file descriptor that closes itself.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

// A file that is removed unless it was renamed, also when the user interrupts the program. One at a
// time.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string path) : path_(std::move(path)) {
    on_signal_ = path_.c_str();
    for (const int signal : kSignals) std::signal(signal, RemoveAndDie);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    for (const int signal : kSignals) std::signal(signal, SIG_DFL);
    unlink(path_.c_str());  // fails after the rename, as it should
  }

 private:
  static constexpr int kSignals[] = {SIGHUP, SIGINT, SIGTERM};
  static void RemoveAndDie(int signal) {
    unlink(on_signal_);
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }

  static inline const char* on_signal_ = nullptr;
  std::string path_;
};

void WriteAll(int fd, std::span<const std::byte> bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw UserError(fmt::format("cannot write {}: {}", path, ErrnoText()));
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

// Where `path` leads: a link is written through, not replaced, also when its target is yet to be
// made.
std::filesystem::path Target(const std::string& path) {
  constexpr int kMaxLinks = 40;
  std::filesystem::path target = path;
  std::error_code error;
  for (int i = 0; i < kMaxLinks && std::filesystem::is_symlink(target, error); ++i) {
    target = target.parent_path() / std::filesystem::read_symlink(target, error);
  }
  return target;
}

}  // namespace

const TensorView* SafetensorsView::Find(std::string_view name) const {
  const auto found = std::find_if(tensors.begin(), tensors.end(),
                                  [&](const TensorView& t) { return t.name == name; });
  return found == tensors.end() ? nullptr : &*found;
}

std::optional<std::string> ParseSafetensors(std::span<const std::byte> file,
                                            SafetensorsView* view) {
  *view = {};
  std::optional<std::string> error = ParseInto(file, view);
  if (error) *view = {};
  return error;
}

SafetensorsFile::SafetensorsFile(const std::string& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.fd() < 0) throw UserError(fmt::format("cannot open {}: {}", path, ErrnoText()));
  struct stat info = {};
  if (fstat(file.fd(), &info) != 0)
    throw UserError(fmt::format("cannot read {}: {}", path, ErrnoText()));
  if (!S_ISREG(info.st_mode)) {
    throw UserError(fmt::format("{} is {}, expected a safetensors file", path,
                                S_ISDIR(info.st_mode) ? "a directory" : "not a regular file"));
  }
  const size_t wanted = static_cast<size_t>(info.st_size);
  bytes_ = static_cast<std::byte*>(::operator new(wanted, std::align_val_t(kAlignment)));
  try {
    while (size_ < wanted) {
      const ssize_t got = read(file.fd(), bytes_ + size_, wanted - size_);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw UserError(fmt::format("cannot read {}: {}", path, ErrnoText()));
      if (got == 0) break;  // the file shrank meanwhile
      size_ += static_cast<size_t>(got);
    }
    if (const auto error = ParseSafetensors({bytes_, size_}, &view_)) {
      throw UserError(fmt::format("{}: {}", path, *error));
    }
  } catch (...) {
    ::operator delete(bytes_, std::align_val_t(kAlignment));
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() { ::operator delete(bytes_, std::align_val_t(kAlignment)); }

void CheckWritable(const std::string& path) {
  const std::filesystem::path target = Target(path);
  std::error_code error;
  const auto type = std::filesystem::status(target, error).type();
  if (type == std::filesystem::file_type::directory) {
    throw UserError(fmt::format("cannot write {}: it is a directory, expected a file name", path));
  }
  if (type != std::filesystem::file_type::not_found &&
      type != std::filesystem::file_type::regular) {
    throw UserError(fmt::format("cannot write {}: it is not a regular file", path));
  }
  const std::filesystem::path parent = target.parent_path();
  const std::string folder = parent.empty() ? "." : parent.string();
  if (std::filesystem::exists(folder, error) && !std::filesystem::is_directory(folder, error)) {
    throw UserError(fmt::format("cannot write {}: {} is not a directory", path, folder));
  }
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    throw UserError(fmt::format("cannot write {}: folder {}: {}", path, folder, ErrnoText()));
  }
}

void WriteSafetensors(const std::string& path, std::span<const TensorView> tensors,
                      const std::map<std::string, std::string>& metadata) {
  CheckWritable(path);
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const TensorView& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + tensor.data.size()}}};
    offset += tensor.data.size();
  }
  std::string text = header.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  // The data begins on a multiple of 64 bytes, so that a reader can use it where it lies.
  text.resize((text.size() + sizeof(uint64_t) + kAlignment - 1) / kAlignment * kAlignment -
                  sizeof(uint64_t),
              ' ');
  const uint64_t header_bytes = text.size();

  const std::string target = Target(path).string();
  std::string temporary = target + ".tmp-XXXXXX";
  const File file(mkostemp(temporary.data(), O_CLOEXEC));
  if (file.fd() < 0) throw UserError(fmt::format("cannot write {}: {}", temporary, ErrnoText()));
  const TemporaryFile guard(temporary);
  const mode_t mask = umask(0);
  umask(mask);
  if (fchmod(file.fd(), 0666 & ~mask) != 0)
    throw UserError(fmt::format("cannot write {}: {}", path, ErrnoText()));

  WriteAll(file.fd(), std::as_bytes(std::span(&header_bytes, 1)), path);
  WriteAll(file.fd(), std::as_bytes(std::span(text)), path);
  for (const TensorView& tensor : tensors) WriteAll(file.fd(), tensor.data, path);
  // A full disk may show only here, and the rename must not come before the data.
  if (fsync(file.fd()) != 0) throw UserError(fmt::format("cannot write {}: {}", path, ErrnoText()));
  if (rename(temporary.c_str(), target.c_str()) != 0) {
    throw UserError(fmt::format("cannot write {}: {}", path, ErrnoText()));
  }
}

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

std::string ShapeText(std::span<const int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

}  // namespace strobe::cli
