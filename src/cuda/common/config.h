// What distinguishes one CUDA kernel from another besides its features: the template argument of
// the kernels, and the columns of kernels.def.
#ifndef STROBE_CUDA_COMMON_CONFIG_H_
#define STROBE_CUDA_COMMON_CONFIG_H_

#include <cstdint>

#include "core/macros.h"
#include "cuda/common/features.h"

namespace strobe::cuda {

/// When an instance is the planner's choice among those that fit equally well: a function of the
/// problem and the device.
enum class When : int8_t {
  kAny,
  kUpTo256Keys,   // a query sees so many keys on average; also with softcap, ALiBi or dropout
  kUpTo4096Keys,  // the same
  kFewQueries,    // no more tiles than multiprocessors, or the tiles are fuller than larger
                  // ones
  kRuns,  // 64 keys or more lie one after the other: a contiguous cache, or pages of so many
  kSmall  // an earlier instance of the width takes more shared memory than the device has
};

/// The tiles of forward kernels. `width` is the head dimension that those of Q and K hold, width_v
/// that of V and O: any head_dim up to it runs, the rest of a tile being zeros.
struct ForwardConfig {
  // 75: mma.sync, compute capability 7.5; 80: the same, 8.0 and newer; 90: TMA and wgmma, 9.x only
  int arch;
  int dtype;  // strobe_dtype of q, k and v; of float8 attention that of q
  int width, width_v;
  int tile_q, tile_k;  // queries and keys of a score tile
  int stages;          // K and V tiles in shared memory
  int warps;           // that compute
  int kv_dtype = -1;   // of a quantised cache, or float8 (element.h); -1: k and v have q's
};

/// Kernels for keys in a cache: tile_q rows, which are queries times query heads of a key head;
/// tile_k keys of a team's stage (decode/layout.h).
using CachedConfig = ForwardConfig;

/// Whether the kernels of a configuration that divide keys have instances that cut them into chunks
/// besides (decode/shares.h): those that batch_invariant takes on devices of any size, for 32 rows
/// or with the smallest rings.
STROBE_HOST_DEVICE constexpr bool has_chunked_kernels(const CachedConfig& c) {
  return c.arch != 90 && c.tile_q != 8 && (c.tile_q == 32 || c.stages == 2 || c.kv_dtype >= 0);
}

/// The tiles of backward kernels.
struct BackwardConfig {
  int arch;
  int dtype;
  int width, width_v;
  int tile_q, tile_k;
  int stages;
  int warps;
};

/// What a kernel file says of a configuration to the planner.
struct LaunchShape {
  int threads;           // of a block
  int64_t shared_bytes;  // dynamic shared memory of a block
};

// What a kernel's host side gives to the planner and the launch.
// src/cuda/mma_sync/forward_sm80_launch.h, which is host code for the kernel of forward_sm80.cuh,
// defines in namespace strobe::cuda::sm80 (and alike for backward, BackwardConfig and
// BackwardParams, and for hopper's sm90),
//
//     template <ForwardConfig kConfig, Features kComputes> constexpr LaunchShape forward_shape();
//     template <ForwardConfig kConfig, Features kComputes>
//     void forward_carve(Arena&, const AttentionProblem&, ForwardParams&);
//     template <ForwardConfig kConfig, Features kComputes>
//     cudaError_t launch_forward(const ForwardParams& params, const LaunchTarget& target);
//
// kComputes names one of the kernels with these tiles: the launcher launches that one, whatever the
// params say, and makes no choice by them. The carver takes the kernel's part of the workspace and
// sets the params' pointers to it; it runs on a counting arena when a plan is made. The launcher
// enqueues and returns: no allocation, no synchronisation. Where it cannot launch, it launches
// nothing and returns an error. For each row of kernels.def CMake writes a translation unit that
// puts them into a ForwardInstance (host/instance.h) for each type and variant of the row. Kernels
// themselves take a type made of integers: nvcc 13 writes a stub that does not compile for a
// __global__ template with an argument of class type.

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_CONFIG_H_
