// Memory for tests: red zones on both sides, poison everywhere, and a record of what the library
// may write.
#ifndef STROBE_CHECK_GUARDED_H_
#define STROBE_CHECK_GUARDED_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "numeric.h"
#include "oracle.h"
#include "strobe/strobe.h"

namespace strobe_test {

/// A NaN in every type of ours, wherever in memory it is read from. No computation gives these
/// bits.
inline constexpr uint16_t kPoison = 0x7FDB;

/// `elements` elements between two red zones, all poison at first.
class Guarded {
 public:
  /// shift: bytes by which the first element stands off 64-byte alignment.
  Guarded(int64_t elements, int64_t element_size, int64_t shift = 0)
      : elements_(elements), element_size_(element_size), shift_(shift) {
    const int64_t bytes = elements * element_size;
    storage_.resize(static_cast<size_t>((2 * kZone + 64 + shift + bytes + 2) / 2), kPoison);
    const auto base = reinterpret_cast<uintptr_t>(storage_.data());
    start_ = kZone + static_cast<int64_t>((64 - (base + kZone) % 64) % 64) + shift;
    writable_.resize(static_cast<size_t>(elements));
  }

  /// All of it, red zones too, from a place that is aligned as the library wants its workspace.
  std::span<std::byte> whole() {
    const auto begin = static_cast<size_t>((start_ - shift_ - kZone) / 2);
    return std::as_writable_bytes(std::span(storage_).subspan(begin));
  }

  char* bytes() { return reinterpret_cast<char*>(storage_.data()) + start_; }
  void* at(int64_t element) { return bytes() + element * element_size_; }
  int64_t elements() const { return elements_; }
  int64_t element_size() const { return element_size_; }

  /// From here on only AllowWrite's elements may change, and those must.
  void Seal() { sealed_ = storage_; }
  void AllowWrite(int64_t element) { writable_[static_cast<size_t>(element)] = true; }
  void ForbidWrites() { writable_.assign(writable_.size(), false); }

  /// "" when nothing changed since Seal() but elements that may, and each of those did (every: or
  /// not); else what is wrong.
  std::string Check(const std::string& name, bool every = true) {
    const auto* const before = reinterpret_cast<const char*>(sealed_.data());
    const auto* const after = reinterpret_cast<const char*>(storage_.data());
    const int64_t total = static_cast<int64_t>(storage_.size()) * 2;
    if (std::memcmp(before, after, static_cast<size_t>(start_)) != 0)
      return name + ": written before its start";
    const int64_t end = start_ + elements_ * element_size_;
    if (std::memcmp(before + end, after + end, static_cast<size_t>(total - end)) != 0) {
      return name + ": written past its end";
    }
    int64_t unwritten = -1;  // is said of where nothing was written that should not be
    for (int64_t e = 0; e < elements_; ++e) {
      const int64_t at = start_ + e * element_size_;
      const bool changed =
          std::memcmp(before + at, after + at, static_cast<size_t>(element_size_)) != 0;
      if (changed && !writable_[static_cast<size_t>(e)]) {
        return name + ": element " + std::to_string(e) +
               ", which is no element of an output, was written";
      }
      if (unwritten < 0 && !changed && writable_[static_cast<size_t>(e)]) unwritten = e;
    }
    if (!every || unwritten < 0) return "";
    return name + ": element " + std::to_string(unwritten) + " was not written";
  }

  /// "" when the bytes outside of the elements are as they were.
  std::string CheckZones(const std::string& name) {
    ForbidWrites();
    std::memcpy(reinterpret_cast<char*>(sealed_.data()) + start_, bytes(),
                static_cast<size_t>(elements_ * element_size_));
    return Check(name);
  }

 private:
  static constexpr int64_t kZone = 512;

  int64_t elements_, element_size_, shift_, start_;
  std::vector<uint16_t> storage_, sealed_;
  std::vector<bool> writable_;
};

inline std::vector<std::span<std::byte>> WholeOf(
    const std::vector<std::unique_ptr<Guarded>>& memory) {
  std::vector<std::span<std::byte>> all;
  for (const auto& each : memory) all.push_back(each->whole());
  return all;
}

/// A tensor of the library's: [batch, rows, heads, dim] with any strides, somewhere in a Guarded.
struct Strided {
  Guarded* memory = nullptr;
  oracle::DType dtype = oracle::DType::kFloat32;
  int64_t batch = 0, rows = 0, heads = 0, dim = 0;
  int64_t origin = 0;        // element of `memory` at index (0, 0, 0, 0)
  strobe_strides strides{};  // the true ones

  int64_t Index(int64_t b, int64_t row, int64_t head, int64_t d) const {
    return origin + (batch > 1 ? b * strides.batch : 0) + (rows > 1 ? row * strides.seqlen : 0) +
           (heads > 1 ? head * strides.head : 0) + (dim > 1 ? d * strides.dim : 0);
  }
  bool empty() const { return batch * rows * heads * dim == 0; }
  void* pointer() const { return memory->at(origin); }

  /// Calls visit(row through all batches, head, dim, element of memory).
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t head = 0; head < heads; ++head) {
          for (int64_t d = 0; d < dim; ++d) visit(b * rows + row, head, d, Index(b, row, head, d));
        }
      }
    }
  }

  float Get(int64_t element) const { return oracle::Load(dtype, memory->bytes(), element); }
  void Set(int64_t element, double x) const {
    oracle::Store(dtype, memory->bytes(), element, static_cast<float>(x));
  }

  oracle::Tensor Read() const {
    oracle::Tensor t(batch * rows, heads, dim);
    ForEach([&](int64_t row, int64_t head, int64_t d, int64_t e) { t.at(row, head)[d] = Get(e); });
    return t;
  }
  void AllowWrite() const {
    ForEach([&](int64_t, int64_t, int64_t, int64_t e) { memory->AllowWrite(e); });
  }
};

}  // namespace strobe_test

#endif  // STROBE_CHECK_GUARDED_H_
