// Plans that were made, kept by all that they depend on.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "latest.h"
#include "library.h"
#include "tensor.h"

namespace strobe_python {

// What a plan depends on, in words that are written one after the other.
class Key {
 public:
  static constexpr size_t kMost = 512;
  void add(uint64_t word) {
    if (size_ < kMost) words_[size_] = word;
    ++size_;
    hash_ = (hash_ ^ word) * 0x9E3779B97F4A7C15u;
    hash_ ^= hash_ >> 29;
  }
  void add(double number) {
    uint64_t word;
    static_assert(sizeof word == sizeof number);
    __builtin_memcpy(&word, &number, sizeof word);
    add(word);
  }
  uint64_t hash() const { return hash_; }
  bool fits() const { return size_ <= kMost; }  // else it is no key: words are missing
  std::vector<uint64_t> words() const { return {words_, words_ + size_}; }
  bool is(const std::vector<uint64_t>& words) const {
    return words.size() == size_ &&
           __builtin_memcmp(words.data(), words_, size_ * sizeof *words_) == 0;
  }

 private:
  uint64_t words_[kMost];
  size_t size_ = 0;
  uint64_t hash_ = 0;
};

// A call of Python's that makes a new contiguous array: function(*arguments, **keywords). What it
// gives is checked, as a mode of PyTorch's may change it.
struct Allocator {
  Ref function, arguments, keywords;
  uint8_t dtype = kOtherType;
  int ndim = 0;
  int64_t shape[kMaxAxes] = {};

  // From what `_plans.allocator` gives; None leaves it empty.
  bool take(PyObject* made);
  // Makes the array, which messages call `name`, on the device of `like`, and reads it. unwatched:
  // there is no mode. On null an exception is set.
  Ref make(const char* name, const Tensor& like, Tensor& tensor, bool unwatched = false) const;
};

// dq, dk, dv, dsinks and dbias.
constexpr int kMostResults = 5;

// A plan and all that a call needs besides the addresses of its tensors.
struct Launch {
  SharedPlan plan;
  Allocator results[kMostResults];  // as Call::result has them
  Allocator workspace;    // CUDA: the framework's memory; without: the library makes its own
  bool small = false;     // so small a workspace that the library keeps it, but not in a graph
  bool is_long = false;   // enough for a user to lose patience: Ctrl-C is heard
  bool is_short = false;  // microseconds: no other thread would get far meanwhile
};

// What was made of a key. The GIL is its lock, or it is one thread's: a lock that a fork could
// leave locked is not needed.
template <typename Made>
class Kept {
 public:
  std::shared_ptr<Made> find(const Key& key) const {
    const auto [first, last] = by_hash_.equal_range(key.hash());
    for (auto at = first; at != last; ++at)
      if (key.is(at->second.words)) return at->second.made;
    return nullptr;
  }
  void keep(const Key& key, std::shared_ptr<Made> made) {
    // What is freed may run Python, and that another call: last, when all is in order again.
    typename decltype(by_hash_)::node_type oldest;
    if (ages_.size() >= kCapacity) {
      oldest = by_hash_.extract(by_hash_.find(ages_.front()));
      ages_.pop_front();
    }
    by_hash_.emplace(key.hash(), Entry{key.words(), std::move(made)});
    ages_.push_back(key.hash());
  }
  size_t size() const { return by_hash_.size(); }
  void clear() {
    decltype(by_hash_) freed;
    freed.swap(by_hash_);
    ages_.clear();
  }

  static constexpr size_t kCapacity = 1024;  // about 4 KiB each; the oldest goes first

 private:
  struct Entry {
    std::vector<uint64_t> words;
    std::shared_ptr<Made> made;
  };
  std::unordered_multimap<uint64_t, Entry> by_hash_;
  std::deque<uint64_t> ages_;
};
using Plans = Kept<Launch>;

}  // namespace strobe_python
