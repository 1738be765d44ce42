// The decoded sequences of a launch, cut into items.
#ifndef STROBE_CPU_DECODE_ITEMS_H_
#define STROBE_CPU_DECODE_ITEMS_H_

#include "core/kernel.h"
#include "core/workspace.h"
#include "cpu/decode.h"

namespace strobe::cpu {

/// Whether a launch may hold sequences that are decoded, and whether it holds no others.
struct DecodeUse {
  bool some = false, all = false;
  int64_t most = 0;  // queries of a sequence that is decoded

  DecodeUse(const InstructionSet& isa, const AttentionProblem& p) {
    if (!isa.decode(p) || p.direction != STROBE_FORWARD || p.dropout_p != 0) return;
    if (rows_q(p) == 0) return;  // whatever the batch is, nothing is to be kept for it
    // Masks as data and biases go one way then at any number of queries: by tiles of them.
    if (p.batch_invariant && (p.has_bias || p.mask.kind != STROBE_MASK_NONE)) return;
    most = isa.most_decoded(p);
    all = p.seqlen_q <= most;
    some = all || p.varlen || p.has_seqused_q;
  }
  /// Whether a sequence with so many queries in use is decoded. It is that number alone which
  /// decides, not the batch that the sequence is in.
  bool decoded(int64_t queries) const { return some && queries <= most; }
};

/// How a plan decodes.
struct DecodePlan {
  const DecodeKernel& kernel;
  int64_t leaf;  // blocks of a leaf of its tree
  DecodeShape shape;
  int64_t blocks;       // of keys that an item has at least, unless the sequence has fewer
  int64_t work_items;   // when all sequences have all keys that they may have
  int64_t item_blocks;  // of such an item
  int64_t slots;        // partial results that a launch may keep
  size_t bytes;         // of workspace that DecodeItems needs

  /// threads: that a launch may use.
  DecodePlan(const InstructionSet& isa, const AttentionProblem& p, int64_t threads);
};

class DecodeItems {
 public:
  /// Takes DecodePlan::bytes of the arena.
  DecodeItems(const InstructionSet& isa, const ForwardContext& context, int64_t threads,
              Arena& arena);

  int64_t count() const { return memory_.first_item[context_.problem.batch]; }
  /// Does item n. It writes the results of its sequence if all others of the sequence are done.
  void run(int64_t n, std::byte* scratch) const;

 private:
  friend DecodePlan;
  struct Memory {
    int64_t *first_item, *first_slot;  // [batch + 1]
    int64_t* done;                     // [batch][sets]: items that have ended
    float* slots;
  };
  static Memory carve(Arena& arena, const AttentionProblem& p, const DecodePlan& plan);
  int64_t splits(Range blocks) const {
    if (blocks.size() <= item_blocks_) return 1;
    return (blocks.end - 1) / item_blocks_ - blocks.begin / item_blocks_ + 1;
  }

  const ForwardContext& context_;
  const DecodePlan plan_;
  const DecodeUse use_;
  int64_t item_blocks_, level_;  // of a tree of so many blocks
  Memory memory_;
};

/// out and lse of queries that are not in use: zeros, -inf.
void fill_unused(const ForwardContext& c, const SequenceRows& s, int64_t head, Range queries);

}  // namespace strobe::cpu

#endif  // STROBE_CPU_DECODE_ITEMS_H_
