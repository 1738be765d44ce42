// Copies of the tool's tensors on the GPU. The tool computes with host memory; where a command runs
// on a GPU, a Mirror holds what the launch reads and writes there. On the CPU it is transparent.
#ifndef STROBE_CLI_MIRROR_H_
#define STROBE_CLI_MIRROR_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <strobe/strobe.hpp>
#include <vector>

namespace strobe::cli {

class Mirror {
 public:
  // Throws UserError where the tool was built without CUDA, and Error where the GPU refuses.
  explicit Mirror(Device device, int64_t device_index = 0);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  // The counterpart of `count` values, copied there now; memory that has one already keeps it.
  // Null stays null.
  template <typename T>
  [[nodiscard]] T* In(T* host, size_t count) {
    return static_cast<T*>(
        Find(const_cast<void*>(static_cast<const void*>(host)), count * sizeof(T), false));
  }
  // Likewise of memory that the launch writes: Fetch brings it back as a whole.
  template <typename T>
  [[nodiscard]] T* Out(T* host, size_t count) {
    return static_cast<T*>(Find(host, count * sizeof(T), true));
  }
  [[nodiscard]] std::span<std::byte> Out(std::span<std::byte> host) {
    return {Out(host.data(), host.size()), host.size()};
  }

  // Of a place in memory that has been copied.
  [[nodiscard]] void* Counterpart(const void* host) {
    return Find(const_cast<void*>(host), 0, false);
  }

  // On the GPU, both pointers there: returns when it is enqueued. On the CPU nothing calls it.
  void CopyOnGpu(void* to, const void* from, size_t bytes) const;
  void Wait() const;   // until all launches are done
  void Fetch() const;  // Wait, then outputs back to the host

 private:
  struct Copy {
    std::byte* host;
    std::byte* device;
    size_t bytes;
    bool out;
  };
  [[nodiscard]] void* Find(void* host, size_t bytes, bool out);

  bool transparent_;
  std::vector<Copy> copies_;
};

}  // namespace strobe::cli

#endif  // STROBE_CLI_MIRROR_H_
