// Thread blocks that do not all begin at the same time.
#ifndef STROBE_CUDA_COMMON_STAGGER_CUH_
#define STROBE_CUDA_COMMON_STAGGER_CUH_

#include <cstdint>

#include "core/arithmetic.h"
#include "core/macros.h"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// Thread blocks that a device runs at once: of `block_bytes` of shared memory, where a block can
/// have `shared_bytes`, and registers and threads leave room for `most` on a multiprocessor.
STROBE_INLINE constexpr int64_t blocks_at_once(int64_t multiprocessors, int64_t shared_bytes,
                                               int64_t block_bytes, int64_t most) {
  constexpr int64_t kReserved = 1024;  // of a multiprocessor's, by the system, for each block
  const int64_t fit = (shared_bytes + kReserved) / (block_bytes + kReserved);
  return multiprocessors * max64(1, min64(fit, most));
}

/// Thread blocks that take equally long and begin together stay in step, wave after wave: all load
/// their first tiles at the same time, and no multiprocessor computes meanwhile. If the blocks of
/// the first wave begin a little apart, the copies of one run under the products of others, in all
/// waves that follow. The price: a launch ends later by what the blocks of its last wave waited,
/// which is the more the fuller that wave is. So blocks wait only in launches of several waves that
/// compute for a while, not where the waves are few and the last is almost full
/// (docs/log/2026-11.md).
struct Stagger {
  uint32_t blocks = 0;  // of the first wave; 0: no block waits
  uint32_t step = 0;    // clock cycles from one begin to the next
  static constexpr uint32_t kBegins = 16;

  /// items: thread blocks in all; at_once: that fit the device; bytes: what a block reads before
  /// its first product and writes after its last.
  STROBE_INLINE static constexpr Stagger make(const CommonParams& p, int64_t items, int64_t at_once,
                                              int64_t bytes, int32_t tile_q) {
    constexpr int64_t kWaves = 6, kManyWaves = 16, kMinKeys = 512;
    // Sequences of different lengths, and few queries or keys, have no common phase, or no products
    // to hide one under.
    if (p.sequences_differ() || p.seqlen_q < tile_q || p.seqlen_k < kMinKeys) return {};
    if (!p.rule.reaches_back(kMinKeys)) return {};
    if (p.sequence_of_all_heads(0).mask.row(0).empty()) return {};  // tiles that see no key at all
    if (items < kWaves * at_once) return {};
    const int64_t last = (items - 1) % at_once + 1;  // blocks of the last wave
    if (items < kManyWaves * at_once && last > at_once * 4 / 5) return {};
    // At half the rate that a multiprocessor has left where all ask at once.
    constexpr int64_t kBytesPerCycle = 16;
    return {static_cast<uint32_t>(at_once),
            static_cast<uint32_t>(bytes / kBytesPerCycle / kBegins)};
  }

  STROBE_INLINE constexpr uint32_t cycles(int64_t index) const {
    return index < blocks ? static_cast<uint32_t>(index) % kBegins * step : 0;
  }

#if defined(__CUDACC__)
  __device__ __forceinline__ void wait(int64_t index) const {
    const uint32_t begun = static_cast<uint32_t>(clock()), cycles = this->cycles(index);
    while (static_cast<uint32_t>(clock()) - begun < cycles) __nanosleep(20);
  }
#endif
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_STAGGER_CUH_
