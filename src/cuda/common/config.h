// What distinguishes one CUDA kernel from another: the template argument of the kernels, and the
// columns of kernels.def.
#ifndef STROBE_CUDA_COMMON_CONFIG_H_
#define STROBE_CUDA_COMMON_CONFIG_H_

#include <cstdint>

namespace strobe::cuda {

/// When an instance is the planner's choice among those that fit equally well: a function of the
/// problem and the device.
enum class When : int8_t {
  kAny,
  kPlain,         // no softcap, ALiBi or dropout
  kUpTo256Keys,   // a query sees so many keys on average; also problems that are not plain
  kUpTo4096Keys,  // the same
  kFewQueries,    // no more tiles than multiprocessors, or the tiles are fuller than larger
                  // ones
  kRuns,  // 64 keys or more lie one after the other: a contiguous cache, or pages of so many
  kSmall  // an earlier instance of the width takes more shared memory than the device has
};

/// One forward kernel. `width` is the head dimension that its tiles hold: any head_dim up to it
/// runs, the rest of a tile being zeros.
struct ForwardConfig {
  int arch;   // 80: mma.sync, compute capability 8.0 and newer; 90: TMA and wgmma, 9.x only
  int dtype;  // strobe_dtype
  int width;
  int tile_q, tile_k;  // queries and keys of a score tile
  int stages;          // K and V tiles in shared memory
  int warps;           // that compute
};

/// One kernel for keys in a cache: tile_q rows, which are queries times query heads of a key head;
/// tile_k keys of a team's stage (decode/layout.h).
using CachedConfig = ForwardConfig;

/// One backward kernel.
struct BackwardConfig {
  int arch;
  int dtype;
  int width;
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
//     template <ForwardConfig kConfig> constexpr LaunchShape forward_shape();
//     template <ForwardConfig kConfig>
//     void forward_carve(Arena&, const AttentionProblem&, ForwardParams&);
//     template <ForwardConfig kConfig>
//     cudaError_t launch_forward(const ForwardParams& params, const LaunchTarget& target);
//
// The carver takes the kernel's part of the workspace and sets the params' pointers to it; it runs
// on a counting arena when a plan is made. The launcher enqueues and returns: no allocation, no
// synchronisation. Where it cannot launch, it launches nothing and returns an error. For each row
// of kernels.def CMake writes a translation unit that puts them into a ForwardInstance
// (host/instance.h) of bf16 and one of fp16. Kernels themselves take a type made of integers: nvcc
// 13 writes a stub that does not compile for a __global__ template with an argument of class type.

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_CONFIG_H_
