// The lists of a mask as data for kernels whose tiles hold the query heads of a key head.
#ifndef STROBE_CUDA_HOST_UNITE_LISTS_H_
#define STROBE_CUDA_HOST_UNITE_LISTS_H_

#include <cuda_runtime_api.h>

#include "core/workspace.h"
#include "cuda/common/params.h"
#include "cuda/host/launch_target.h"

namespace strobe::cuda {

/// Whether the query heads of a key head have lists of their own: a tile goes through the union of
/// these, which a kernel makes in the workspace.
inline bool unites_lists(const CachedParams& p) { return p.mask_layout.heads > 1 && p.group > 1; }

/// The lists that spans go through, with room for unions where there have to be some.
inline SpanLists carve_lists(Arena& arena, const CachedParams& p) {
  const MaskLayout& l = p.mask_layout;
  SpanLists s{};
  s.numbers = l;
  while ((int64_t{1} << s.log2_k) < l.block_k) ++s.log2_k;
  s.width = MaskLayout::kEntry;
  if (!unites_lists(p)) {
    s.lists = p.mask ? p.mask + l.lists : nullptr;
    s.entries = p.mask ? p.mask + l.entries : nullptr;
    return s;
  }
  s.numbers.heads = p.heads_kv;
  s.numbers.blocks_q = l.blocks_q / p.group;
  s.width = 1 + p.group;
  s.lists = arena.take<int32_t>(2 * s.numbers.blocks_q);
  s.entries = arena.take<int32_t>(l.capacity * s.width);
  return s;
}

/// Makes the unions, if there have to be some.
cudaError_t launch_unite_lists(const CachedParams& p, const SpanLists& lists,
                               const LaunchTarget& target);

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_HOST_UNITE_LISTS_H_
