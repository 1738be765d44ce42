// Thread blocks that do not all begin at the same time.
#ifndef STROBE_CUDA_STAGGER_CUH_
#define STROBE_CUDA_STAGGER_CUH_

#include <cstdint>

#include "core/problem.h"
#include "cuda/params.h"

namespace strobe::cuda {

/// Blocks that take equally long and begin together go on together, wave after wave: all ask memory
/// for their first tiles at once, and no multiprocessor computes meanwhile. Once the blocks of the
/// first wave begin a little apart, the phases of one lie under the products of others, in all
/// waves that follow. The launch ends later by what the last block waits: only for several waves of
/// blocks that compute for a while (docs/perf-log.md).
struct Stagger {
  uint32_t blocks = 0;  // of the first wave; 0: nobody waits
  uint32_t step = 0;    // clock cycles from one begin to the next
  static constexpr uint32_t kBegins = 16;

  /// items: thread blocks in all; at_once: that fit the device; bytes: what a block reads before
  /// its first product and writes after its last.
  STROBE_INLINE static constexpr Stagger make(const CommonParams& p, int64_t items, int64_t at_once,
                                              int64_t bytes, int32_t tile_q) {
    constexpr int64_t kWaves = 6, kMinKeys = 512;
    // Sequences of different lengths, and few queries or keys, have no common phase, or no products
    // to hide one under.
    if (p.cu_q || p.cu_k || p.seqlen_q < tile_q || p.seqlen_k < kMinKeys) return {};
    if (p.window_left >= 0 && p.window_left < kMinKeys) return {};
    if (items < kWaves * at_once) return {};
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

#endif  // STROBE_CUDA_STAGGER_CUH_
