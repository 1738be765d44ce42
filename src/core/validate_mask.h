// The checks of a problem's mask as data, of what it is packed from, and of the packed mask.
#ifndef STROBE_CORE_VALIDATE_MASK_H_
#define STROBE_CORE_VALIDATE_MASK_H_

#include <array>
#include <cstdint>
#include <string>

#include "core/overlap.h"
#include "core/problem.h"

namespace strobe {

using MaskArgs = strobe_mask_args;

/// Checks the mask of a problem whose other extents passed their checks. Without a mask its fields
/// have to be 0.
Status check_mask(const AttentionProblem& problem);

/// Fills in the capacities.
void resolve_mask(AttentionProblem& problem);

/// What a mask is packed from, and to; the pointer of what is not given is null. problem: resolved;
/// seqlen_k: as the caller has it; keep's strides: filled in.
struct MaskPointer {
  const char* name;
  const void* pointer;
  Extents extents;
  bool written;
};
std::array<MaskPointer, 10> mask_pointers(const AttentionProblem& problem, int64_t seqlen_k,
                                          const MaskArgs& args);

/// Checks what a mask is packed from: pointers, strides, sizes. problem: resolved; seqlen_k: as the
/// caller has it. Strides that were left at zero are filled in.
Status check_mask_args(const AttentionProblem& problem, int64_t seqlen_k, MaskArgs& args);

/// Checks that a packed mask, in the CPU's memory, is one of this problem: that no number leads out
/// of it, and that the lists of both sides say the same: threads that wait for each other (the
/// order of additions to dQ) rely on that. cu_q, cu_k: of packed sequences, checked; else null.
Status check_packed_mask(const AttentionProblem& problem, const int32_t* words, const int32_t* cu_q,
                         const int32_t* cu_k);

/// What to_string says of it: "" without a mask.
std::string mask_text(const AttentionProblem& problem);

}  // namespace strobe

#endif  // STROBE_CORE_VALIDATE_MASK_H_
