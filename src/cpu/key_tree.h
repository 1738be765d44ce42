// The tree along which partial results over a sequence's keys are merged. Its leaves are pieces of
// keys at fixed multiples from the first one: of decoding, blocks; with batch_invariant, chunks,
// whoever computes a row. It depends on the keys' numbers alone, so that bits depend neither on how
// the keys are handed out nor on which of them other rows see.
#ifndef STROBE_CPU_KEY_TREE_H_
#define STROBE_CPU_KEY_TREE_H_

#include "core/arithmetic.h"
#include "core/problem.h"

namespace strobe::cpu {

/// Keys of a block of decoding, and of every block with batch_invariant.
inline constexpr int64_t kDecodeKeys = 64;

/// Blocks of a leaf with batch_invariant. Within a leaf the blocks come one after the other, each
/// against the maximum so far, as in a tile of queries always: a leaf for each block would cost a
/// tile of queries up to a tenth of its time in merges.
inline constexpr int64_t kChunkBlocks = 4;

/// Blocks of a leaf of decoding's tree, of the kernels with float32 arithmetic.
STROBE_INLINE int64_t leaf_blocks(const AttentionProblem& p) {
  return p.batch_invariant ? kChunkBlocks : 1;
}

/// Merges the nodes of the tree as they come, from left to right. They lie on a stack, and
/// merge(place) merges what lies at place + 1 into what lies at place.
class KeyTree {
 public:
  /// Where the next node has to lie.
  STROBE_INLINE int64_t top() const { return count_; }

  /// Node `index` of `level` lies at top(). Its left neighbour has come before, unless there is
  /// none.
  template <typename Merge>
  STROBE_INLINE void add(int64_t level, int64_t index, const Merge& merge) {
    for (; index % 2 != 0; ++level, index /= 2) {
      if (count_ > 0 && level_[count_ - 1] == level) merge(--count_);
    }
    level_[count_++] = level;
  }
  /// Node `index` of `level` has nothing: no key that it stands for is seen. What stands left of it
  /// is their parent then.
  template <typename Merge>
  STROBE_INLINE void leave_out(int64_t level, int64_t index, const Merge& merge) {
    for (; index % 2 != 0; ++level, index /= 2) {
      if (count_ == 0 || level_[count_ - 1] != level) continue;
      --count_;
      return add(level + 1, index / 2, merge);
    }
  }
  /// All have come: their root will lie at place 0.
  template <typename Merge>
  STROBE_INLINE void end(const Merge& merge) {
    while (count_ > 1) merge(--count_ - 1);
  }

  /// Levels of a tree with so many leaves. The stack never has more nodes than one more than that.
  STROBE_INLINE static int64_t levels(int64_t leaves) {
    int64_t n = 0;
    for (; leaves > 0; leaves /= 2) ++n;
    return n;
  }

 private:
  int64_t level_[64];
  int64_t count_ = 0;
};

}  // namespace strobe::cpu

#endif  // STROBE_CPU_KEY_TREE_H_
