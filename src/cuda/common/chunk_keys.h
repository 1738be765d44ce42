// How many keys a chunk has with batch_invariant: of the kernels that divide keys
// (decode/shares.h), and of Hopper's forward (hopper/key_chunks.h). The planner says it of a plan.
#ifndef STROBE_CUDA_COMMON_CHUNK_KEYS_H_
#define STROBE_CUDA_COMMON_CHUNK_KEYS_H_

#include <cstdint>

#include "core/macros.h"

namespace strobe::cuda {

/// Keys of a chunk. Of the cuts that came to mind it is the finest whose pieces cost a launch that
/// reads at full speed a tenth of its time or so.
inline constexpr int kChunkKeys = 512;

namespace sm90 {

/// Keys of a chunk, up to the end of a block. More keep more multiprocessors without work where
/// sequences are few; with fewer, prompts park more often, which is 64 KB there and back for each
/// tile of 128 columns, beside the chunk's keys and values of 1 MB.
inline constexpr int32_t kChunkKeys = 2048;
/// Blocks of a chunk.
STROBE_INLINE constexpr int32_t chunk_blocks(int32_t tile_k) {
  return (kChunkKeys + tile_k - 1) / tile_k;
}

}  // namespace sm90

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_CHUNK_KEYS_H_
