// Memory that is aligned to 64 bytes, as a launch wants its workspace, and not initialised.
#ifndef STROBE_CLI_BUFFER_H_
#define STROBE_CLI_BUFFER_H_

#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace strobe::cli {

class Buffer {
 public:
  Buffer() = default;
  // Throws std::bad_alloc.
  explicit Buffer(size_t bytes)
      : bytes_(static_cast<std::byte*>(::operator new(bytes, kAlignment))), size_(bytes) {}

  [[nodiscard]] std::byte* data() const { return bytes_.get(); }
  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] std::span<std::byte> span() const { return {bytes_.get(), size_}; }
  [[nodiscard]] float* floats() const { return reinterpret_cast<float*>(bytes_.get()); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* bytes) const { ::operator delete(bytes, kAlignment); }
  };
  std::unique_ptr<std::byte, Free> bytes_;
  size_t size_ = 0;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_BUFFER_H_
