// Masks as data are packed: strobe::pack_mask(). Part of strobe.hpp, which includes it.
#ifndef STROBE_MASK_HPP_
#define STROBE_MASK_HPP_

#include <strobe/strobe.h>

#include <cstddef>
#include <cstdint>
#include <strobe/strobe.hpp>

namespace strobe {
inline namespace v0 {

// Bytes of the problem's mask as data, packed: memory for pack_mask. Throws Error.
[[nodiscard]] inline size_t mask_bytes(const Problem& problem) {
  const strobe_problem p = problem.c();
  size_t bytes = 0;
  internal::throw_unless_ok(static_cast<Status>(strobe_mask_bytes(&p, &bytes)));
  return bytes;
}

// What a mask is packed from, and where it goes. strobe.h has the rules.
struct MaskArgs {
  const uint8_t* keep = nullptr;            // a byte for each pair, other than 0: it is seen
  Strides keep_strides = {};                // of keep, in bytes; all zero: contiguous
  const int32_t* intervals = nullptr;       // of each query begin, end, begin, end of keys
  const int32_t* partial_counts = nullptr;  // of each block of queries: entries of partial_blocks
  const int32_t* partial_blocks =
      nullptr;                             // blocks of keys that are seen as far as the rest allows
  int64_t partial_columns = 0;             // of partial_blocks
  const uint32_t* partial_bits = nullptr;  // the pairs of those blocks; null: all
  const int32_t* full_counts = nullptr;    // of each block of queries: entries of full_blocks
  const int32_t* full_blocks = nullptr;    // blocks of keys that are seen whole
  int64_t full_columns = 0;                // of full_blocks
  const int32_t *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;  // varlen: as in forward
  void* packed = nullptr;   // gets the mask: mask_bytes, 16-byte aligned
  size_t packed_bytes = 0;  // of packed, at least mask_bytes
  void* stream = nullptr;   // CUDA: cudaStream_t

  // The same arguments for the C interface.
  [[nodiscard]] strobe_mask_args c() const noexcept {
    strobe_mask_args a = {};
    a.struct_size = sizeof a;
    a.keep = keep;
    a.keep_strides = keep_strides;
    a.intervals = intervals;
    a.partial_counts = partial_counts;
    a.partial_blocks = partial_blocks;
    a.partial_columns = partial_columns;
    a.partial_bits = partial_bits;
    a.full_counts = full_counts;
    a.full_blocks = full_blocks;
    a.full_columns = full_columns;
    a.cu_seqlens_q = cu_seqlens_q;
    a.cu_seqlens_k = cu_seqlens_k;
    a.packed = packed;
    a.packed_bytes = packed_bytes;
    a.stream = stream;
    return a;
  }
};

// Packs a mask as data, for all problems with these lengths, batch, heads and mask. Throws Error.
inline void pack_mask(const Problem& problem, const MaskArgs& args) {
  const strobe_problem p = problem.c();
  const strobe_mask_args a = args.c();
  internal::throw_unless_ok(static_cast<Status>(strobe_mask_pack(&p, &a)));
}

}  // namespace v0
}  // namespace strobe

#endif  // STROBE_MASK_HPP_
