// Hopper forward in float8: the two steps of a consumer warpgroup, one with a pending O += P V and
// one without, and the products of slices of O that both are made of. Consumer::step chooses;
// transposed_values.h has the order of keys and columns.
#ifndef STROBE_CUDA_HOPPER_FORWARD_SM90_FLOAT8_CUH_
#define STROBE_CUDA_HOPPER_FORWARD_SM90_FLOAT8_CUH_

#include <cstdint>
#include <type_traits>

#include "cuda/common/softmax.cuh"
#include "cuda/hopper/forward_sm90_consumer.cuh"
#include "cuda/ptx/float8.h"
#include "cuda/ptx/shared_access.h"
#include "cuda/ptx/wgmma.h"

namespace strobe::cuda::sm90 {

/// A step (Consumer::step) in float8. Each block takes its maximum: weights have to be near e4m3's
/// largest number, which leaves no room for larger ones. A tensor core's sum of float8 products
/// keeps some 14 bits, so each P V has accumulators of its own, which are added to O in float32;
/// and a factor that O needs, since the reference has grown, costs nothing there. They are those of
/// kSlice columns, so that there are registers for them: slice after slice, each beside a share
/// of the softmax.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::step_float8(
    int n, bool last, bool masked) {
  const RingPosition<Tr::kStages> at = at_, v_at{at_.count - 1};  // K's, and the pending V's
  shared_.k_ring.full[at.stage()].wait(at.phase());
  if (pending_) wait_for_v(v_at);
  // Where nothing is pending, the product multiplies something that nobody writes by halves now:
  // what it gives is not used.
  const uint8_t* const v = pending_ ? shared_.float8.v[v_at.stage()] : shared_.k[at.stage()];
  wait_ping_pong();
  ptx::wgmma_fence();
  issue_qk(at.stage());
  ptx::wgmma_commit();
  issue_slice<0>(v);
  ptx::wgmma_commit();
  pass_ping_pong();
  const float scale = shared_.float8.scales[slot_.stage()].score;
  ptx::wgmma_wait<1>();
  ptx::pin(s_);
  free_k_and_q(at.stage(), last);

  if (masked) mask(n * kTileK);
  float alpha[2], part[2] = {0.f, 0.f}, reference[2];
  take_maximum(alpha, scale);
#pragma unroll
  for (int r = 0; r < 2; ++r) reference[r] = reference_of(max_[r]) - kWeightShift;
  finish_slices<0>(v, [&](auto slice) {
    constexpr int kBlocks = kTileK / 8, kNow = decltype(slice)::value;  // of eight columns of S
    take_weights_of<kBlocks * kNow / kSlices, kBlocks*(kNow + 1) / kSlices>(scale, reference, part);
    keep_before_wait(part[0] + part[1]);
  });
  done_ = first_ && pending_;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum_[r] += part[r];
    o_factor_[r] = alpha[r];
  }
  if (pending_) arrive(shared_.float8.v_ring.empty[v_at.stage()]);
  ++at_.count;
  pending_ = true;
  round_weights();
}

/// The same without a product that is pending (kRunsBeside): S, its softmax, and O += P V of the
/// same block. The other warpgroup's products run beside the softmax.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::step_one_by_one(
    int n, bool last, bool masked) {
  const RingPosition<Tr::kStages> at = at_;
  shared_.k_ring.full[at.stage()].wait(at.phase());
  wait_ping_pong();
  ptx::wgmma_fence();
  issue_qk(at.stage());
  ptx::wgmma_commit();
  pass_ping_pong();
  const float scale = shared_.float8.scales[slot_.stage()].score;
  ptx::wgmma_wait<0>();
  ptx::pin(s_);
  free_k_and_q(at.stage(), last);

  if (masked) mask(n * kTileK);
  float part[2] = {0.f, 0.f}, reference[2];
  take_maximum(o_factor_, scale);
#pragma unroll
  for (int r = 0; r < 2; ++r) reference[r] = reference_of(max_[r]) - kWeightShift;
  take_weights_of<0, kTileK / 8>(scale, reference, part);
#pragma unroll
  for (int r = 0; r < 2; ++r) sum_[r] += part[r];
  round_weights();
  wait_for_v(at);
  const uint8_t* const v = shared_.float8.v[at.stage()];
  ptx::wgmma_fence();
  issue_slice<0>(v);
  ptx::wgmma_commit();
  finish_slices<0>(v, [](auto) {});
  arrive(shared_.float8.v_ring.empty[at.stage()]);
  ++at_.count;
  done_ = last;
  if (last) retire(true);
}

template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::round_weights() {
#pragma unroll
  for (int i = 0; i < kTileK / 8; ++i) {
    // Row i % 2 of the thread's, half i / 2 % 2 of a step's 32 keys (transposed_values.h).
    const float* const s = s_ + i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2;
    weights_[i] = ptx::pack_e4m3(s[0], s[1], s[4], s[5]);
  }
}

/// S = 2^(S * scale - reference) of eights [begin, end) of columns, both rows; adds to their
/// sums.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
template <int kBegin, int kEnd>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::take_weights_of(
    float scale, const float (&reference)[2], float (&sum)[2]) {
#pragma unroll
  for (int i = 4 * kBegin; i < 4 * kEnd; ++i) {
    const int r = i / 2 % 2;
    s_[i] = exp2_fast(__fmaf_rn(s_[i], scale, -reference[r]));
    sum[r] += s_[i];
  }
}

/// The product of a slice = P V's columns of the slice.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
template <int kNow>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::issue_slice(
    const uint8_t* tile) {
  const auto v = ptx::Descriptor::make(ptx::shared_address(tile), 0);
#pragma unroll
  for (int i = 0; i < kTileK / 32; ++i) {
    ptx::Wgmma<T, Tr::kSlice>::rs(product_, weights_ + 4 * i,
                                  v.at(kNow * Tr::kSlice * 128 + 32 * i), i != 0);
  }
}

/// O = O * factor + product, slice after slice from kNow on, whose product is under way. beside:
/// what is done while a slice's product is, called with its number as an integral constant.
template <typename Tr, bool kGeneral, bool kAllRowsUsed, typename Params>
template <int kNow, typename Beside>
__device__ __forceinline__ void Consumer<Tr, kGeneral, kAllRowsUsed, Params>::finish_slices(
    const uint8_t* tile, const Beside& beside) {
  beside(std::integral_constant<int, kNow>());
  ptx::wgmma_wait<0>();
  ptx::pin(product_);
#pragma unroll
  for (int i = 0; i < Tr::kSlice / 2; ++i) {
    float& o = o_[kNow * (Tr::kSlice / 2) + i];
    o = __fmaf_rn(o, o_factor_[i / 2 % 2], product_[i]);
  }
  if constexpr (kNow + 1 < kSlices) {
    ptx::wgmma_fence();
    issue_slice<kNow + 1>(tile);
    ptx::wgmma_commit();
    finish_slices<kNow + 1>(tile, beside);
  }
}

}  // namespace strobe::cuda::sm90

#endif  // STROBE_CUDA_HOPPER_FORWARD_SM90_FLOAT8_CUH_
