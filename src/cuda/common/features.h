// What a problem asks of a kernel besides plain attention on whole tensors, and what a kernel
// computes: the same set of features. kernels.def says it of each instance, features_of
// (host/features_of.h) of a problem, and an instance takes a problem where it computes all that the
// problem asks for. A kernel without a feature is shorter, or has registers for something else.
#ifndef STROBE_CUDA_COMMON_FEATURES_H_
#define STROBE_CUDA_COMMON_FEATURES_H_

#include <cstdint>

#include "core/macros.h"

namespace strobe::cuda {

/// A set of features: a type made of integers, which may be a template argument of host code.
struct Features {
  uint32_t bits = 0;

  /// Whether some of those are in it.
  STROBE_INLINE constexpr bool has(Features some) const { return (bits & some.bits) != 0; }
  /// Whether all of those are.
  STROBE_INLINE constexpr bool contains(Features all) const { return (all.bits & ~bits) == 0; }
  STROBE_INLINE constexpr Features without(Features some) const { return {bits & ~some.bits}; }

  STROBE_INLINE friend constexpr Features operator|(Features a, Features b) {
    return {a.bits | b.bits};
  }
  STROBE_INLINE friend constexpr bool operator==(Features a, Features b) {
    return a.bits == b.bits;
  }
};

namespace features {

inline constexpr Features kNothing{};

// Scores that are more than a scale times q.k: their order within a row may differ from that of
// q.k, and each is changed by itself.
inline constexpr Features kSoftcap{1u << 0}, kAlibi{1u << 1}, kScores = kSoftcap | kAlibi;
inline constexpr Features kAnyScale{1u << 2};  // a scale that is not positive
inline constexpr Features kDropout{1u << 3};

// Sequences of which the tensors' shapes and cu_seqlens do not say all: lengths in use, positions,
// prefixes, and what else an array says of a sequence; and attention chunks.
inline constexpr Features kUsedRows{1u << 4}, kChunks{1u << 5}, kSequences = kUsedRows | kChunks;

// Rows of q, k, v or out that are not made of whole 16-byte units. Of kernels that read by TMA this
// is not asked: they have rules of their own (host/tma_declines.cpp).
inline constexpr Features kAnyRows{1u << 6};

// out is float32, though q is not.
inline constexpr Features kFloatOut{1u << 10};

// New keys are appended to a cache, or rows rotated, by the main kernel itself.
inline constexpr Features kUpdates{1u << 7};

// Backward: some tile of dQ may get more than one addition, so that there has to be a sum of them;
// and dQ has the same bits each time (`deterministic`), so that additions have an order.
inline constexpr Features kSumsDq{1u << 8}, kOrder{1u << 9};

// An additive bias, a value for each pair of query and key; and its gradient.
inline constexpr Features kBias{1u << 11}, kDbias{1u << 12};

// A mask as data.
inline constexpr Features kMask{1u << 13};

// What is known of pairs one by one.
inline constexpr Features kOfPairs = kBias | kMask;

// batch_invariant, of Hopper's forward: the bits of a row follow from its query, the keys that it
// sees and their numbers, whatever lies beside it in its tile.
inline constexpr Features kInvariantRows{1u << 14};

}  // namespace features

/// Whether no tile of dQ gets a second addition, since no sequence has a second block of tile_k
/// keys: then there need be no sum, and a main kernel may write dQ itself. seqlen_k: the longest
/// sequence's. With batch_invariant, where lengths differ, the longest of other sequences does not
/// count.
STROBE_INLINE constexpr bool adds_once(int64_t seqlen_k, int64_t tile_k, bool batch_invariant,
                                       bool lengths_differ) {
  return seqlen_k <= tile_k && !(batch_invariant && lengths_differ);
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_FEATURES_H_
