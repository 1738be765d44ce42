// What the mask of a random problem is packed from, and what it means: read pair by pair from the
// numbers themselves, so that what the tests take for the truth does not come from packing.
#ifndef STROBE_CHECK_MASK_CASE_H_
#define STROBE_CHECK_MASK_CASE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "guarded.h"
#include "numeric.h"
#include "strobe/strobe.h"

namespace strobe_test {

/// What a case has of a mask as data. Its numbers come from the case's seed.
struct MaskChoice {
  bool there = false;
  int32_t block_q = 64, block_k = 64;
  bool of_each_sequence = false, of_each_head = false;
  bool keep = false, intervals = false, partial = false, bits = false, full = false;
  bool hostile = false;  // numbers that lead nowhere, lists in disorder
  bool exact = false;    // capacities as small as they may be
  // keep shows all queries a block of keys, and some of them all keys, or their neighbours: one
  // list is much longer than the others.
  bool global = false;
  double density = 0.5;  // of what is seen

  /// As problems have it, with room for everything.
  strobe_mask Shape(int64_t batch, int64_t heads) const;
};
MaskChoice PickMaskChoice(oracle::Rng& rng, bool varlen);
std::string ToString(const MaskChoice& choice);

/// The numbers of one mask.
class MaskData {
 public:
  MaskData() = default;
  /// problem: with its mask but for the capacities. cu_q, cu_k: empty unless packed.
  MaskData(const MaskChoice& choice, const strobe_problem& problem,
           const std::vector<int32_t>& cu_q, const std::vector<int32_t>& cu_k, uint64_t seed);

  /// Whether a pair is allowed.
  bool Allows(int64_t sequence, int64_t head, int64_t query, int64_t key) const;
  /// But for where the packed mask goes.
  strobe_mask_args Args() const;
  /// Packs with room for everything, and, where `exact`, again with as little as that has shown to
  /// be enough. problem: with `shape` as its mask, whose capacities this sets; allocate: so many
  /// words. "" or what went wrong.
  std::string Pack(bool exact, const std::function<strobe_problem()>& problem, strobe_mask& shape,
                   const std::function<Guarded*(int64_t words)>& allocate) const;

 private:
  int64_t Row(int64_t sequence, int64_t head, int64_t query) const;
  int64_t List(int64_t sequence, int64_t head, int64_t query) const;
  void FillKeep(oracle::Rng& rng);
  void FillGlobal(oracle::Rng& rng, int64_t row);
  void FillIntervals(oracle::Rng& rng);
  void FillList(oracle::Rng& rng, std::vector<int32_t>& counts, std::vector<int32_t>& blocks,
                int64_t& columns);

  MaskChoice choice_;
  strobe_problem problem_{};
  std::vector<int32_t> cu_q_, cu_k_;
  int64_t rows_ = 0, lists_ = 0;
  std::vector<uint8_t> keep_;
  strobe_strides keep_strides_{};
  std::vector<int32_t> intervals_;
  std::vector<int32_t> partial_counts_, partial_blocks_, full_counts_, full_blocks_;
  int64_t partial_columns_ = 0, full_columns_ = 0;
  std::vector<uint32_t> bits_;
};

}  // namespace strobe_test

#endif  // STROBE_CHECK_MASK_CASE_H_
