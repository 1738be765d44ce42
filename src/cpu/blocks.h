// Blocks of rows: the work items that the rows of all sequences and heads are cut into.
#ifndef STROBE_CPU_BLOCKS_H_
#define STROBE_CPU_BLOCKS_H_

#include <algorithm>
#include <cstdint>

#include "core/problem.h"

namespace strobe::cpu {

/// Blocks of `size` rows of one head of one sequence. They hold all rows that the sequences have,
/// whether in use or not. Blocks are numbered; those of one head of a sequence come in ascending
/// order of their rows.
///
/// Packed sequences can be numbered in two ways. The first counts as if every sequence were as long
/// as the longest may be; the blocks past a sequence's end are empty. Blocks with successive
/// numbers then belong to different heads, which wait for each other the least. The second is for a
/// longest length far above the others: blocks are numbered as the rows lie, and the first block of
/// sequence b is cu_seqlens[b] / size + b. Neither way gives many more blocks than are needed.
class Blocks {
 public:
  struct Block {
    int64_t batch, head, begin;
  };

  static Blocks of_queries(const AttentionProblem& p, const int32_t* cu_q, int64_t size) {
    return {p, cu_q, p.seqlen_q, p.total_q, p.heads, size, 1};
  }
  /// threads: that take successive blocks, so these are of heads that lie far from each other, of
  /// different sequences if there are some. Heads beside each other share pages of memory: of new
  /// tensors for the gradients two threads would make each page twice, and wait for each other.
  static Blocks of_keys(const AttentionProblem& p, const int32_t* cu_k, int64_t size,
                        int64_t threads = 1) {
    return {p, cu_k, p.seqlen_k, p.total_k, p.heads_kv, size, threads};
  }

  int64_t count() const { return count_; }

  /// Block n. It may reach past the sequence's last row, and even begin there.
  Block operator[](int64_t n) const {
    if (!packed_) {
      const int64_t all = batch_ * heads_, stream = n % all % streams_;
      const int64_t sequence =
          stream * (all / streams_) + min64(stream, all % streams_) + n % all / streams_;
      return {sequence / heads_, sequence % heads_, n / all * size_};
    }
    const int64_t place = n / heads_;
    // The sequence: the last one whose first block does not come after this block.
    int64_t low = 0, high = batch_;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first(middle) <= place ? low : high) = middle;
    }
    return {low, n % heads_, (place - first(low)) * size_};
  }

 private:
  Blocks(const AttentionProblem& p, const int32_t* cu, int64_t longest, int64_t total,
         int64_t heads, int64_t size, int64_t streams)
      : cu_(cu),
        batch_(p.batch),
        heads_(heads),
        size_(size),
        streams_(max64(1, min64(streams, batch_ * heads_))) {
    const int64_t bounded = batch_ * ceil_div(longest, size), packed = total / size + batch_;
    packed_ = p.varlen && bounded / 4 > packed;
    count_ = heads_ * (packed_ ? packed : bounded);
  }
  int64_t first(int64_t batch) const { return cu_[batch] / size_ + batch; }

  const int32_t* cu_;
  int64_t batch_, heads_, size_;
  int64_t streams_;  // the heads of all sequences in so many parts, whose blocks come in turns
  int64_t count_;
  bool packed_;
};

}  // namespace strobe::cpu

#endif  // STROBE_CPU_BLOCKS_H_
