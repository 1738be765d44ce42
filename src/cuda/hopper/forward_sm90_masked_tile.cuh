// Hopper forward: a consumer warpgroup's tile under a mask as data, whose visits the warp that
// loads finds (forward_sm90_mask.cuh).
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_MASKED_TILE_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_MASKED_TILE_CUH_

#include "cuda/hopper/forward_sm90_consumer.cuh"
#include "cuda/hopper/forward_sm90_mask.cuh"

namespace strobe::cuda::sm90 {

/// The same under a mask as data: turn after turn, as warp 0 finds them. A turn's visit says what
/// is to be done, and whether it is the tile's last.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::run_masked_tile(
    const Tile<Tr::kWarpgroups>& tile, bool exists) {
  first_ = true;
  done_ = false;
  if (!exists) {
    skip(false, true);
    if (done_) finish_tile();
    return;
  }
  wait_for_q(tile);
  for (bool is_last = false; !is_last;) {
    PartVisit visit = next_visit();
    is_last = visit.is(PartVisit::kLast);
    done_ = false;
    if (!visit.is(PartVisit::kComputed)) {
      arrive(shared_.k_ring.empty[at_.stage()]);
      if (is_last && !first_) arrive(shared_.q_ring[warpgroup_].empty[q_at().stage()]);
      skip(true, is_last);
    } else if (first_ || !keeps_reference(visit)) {
      // On their way while the warpgroup waits for its turn, and for S.
      if (visit.is(PartVisit::kMasked)) load_bits(tile, visit);
      is_limited_ = visit.is(PartVisit::kLimited);
      if (first_) begin_tile(tile);
      step<Kind::kTakeMaximum>(visit.block, is_last, visit.is(PartVisit::kMasked));
      first_ = false;
    } else {
      visit_ = visit;
      do {
        step<Kind::kKeepReference>(visit_.block, visit_.is(PartVisit::kLast), false);
      } while (goes_on_full());
      is_last = visit_.is(PartVisit::kLast);
    }
    if (done_) finish_tile();
  }
  if (first_) {
    store_nothing(tile);
    announce_nothing();
    arrive(shared_.q_ring[warpgroup_].empty[q_at().stage()]);
    arrive(shared_.tile_ring.empty[slot_.stage()]);
  }
}

/// As part_walk has it: where Q has one stage, a tile's last block takes its maximum.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ bool Consumer<Tr, kGeneral, kAllRowsUsed, Params>::keeps_reference(
    const PartVisit& visit) {
  return !kGeneral && PartVisit::is_full(visit.flags) &&
         !(Tr::kQStages == 1 && visit.is(PartVisit::kLast));
}

template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::load_bits(
    const Tile<Tr::kWarpgroups>& tile, const PartVisit& visit) {
#pragma unroll
  for (int r = 0; r < 2; ++r) bits_.load(p_, visit, r, tile.first + min(row(r), tile.rows - 1));
}

/// After a step of a full block: whether the visit said that another one follows. It is waited for.
/// (Where the step has products under way beside its softmax, it is there that it reads its visit:
/// between two steps the tensor cores would wait for it.)
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ bool Consumer<Tr, kGeneral, kAllRowsUsed, Params>::goes_on_full() {
  if (!visit_.is(PartVisit::kNextIsFull)) return false;
  if constexpr (Tr::kRunsBeside) {
    shared_.k_ring.full[at_.stage()].wait(at_.phase());
  } else {
    visit_ = next_visit();
  }
  return true;
}

/// What is to be done with the next block of K, which is there then.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ PartVisit Consumer<Tr, kGeneral, kAllRowsUsed, Params>::next_visit() {
  shared_.k_ring.full[at_.stage()].wait(at_.phase());
  return shared_.mask.visits[at_.stage()][warpgroup_];
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_MASKED_TILE_CUH_
