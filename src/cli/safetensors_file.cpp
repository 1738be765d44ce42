#include "cli/safetensors_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/errors.h"
#include "cli/text.h"

namespace strobe::cli {
namespace {

constexpr size_t kAlignment = 64;

// "cannot read FILE: No such file or directory"
[[noreturn]] void ThrowErrno(const char* what, const std::string& path) {
  const int error = errno;
  throw UserError(fmt::format("cannot {} {}: {}", what, PathText(path), std::strerror(error)));
}

// Reads until `to` is full or the file ends: from where it stands, or from byte `at`. Returns how
// much came.
size_t ReadAll(int fd, std::span<std::byte> to, std::optional<uint64_t> at,
               const std::string& path) {
  size_t size = 0;
  while (size < to.size()) {
    const ssize_t got =
        at ? pread(fd, to.data() + size, to.size() - size, static_cast<off_t>(*at + size))
           : read(fd, to.data() + size, to.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) ThrowErrno("read", path);
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  return size;
}

// `bytes` from a pipe. Memory grows with what comes: a header's promises take none.
Buffer ReadPart(int fd, uint64_t bytes, const std::string& path) {
  constexpr uint64_t kFirst = 1 << 20;
  Buffer buffer(std::min(bytes, kFirst));
  size_t size = 0;
  for (;;) {
    size += ReadAll(fd, buffer.span().subspan(size), std::nullopt, path);
    if (size == bytes) return buffer;
    if (size < buffer.size()) {
      throw UserError(
          fmt::format("{} ended {} bytes early: it is cut off", PathText(path), bytes - size));
    }
    Buffer larger(std::min<uint64_t>(bytes, 2 * buffer.size()));
    std::memcpy(larger.data(), buffer.data(), size);
    buffer = std::move(larger);
  }
}

// A new file that is removed unless it was renamed, also when the user interrupts the program. One
// at a time. `pattern` ends in XXXXXX, in whose place other letters come.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string pattern) : path_(std::move(pattern)) {
    // Before there is a file, so that no signal finds one of which nobody knows: a signal that
    // comes until it is known waits.
    pending_ = 0;
    for (size_t i = 0; i < kSignals.size(); ++i) {
      sigaction(kSignals[i], nullptr, &before_[i]);
      if (before_[i].sa_handler == SIG_IGN) continue;  // nohup: the program is to go on
      struct sigaction remove = {};
      remove.sa_handler = OnSignal;
      sigaction(kSignals[i], &remove, nullptr);
    }
    fd_ = mkostemp(path_.data(), O_CLOEXEC);
    const int error = errno;
    on_signal_ = fd_ < 0 ? "" : path_.c_str();
    if (pending_ != 0) RemoveAndDie(pending_);
    if (fd_ >= 0) return;
    Restore();
    errno = error;
    ThrowErrno("write", path_);
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    unlink(path_.c_str());  // fails after the rename, as it should
    Restore();
    close(fd_);
  }
  [[nodiscard]] int fd() const { return fd_; }
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  static constexpr std::array<int, 3> kSignals = {SIGHUP, SIGINT, SIGTERM};
  // In any thread. Either it finds the path, or the constructor the signal, or both.
  static void OnSignal(int signal) {
    pending_ = signal;
    if (on_signal_ != nullptr) RemoveAndDie(signal);
  }
  static void RemoveAndDie(int signal) {
    unlink(on_signal_);
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  void Restore() {
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
    on_signal_ = nullptr;
  }

  static inline std::atomic<const char*> on_signal_ = nullptr;
  static inline std::atomic<int> pending_ = 0;
  static_assert(std::atomic<const char*>::is_always_lock_free &&
                std::atomic<int>::is_always_lock_free);
  std::string path_;
  int fd_ = -1;
  std::array<struct sigaction, kSignals.size()> before_ = {};
};

void WriteAll(int fd, std::span<const std::byte> bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) ThrowErrno("write", path);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

// Gives the new file the permissions of the one that it replaces, or else what the umask leaves.
void SetMode(int fd, const std::string& target, const std::string& path) {
  struct stat before = {};
  mode_t mode = 0;
  if (stat(target.c_str(), &before) == 0) {
    constexpr mode_t kAll = S_IRWXU | S_IRWXG | S_IRWXO;
    mode = before.st_mode & kAll;
    struct stat now = {};
    if (fstat(fd, &now) != 0) ThrowErrno("write", path);
    const bool same = now.st_uid == before.st_uid && now.st_gid == before.st_gid;
    if (!same && fchown(fd, before.st_uid, before.st_gid) != 0 &&
        fchown(fd, static_cast<uid_t>(-1), before.st_gid) != 0) {
      // What the file's group might do is not for another group: it may what everybody may.
      mode = (mode & ~static_cast<mode_t>(S_IRWXG)) | (mode & S_IRWXO) << 3;
    }
  } else {
    const mode_t mask = umask(0);
    umask(mask);
    mode = 0666 & ~mask;
  }
  if (fchmod(fd, mode) != 0) ThrowErrno("write", path);
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

File::~File() {
  if (fd_ >= 0) close(fd_);
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : path_(path), file_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (file_.fd() < 0) ThrowErrno("open", path);
  struct stat info = {};
  if (fstat(file_.fd(), &info) != 0) ThrowErrno("read", path);
  const bool pipe = S_ISFIFO(info.st_mode);
  if (!pipe && !S_ISREG(info.st_mode)) {
    throw UserError(fmt::format("{} is {}, expected a safetensors file", PathText(path),
                                S_ISDIR(info.st_mode) ? "a directory" : "not a regular file"));
  }
  // Opening must not wait for somebody who writes, but reading may.
  if (pipe && fcntl(file_.fd(), F_SETFL, 0) != 0) ThrowErrno("read", path);

  const auto check = [&](const std::optional<std::string>& error) {
    if (error) throw UserError(fmt::format("{}: {}", PathText(path), *error));
  };
  std::array<std::byte, kPrefixBytes> first;
  const size_t got = ReadAll(file_.fd(), first, std::nullopt, path);
  if (pipe && got == 0) {
    throw UserError(
        fmt::format("{} is not a regular file, and nothing was written to it", PathText(path)));
  }
  std::optional<uint64_t> file_bytes;
  if (!pipe) file_bytes = std::max(static_cast<uint64_t>(info.st_size), uint64_t{got});
  uint64_t header_bytes = 0;
  check(ParsePrefix(std::span(first).first(got), file_bytes, &header_bytes));
  data_begin_ = sizeof header_bytes + header_bytes;
  std::string text = "{";
  if (pipe || got == kPrefixBytes) {
    const Buffer rest = ReadPart(file_.fd(), header_bytes - 1, path);
    text.append(reinterpret_cast<const char*>(rest.data()), rest.size());
  }
  std::optional<uint64_t> data_bytes;
  if (file_bytes) data_bytes = *file_bytes - data_begin_;
  check(ParseHeader(text, data_bytes, &header_));
  if (pipe) ReadPipe();
}

void SafetensorsFile::ReadPipe() {
  for (const TensorInfo& tensor : header_.tensors) {
    data_.emplace(&tensor, ReadPart(file_.fd(), tensor.bytes(), path_));
  }
  std::byte more;
  if (ReadAll(file_.fd(), {&more, 1}, std::nullopt, path_) != 0) {
    throw UserError(fmt::format("{}: more data than its tensors take", PathText(path_)));
  }
}

std::span<const std::byte> SafetensorsFile::Read(const TensorInfo& tensor) {
  if (const auto known = data_.find(&tensor); known != data_.end()) return known->second.span();
  Buffer buffer(tensor.bytes());
  const size_t got = ReadAll(file_.fd(), buffer.span(), data_begin_ + tensor.begin, path_);
  if (got != buffer.size()) {
    throw UserError(fmt::format("{} was cut short while it was read: {} of the {} bytes of {}",
                                PathText(path_), got, buffer.size(), Printable(tensor.name)));
  }
  return data_.emplace(&tensor, std::move(buffer)).first->second.span();
}

void CheckWritable(const std::string& path) {
  const auto refuse = [&path](const std::string& why) {
    throw UserError(fmt::format("cannot write {}: {}", PathText(path), why));
  };
  const std::filesystem::path target = Target(path);
  std::error_code error;
  const auto type = std::filesystem::status(target, error).type();
  if (type == std::filesystem::file_type::directory)
    refuse("it is a directory, expected a file name");
  const bool there = type != std::filesystem::file_type::not_found;
  if (there && type != std::filesystem::file_type::regular) refuse("it is not a regular file");
  const std::filesystem::path parent = target.parent_path();
  const std::string folder = parent.empty() ? "." : parent.string();
  const std::string folder_text = Printable(PathText(folder), 120);
  if (std::filesystem::exists(folder, error) && !std::filesystem::is_directory(folder, error)) {
    refuse(folder_text + " is not a directory");
  }
  if (access(folder.c_str(), W_OK | X_OK) != 0)
    refuse(fmt::format("folder {}: {}", folder_text, std::strerror(errno)));
  // Renaming over a file asks for no leave to write to it.
  if (there && access(target.c_str(), W_OK) != 0) refuse(std::strerror(errno));
}

void WriteFile(const std::string& path, std::span<const std::span<const std::byte>> parts) {
  CheckWritable(path);
  const std::string target = Target(path).string();
  const TemporaryFile file(target + ".tmp-XXXXXX");
  SetMode(file.fd(), target, path);
  for (const std::span<const std::byte> part : parts) WriteAll(file.fd(), part, path);
  // A full disk may show only here, and the rename must not come before the data.
  if (fsync(file.fd()) != 0) ThrowErrno("write", path);
  if (rename(file.path().c_str(), target.c_str()) != 0) ThrowErrno("write", path);
}

void WriteSafetensors(const std::string& path, std::span<const TensorView> tensors,
                      const std::map<std::string, std::string>& metadata) {
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

  std::vector<std::span<const std::byte>> parts = {std::as_bytes(std::span(&header_bytes, 1)),
                                                   std::as_bytes(std::span(text))};
  for (const TensorView& tensor : tensors) parts.push_back(tensor.data);
  WriteFile(path, parts);
}

}  // namespace strobe::cli
