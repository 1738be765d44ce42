// Packed masks that are none: words that strobe_mask_pack did not write, between pages that nobody
// may read. On a device nobody looks at a mask's words before kernels read them.
#ifndef STROBE_TESTS_EMULATOR_HOSTILE_MASK_H_
#define STROBE_TESTS_EMULATOR_HOSTILE_MASK_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "numeric.h"

namespace strobe_test {

/// Memory that ends where a page begins that cannot be read, and begins, as near as a line allows,
/// behind another one.
class FencedWords {
 public:
  explicit FencedWords(size_t words) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = (4 * words + 127) / 128 * 128, inside = (bytes + page - 1) / page * page;
    size_ = inside + 2 * page;
    base_ = static_cast<std::byte*>(
        mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + page, inside, PROT_READ | PROT_WRITE);
    words_ = {reinterpret_cast<int32_t*>(base_ + page + inside - bytes), words};
  }
  FencedWords(const FencedWords&) = delete;
  FencedWords& operator=(const FencedWords&) = delete;
  ~FencedWords() { munmap(base_, size_); }

  std::span<int32_t> words() const { return words_; }

 private:
  std::byte* base_;
  size_t size_;
  std::span<int32_t> words_;
};

/// Writes over a part of a mask's words, or all of them: numbers of any size, numbers of the size
/// that blocks and places have, or the words of other places.
inline void MakeHostile(std::span<int32_t> words, uint64_t seed) {
  oracle::Rng rng(seed ^ 0x4057u);
  const double part = rng.Chance(0.3) ? 1 : rng.Chance(0.5) ? 0.2 : 0.01;
  const int64_t small = rng.Integer(1, 40), kind = rng.Integer(0, 3);
  const auto last = static_cast<int64_t>(words.size()) - 1;
  for (int32_t& word : words) {
    if (!rng.Chance(part)) continue;
    switch (kind == 3 ? rng.Integer(0, 2) : kind) {
      case 0:
        word = static_cast<int32_t>(rng.Integer(INT32_MIN, INT32_MAX));
        break;
      case 1:
        word = static_cast<int32_t>(rng.Integer(-2, small));
        break;
      default:
        word = words[static_cast<size_t>(rng.Integer(0, last))];
    }
  }
}

}  // namespace strobe_test

#endif  // STROBE_TESTS_EMULATOR_HOSTILE_MASK_H_
