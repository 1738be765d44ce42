// What the fuzzers of the C ABI give to it: strides and tensors.
#ifndef STROBE_FUZZ_TENSOR_H_
#define STROBE_FUZZ_TENSOR_H_

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "input.h"
#include "strobe/strobe.h"

namespace {

void require_documented(strobe_status status) {
  REQUIRE(status >= STROBE_OK &&
          status <= STROBE_UNSUPPORTED);  // nothing here runs out of memory or breaks a device
  REQUIRE(status == STROBE_OK || strobe_last_error()[0] != '\0');
  REQUIRE(std::strncmp(strobe_status_name(status), "STROBE_", 7) == 0);
}

[[maybe_unused]] strobe_strides take_strides(Input& in, int64_t rows, int64_t heads, int64_t dim) {
  switch (in.take<uint8_t>() % 8) {
    case 0:  // heads before rows
      return {heads * rows * dim, dim, rows * dim, 1};
    case 1:  // padded
      return {rows * heads * (dim + 3) + 5, heads * (dim + 3), dim + 3, 1};
    case 2:  // small, of either sign, zero too
      return {in.range(-600, 600), in.range(-600, 600), in.range(-600, 600), 1};
    case 3:
      return in.take<strobe_strides>();
    default:
      return {0, 0, 0, 0};
  }
}

// One tensor of a launch, filled with a pattern.
class Tensor {
 public:
  Tensor(int64_t batch, int64_t rows, int64_t heads, int64_t dim, const strobe_strides& s,
         int64_t element_size, uint8_t seed, int64_t parts = 1, int64_t part_stride = 0) {
    if (parts == 0 || batch == 0 || rows == 0 || heads == 0) return;
    const struct {
      int64_t length, stride;
    } reaches[] = {{parts, part_stride}, {batch, s.batch}, {rows, s.seqlen}, {heads, s.head}};
    int64_t low = 0, high = dim - 1;
    for (const auto& [length, stride] : reaches) {
      if (length > 1 && (stride < -kMaxElements || stride > kMaxElements)) {
        elements_ = kMaxElements + 1;
        return;
      }
      const int64_t reach = length > 1 ? (length - 1) * stride : 0;
      (reach < 0 ? low : high) += reach;
    }
    elements_ = high - low + 1;
    if (elements_ > kMaxElements) return;
    bytes_.resize(static_cast<size_t>(elements_ * element_size));
    // Values of moderate size mostly; every byte pattern is a number of some dtype.
    for (size_t i = 0; i < bytes_.size(); ++i) {
      bytes_[i] = static_cast<uint8_t>(
          (i % static_cast<size_t>(element_size) + 1 == static_cast<size_t>(element_size))
              ? 0x3c + (i * 7 + seed) % 2 * 0x80
              : i * 31 + seed);
    }
    bytes_.shrink_to_fit();
    before_ = bytes_;
    offset_ = -low * element_size;
  }
  /// Another value at a place in the block.
  template <typename T>
  void put(int64_t element, T value) {
    for (std::vector<uint8_t>* bytes : {&bytes_, &before_}) {
      std::memcpy(bytes->data() + element * static_cast<int64_t>(sizeof value), &value,
                  sizeof value);
    }
  }
  int64_t elements() const { return bytes_.empty() ? 0 : elements_; }
  bool fits() const { return elements_ <= kMaxElements; }
  bool unchanged() const { return bytes_ == before_; }
  void* get() { return bytes_.empty() ? nullptr : bytes_.data() + offset_; }
  template <typename T>
  T* as() {
    return static_cast<T*>(get());
  }

 private:
  static constexpr int64_t kMaxElements = 1 << 20;
  std::vector<uint8_t> bytes_, before_;
  int64_t elements_ = 0, offset_ = 0;
};

}  // namespace

#endif  // STROBE_FUZZ_TENSOR_H_
