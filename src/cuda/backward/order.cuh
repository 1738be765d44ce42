// In which order the backward pass takes its work items.
#ifndef STROBE_CUDA_BACKWARD_ORDER_CUH_
#define STROBE_CUDA_BACKWARD_ORDER_CUH_

#include <cstdint>

#include "cuda/backward/scratch.cuh"

namespace strobe::cuda {

/// The order in which work items, each a (batch, key head, part of the group, key block), are
/// taken. The first three make a track. Tracks come in groups whose queries fit into L2 together.
/// Within a group the first key block of all its tracks comes first: under a causal mask that is
/// the longest work, and no item waits for one that is taken later.
struct BackwardOrder {
  uint32_t blocks, tracks, group, parts;
  int32_t heads_per_part;
  int64_t items;
};

struct BackwardItem {
  int32_t batch, head_kv, part, block;
};

STROBE_INLINE constexpr BackwardItem backward_item(const BackwardOrder& o, int32_t heads_kv,
                                                   int64_t index) {
  const uint32_t per_group = o.group * o.blocks;  // fits
  uint32_t first, rest;
  if (o.items <= INT32_MAX) {  // 32-bit division takes a fifth of the time
    first = static_cast<uint32_t>(index) / per_group * o.group;
    rest = static_cast<uint32_t>(index) % per_group;
  } else {
    first = static_cast<uint32_t>(index / per_group) * o.group;
    rest = static_cast<uint32_t>(index % per_group);
  }
  const uint32_t here = o.tracks - first < o.group ? o.tracks - first : o.group;
  const uint32_t track = first + rest % here, head = track / o.parts;
  return {static_cast<int32_t>(head) / heads_kv, static_cast<int32_t>(head) % heads_kv,
          static_cast<int32_t>(track % o.parts), static_cast<int32_t>(rest / here)};
}

/// For an item `index` that does not exist, since its sequence has fewer keys than the longest: the
/// first item after it that may exist. Those in between do not exist either. exists(batch, block):
/// whether a sequence has that key block.
template <typename Exists>
STROBE_INLINE constexpr int64_t next_existing_item(const BackwardOrder& o, int32_t heads_kv,
                                                   int64_t index, const Exists& exists) {
  const int64_t per_group = int64_t{o.group} * o.blocks, group = index / per_group;
  const auto first = static_cast<uint32_t>(group) * o.group;
  const uint32_t here = o.tracks - first < o.group ? o.tracks - first : o.group;
  const auto rest = static_cast<uint32_t>(index - group * per_group);
  const auto block = static_cast<int32_t>(rest / here);
  // Goes on among the items of the same key block, a sequence at a time: the tracks of a sequence
  // are neighbours.
  const uint32_t of_sequence = static_cast<uint32_t>(heads_kv) * o.parts;
  uint32_t batch = (first + rest % here) / of_sequence;
  const bool whole_row = batch == first / of_sequence;  // none before it in the row
  while (++batch * of_sequence < first + here) {
    if (exists(static_cast<int32_t>(batch), block)) {
      return index - rest + int64_t{block} * here + batch * of_sequence - first;
    }
  }
  if (!whole_row) return index - rest + (int64_t{block} + 1) * here;
  return index - rest + int64_t{here} * o.blocks;  // nor is there a longer one in the group
}

/// Tracks of a group: as many as L2 holds the queries and the sums of their dQ, for short
/// sequences; but not so few that many key blocks of one track are under way at once, which add to
/// the same tiles of dQ (and, in a deterministic launch, wait for one another).
inline constexpr int64_t kBackwardGroupBytes = int64_t{32} << 20, kBackwardGroupTracks = 16;

STROBE_INLINE constexpr BackwardOrder backward_order(const BackwardParams& p, int64_t width,
                                                     int64_t tile_k) {
  BackwardOrder o{};
  o.blocks = static_cast<uint32_t>(ceil_div(p.seqlen_k, tile_k));
  o.parts = static_cast<uint32_t>(group_parts(sizes_of(p), tile_k));
  o.heads_per_part = static_cast<int32_t>(ceil_div(p.group, o.parts));
  o.tracks = static_cast<uint32_t>(p.batch) * static_cast<uint32_t>(p.heads_kv) * o.parts;
  o.items = int64_t{o.tracks} * o.blocks;
  const int64_t bytes = int64_t{p.seqlen_q} * o.heads_per_part * width * 8;
  o.group = static_cast<uint32_t>(
      max64(kBackwardGroupTracks, min64(kBackwardGroupBytes / max64(1, bytes), 65536)));
  // 32-bit arithmetic within a group.
  o.group = static_cast<uint32_t>(max64(1, min64(o.group, INT32_MAX / max64(1, o.blocks))));
  return o;
}

}  // namespace strobe::cuda

#endif  // STROBE_CUDA_BACKWARD_ORDER_CUH_
