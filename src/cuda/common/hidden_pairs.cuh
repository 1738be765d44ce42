// Which pairs of a head are hidden besides those that rule and lengths hide.
#ifndef STROBE_CUDA_COMMON_HIDDEN_PAIRS_CUH_
#define STROBE_CUDA_COMMON_HIDDEN_PAIRS_CUH_

#include <cstdint>

#include "core/packed_mask.h"
#include "cuda/common/bias.cuh"
#include "cuda/common/params.h"

namespace strobe::cuda {

/// A bias of -inf hides a pair, and so does a mask as data. For code that looks at pairs one by
/// one.
struct HiddenPairs {
  BiasPlane bias;  // its data is null without one
  HeadMask mask;

  __device__ __forceinline__ static HiddenPairs of(const CommonParams& p, const SequenceRows& rows,
                                                   int32_t head) {
    HiddenPairs h{};
    if (p.bias.data) h.bias = BiasPlane::of(p.bias, static_cast<int32_t>(rows.batch), head);
    if (p.mask) h.mask = p.head_mask(rows, head);
    return h;
  }
  __device__ __forceinline__ bool hides(int32_t query, int32_t key) const {
    return (bias.data && bias.hides(query, key)) || (mask.there() && !mask.allows(query, key));
  }
};

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_COMMON_HIDDEN_PAIRS_CUH_
