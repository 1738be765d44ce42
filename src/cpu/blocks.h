// Blocks of rows: the items that the rows of all sequences and heads are cut into.
#ifndef STROBE_CPU_BLOCKS_H_
#define STROBE_CPU_BLOCKS_H_

#include <algorithm>
#include <cstdint>

#include "core/problem.h"

namespace strobe::cpu {

/// Blocks of `size` rows, each of them one sequence's of one head. In ascending order of their
/// number the blocks of a sequence's head come from its first row to its last.
///
/// Where lengths vary there are two ways to count them. As if every sequence had the length of the
/// bound, those past a sequence's end being empty: neighbours in number are then blocks of
/// different heads, which wait for each other the least. Or, where the bound is far above the
/// lengths, packed as the rows are: the first of sequence b is cu_seqlens[b] / size + b. Neither
/// gives many more than there are.
class Blocks {
 public:
  struct Block {
    int64_t batch, head, begin;
  };

  static Blocks of_queries(const AttentionProblem& p, const int32_t* cu_q, int64_t size) {
    return {p, cu_q, p.seqlen_q, p.total_q, p.heads, size};
  }
  static Blocks of_keys(const AttentionProblem& p, const int32_t* cu_k, int64_t size) {
    return {p, cu_k, p.seqlen_k, p.total_k, p.heads_kv, size};
  }

  int64_t count() const { return count_; }

  /// Block n. Its end is not yet cut to the sequence's length; it may begin at it or past it.
  Block operator[](int64_t n) const {
    if (!packed_) {
      const int64_t sequence = n % (batch_ * heads_);
      return {sequence / heads_, sequence % heads_, n / (batch_ * heads_) * size_};
    }
    const int64_t place = n / heads_;
    // The last sequence whose first block is not after it.
    int64_t low = 0, high = batch_;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first(middle) <= place ? low : high) = middle;
    }
    return {low, n % heads_, (place - first(low)) * size_};
  }

 private:
  Blocks(const AttentionProblem& p, const int32_t* cu, int64_t longest, int64_t total,
         int64_t heads, int64_t size)
      : cu_(cu), batch_(p.batch), heads_(heads), size_(size) {
    const int64_t bounded = batch_ * ceil_div(longest, size), packed = total / size + batch_;
    packed_ = p.varlen && bounded / 4 > packed;
    count_ = heads_ * (packed_ ? packed : bounded);
  }
  int64_t first(int64_t batch) const { return cu_[batch] / size_ + batch; }

  const int32_t* cu_;
  int64_t batch_, heads_, size_, count_;
  bool packed_;
};

}  // namespace strobe::cpu

#endif  // STROBE_CPU_BLOCKS_H_
