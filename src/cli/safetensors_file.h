// Safetensors files on disk: read tensor by tensor, written whole or not at all.
#ifndef STROBE_CLI_SAFETENSORS_FILE_H_
#define STROBE_CLI_SAFETENSORS_FILE_H_

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "cli/buffer.h"
#include "cli/safetensors.h"

namespace strobe::cli {

// A file descriptor that closes itself.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File();
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
};

// A file to read. Only the header is looked at until a tensor is asked for, and no memory is taken
// for what the file has no room for. It is read rather than mapped: a mapped file that another
// program cuts short kills the process that looks at it, a read of it only ends early.
class SafetensorsFile {
 public:
  // A regular file, or a pipe (such as /dev/stdin), which is read to its end at once. All of this
  // class throws UserError (errors.h) with the path in its text, and std::bad_alloc.
  explicit SafetensorsFile(const std::string& path);

  [[nodiscard]] const SafetensorsHeader& header() const { return header_; }

  // The bytes of one of header()'s tensors, aligned to 64. They stay where they are; what is asked
  // for again is not read again.
  [[nodiscard]] std::span<const std::byte> Read(const TensorInfo& tensor);

 private:
  void ReadPipe();

  std::string path_;
  File file_;
  uint64_t data_begin_ = 0;
  SafetensorsHeader header_;
  std::map<const TensorInfo*, Buffer> data_;
};

// A tensor to write.
struct TensorView {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

// Throws UserError when `path` cannot be written: a directory, no such folder, no permission.
// Writes nothing.
void CheckWritable(const std::string& path);

// Writes the bytes to a temporary file beside `path`, then renames it: `path` holds all of them or
// what it held before. A file that is replaced passes on its permissions and its owner. Throws
// UserError.
void WriteFile(const std::string& path, std::span<const std::span<const std::byte>> parts);

// As WriteFile.
void WriteSafetensors(const std::string& path, std::span<const TensorView> tensors,
                      const std::map<std::string, std::string>& metadata);

}  // namespace strobe::cli

#endif  // STROBE_CLI_SAFETENSORS_FILE_H_
