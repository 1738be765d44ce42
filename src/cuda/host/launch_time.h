// Estimates of what a forward launch takes, from shapes and the device alone: by them
// instance_choice.cpp decides between whole tiles and divided keys.
#ifndef STROBE_CUDA_HOST_LAUNCH_TIME_H_
#define STROBE_CUDA_HOST_LAUNCH_TIME_H_

#include <cstdint>

#include "core/problem.h"
#include "cuda/host/instance.h"
#include "cuda/host/machine.h"

namespace strobe::cuda {

struct WholeTiles {
  int64_t tiles;  // of all heads
  double microseconds;
};

/// The forward kernels for whole tensors: a thread block takes a tile of one query head, and reads
/// all keys that the tile sees.
WholeTiles whole_tiles(const AttentionProblem& problem, const ForwardConfig& config,
                       const DeviceProperties& device);

/// Thread blocks that share the keys of a tile, about: those are so many units, and a thread block
/// has a share of so many, wherever it begins; or each tile has `own` thread blocks, if not 0.
int64_t pieces_of_span(int64_t units, int64_t share, int64_t own);

/// Microseconds that it takes to merge a tile's pieces, by the last of the thread blocks that leave
/// one, or, `apart`, by a kernel that has a warp for each row.
double merging_time(const CachedConfig& config, int64_t rows, int64_t pieces, bool apart);

struct DividedKeys {
  int64_t tiles;   // of all key heads
  int64_t pieces;  // thread blocks that share the keys of a tile, about
  bool merges_apart;
  double microseconds;
};

/// The kernels that divide keys (docs/decode-kernels.md), for a problem without a cache: a tile has
/// rows of all query heads that share a key head, and its keys are shared by some thread blocks.
DividedKeys divided_keys(const AttentionProblem& problem, const CachedInstance& instance,
                         const DeviceProperties& device);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_LAUNCH_TIME_H_
