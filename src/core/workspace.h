// One arena that counts or carves: the code that sizes a workspace is the code that lays it out.
#ifndef STROBE_CORE_WORKSPACE_H_
#define STROBE_CORE_WORKSPACE_H_

#include <cstddef>
#include <cstdint>

#include "core/macros.h"

namespace strobe {

inline constexpr size_t kWorkspaceAlignment = 64;

STROBE_INLINE constexpr size_t round_up_to_alignment(size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

class Arena {
 public:
  /// base null: only count.
  STROBE_INLINE explicit Arena(void* base = nullptr) : base_(static_cast<std::byte*>(base)) {}

  /// Room for `count` values, 64-byte aligned; null while counting.
  template <typename T>
  STROBE_INLINE T* take(int64_t count) {
    std::byte* const at = base_ ? base_ + used_ : nullptr;
    used_ += round_up_to_alignment(static_cast<size_t>(count) * sizeof(T));
    return reinterpret_cast<T*>(at);
  }
  STROBE_INLINE size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace strobe

#endif  // STROBE_CORE_WORKSPACE_H_
