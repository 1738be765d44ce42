#include "core/overlap.h"

#include <algorithm>
#include <numeric>

#include "core/arithmetic.h"
#include "core/checks.h"

namespace strobe {

namespace {

// Enough for any layout in which larger strides step over what smaller ones reach, which takes a
// few dozen, and for most others. What takes more is half a millisecond until it is given up.
constexpr int64_t kSteps = 1 << 13;

constexpr int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

// The distances between a byte of one tensor and a byte of another are sums of multiples of their
// strides. Looks for one between two bounds: with the largest stride first, whose multiples leave
// few possibilities, as the smaller strides reach only so far.
class Sums {
 public:
  // count multiples of the stride besides 0. Equal strides of both tensors, as interleaved ones
  // have them, are one.
  void add(int64_t stride, int64_t count) {
    if (stride == 0 || count == 0) return;
    int at = 0;
    while (at < size_ && terms_[at].stride > stride) ++at;
    if (at < size_ && terms_[at].stride == stride) {
      terms_[at].count += count;
      return;
    }
    std::copy_backward(terms_ + at, terms_ + size_, terms_ + size_ + 1);
    terms_[at] = {stride, count, 0, 0, false};
    ++size_;
  }

  // Whether a sum lies in [low, high]; nothing when that takes more than `steps` steps.
  std::optional<bool> any_in(int64_t low, int64_t high, int64_t steps) {
    terms_[size_] = {0, 0, 0, 0, true};
    const int64_t width = high - low + 1;
    for (int i = size_ - 1; i >= 0; --i) {
      Term& x = terms_[i];
      const Term& below = terms_[i + 1];
      x.reach = below.reach + x.stride * x.count;
      x.divisor = std::gcd(x.stride, below.divisor);
      x.dense = below.dense && x.stride <= below.reach + width;
    }
    steps_ = steps;
    const bool found = search(0, low, high);
    if (steps_ < 0) return std::nullopt;
    return found;
  }

 private:
  struct Term {
    int64_t stride, count;
    // Of this term and those after it: the largest sum, what divides all sums, and whether every
    // interval of the width that is looked for has one, between 0 and the largest.
    int64_t reach, divisor;
    bool dense;
  };

  bool search(int i, int64_t low, int64_t high) {
    if (i == size_ || i == kTerms) return low <= 0 && 0 <= high;
    const Term& x = terms_[i];
    if (high < 0 || low > x.reach) return false;
    if (x.dense || low <= 0) return true;  // 0 is a sum
    if (--steps_ < 0) return false;
    if (high / x.divisor * x.divisor < low) return false;
    const Term& below = terms_[i + 1];
    const int64_t first = low > below.reach ? ceil_div(low - below.reach, x.stride) : 0;
    const int64_t last = min64(x.count, high / x.stride);
    for (int64_t n = last; n >= first && steps_ >= 0; --n) {
      if (search(i + 1, low - n * x.stride, high - n * x.stride)) return true;
    }
    return false;
  }

  static constexpr int kTerms = 8;  // four of each tensor
  Term terms_[kTerms + 1];          // and an end
  int size_ = 0;
  int64_t steps_ = 0;
};

}  // namespace

std::optional<bool> share_bytes(uint64_t a_begin, const Extents& a, uint64_t b_begin,
                                const Extents& b, int64_t steps) {
  // Bytes are a_begin + (a sum of a's strides) + [0, a.run), and b_begin + b's reach - (a sum of
  // b's strides) + [0, b.run): the set of all sums is the same from both ends.
  Sums sums;
  for (const Extents::Dimension& d : a.dimensions) sums.add(magnitude(d.stride), d.count - 1);
  int64_t reach = 0;
  for (const Extents::Dimension& d : b.dimensions) {
    sums.add(magnitude(d.stride), d.count - 1);
    reach += magnitude(d.stride) * (d.count - 1);
  }
  const auto distance = static_cast<int64_t>(b_begin - a_begin) + reach;
  return sums.any_in(distance - (a.run - 1), distance + (b.run - 1), steps);
}

void Memory::add(const char* name, const void* pointer, const Extents& extents, bool written) {
  if (!pointer || extents.empty() || count_ == kMost) return;
  int64_t first = 0, last = 0;
  for (const Extents::Dimension& d : extents.dimensions) {
    if (d.count > 1) (d.stride < 0 ? first : last) += d.stride * (d.count - 1);
  }
  tensors_[count_++] = {name, extents,
                        reinterpret_cast<uintptr_t>(pointer) + static_cast<uint64_t>(first),
                        static_cast<uint64_t>(last - first + extents.run), written};
}

Status Memory::check() const {
  for (int i = 0; i < count_; ++i) {
    const Tensor& output = tensors_[i];
    if (!output.written) continue;
    for (int j = 0; j < count_; ++j) {
      const Tensor& other = tensors_[j];
      if (j == i || (other.written && j < i)) continue;
      // Intervals of addresses, whatever their ends are.
      const bool apart =
          other.begin - output.begin >= output.bytes && output.begin - other.begin >= other.bytes;
      if (apart) continue;
      const std::optional<bool> shared =
          share_bytes(output.begin, output.extents, other.begin, other.extents, kSteps);
      if (shared == false) continue;
      return invalid(
          format("%s %s memory with %s, expected memory of its own (outputs must overlap "
                 "neither inputs nor each other)",
                 output.name,
                 shared ? "shares" : "has strides that take too long to compare and may share",
                 other.name));
    }
  }
  return {};
}

}  // namespace strobe
