// The mask from the side of the keys, as the backward pass looks at it.
#ifndef STROBE_CUDA_BACKWARD_SEEN_QUERIES_CUH_
#define STROBE_CUDA_BACKWARD_SEEN_QUERIES_CUH_

#include <cstdint>

#include "core/mask.h"
#include "cuda/ptx/shared_access.h"

namespace strobe::cuda {

/// Queries that see a key, as kernels keep them in shared memory; none of a key past the end.
template <typename Int>
__device__ __forceinline__ int2 key_limits(const BasicMask<Int>& mask, int64_t key) {
  const Range seen = key < mask.seqlen_k ? mask.q_range({key, key + 1}) : Range{0, 0};
  if (seen.empty()) return make_int2(0, 0);
  return make_int2(static_cast<int>(seen.begin), static_cast<int>(seen.end));
}

/// Which of a tile's queries see the keys of some of this lane's rows.
template <int kCount>
struct SeenQueries {
  int32_t begin[kCount > 0 ? kCount : 1];
  uint32_t count[kCount > 0 ? kCount : 1];
  /// limits: address of row 0's. Rows are 8 keys apart.
  __device__ __forceinline__ SeenQueries(uint32_t limits, int32_t q_begin) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      const int2 seen = ptx::load_shared_wide<int2>(limits + 64 * r);
      begin[r] = seen.x - q_begin;
      count[r] = static_cast<uint32_t>(seen.y - seen.x);
    }
  }
  __device__ __forceinline__ bool operator()(int r, int q) const {
    return static_cast<uint32_t>(q - begin[r]) < count[r];
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_SEEN_QUERIES_CUH_
