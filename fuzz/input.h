// A fuzzer's input as values.
#ifndef STROBE_FUZZ_INPUT_H_
#define STROBE_FUZZ_INPUT_H_

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

#define REQUIRE(condition)                                                 \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (0)

// Values out of the input; zeros once it is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  template <typename T>
  T take() {
    T value{};
    const size_t n = std::min(sizeof value, size_);
    std::memcpy(static_cast<void*>(&value), data_, n);
    data_ += n;
    size_ -= n;
    return value;
  }
  // A value from low to high.
  int64_t range(int64_t low, int64_t high) { return low + take<uint16_t>() % (high - low + 1); }
  bool flag() { return take<uint8_t>() % 2 != 0; }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace

#endif  // STROBE_FUZZ_INPUT_H_
