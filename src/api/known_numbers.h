// What was said or written already, by its hash.
#ifndef STROBE_API_KNOWN_NUMBERS_H_
#define STROBE_API_KNOWN_NUMBERS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace strobe {

/// Numbers that were given to it, of which it holds so many at most. Without a lock, which a fork
/// in the midst of a launch would leave locked in the child.
template <size_t kMost>
class KnownNumbers {
 public:
  enum Answer { kNew, kKnown, kFull };
  Answer add(uint64_t number) {
    number |= uint64_t{1} << 63;  // 0 marks a free place
    for (size_t i = 0; i < kMost; ++i) {
      uint64_t found = 0;
      if (places_[(number + i) % kMost].compare_exchange_strong(found, number)) return kNew;
      if (found == number) return kKnown;
    }
    return kFull;
  }

 private:
  std::atomic<uint64_t> places_[kMost] = {};
};

}  // namespace strobe

#endif  // STROBE_API_KNOWN_NUMBERS_H_
