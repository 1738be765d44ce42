// How a warp arrives at an mbarrier.
#ifndef STROBE_CUDA_PTX_WARP_ARRIVALS_H_
#define STROBE_CUDA_PTX_WARP_ARRIVALS_H_

#include <cstdint>

namespace strobe::cuda::ptx {

/// Arrivals that a warp makes: one, lane 0's, after __syncwarp. compute-sanitizer's racecheck
/// orders by an arrival what the arriving thread itself has done, and takes what the other lanes
/// have written for a race; in a build for it (STROBE_RACECHECK) every lane arrives.
#ifdef STROBE_RACECHECK
inline constexpr uint32_t kWarpArrivals = 32;
#else
inline constexpr uint32_t kWarpArrivals = 1;
#endif

/// Whether this lane arrives for its warp.
__device__ __forceinline__ bool arrives(int lane) { return kWarpArrivals == 32 || lane == 0; }

}  // namespace strobe::cuda::ptx

#endif  // STROBE_CUDA_PTX_WARP_ARRIVALS_H_
